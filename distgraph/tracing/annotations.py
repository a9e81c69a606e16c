"""Annotations that users write in a model: layouts of tensors and calls, meshes of ops, pipeline boundaries.

Annotations never change the meaning of the serial program, and the same script runs without any mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import EllipsisType
from typing import Any

from distgraph.errors import ShardingError
from distgraph.errors.arguments import Count, check_argument, checked_arguments
from distgraph.ir.graph import SOURCES
from distgraph.ir.matmul_algorithm import ATTENTION, MatmulAlgorithm
from distgraph.ir.mesh import ProcessMesh, check_mesh
from distgraph.ir.sharding_spec import AxisAttr, Dim, DistAttr, Origin, ShardSpec, UserDim, check_has_axes
from distgraph.tracing.op_axes import IndexAxes, laid_out_op
from distgraph.tracing.op_counts import Counts, cut_op
from distgraph.tracing.tensor import Tensor, TensorOperators
from distgraph.tracing.tracer import Trace, caller

Dims = Sequence[UserDim]
Ends = tuple[tuple[str, ...], str]
"""Axes that split the first dim of a tensor, and the axis that splits the last."""
Flow = tuple[Ends, DistAttr, Ends]
"""Of a dataflow: axes of the input, layout of the weight, axes of the result."""


def shard_tensor(
    x: Any,
    mesh: ProcessMesh | EllipsisType | None = ...,
    dims: Dims | None = None,
    *,
    axes: Dims | None = None,
    partial: str | Sequence[str] = (),
    gradient: bool = False,
) -> Any:
    """Pin the layout of a parameter or of a value that is being traced.

    Args:
        x: a `nn.Parameter`, or a traced tensor.
        mesh: ranks that store it; None leaves `x` unchanged, so that a script also runs serially.
        dims: for each dim the axis that splits it, None, or a tuple of axes (major to minor).
        axes: the same without a mesh: the layout holds on whichever mesh stores `x`, such as that of a
            pipeline stage that a search chooses. A mesh of one rank splits nothing.
        partial: axis or axes over which a traced tensor stays a sum of blocks until it is read.
        gradient: whether the gradient of a tensor must have this layout too; by default completion decides.

    Returns:
        `x` itself.

    Raises:
        ShardingError: an axis is unknown or used twice, the number of dims differs, or `x` is pinned to
            another layout; neither mesh and dims nor axes are given, or both; a parameter or input is to be
            partial.

    Example:
        `dg.shard_tensor(self.fc.weight, mesh, [None, "tp"])`
        `dg.shard_tensor(self.fc.weight, axes=[None, "tp"])`
    """
    if mesh is None:
        return x
    check_argument("shard_tensor", "partial", partial, str | Sequence[str], ShardingError)
    check_argument("shard_tensor", "gradient", gradient, bool, ShardingError)
    where = caller()
    attr = _attr(mesh, dims, axes, (partial,) if isinstance(partial, str) else tuple(partial), where)
    if isinstance(x, Tensor):
        _annotate(x, attr)
        if gradient:
            x.trace.mirrored.add(x.value.name)
        return x
    if not isinstance(x, TensorOperators):
        raise ShardingError(
            f"shard_tensor ({where}): {type(x).__name__} cannot be annotated; pass a parameter such as "
            f"layer.weight, or a tensor inside of forward"
        )
    parameter: Any = x
    subject = f"parameter of shape {tuple(parameter.shape)} ({where})"
    if attr.spec.partial:
        raise ShardingError(
            f"{subject}: is stored and cannot be partial; annotate a tensor inside of forward"
        )
    if isinstance(attr, DistAttr):
        attr.spec.check(parameter.shape, attr.mesh, subject)
    else:
        attr.spec.check_dims(parameter.shape, subject)
    before = parameter.annotation
    if before is not None and before != attr:
        raise ShardingError(
            f"parameter is annotated {attr} ({where}) but was annotated {before} ({before.origin.where}); "
            f"remove one"
        )
    parameter.annotation = attr
    return x


def _check_types(arguments: Mapping[str, Any]) -> None:
    """Raises ShardingError where an argument of `shard_op` has another type than it must."""
    number, text, specs = Count | None, str | None, Sequence[Any] | None
    hints: dict[str, Any] = {"in_specs": specs, "slices": Count, "block": number}
    for name, argument in arguments.items():
        check_argument("shard_op", name, argument, hints.get(name, text), ShardingError)


def _attr(
    mesh: ProcessMesh | EllipsisType,
    dims: Dims | None,
    axes: Dims | None,
    partial: Sequence[str],
    where: str,
) -> DistAttr | AxisAttr:
    """The layout that the arguments of `shard_tensor` give."""
    origin, summed = Origin("user", where), dict.fromkeys(partial, "sum")
    if isinstance(mesh, EllipsisType):
        if axes is None or dims is not None:
            raise ShardingError(
                f"shard_tensor ({where}) has no mesh and no axes; give it a mesh and dims, or "
                f'axes=[None, "tp"]'
            )
        return AxisAttr(ShardSpec.of(axes, summed, f"shard_tensor ({where})"), origin)
    check_mesh(f"shard_tensor ({where})", mesh)
    if dims is None or axes is not None:
        raise ShardingError(
            f"shard_tensor ({where}) has a mesh {'and axes' if axes is not None else 'but no dims'}; give it "
            f"a mesh and dims, or axes alone"
        )
    return DistAttr(mesh, ShardSpec.of(dims, summed, f"shard_tensor ({where})"), origin)


def _annotate(x: Tensor, attr: DistAttr | AxisAttr) -> None:
    if isinstance(attr, DistAttr):
        x.trace.annotate(x.value, attr)
    else:
        x.trace.annotate_axes(x.value, attr)


def reshard(x: Any, mesh: ProcessMesh | None, dims: Dims) -> Any:
    """The tensor in another layout; unlike `shard_tensor`, the layout may differ from that of `x` itself.

    Raises:
        ShardingError: as `shard_tensor`.
    """
    if mesh is None:
        return x
    where = caller()
    check_mesh(f"reshard ({where})", mesh)
    trace = x.trace if isinstance(x, Tensor) else Trace.current()
    attr = DistAttr(mesh, ShardSpec.of(dims, where=f"reshard ({where})"), Origin("user", where))
    with trace.on(mesh):
        (y,) = trace.emit("reshard", (x,))
    trace.annotate(y.value, attr)
    return y


def shard_op(
    function: Callable[..., Any],
    mesh: ProcessMesh | EllipsisType | None = ...,
    in_specs: Sequence[Dims | None] | None = None,
    out_specs: Sequence[Dims | None] | Dims | None = None,
    *,
    algorithm: str | None = None,
    dataflow: str | None = None,
    slices: int = 1,
    block: int | None = None,
    ring: str | None = None,
    counts: Counts | None = None,
    axes: IndexAxes | None = None,
) -> Callable[..., Any]:
    """A function or module whose calls take and return tensors in given layouts, computed on `mesh`.

    With `algorithm` its matrix products, and those of its gradients, are computed by a distributed algorithm;
    see docs/parallelism/matmul_algorithms.md.

    Args:
        function: an op, a function of tensors or a module.
        mesh: ranks that compute it; None returns `function` as it is. With counts or axes it may be left out.
        in_specs: one for each argument that is a tensor, those of parameters may be left out; None leaves
            the layout unchanged.
        out_specs: one for each result; for a single result the dims themselves.
        algorithm: "meshslice", "collective", "wang", "summa", "cannon" or another that is registered; see
            docs/parallelism/matmul_algorithms.md.
        dataflow: "OS", "LS" or "RS", on a mesh of two axes: pins the parameter matrices, and tensors and
            results without a spec, to the layouts of this dataflow. None leaves layouts to other annotations.
            Mesh axes before the last two are of data parallelism: they split the first dim of tensors and
            results before the axis of the dataflow.
        slices: of "meshslice".
        block: adjacent rows or columns that stay together when a shard is sliced. None: as many as the
            shards allow.
        ring: of "wang": mesh axis along which a matrix goes round as a ring of blocks, in the product and in
            both gradients: the last axis for the input (in OS and RS) or the result (LS), the axis before it
            for the weight (OS and LS) or the result (RS). None: the axis along which more bytes are sent.
        counts: a strategy as in MindSpore, in place of specs and algorithm: for each tensor of the call of
            one op the number of parts of each dim. Dims that the op takes as one index have equal cuts; a
            result has the cuts of its operands, and what is cut but not in the result is summed. The ranks
            are those of `mesh`, whose axes do not matter and on which the op is repeated where they are more
            than the parts; without a mesh as many ranks as there are parts, from 0 on.
        axes: the layout of one op, in place of specs and algorithm: index of its rule -> the axis that splits
            it, None, or a tuple of axes; indices that are left out are not split. Without a mesh it holds on
            whichever mesh computes the op. Operands are resharded; the layout of the result is left open.

    Raises:
        ShardingError: no mesh, no counts and no axes; counts or axes that do not fit the op, or besides
            specs; the number of specs and of tensors differ; a call without an op that the algorithm
            computes; a dataflow, slices, block or ring without an algorithm; an unknown dataflow, or one on a
            mesh of one axis; a ring along an axis that the mesh does not have.

    Example:
        `y = dg.shard_op(self.fc, mesh, algorithm="meshslice", dataflow="OS", slices=4)(x)`
        `y = dg.shard_op(self.fc, mesh, algorithm="wang", dataflow="OS", ring="cols")(x)`
        `y = dg.shard_op(ops.matmul, counts=((2, 1), (1, 4)))(x, w)`
        `y = dg.shard_op(ops.matmul, axes={"m": "dp", "k": "tp"})(x, w)`
    """
    if mesh is None:
        return function
    options = {"dataflow": dataflow, "slices": slices, "block": block, "ring": ring}
    _check_types({"in_specs": in_specs, "algorithm": algorithm, **options})
    options = {name: value for name, value in options.items() if value not in (None, 1)}
    if counts is not None or axes is not None or isinstance(mesh, EllipsisType):
        others = {"in_specs": in_specs, "out_specs": out_specs, "algorithm": algorithm, **options}
        return _of_one_op(function, mesh, counts, axes, others, caller())
    check_mesh(f"shard_op ({caller()})", mesh)
    where = caller()
    _check_options(options, algorithm, mesh, where)
    chosen = None if algorithm is None else MatmulAlgorithm(algorithm, slices, block, ring)
    flow = _flow_layouts(mesh, dataflow, where)

    def call(*args: Any, **kwargs: Any) -> Any:
        if chosen is None:
            return sharded(*args, **kwargs)
        weight, trace = None if flow is None else flow[1], Trace.current()
        before = len(trace.algorithms)
        with trace.computing_by(chosen, weight):
            returned = sharded(*args, **kwargs)
        if len(trace.algorithms) == before:
            raise ShardingError(_nothing_to_compute(chosen, where))
        return returned

    def sharded(*args: Any, **kwargs: Any) -> Any:
        arguments = _resharded_arguments(args, mesh, in_specs, flow)
        with Trace.current().on(mesh):
            returned = function(*arguments, **kwargs)
        return _pinned(returned, mesh, out_specs, None if flow is None else flow[2])

    return call


def _nothing_to_compute(algorithm: MatmulAlgorithm, where: str) -> str:
    """The message of a call without an op that its algorithm computes."""
    kinds, advice = " and ".join(algorithm.kinds), "give it such an op"
    if algorithm.kinds == ATTENTION:
        advice = "use ops.attention or a module with fused=True"
    return (
        f"shard_op ({where}): algorithm {algorithm} computes ops of kind {kinds} but the call has none "
        f"outside of loops; {advice}, or leave the algorithm out"
    )


def _pinned(
    returned: Any,
    mesh: ProcessMesh,
    out_specs: Sequence[Dims | None] | Dims | None,
    flow: Ends | None,
) -> Any:
    """Results with their layouts: by `out_specs`, or the axes that a dataflow gives a single result."""
    if out_specs is None and flow is not None and isinstance(returned, Tensor):
        return shard_tensor(returned, mesh, _middle(flow, returned), gradient=True)
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


def _of_one_op(
    function: Callable[..., Any],
    mesh: ProcessMesh | EllipsisType,
    counts: Counts | None,
    axes: IndexAxes | None,
    others: Mapping[str, object],
    where: str,
) -> Callable[..., Any]:
    """The function with its op laid out by counts or by axes, in place of other arguments of `shard_op`."""
    given = [name for name, value in {"axes": axes, **others}.items() if value is not None]
    if counts is None and axes is None:
        raise ShardingError(
            f"shard_op ({where}) has no mesh and no counts; give it a mesh, or counts=((2, 1), (1, 4)), or "
            f'axes={{"m": "dp"}}'
        )
    first = "axes" if counts is None else "counts"
    given = [name for name in given if name != first]
    if given:
        raise ShardingError(f"shard_op ({where}) has {first} and {given[0]}; leave one of them out")
    if axes is not None and not isinstance(axes, Mapping):
        raise ShardingError(
            f"shard_op ({where}): axes is a {type(axes).__name__} but must name the index that each axis "
            f'splits, as axes={{"m": "dp"}}'
        )
    ranks = None if isinstance(mesh, EllipsisType) else mesh
    if ranks is not None:
        check_mesh(f"shard_op ({where})", ranks)
    if counts is not None:
        return _with_counts(function, ranks, counts, where)
    assert axes is not None
    return _with_axes(function, ranks, axes, where)


def _with_axes(
    function: Callable[..., Any], mesh: ProcessMesh | None, axes: IndexAxes, where: str
) -> Callable[..., Any]:
    """The function with the indices of its op split over axes, of a mesh or of whichever computes it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        trace = Trace.current()
        tensors = [trace.tensor(a) if isinstance(a, TensorOperators) else a for a in args]
        given, layouts = laid_out_op(function, tensors, kwargs, axes, where)
        if mesh is not None:
            check_has_axes(mesh, [axis for _, split in given.axes for axis in split], f"shard_op ({where})")
        dims = iter(layouts)
        with trace.on(mesh) if mesh is not None else nullcontext():
            laid_out = [
                _resharded(a, mesh, next(dims), where) if isinstance(a, Tensor) else a for a in tensors
            ]
            first = len(trace.ops)
            returned = function(*laid_out, **kwargs)
        op = next(op for op in trace.ops[first:] if op.kind not in SOURCES)
        trace.op_axes[op.name] = given
        return returned

    return call


def _resharded(x: Tensor, mesh: ProcessMesh | None, dims: Sequence[Dim], where: str) -> Tensor:
    """A tensor in the layout in which an op is to read it."""
    (y,) = x.trace.emit("reshard", (x,))
    spec, origin = ShardSpec(tuple(dims)), Origin("user", where)
    _annotate(y, AxisAttr(spec, origin) if mesh is None else DistAttr(mesh, spec, origin))
    return y


def _with_counts(
    function: Callable[..., Any], ranks: ProcessMesh | None, counts: Counts, where: str
) -> Callable[..., Any]:
    """The function with its op cut as counts say."""

    def call(*args: Any, **kwargs: Any) -> Any:
        trace = Trace.current()
        tensors = [trace.tensor(a) if isinstance(a, TensorOperators) else a for a in args]
        cut = cut_op(function, tensors, kwargs, counts, ranks, where)
        specs = iter(cut.operands)
        arguments = [reshard(a, cut.mesh, next(specs)) if isinstance(a, Tensor) else a for a in tensors]
        with trace.on(cut.mesh):
            returned = function(*arguments, **kwargs)
        if isinstance(returned, Tensor):
            return shard_tensor(returned, cut.mesh, cut.results[0])
        return type(returned)(
            shard_tensor(r, cut.mesh, d) for r, d in zip(returned, cut.results, strict=True)
        )

    return call


def _check_options(
    options: Mapping[str, object], algorithm: str | None, mesh: ProcessMesh, where: str
) -> None:
    """Raise ShardingError for an option without an algorithm, and a ring along an axis of another mesh."""
    for name, value in options.items():
        if algorithm is None:
            usual = "wang" if name == "ring" else "meshslice"
            raise ShardingError(
                f"shard_op ({where}): {name} is {value!r} but there is no algorithm; name one, such as "
                f'algorithm="{usual}"'
            )
        if name == "ring" and value not in mesh.sizes:
            raise ShardingError(
                f"shard_op ({where}): ring is {value!r} but {mesh} has {', '.join(mesh.axes)}; name one of "
                "these axes"
            )


def _flow_layouts(mesh: ProcessMesh, dataflow: str | None, where: str) -> Flow | None:
    """The layouts of a dataflow; None without one. Raises ShardingError."""
    if dataflow is None:
        return None
    if len(mesh.axes) < 2:
        raise ShardingError(
            f"shard_op ({where}): dataflow {dataflow} needs a mesh of two axes but {mesh} has "
            f"{len(mesh.axes)}; give one such as ProcessMesh.grid(rows=2, cols=4)"
        )
    *data, rows, cols = mesh.axes
    samples = (*data, rows)
    layouts = {
        "OS": ((samples, cols), [rows, cols]),
        "LS": ((samples, cols), [cols, rows]),
        "RS": (((*data, cols), rows), [rows, cols]),
    }
    if dataflow not in layouts:
        raise ShardingError(
            f"shard_op ({where}): dataflow {dataflow!r} does not exist; it is one of {', '.join(layouts)}"
        )
    source, weight = layouts[dataflow]
    return source, DistAttr(mesh, ShardSpec.of(weight), Origin("user", where)), (samples, cols)


def _resharded_arguments(
    args: Sequence[Any], mesh: ProcessMesh, in_specs: Sequence[Dims | None] | None, flow: Flow | None
) -> list[Any]:
    """The arguments of a call: tensors in their specs, and those without one as the dataflow needs them."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    if in_specs is not None and len(in_specs) > len(tensors):  # parameters have specs, too
        args = [Trace.current().tensor(a) if hasattr(a, "__distgraph_tensor__") else a for a in args]
        tensors = [a for a in args if isinstance(a, Tensor)]
    if in_specs is not None and len(in_specs) != len(tensors):
        raise ShardingError(f"shard_op has {len(in_specs)} in_specs but the call has {len(tensors)} tensors")
    specs = iter(in_specs or [None] * len(tensors))
    arguments = []
    for a in args:
        spec = next(specs) if isinstance(a, Tensor) else None
        if spec is None and flow is not None and isinstance(a, Tensor):
            spec = _middle(flow[0], a) if a is tensors[0] else [*flow[1].spec.dims]
            arguments.append(_mirrored(reshard(a, mesh, spec)))
        else:
            arguments.append(a if spec is None else reshard(a, mesh, spec))
    return arguments


def _middle(axes: Ends, x: Tensor) -> list[UserDim]:
    """The first dim of a tensor split by some axes, the last by another."""
    return [axes[0], *[None] * (x.ndim - 2), axes[1]]


def _mirrored(x: Tensor) -> Tensor:
    """A tensor whose gradient has its layout too."""
    x.trace.mirrored.add(x.value.name)
    return x


@checked_arguments(ShardingError)
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
    """Ops inside are computed on `mesh`: one pipeline stage. None changes nothing.

    Raises:
        ShardingError: it is no mesh.
    """
    check_argument("on", "mesh", mesh, ProcessMesh | None, ShardingError)
    with nullcontext() if mesh is None else Trace.current().on(mesh):
        yield


@checked_arguments(ShardingError)
def pipeline_boundary(x: Any, mesh: ProcessMesh | EllipsisType | None = ...) -> Any:
    """Mark the boundary between two pipeline stages: later ops run on `mesh` unless annotated otherwise.

    What comes before is to be placed too, by `on`, an annotation or `Strategy(mesh=..., batch_axis=...)`:
    ops without a mesh run on that of their neighbours, so that a single mesh divides nothing.

    Without a mesh it marks the end of a layer: the layers of a plan, from which the search of mode "auto"
    makes pipeline stages, are then those between the marks. Other modes are not affected.

    Args:
        x: the tensor that the first stage or layer sends to the second.
        mesh: the ranks of the second stage; None changes nothing, so that a script also runs serially.

    Returns:
        `x` itself.
    """
    if mesh is None:
        return x
    trace = Trace.current()
    if isinstance(mesh, EllipsisType):
        trace.boundaries.append(len(trace.ops))
        return x
    trace.begin_stage(mesh)
    return x
