r"""What no plan goes below: seconds of all products and all data movement, and bytes, over all devices.

*In:* a serial train graph, a cluster. *Out:* seconds of a step; bytes of a device.
*Invariant:* no forecast of a program that computes this graph on this cluster is below it, whatever the
layouts, stages or schedule, with as many micro-batches as the graph has or, where it is that of a whole
batch, with any number; except with convolutions whose windows may be padding alone:
blocks of these may be nothing.

Let p_do be the seconds of op o on one device of kind d alone. For a product, w_o FLOPs are computed at the
rate of its whole shape; any other op reads and writes w_o bytes at the bandwidth of the memory:

    p_do = launch_d + w_o / rate_d(o)

A rank that does the share x of an op takes at least x p_do: the launch is not shared, and rates do not rise
as matrices get smaller. Where a resource file has a measured table for the kind of op, the rate is the best
of the table. A convolution of which patches were measured has them in p_do: whoever does the share x of its
FLOPs copies at least the share x of its patches and rows. Of one that is computed in tiles only the FLOPs
that its result needs count, as a part may fill its tiles better than the whole. The bytes of a product do
not count where they have a price besides FLOPs (`moved`). The shares of all ranks make each op at least
once, no rank works longer than the step takes, and there are n_d devices of kind d, so the step takes at
least

    min T   subject to   sum_d x_do >= 1,   sum_o x_do p_do <= n_d T,   x >= 0,

with one kind of device the sum of p_o over n. Several micro-batches do not do less, computing again does
more. Of an op that completion may replace by simpler ones, the lesser of both ways counts. Left out are
lookups, ops that completion may replace by views, all communication, bubbles and the limit of memory, which
is what makes the gap.

Source: the roofline (Williams, Waterman and Patterson, 2009) and the fractional relaxation of scheduling
unrelated machines (Lenstra, Shmoys and Tardos, 1990).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import product

import numpy as np

from distgraph.ir.float_arrays import Floats
from distgraph.ir.graph import Op, Value
from distgraph.ir.op_registry import lookup
from distgraph.ir.step_phases import multiplicity
from distgraph.passes.analysis.op_work import Work, work_of
from distgraph.passes.decompose import expand
from distgraph.passes.search.layering.layer_folding import Fold, FoldedOp
from distgraph.passes.search.layering.liveness import Lifetimes
from distgraph.resources import Cluster, ComputeCost


def least_seconds(fold: Fold, cluster: Cluster, besides: Collection[str] = ()) -> float:
    """No plan takes less for a step.

    Args:
        fold: of a serial train graph; what runs once for each micro-batch counts as often.
        cluster: where it is to run; any of its devices may stay unused.
        besides: names of ops that are left out.

    Raises:
        ResourceError: a number that a product costs is not in the resource file.
    """
    times = multiplicity(fold.graph)
    counted = [(op, sum(times[name] for name in op.members if name not in besides)) for op in fold.ops]
    works = [(count, ways) for op, count in counted if count for ways in [_ways(fold, op)] if all(ways)]
    kinds: dict[object, list[int]] = {}
    for device in cluster.devices:
        kinds.setdefault((device.type, device.model, device.origin), []).append(device.index)
    cost = ComputeCost(cluster)
    seconds = np.array(
        [
            [
                count * min(sum(_alone(cost, devices[0], work) for work in way) for way in ways)
                for count, ways in works
            ]
            for devices in kinds.values()
        ]
    )
    return _divided(seconds.reshape(len(kinds), len(works)), [len(devices) for devices in kinds.values()])


def least_bytes(fold: Fold, devices: int) -> float:
    """No program without recomputation in which all devices compute every op needs less on each of them.

    Parameters, states, sums of gradients and the inputs of a step are held throughout, and between the two
    parts of a micro-batch what the first one stores for the second, each divided over all devices.

    Args:
        fold: of a serial train graph.
        devices: that hold it together.
    """
    micro, lifetimes = fold.graph.micro_batches, Lifetimes(fold).of
    held = 0
    for value, lifetime in zip(fold.values, lifetimes, strict=True):
        if lifetime.kind in ("fixed", "activation"):
            copies = micro if fold.ops[value.producer].op.kind == "input" else 1
            held += copies * len(value.members) * value.value.nbytes
    return held / devices


def _ways(fold: Fold, folded: FoldedOp) -> list[list[Work]]:
    """The works that all ranks together do at least for an op, in each of the ways to compute it; an empty
    list for a way that may cost nothing."""
    op, declared = folded.op, lookup(folded.op.kind)
    if declared.view or not op.operands:
        return [[]]
    read = dict(zip(op.operands, (_read_bytes(fold, operand) for operand in folded.operands), strict=True))
    if declared.decompose is None:
        return [_unavoidable(op, read)]
    fused = _memory_work(op, read) if declared.cost == "memory" else []
    if not fused:
        return [[]]
    return [fused, [work for part in expand(op) for work in _unavoidable(part, read)]]


def _unavoidable(op: Op, read: Mapping[Value, int]) -> list[Work]:
    """The work of an op that is neither replaced nor a view; none where it may cost nothing."""
    declared = lookup(op.kind)
    if declared.view or declared.decompose is not None or not op.operands:
        return []
    if declared.cost == "matmul":
        return _product(op)
    return _memory_work(op, read) if declared.cost == "memory" else []


def _memory_work(op: Op, read: Mapping[Value, int]) -> list[Work]:
    """The bytes that an op moves. Of what a part of another op has made, nothing is known about the memory
    behind it, so that reading it is not counted."""
    work = work_of(op, [read.get(operand, 0) for operand in op.operands])
    return [work] if work.kind == "memory" else []


def _read_bytes(fold: Fold, index: int) -> int:
    """Bytes in memory behind a folded value: views of smaller tensors are as large as these."""
    size = math.inf
    while True:
        value = fold.values[index]
        size, producer = min(size, value.value.nbytes), fold.ops[value.producer]
        if not (lookup(producer.op.kind).view and producer.operands):
            return int(size)
        index = producer.operands[0]


def _product(op: Op) -> list[Work]:
    """The FLOPs of a product. With windows of one element nothing is copied for patches. Tiles have at least
    the FLOPs of their result, which are fewer than those of the op for the gradient of an input that is
    smaller than the output: the padding has none."""
    work = replace(work_of(op, [0] * len(op.operands)), nbytes=0.0, copied=0.0)
    single = op.kind == "conv" and math.prod(op.operands[1].shape[2:]) == 1
    work = replace(work, patches=(0.0, 0.0)) if single else work
    if any(work.tiles):
        flops = work.flops
        if op.kind == "conv_grad_input":
            kernel, groups = op.operands[1].shape, op.attrs["groups"]
            flops = min(flops, 2.0 * op.result.size * (kernel[0] // groups) * math.prod(kernel[2:]))
        work = replace(work, tiles=(flops, 0.0, 0.0))
    return [work] if work.kind == "matmul" else []


def _alone(cost: ComputeCost, device: int, work: Work) -> float:
    """Seconds of a work on one device, at the best rate that a part of it may reach, added up or not."""
    compute = cost.cluster.devices[device].compute
    table = compute.ops.get(work.op, {}).get(work.dtype)
    if table is None or not table.times:
        ways = product((work.op, f"{work.op}+="), {work.tiles, (0.0, 0.0, 0.0)})
        return min(cost.time(device, *replace(work, op=op, tiles=tiles).amounts) for op, tiles in ways)
    amount = work.flops if table.unit == "flops" else work.nbytes
    return amount * min(t / w for t, w in zip(table.times, table.work, strict=True))


def _divided(seconds: Floats, counts: Sequence[int]) -> float:
    """The programme above.

    Args:
        seconds: p, [kinds of devices, products].
        counts: n, devices of each kind.
    """
    kinds, products = seconds.shape
    if not products:
        return 0.0
    if kinds == 1:
        return float(seconds.sum()) / counts[0]
    scale = float(seconds.max()) or 1.0
    # x [kinds, products], T; every product at least once; no kind longer than T on each of its devices
    once = np.hstack([-np.tile(np.eye(products), kinds), np.zeros((products, 1))])
    busy = np.zeros((kinds, kinds * products + 1))
    for kind in range(kinds):
        busy[kind, kind * products : (kind + 1) * products] = seconds[kind] / scale
        busy[kind, -1] = -counts[kind]
    solution = import_module("scipy.optimize").linprog(
        np.append(np.zeros(kinds * products), 1.0),
        A_ub=np.vstack([once, busy]),
        b_ub=np.append(-np.ones(products), np.zeros(kinds)),
    )
    assert solution.x is not None, solution.message  # x = 1 on one kind is a solution
    return float(solution.x[-1]) * scale
