"""ImportedModule: a module of torch as a module of distgraph."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from types import EllipsisType
from typing import Any

import torch

from distgraph.errors import GraphError
from distgraph.frontends.imported_model import ImportedModel, returned
from distgraph.frontends.torch.exported_graph import Exported
from distgraph.frontends.torch.exporting import export
from distgraph.frontends.torch.graph_evaluator import evaluate
from distgraph.frontends.torch.opaque_ops import OpaqueOp, check_used, opaque_ops
from distgraph.frontends.torch.torch_dtypes import as_array, short_dtype
from distgraph.ir.dtypes import is_float
from distgraph.ir.mesh import ProcessMesh
from distgraph.nn import Buffer, Parameter
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace


class ImportedModule(ImportedModel):
    """A module of torch whose graph was exported; made by `import_module`.

    Parameters and buffers have the names of torch, and its values.
    """

    def __init__(self, source: torch.nn.Module, training: Exported, evaluation: Exported) -> None:
        self._exported = {True: training, False: evaluation}
        constants = {each.name for each in training.inputs.values() if each.kind == "constant"}
        tensors, self._names = _tensors(source, constants)
        super().__init__(type(source).__name__, tensors, tuple(training.shapes))
        self._boundaries: dict[str, Any] = {}
        self._paths = frozenset(path for path, _ in source.named_modules())

    def children(self) -> Iterator[tuple[str, Any]]:
        """(name in torch, parameter or buffer); a tied one under its first name."""
        yield from self._names.items()

    @property
    def names(self) -> dict[str, str]:
        """Every name in torch -> the name here, which for a tied tensor is the first of its names."""
        first = {id(tensor): name for name, tensor in self._names.items()}
        return {name: first[id(tensor)] for name, tensor in self._tensors.items()}

    def pipeline_boundary(self, path: str, mesh: ProcessMesh | EllipsisType = ...) -> None:
        """Mark the boundary between two pipeline stages, as `distgraph.pipeline_boundary` does in code.

        Args:
            path: of the first module behind the boundary, such as "transformer.h.6".
            mesh: the ranks of the stage that begins there; without it the boundary is one between layers.

        Raises:
            GraphError: there is no module of this path.
        """
        if path not in self._paths or not path:
            near = difflib.get_close_matches(path, self._paths, 3)
            raise GraphError(
                f"{self._name} has no module {path!r}"
                + (f"; near are {', '.join(near)}" if near else "; give a path of named_modules()")
            )
        self._boundaries[path] = mesh

    def _run(self, given: Mapping[str, Any]) -> Any:
        trace = Trace.current()
        exported = self._exported[trace.training]
        inputs = {name: trace.tensor(x) for name, x in given.items()}
        _check_inputs(self._name, exported, inputs)
        if trace.training and exported.lost_gradients:
            raise GraphError(
                f"{self._name} has gradients in torch that are not those of its forward part: "
                f"{', '.join(exported.lost_gradients)}; torch.export does not record them. Write them with "
                "detach, as x + (f(x) - x).detach() for a gradient that passes f, or take them out; without "
                "training, evaluate and predict compute as torch does"
            )
        changes, results = evaluate(exported, self._tensors, inputs, self._boundaries)
        if trace.training:
            for path, new in zip(exported.mutated, changes, strict=True):
                self._update(path, new)
        return _returned(exported, results, trace)


def import_module(
    module: torch.nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_shapes: Any = None,
    opaque: str | Mapping[str, str | OpaqueOp] | None = None,
) -> ImportedModule:
    """A module of torch as a module of distgraph, which trains, plans and exports like any other.

    Values of parameters and buffers are copied; parameters on the meta device have none and are drawn as
    normal numbers, so that a large model can be planned without its memory. A module in training mode is
    exported in evaluation mode too, for `evaluate` and `predict`; one in evaluation mode stays in it.

    Args:
        module: a `torch.nn.Module`.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
        example_kwargs: further keyword arguments; those that are no tensors are part of the program.
        dynamic_batch: whether dim 0 of every input is the batch, whose size may differ from the example's.
        dynamic_shapes: as of `torch.export.export`, in place of `dynamic_batch`.
        opaque: ops without a rule that the program calls instead of computing them itself: "elementwise" for
            all that torch declares so, or name of an op -> index rule or `OpaqueOp`.

    Raises:
        GraphError: torch.export refuses the module, or it uses ops that have no rule and cannot be opaque:
            all are listed.

    Example:
        >>> import torch, distgraph as dg
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        >>> model = dg.frontends.torch.import_module(net, torch.zeros(2, 3))
        >>> [(name, p.shape) for name, p in model.named_parameters()][:2]
        [('0.weight', (4, 3)), ('0.bias', (4,))]
    """
    if not isinstance(module, torch.nn.Module):
        raise GraphError(f"module is a {type(module).__name__} but must be a torch.nn.Module")
    args, kwargs = _arguments(example_inputs, example_kwargs)
    allowed = opaque_ops(opaque)
    training = evaluation = export(module, args, kwargs, dynamic_shapes, dynamic_batch, allowed)
    modes = {m: m.training for m in module.modules()}
    if any(modes.values()):
        module.eval()
        try:
            evaluation = export(module, args, kwargs, dynamic_shapes, dynamic_batch, allowed, training)
        finally:
            for part, was in modes.items():
                part.training = was
    check_used(allowed, (training, evaluation), type(module).__name__)
    return ImportedModule(module, training, evaluation)


def _arguments(inputs: Any, further: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if further is not None and not isinstance(further, Mapping):
        raise GraphError(
            f"example_kwargs is a {type(further).__name__} but must be a dict; give several inputs as a tuple"
        )
    kwargs = dict(further or {})
    if isinstance(inputs, torch.Tensor):
        return (inputs,), kwargs
    if isinstance(inputs, Mapping):
        return (), {**inputs, **kwargs}
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), kwargs
    raise GraphError(
        f"example_inputs is a {type(inputs).__name__} but must be a torch.Tensor, a tuple of them or a dict"
    )


def _tensors(
    module: torch.nn.Module, constants: set[str]
) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """(name -> tensor with every name of a tied one, name -> tensor with the first name of each).

    Buffers that are constants of the graph are neither saved by torch nor here.
    """
    every: dict[str, Parameter] = {}
    first: dict[str, Parameter] = {}
    made: dict[int, Parameter] = {}
    parameters = list(module.named_parameters(remove_duplicate=False))
    for name, tensor in [*parameters, *module.named_buffers(remove_duplicate=False)]:
        if name in constants:
            continue
        if id(tensor) not in made:
            made[id(tensor)] = first[name] = _tensor(tensor)
        every[name] = made[id(tensor)]
    return every, first


def _tensor(tensor: torch.Tensor) -> Parameter:
    dtype = short_dtype(tensor.dtype)
    if isinstance(tensor, torch.nn.Parameter):
        parameter = Parameter(tuple(tensor.shape), dtype, trainable=tensor.requires_grad)
    else:
        parameter = Buffer(tuple(tensor.shape), dtype)
    if not tensor.is_meta:
        parameter.assign(as_array(tensor))
    return parameter


def _check_inputs(model: str, exported: Exported, inputs: Mapping[str, Tensor]) -> None:
    """Raises GraphError for a shape or dtype that does not fit the exported graph."""
    sizes: dict[str, int] = {}
    for name, x in inputs.items():
        example = exported.shapes[name]
        dtype = short_dtype(example.dtype)
        fits = len(x.shape) == example.ndim and all(
            sizes.setdefault(str(n), actual) == actual if not isinstance(n, int) else n == actual
            for n, actual in zip(example.shape, x.shape, strict=True)
        )
        if not fits:
            shown = ", ".join(map(str, example.shape))
            raise GraphError(
                f"input {name} of {model} is {x.value.type} but was exported as {dtype}[{shown}]; sizes of "
                "one name are equal and numbers are fixed: give such inputs, or import with dynamic_shapes"
            )
        if x.dtype != dtype and (is_float(x.dtype) or is_float(dtype)):
            raise GraphError(
                f"input {name} of {model} is {x.value.type} but was exported as {dtype}; convert the array "
                "with .astype"
            )
    _check_conditions(model, exported, inputs, sizes)


def _check_conditions(
    model: str, exported: Exported, inputs: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> None:
    """Raises GraphError for sizes for which the module of torch computes by another graph.

    torch takes sizes of 1 for another program in any case, and its conditions say nothing of them.
    """
    places = {str(n): f"{x}.shape[{d}]" for x, of in exported.shapes.items() for d, n in enumerate(of.shape)}
    for condition in exported.conditions:
        symbols = getattr(condition, "free_symbols", ())
        given = {symbol: sizes.get(str(symbol), 1) for symbol in symbols}
        if not given or min(given.values()) <= 1 or condition.subs(given) != False:  # noqa: E712 (of sympy)
            continue
        text = str(condition)
        for symbol in given:
            text = text.replace(str(symbol), places[str(symbol)])
        shown = ", ".join(f"{name} is {x.value.type}" for name, x in inputs.items())
        raise GraphError(
            f"{model} was exported for inputs with {text} but {shown}: for these its code takes another way; "
            "give inputs of such sizes, or import an example of the sizes that are used"
        )


def _returned(exported: Exported, results: list[Any], trace: Trace) -> Any:
    """The outputs as the module of torch returns them; those that are no tensors are left out."""
    named = {
        name: trace.tensor(x)
        for name, x in zip(exported.outputs, results, strict=True)
        if x is not None and not isinstance(x, (bool, int, float, str))
    }
    if not named:
        raise GraphError("imported model returns no tensor; return what the loss needs")
    return returned(exported.kind, named)
