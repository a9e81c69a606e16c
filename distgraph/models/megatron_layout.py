"""Layouts of whole models: Megatron-like on one mesh, or on one mesh a pipeline stage.

A table maps the end of a parameter's name to the dims that are split; a role (dp, tp, sp, ep) for which the
mesh has no axis splits nothing, so that stages of different shape share one call. Column then row: the first
matrix of a pair is split by its outputs, the second by its inputs, and one sum over tp follows (Shoeybi et
al., "Megatron-LM", 2019, section 3). With `sequence_parallel`, activations between such pairs are split along
the sequence (Korthikanti et al., 2022, section 4.2.2). An axis sp splits the sequence in the whole model, and
parameters are repeated along it; `context_parallel` says how attention reaches all keys. Experts are split
over the axis of the batch unless `ep` names another, and tokens are exchanged by all_to_all (Lepikhin et al.,
"GShard", 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from distgraph.errors import GraphError, ShardingError
from distgraph.errors.arguments import check_fields, checked_arguments
from distgraph.ir.mesh import ProcessMesh
from distgraph.nn import Module, Parameter
from distgraph.tracing.annotations import on, reshard, shard_op, shard_tensor
from distgraph.tracing.annotations import recompute as again

COLUMN: tuple[str | None, ...] = (None, "tp")
ROW: tuple[str | None, ...] = ("tp", None)
SPLIT: dict[str, tuple[str | None, ...]] = {
    "tokens.weight": ROW,
    "head.weight": COLUMN,
    "head.bias": ("tp",),
    **{f"attn.{part}.weight": COLUMN for part in ("qkv", "q", "k", "v")},
    **{f"attn.{part}.bias": ("tp",) for part in ("qkv", "q", "k", "v")},
    "attn.out.weight": ROW,
    **{f"mlp.{part}.weight": COLUMN for part in ("up", "gate")},
    "mlp.up.bias": ("tp",),
    "mlp.down.weight": ROW,
    "mlp.up": ("ep", None, "tp"),
    "mlp.up_bias": ("ep", "tp"),
    "mlp.down": ("ep", "tp", None),
    "mlp.down_bias": ("ep", None),
    "conv2.weight": ("tp", None, None, None),
    "bn2.weight": ("tp",),
    "bn2.bias": ("tp",),
    "conv3.weight": (None, "tp", None, None),
}
"""End of a parameter's name -> the role that splits each dim. Others are whole on every rank of the mesh."""
CONTEXT_PARALLEL = ("gather", "ring", "ulysses")
"""How attention reaches the keys of a sequence that is split: keys and values are gathered; they go round
the ranks (docs/parallelism/long_sequences.md); all are exchanged, so that heads are split in place of
the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of a module: its mesh, and the mesh axis of each role. Immutable.

    Attributes:
        mesh: the ranks that compute it; None where nothing is distributed.
        dp, tp, sp, ep: axes for the batch, for matrices, for the sequence and for experts; axes that are not
            in the mesh split nothing. The batch may be split by several: ("dp", "ep") where `ep` is only part
            of the data parallel ranks.
        sequence: whether hidden states are split along the sequence over `tp` too.
        context_parallel: of `CONTEXT_PARALLEL`, where `sp` splits the sequence.
    """

    mesh: ProcessMesh | None = None
    dp: str | tuple[str, ...] = "dp"
    tp: str = "tp"
    sp: str = "sp"
    ep: str = "dp"
    sequence: bool = False
    context_parallel: str = "gather"

    def __post_init__(self) -> None:
        check_fields(self, ShardingError)

    def axes(self, role: str | None) -> tuple[str, ...]:
        """The axes of a role that the mesh has."""
        if role is None or self.mesh is None:
            return ()
        name = {"dp": self.dp, "tp": self.tp, "sp": self.sp, "ep": self.ep}[role]
        return tuple(n for n in (name if isinstance(name, tuple) else (name,)) if n in self.mesh.axes)

    def axis(self, role: str | None) -> str | None:
        """The axis of a role for matrices or experts, None when the mesh has none."""
        return next(iter(self.axes(role)), None)

    def batch(self, x: Any) -> Any:
        """Annotates a tensor whose first dim is the batch."""
        return self.pin(x, "dp", *[None] * (x.ndim - 1))

    def hidden(self, x: Any) -> Any:
        """Annotates hidden states [b, s, width] between the blocks."""
        positions = (*self.axes("sp"), *(self.axes("tp") if self.sequence else ()))
        return shard_tensor(x, self.mesh, [self.axes("dp"), positions, None])

    def inner(self, x: Any) -> Any:
        """Annotates the output [b, s, n] of the first matrix of a pair, or logits."""
        return self.pin(x, "dp", "sp", "tp")

    def heads(self, x: Any) -> Any:
        """Annotates heads [b, h, s, d]; not where tp does not divide their number."""
        if self.axis("sp") is not None:
            return self._heads_of_parts(x)
        axis = self.axis("tp")
        divides = self.mesh is None or axis is None or x.shape[1] % self.mesh.axis_size(axis) == 0
        return self.pin(x, "dp", "tp", None, None) if divides else x

    def _heads_of_parts(self, x: Any) -> Any:
        """Annotates heads where the sequence is split."""
        assert self.mesh is not None
        split = (*self.axes("tp"), *(self.axes("sp") if self.context_parallel == "ulysses" else ()))
        parts = self.mesh.count(split)
        if x.shape[1] % parts:
            raise ShardingError(
                f"attention has {x.shape[1]} heads of queries or of keys, which axes {', '.join(split)} of "
                f"{self.mesh} do not divide into {parts}; use fewer ranks along them"
                + (', or context_parallel="ring"' if self.context_parallel == "ulysses" else "")
            )
        positions = None if self.context_parallel == "ulysses" else self.axes("sp")
        return shard_tensor(x, self.mesh, [self.axes("dp"), split, positions, None], gradient=True)

    def attention(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Attention as an op, by the algorithm of the layout where the sequence is split."""
        if self.axis("sp") is None or self.context_parallel != "ring":
            return function
        return shard_op(function, self.mesh, algorithm="ring")

    def whole(self, x: Any) -> Any:
        """Hidden states gathered over tp for a pair of matrices; `x` itself if tp splits no sequence."""
        if not self.sequence or self.axis("tp") is None:
            return x
        return reshard(x, self.mesh, [self.axes("dp"), self.axes("sp"), None])

    def routed(self, x: Any, last: str | None = None) -> Any:
        """Annotates tokens at experts [experts, groups, capacity, n]; `last` is the role of the last dim."""
        experts = self.axes("ep")
        groups = tuple(axis for axis in self.axes("dp") if axis not in experts)
        return shard_tensor(x, self.mesh, [experts, groups, None, self.axis(last)], gradient=True)

    def pin(self, x: Any, *roles: str | None) -> Any:
        """`x` annotated with a role, or None, for each dim; `x` itself without a mesh."""
        return shard_tensor(x, self.mesh, [self.axes(role) for role in roles])


SERIAL = Layout()


class Placed(Module):
    """A module with a layout: serial until `annotate` or `stages` sets another."""

    layout: Layout = SERIAL


class Stack(Placed):
    """A model that is a sequence of blocks, with modules before and after them.

    Attributes:
        blocks: the modules that are divided among pipeline stages.
        layout, end: layouts of the first and of the last stage.
        recompute: whether each block is recomputed in the backward part.
        tail: names of the attributes that belong to the last stage; other parameters belong to the first.
        presets: configs of published models by name.
    """

    blocks: Sequence[Placed]
    end: Layout = SERIAL
    recompute: bool = False
    tail: tuple[str, ...] = ()
    presets: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    @checked_arguments()
    def preset(cls, name: str, **changes: Any) -> Self:
        """A published model, some fields of its config changed. Raises GraphError for an unknown name."""
        if name not in cls.presets:
            names = ", ".join(cls.presets)
            raise GraphError(f"preset {name!r} of {cls.__name__} does not exist; there are {names}")
        build: Callable[[Any], Self] = cls
        config = cls.presets[name]
        if unknown := [change for change in changes if change not in type(config).__dataclass_fields__]:
            raise GraphError(
                f"config of {cls.__name__} has no field {', '.join(unknown)}; it has "
                f"{', '.join(type(config).__dataclass_fields__)}"
            )
        return build(replace(config, **changes))

    def through(self, x: Any) -> Any:
        """`x` after all blocks, each computed on its mesh."""
        for block in self.blocks:
            with on(block.layout.mesh):
                x = again(block)(x) if self.recompute else block(x)
        return x


@checked_arguments(ShardingError)
def annotate(
    model: Stack,
    mesh: ProcessMesh | None,
    *,
    dp: str | tuple[str, ...] = "dp",
    tp: str = "tp",
    sp: str = "sp",
    ep: str | None = None,
    sequence_parallel: bool = False,
    context_parallel: str = "gather",
    recompute: bool = False,
) -> None:
    """Annotate a model for one mesh: `stages` with one stage."""
    stages(
        model,
        [mesh],
        dp=dp,
        tp=tp,
        sp=sp,
        ep=ep,
        sequence_parallel=sequence_parallel,
        context_parallel=context_parallel,
        recompute=recompute,
    )


@checked_arguments(ShardingError)
def stages(
    model: Stack,
    meshes: Sequence[ProcessMesh | None],
    layers: Sequence[int] | None = None,
    *,
    dp: str | tuple[str, ...] = "dp",
    tp: str = "tp",
    sp: str = "sp",
    ep: str | None = None,
    sequence_parallel: bool = False,
    context_parallel: str = "gather",
    recompute: bool = False,
) -> None:
    """Divide the blocks of a model among meshes and annotate each stage; to be called once for a model.

    Modules before the blocks belong to the first stage, those after them to the last.

    Args:
        model: a model of `distgraph.models`.
        meshes: one a stage, of any shape and size; None for a stage that is not distributed.
        layers: blocks of each stage; by default as even as possible, the longer ones first.
        dp, tp: axes that split the batch and the matrices; a mesh without such an axis splits nothing by it.
        sp: axis that splits the sequence in the whole model; parameters are repeated along it.
        ep: axis that splits experts; by default `dp`, the last of several.
        sequence_parallel: split hidden states along the sequence over `tp`.
        context_parallel: how attention reaches all keys where `sp` splits the sequence, see
            `CONTEXT_PARALLEL`.
        recompute: recompute each block in the backward part instead of storing its activations.

    Raises:
        ShardingError: stages and `layers` differ in number, or `layers` do not add up to the blocks; there is
            no such `context_parallel`.

    Example:
        >>> from distgraph.models import GPT, GPTConfig
        >>> model = GPT(GPTConfig(hidden=16, layers=3, heads=2, vocabulary=40, sequence=8))
        >>> first, second = ProcessMesh.grid(dp=2), ProcessMesh.grid(2, dp=2, tp=3)
        >>> stages(model, [first, second], [1, 2])
        >>> model.blocks[0].attn.out.weight.annotation.mesh, model.blocks[2].attn.out.weight.annotation
        (mesh(dp=2), ...)
    """
    if context_parallel not in CONTEXT_PARALLEL:
        raise ShardingError(
            f"context_parallel is {context_parallel!r} but must be one of {', '.join(CONTEXT_PARALLEL)}"
        )
    if not dp:
        raise ShardingError(f"dp is {dp!r} but must be the name of an axis, or several")
    sizes = _stage_sizes(model, len(meshes), layers)
    expert_axis = dp if isinstance(dp, str) else dp[-1]
    layouts = [
        Layout(
            mesh=mesh,
            dp=dp,
            tp=tp,
            sp=sp,
            ep=expert_axis if ep is None else ep,
            sequence=sequence_parallel,
            context_parallel=context_parallel,
        )
        for mesh in meshes
    ]
    model.recompute, model.layout, model.end = recompute, layouts[0], layouts[-1]
    of_block = [layout for layout, size in zip(layouts, sizes, strict=True) for _ in range(size)]
    for block, layout in zip(model.blocks, of_block, strict=True):
        for _, module in block.named_modules():
            if isinstance(module, Placed):
                module.layout = layout
    for path, parameter in model.named_parameters():
        top, _, remainder = path.partition(".")
        layout = of_block[int(remainder.partition(".")[0])] if top == "blocks" else model.layout
        pin(parameter, path, model.end if top in model.tail else layout)


def _stage_sizes(model: Stack, count: int, layers: Sequence[int] | None) -> list[int]:
    """Number of blocks of each stage. Raises ShardingError: there is no stage, or `layers` do not fit."""
    if not count:
        raise ShardingError("stages got no mesh; give one a stage")
    blocks = len(model.blocks)
    sizes = [blocks // count + (i < blocks % count) for i in range(count)]
    if layers is not None:
        sizes = list(layers)
    if len(sizes) != count or sum(sizes) != blocks or min(sizes) < 0:
        raise ShardingError(
            f"layers {sizes} over {count} stages do not cut the {blocks} blocks of "
            f"{type(model).__name__}; give one number a mesh that add up"
        )
    return sizes


def pin(parameter: Parameter, path: str, layout: Layout) -> None:
    """Annotate a parameter by the entry of `SPLIT` for its path."""
    roles = next((roles for end, roles in SPLIT.items() if f".{path}".endswith(f".{end}")), None)
    layout.pin(parameter, *(roles or (None,) * parameter.ndim))
