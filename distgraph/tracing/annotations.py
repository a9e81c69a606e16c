"""Annotations that users write in a model: layouts of tensors and calls, meshes of ops, pipeline boundaries.

Annotations never change the meaning of the serial program, and the same script runs without any mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import EllipsisType
from typing import Any

from distgraph.errors import ShardingError
from distgraph.ir.mesh import ProcessMesh, check_mesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec, UserDim
from distgraph.tracing.tensor import Tensor, TensorOperators
from distgraph.tracing.tracer import Trace, caller

Dims = Sequence[UserDim]


def shard_tensor(x: Any, mesh: ProcessMesh | None, dims: Dims, *, gradient: bool = False) -> Any:
    """Pin the layout of a parameter or of a value that is being traced.

    Args:
        x: a `nn.Parameter`, or a traced tensor.
        mesh: ranks that store it; None leaves `x` unchanged, so that a script also runs serially.
        dims: for each dim the axis that splits it, None, or a tuple of axes (major to minor).
        gradient: whether the gradient of a tensor must have this layout too; by default completion decides.

    Returns:
        `x` itself.

    Raises:
        ShardingError: an axis is unknown or used twice, the number of dims differs, or `x` is pinned to
            another layout.
    """
    if mesh is None:
        return x
    where = caller()
    check_mesh(f"shard_tensor ({where})", mesh)
    attr = DistAttr(mesh, ShardSpec.of(dims), Origin("user", where))
    if isinstance(x, Tensor):
        x.trace.annotate(x.value, attr)
        if gradient:
            x.trace.mirrored.add(x.value.name)
        return x
    if not isinstance(x, TensorOperators):
        raise ShardingError(
            f"shard_tensor ({where}): {type(x).__name__} cannot be annotated; pass a parameter such as "
            f"layer.weight, or a tensor inside of forward"
        )
    parameter: Any = x
    attr.spec.check(parameter.shape, mesh, f"parameter of shape {tuple(parameter.shape)} ({where})")
    before = parameter.annotation
    if before is not None and before != attr:
        raise ShardingError(
            f"parameter is annotated {attr} ({where}) but was annotated {before} ({before.origin.where}); "
            f"remove one"
        )
    parameter.annotation = attr
    return x


def reshard(x: Any, mesh: ProcessMesh | None, dims: Dims) -> Any:
    """The tensor in another layout; unlike `shard_tensor`, the layout may differ from that of `x` itself.

    Raises:
        ShardingError: as `shard_tensor`.
    """
    if mesh is None:
        return x
    check_mesh(f"reshard ({caller()})", mesh)
    trace = x.trace if isinstance(x, Tensor) else Trace.current()
    attr = DistAttr(mesh, ShardSpec.of(dims), Origin("user", caller()))
    with trace.on(mesh):
        (y,) = trace.emit("reshard", (x,))
    trace.annotate(y.value, attr)
    return y


def shard_op(
    function: Callable[..., Any],
    mesh: ProcessMesh | None,
    in_specs: Sequence[Dims | None] | None = None,
    out_specs: Sequence[Dims | None] | Dims | None = None,
) -> Callable[..., Any]:
    """A function or module whose calls take and return tensors in given layouts, computed on `mesh`.

    Args:
        function: an op, a function of tensors or a module.
        mesh: ranks that compute it; None returns `function` as it is.
        in_specs: one for each argument that is a tensor; None leaves its layout unchanged.
        out_specs: one for each result; for a single result the dims themselves.

    Raises:
        ShardingError: the number of specs and of tensors differ.
    """
    if mesh is None:
        return function
    check_mesh(f"shard_op ({caller()})", mesh)

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        if in_specs is not None and len(in_specs) != len(tensors):
            raise ShardingError(
                f"shard_op has {len(in_specs)} in_specs but the call has {len(tensors)} tensors"
            )
        specs = iter(in_specs or [None] * len(tensors))
        arguments = []
        for a in args:
            spec = next(specs) if isinstance(a, Tensor) else None
            arguments.append(a if spec is None else reshard(a, mesh, spec))
        with Trace.current().on(mesh):
            returned = function(*arguments, **kwargs)
        if out_specs is None:
            return returned
        if isinstance(returned, Tensor):
            return shard_tensor(returned, mesh, out_specs)  # type: ignore[arg-type]
        if len(out_specs) != len(returned):
            raise ShardingError(
                f"shard_op has {len(out_specs)} out_specs but the call returns {len(returned)} tensors"
            )
        return type(returned)(
            r if spec is None else shard_tensor(r, mesh, spec)
            for r, spec in zip(returned, out_specs, strict=True)
        )

    return call


def recompute(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function or module whose intermediate results are recomputed in the backward part, not stored.

    Less memory for activations, a second forward computation of the block; the numbers do not change.

    Args:
        function: a module (a transformer block, say) or a function of tensors.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with Trace.current().recomputing():
            return function(*args, **kwargs)

    return call


@contextmanager
def on(mesh: ProcessMesh | None) -> Iterator[None]:
    """Ops inside are computed on `mesh`: one pipeline stage. None changes nothing."""
    with nullcontext() if mesh is None else Trace.current().on(mesh):
        yield


def pipeline_boundary(x: Any, mesh: ProcessMesh | EllipsisType | None = ...) -> Any:
    """Mark the boundary between two pipeline stages: later ops run on `mesh` unless annotated otherwise.

    Args:
        x: the tensor that the first stage sends to the second.
        mesh: the ranks of the second stage; None changes nothing, so that a script also runs serially.

    Returns:
        `x` itself.

    Raises:
        ShardingError: the mesh is left out.
    """
    if isinstance(mesh, EllipsisType):
        raise ShardingError(
            "pipeline_boundary has no mesh but ends a pipeline stage; give it the mesh of the next stage: "
            "pipeline_boundary(x, mesh)"
        )
    if mesh is None:
        return x
    trace = Trace.current()
    trace.placement = mesh
    return x
