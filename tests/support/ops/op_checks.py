"""Checks of any op: against NumPy, against finite differences, and against itself under every layout.

Each raises AssertionError with the op, the mesh and the layout that failed.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

import distgraph.ops  # registers every op
from distgraph.ir.dtypes import epsilon, is_float, short, to_numpy
from distgraph.ir.graph import Op, Value
from distgraph.ir.index_rule import OpLayout, choices
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import (
    infer_results,
    linear_groups,
    local_attrs,
    lookup,
    operand_layout,
    operand_mesh,
    operand_windows,
    result_layout,
    result_mesh,
    rule_of,
    window_bounds,
)
from distgraph.ir.reference_interpreter import interpret
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.serial.backward import differentiate
from distgraph.tracing.tensor import emit
from distgraph.tracing.tracer import Trace

Array = Any
MESHES = (
    ProcessMesh.grid(x=2),
    ProcessMesh.grid(x=4),
    ProcessMesh.grid(x=2, y=2),
    ProcessMesh.grid(x=3),
    ProcessMesh.grid(x=2, y=3),
)
REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


@dataclass(frozen=True)
class Sample:
    """One instance of an op.

    Attributes:
        operands: NumPy arrays; floating ones in f64.
        attrs: attributes of the op.
        reference: NumPy function of the operands; an array or a tuple. None: no independent one exists.
        wrt: operands whose gradient is compared with finite differences; by default every floating one.
        dtypes: also tried with the floating operands in these dtypes.
        results: the results that are compared (statistics that only the gradient op reads may be left out).
    """

    operands: tuple[Array, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    reference: Callable[..., Any] | None = None
    wrt: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] = ("f32", "f16", "bf16")


def as_tuple(result: Any) -> tuple[Array, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _arrays(result: Any) -> tuple[Array, ...]:
    """Results as arrays: NumPy gives scalars for what has no dims."""
    return tuple(r if isinstance(r, np.ndarray) else np.asarray(r) for r in as_tuple(result))


def build(kind: str, sample: Sample, operands: Sequence[Array] | None = None) -> Op:
    arrays = sample.operands if operands is None else operands
    values = tuple(Value(f"x{i}", tuple(a.shape), short(a.dtype)) for i, a in enumerate(arrays))
    inferred = infer_results(kind, values, sample.attrs)
    results = tuple(Value(f"y{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(inferred))
    return Op(kind, values, results, dict(sample.attrs))


def run(
    op: Op, arrays: Sequence[Array], attrs: Mapping[str, Any] | None = None, out: Any = None
) -> tuple[Array, ...]:
    """The kernel; operands are read-only while it runs, so that a kernel that writes to them is caught."""
    declared = lookup(op.kind)
    options = dict(op.attrs if attrs is None else attrs)
    if declared.micro:
        options["micro"] = 0
    flags = [a.flags.writeable for a in arrays]
    for a in arrays:
        a.flags.writeable = any(a is o for o in as_tuple(out))
    try:
        return _arrays(declared.kernel(np, *arrays, out=out, **options))
    finally:
        for a, flag in zip(arrays, flags, strict=True):
            a.flags.writeable = flag


def terms(op: Op) -> int:
    """How many elements one element of a result may be summed from."""
    rule = rule_of(op)
    gone = {i for r in range(len(op.results)) for i in rule.reduced(r)} | set(rule.whole)
    count = 1
    for index in gone:
        count *= rule.sizes[index]
    return max(count, max((n for v in op.operands for n in v.shape), default=1))


def assert_close(found: Array, expected: Array, op: Op, factor: float, context: str) -> None:
    """Equal for exact types; else within eps x (number of terms summed) x factor of the largest element."""
    assert tuple(found.shape) == tuple(expected.shape), (
        f"{context}: shape {found.shape}, expected {expected.shape}"
    )
    if found.dtype.kind in "biu" and expected.dtype.kind in "biu":
        assert np.array_equal(found, expected), f"{context}: {found} is not {expected}"
        return
    wide, target = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    finite = np.abs(target[np.isfinite(target)])
    scale = max(1.0, float(finite.max()) if finite.size else 1.0)
    tolerance = factor * epsilon(short(found.dtype)) * terms(op) * scale
    with np.errstate(invalid="ignore"):
        same = (np.abs(wide - target) <= tolerance) | (wide == target) | (np.isnan(wide) & np.isnan(target))
    if not same.all():
        worst = float(np.nanmax(np.abs(wide - target)))
        raise AssertionError(f"{context}: off by {worst:.3g}, allowed {tolerance:.3g}")


def check_values(kind: str, sample: Sample) -> None:
    """(a) result shapes, dtypes and numbers against NumPy; `out=` and in-place give the same."""
    op = build(kind, sample)
    results = run(op, sample.operands)
    assert len(results) == len(op.results), f"{kind}: {len(results)} results, declared {len(op.results)}"
    for value, result in zip(op.results, results, strict=True):
        assert tuple(result.shape) == value.shape, f"{kind}: result {result.shape}, inferred {value.type}"
        assert short(result.dtype) == value.dtype, f"{kind}: result {result.dtype}, inferred {value.type}"
    if sample.reference is not None:
        expected = as_tuple(sample.reference(*sample.operands))
        for position, (result, wanted) in enumerate(zip(results, expected, strict=False)):
            assert_close(result, np.asarray(wanted), op, 16, f"{kind} result {position} against NumPy")
    _check_out(op, sample, results)


def _check_out(op: Op, sample: Sample, expected: tuple[Array, ...]) -> None:
    declared = lookup(op.kind)
    if declared.view:
        return
    for position, result in enumerate(expected):  # else a reused buffer would change under its readers
        alias = any(np.shares_memory(result, a) for a in sample.operands)
        assert not alias, f"{op.kind}: result {position} is an operand's memory, but the op is no view"
    targets = tuple(np.empty(v.shape, to_numpy(v.dtype)) for v in op.results)
    out = targets if len(targets) > 1 else targets[0]
    for position, (found, wanted) in enumerate(zip(run(op, sample.operands, out=out), expected, strict=True)):
        assert found is targets[position], f"{op.kind}: result {position} was not written to out"
        assert_close(found, wanted, op, 4, f"{op.kind} with out=")
    for position in declared.inplace:
        value = op.operands[position]
        if (value.shape, value.dtype) != (op.results[0].shape, op.results[0].dtype):
            continue
        arrays = [a.copy() for a in sample.operands]
        rest = tuple(np.empty(v.shape, to_numpy(v.dtype)) for v in op.results[1:])
        out = (arrays[position], *rest) if rest else arrays[position]
        assert_close(
            run(op, arrays, out=out)[0], expected[0], op, 4, f"{op.kind} in place of operand {position}"
        )


def check_dtype(kind: str, sample: Sample, dtype: str) -> None:
    """(d) another floating dtype gives what f64 gives, to its own precision, from equal operands."""
    narrow = [a.astype(to_numpy(dtype)) if a.dtype == np.float64 else a for a in sample.operands]
    wide = [a.astype(np.float64) if is_float(short(a.dtype)) else a for a in narrow]
    attrs = dict(sample.attrs)
    op = build(kind, sample, narrow)
    for position, (found, wanted, value) in enumerate(
        zip(run(op, narrow), run(build(kind, sample, wide), wide), op.results, strict=True)
    ):
        assert short(found.dtype) == value.dtype, (
            f"{kind} {dtype}: result {found.dtype}, inferred {value.type}"
        )
        assert_close(found, wanted, op, 16, f"{kind} {dtype} result {position} {attrs}")


def check_gradient(kind: str, sample: Sample) -> None:
    """(b) reverse mode against central differences in f64, of a weighted sum of the results."""
    declared = lookup(kind)
    floats = tuple(i for i, a in enumerate(sample.operands) if a.dtype == np.float64)
    wrt = floats if sample.wrt is None else sample.wrt
    op = build(kind, sample)
    used = [r for r, v in enumerate(op.results) if is_float(v.dtype)]
    if declared.gradient is None or not wrt or not used:
        return
    used = used if len(used) == 1 or kind == "sort" else used[:1]
    weights = [_noise(op.results[r].shape, f"{kind} weight {r}") for r in used]
    trace = Trace(kind)
    with trace.activate():
        tensors = [trace.source("input", f"x{i}", v.shape, v.dtype) for i, v in enumerate(op.operands)]
        results = as_tuple(emit(kind, *tensors, **sample.attrs))
        loss = None
        for r, weight in zip(used, weights, strict=True):
            part = distgraph.ops.reduce("sum", results[r] * weight)
            loss = part if loss is None else loss + part
        grads = differentiate(trace, loss, [tensors[i] for i in wrt])
        graph = trace.finish({f"g{i}": g for i, g in zip(wrt, grads, strict=True)})
    found, _ = interpret(graph, {f"x{i}": a for i, a in enumerate(sample.operands)})

    def objective(arrays: Sequence[Array]) -> float:
        made = run(op, arrays)
        return float(sum((made[r] * w).sum() for r, w in zip(used, weights, strict=True)))

    for i in wrt:
        expected = _differences(objective, sample.operands, i)
        error = np.abs(found[f"g{i}"] - expected).max(initial=0.0)
        allowed = 1e-6 * max(
            1.0, np.abs(expected).max(initial=0.0)
        )  # step^2 of the central difference, and its noise
        assert error <= allowed, (
            f"gradient of {kind} {dict(sample.attrs)} by operand {i} is off by {error:.3g}"
        )


def _differences(
    objective: Callable[[Sequence[Array]], float], arrays: Sequence[Array], position: int
) -> Array:
    step = 1e-5
    result = np.zeros(arrays[position].shape)
    for at in np.ndindex(*arrays[position].shape):
        moved = [a.copy() for a in arrays]
        moved[position][at] += step
        above = objective(moved)
        moved[position][at] -= 2 * step
        result[at] = (above - objective(moved)) / (2 * step)
    return result


def check_decomposition(kind: str, sample: Sample) -> None:
    """The op in simpler ops gives the same."""
    function = lookup(kind).decompose
    if function is None:
        return
    op = build(kind, sample)
    trace = Trace(kind)
    with trace.activate():
        tensors = [trace.source("input", f"x{i}", v.shape, v.dtype) for i, v in enumerate(op.operands)]
        graph = trace.finish({f"y{i}": y for i, y in enumerate(as_tuple(function(op.attrs, *tensors)))})
    found, _ = interpret(graph, {f"x{i}": a for i, a in enumerate(sample.operands)})
    for position, expected in enumerate(run(op, sample.operands)):
        assert_close(found[f"y{position}"], expected, op, 64, f"{kind} result {position} decomposed")


def _noise(shape: tuple[int, ...], salt: str) -> Array:
    return np.random.default_rng(zlib.crc32(salt.encode())).standard_normal(shape)


def layouts(op: Op, mesh: ProcessMesh) -> tuple[OpLayout, ...]:
    """Every legal layout; where two axes split one index also the other order of the two."""
    found = choices(rule_of(op), mesh, linear_groups(op))
    turned = [
        OpLayout(mesh, tuple((index, axes[::-1]) for index, axes in option.axes), option.partial)
        for option in found
        if any(len(axes) > 1 for _, axes in option.axes)
    ]
    return (*found, *turned)


def check_layout(op: Op, arrays: Sequence[Array], serial: Sequence[Array], layout: OpLayout) -> None:
    """(c) slice the operands, run the local op of every rank, join the results: the serial result again."""
    completed = replace(op, layout=layout)
    mesh = layout.mesh
    context = f"{op.kind} {dict(op.attrs) or ''} on {mesh} as {layout}"
    specs = [operand_layout(completed, i) for i in range(len(arrays))]
    meshes = [operand_mesh(completed, i) for i in range(len(arrays))]
    pieces = [partial_pieces(a, s, m) for a, s, m in zip(arrays, specs, meshes, strict=True)]
    result_specs = [result_layout(completed, r) for r in range(len(op.results))]
    result_meshes = [result_mesh(completed, r) for r in range(len(op.results))]
    whole: list[dict[tuple[int, ...], tuple[Array, Array]]] = [{} for _ in op.results]
    windows = [operand_windows(completed, i) for i in range(len(arrays))]
    for rank in mesh.members:
        local = [
            window(part[coordinates(s, m, rank)], window_bounds(a.shape, m, s, read, rank))
            for a, part, s, m, read in zip(arrays, pieces, specs, meshes, windows, strict=True)
        ]
        made = run(op, local, local_attrs(completed, rank))
        targets = zip(op.results, result_specs, result_meshes, made, whole, strict=True)
        for value, spec, left, result, blocks in targets:
            where = spec.slices(value.shape, left, rank)
            shape = spec.local_shape(value.shape, left, rank)
            assert tuple(result.shape) == shape, (
                f"{context}: rank {rank} made {result.shape}, its block is {shape}"
            )
            key = coordinates(spec, left, rank)
            if key not in blocks:
                blocks[key] = (np.zeros(value.shape, result.dtype), np.zeros(value.shape, bool))
            total, seen = blocks[key]
            again = seen[where]
            assert np.array_equal(
                total[where][again], result[again], equal_nan=result.dtype.kind not in "biuV"
            ), f"{context}: rank {rank} differs from its replica"
            total[where] = result
            seen[where] = True
    for spec, blocks, expected in zip(result_specs, whole, serial, strict=True):
        assert all(seen.all() for _, seen in blocks.values()), (
            f"{context}: part of the result is made by no rank"
        )
        assert_close(combine(spec, {k: t for k, (t, _) in blocks.items()}), expected, op, 64, context)


def window(x: Array, bounds: Sequence[tuple[int, int]]) -> Array:
    """The elements between bounds, which may wrap around."""
    for dim, (start, stop) in enumerate(bounds):
        x = np.take(x, np.arange(start, stop), axis=dim, mode="wrap")
    return np.asarray(x)


def coordinates(spec: ShardSpec, mesh: ProcessMesh, rank: int) -> tuple[int, ...]:
    """Where a rank lies along the partial axes of a spec."""
    return tuple(mesh.index(rank, (axis,)) for axis, _ in spec.partial)


def combine(spec: ShardSpec, blocks: Mapping[tuple[int, ...], Array]) -> Array:
    """Reduce what the ranks along the partial axes hold, each axis with its own reduction."""
    parts = dict(blocks)
    for _, reduction in reversed(spec.partial):
        merged: dict[tuple[int, ...], Array] = {}
        for key, value in sorted(parts.items(), key=lambda item: item[0]):
            front = key[:-1]
            merged[front] = REDUCE[reduction](merged[front], value) if front in merged else value
        parts = merged
    return parts[()]


def partial_pieces(x: Array, spec: ShardSpec, mesh: ProcessMesh) -> dict[tuple[int, ...], Array]:
    """Arrays by position along the partial axes that sum to `x`; unequal ones."""
    sizes = [mesh.sizes[axis] for axis, _ in spec.partial]
    keys = list(itertools.product(*(range(n) for n in sizes)))
    if len(keys) == 1:
        return {keys[0]: x}
    return _pieces(_Held(x), tuple(keys))


class _Held:
    """An array as a cache key: by identity, which it keeps alive."""

    def __init__(self, x: Array) -> None:
        self.x = x

    def __hash__(self) -> int:
        return id(self.x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.x is self.x


@lru_cache(maxsize=256)
def _pieces(held: _Held, keys: tuple[tuple[int, ...], ...]) -> dict[tuple[int, ...], Array]:
    x = held.x
    rng = np.random.default_rng(len(keys))
    drawn = [
        np.asarray(
            rng.integers(0, 3, x.shape) if x.dtype.kind in "iu" else rng.standard_normal(x.shape)
        ).astype(x.dtype)
        for _ in keys[1:]
    ]
    return dict(zip(keys, map(np.asarray, [x - sum(drawn), *drawn]), strict=True))


def check_layouts(kind: str, sample: Sample, meshes: Sequence[ProcessMesh] = MESHES) -> int:
    """Every legal layout on every mesh. Returns how many there were."""
    op = build(kind, sample)
    serial = run(op, sample.operands)
    count = 0
    for mesh in meshes:
        for layout in layouts(op, mesh):
            check_layout(op, sample.operands, serial, layout)
            count += 1
    return count


def every(samples: Mapping[str, Sequence[Sample]]) -> Iterator[tuple[str, int]]:
    for kind in sorted(samples):
        for position in range(len(samples[kind])):
            yield kind, position
