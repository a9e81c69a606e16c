"""Recordings of the forward pass of a module of torch: which ops it calls, on which results and parameters.

A recording runs the module on fake tensors, which have shapes and no numbers. `computes_the_same` compares
the recording of a module with that of its copy in which runs of equal layers are cut (`repeated_layers`). If
each of the layers that were cut computes with its own parameters what the last one before it computes, both
are equal once the ops of that layer are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from distgraph.frontends.torch.exported_graph import value_text
from distgraph.frontends.torch.repeated_layers import Run, copied

_PLAIN = (
    type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reference:
    """A tensor that an op reads or that the module returns.

    Attributes:
        kind: "op" (a result of an op), "tensor" (a parameter or buffer) or "input".
        number: of the op in the recording, of the tensor or of the input.
        result: which result of the op.
    """

    kind: str
    number: int
    result: int = 0


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """A call of an ATen op.

    Attributes:
        name: of the op and its overload.
        gradients: whether it has a gradient; not under `torch.no_grad()`.
        structure: how operands are nested in the arguments.
        operands: references to tensors, and the text of everything else.
        results: shape, dtype and device of each result.
    """

    name: str
    gradients: bool
    structure: Any
    operands: tuple[Reference | str, ...]
    results: tuple[str, ...]

    def reading(self, renamed: Callable[[Reference], Reference]) -> RecordedOp:
        """The op with its references renamed."""
        return RecordedOp(
            self.name, self.gradients, self.structure, _renamed(self.operands, renamed), self.results
        )


@dataclass(frozen=True, slots=True)
class Recording:
    """What a forward pass computes.

    Attributes:
        ops: in order.
        structure: how outputs are nested in the result.
        outputs: references to tensors, and the text of everything else.
        ends: path of each watched layer -> number of ops when it had returned.
    """

    ops: tuple[RecordedOp, ...]
    structure: Any
    outputs: tuple[Reference | str, ...]
    ends: Mapping[str, int]


class Unrecordable(Exception):
    """A recording cannot describe what the module does."""


def computes_the_same(
    module: torch.nn.Module, runs: Sequence[Run], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a module computes the same as its copy with cut runs, if the last layer of each is repeated.

    The module is not changed. False where either cannot be recorded.
    """
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        fakes = {id(tensor): mode.from_tensor(tensor) for _, tensor in named}
        numbers = {key: number for number, key in enumerate(fakes)}
        tensors = {name: numbers[id(tensor)] for name, tensor in named}
        references = {id(fake): Reference("tensor", numbers[key]) for key, fake in fakes.items()}
        inputs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, dict(kwargs)))
        for number, leaf in enumerate(pytree.tree_leaves(inputs)):
            if isinstance(leaf, torch.Tensor):
                references[id(leaf)] = Reference("input", number)
        whole = _recorded(copied(module, (), fakes), (), inputs, mode, references)
        short = _recorded(copied(module, runs, fakes), runs, inputs, mode, references)
        for run in sorted(runs, key=lambda run: short.ends[run.kept[-1]], reverse=True):
            short = _repeated(short, run, tensors)
        same = whole.ops == short.ops and whole.outputs == short.outputs
        return same and bool(whole.structure == short.structure)
    except Exception:  # noqa: BLE001 - of the model's own code too, which may not run on the copy
        return False


def _recorded(
    module: torch.nn.Module,
    runs: Sequence[Run],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    mode: FakeTensorMode,
    references: Mapping[int, Reference],
) -> Recording:
    """Raises Unrecordable where a layer of a run that is kept is not called exactly once."""
    watched = {id(module.get_submodule(path)): path for run in runs for path in run.kept}
    recorder = _Recorder(references)
    ends: dict[str, int] = {}

    def returned(layer: torch.nn.Module, *_: Any) -> None:
        path = watched.get(id(layer))
        if path in ends:
            raise Unrecordable
        if path is not None:
            ends[path] = len(recorder.ops)

    handle = register_module_forward_hook(returned)
    try:
        with mode, recorder:
            result = module(*inputs[0], **inputs[1])
    finally:
        handle.remove()
    leaves, structure = pytree.tree_flatten(result)
    return Recording(tuple(recorder.ops), structure, tuple(map(recorder.described, leaves)), ends)


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Records the ops that are called; the references are those of `Reference`."""

    def __init__(self, references: Mapping[int, Reference]) -> None:
        super().__init__()
        self.ops: list[RecordedOp] = []
        self._known: dict[int, Reference | str] = dict(references)
        self._alive: list[torch.Tensor] = []  # an id is that of one tensor while the tensor lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # fake tensors ask for devices, the first time of each op only
            return func(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        operands = tuple(map(self.described, leaves))
        out = func(*args, **kwargs)
        results = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        for position, x in enumerate(results):
            self._known[id(x)] = Reference("op", len(self.ops), position)
        self._alive += results
        shown = tuple(f"{x.dtype} {x.device} {tuple(x.shape)}" for x in results)
        self.ops.append(RecordedOp(str(func), torch.is_grad_enabled(), structure, operands, shown))
        return out

    def described(self, leaf: Any) -> Reference | str:
        """The reference of a tensor, the text of anything else. Raises Unrecordable where there is none."""
        if not isinstance(leaf, torch.Tensor):
            if not isinstance(leaf, _PLAIN):
                raise Unrecordable
            return f"{type(leaf).__name__} {leaf!r}"
        if id(leaf) not in self._known:
            if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.is_meta:
                raise Unrecordable  # it has no numbers that could be compared
            with unset_fake_temporarily():
                self._known[id(leaf)] = value_text(leaf)
            self._alive.append(leaf)
        return self._known[id(leaf)]


def _repeated(short: Recording, run: Run, tensors: Mapping[str, int]) -> Recording:
    """The recording with the layers of a run that were cut.

    Their ops are those between the end of the second kept layer and the end of the third.

    Raises:
        Unrecordable: the ops of the second and third layer differ in number.
    """
    first, second, third = (short.ends[path] for path in run.kept)
    size, copies = third - second, len(run.cut)
    if second - first != size or size <= 0:
        raise Unrecordable
    name_of = {number: name for name, number in tensors.items() if name.startswith(f"{run.kept[-1]}.")}
    ops = list(short.ops[:third])
    for copy, path in enumerate(run.cut, 1):

        def in_layer(reference: Reference, by: int = copy * size, path: str = path) -> Reference:
            if reference.kind == "op" and reference.number >= first:
                return Reference("op", reference.number + by, reference.result)
            if reference.kind == "tensor" and reference.number in name_of:
                suffix = name_of[reference.number].removeprefix(run.kept[-1])
                return Reference("tensor", tensors[path + suffix])
            return reference

        ops += [op.reading(in_layer) for op in short.ops[second:third]]

    def behind(reference: Reference) -> Reference:
        if reference.kind == "op" and reference.number >= second:
            return Reference("op", reference.number + copies * size, reference.result)
        return reference

    ops += [op.reading(behind) for op in short.ops[third:]]
    return Recording(tuple(ops), short.structure, _renamed(short.outputs, behind), short.ends)


def _renamed(
    operands: tuple[Reference | str, ...], renamed: Callable[[Reference], Reference]
) -> tuple[Reference | str, ...]:
    return tuple(renamed(x) if isinstance(x, Reference) else x for x in operands)
