"""Seconds that one op takes on one device, from its FLOPs, its bytes and its shape.

There are four classes of ops; each includes the time to start the op:

    matmul   launch + copied elements * copied
             + max(flops / (peak * e), bytes / (memory bandwidth * memory_efficiency))
             or, if the file states `moved`,
             launch + copied elements * copied + flops / (peak * e) + bytes * moved
    memory   launch + bytes / (memory bandwidth * memory_efficiency)
    lookup   launch + bytes / (memory bandwidth * lookup_efficiency)
    launch   launch

    e = efficiency / (f(m_half / m) * f(n_half / n) * f(k_half / k))
    f(r) = 1 + r**exponent if r < 1 else 1 + r

A matmul follows a roofline model whose compute roof is lower for small matrices: partly filled tiles at the
edges waste work, and a short contraction does not hide the filling and draining of the pipeline. In a batch
every matrix has its own edges, so m, n and k are those of one matrix; the batch only shares the launch. A
contraction copies an operand, or its product, where a group of indices that the product takes for one is not
one in memory. A CPU packs operands before it multiplies them, so its file may state `moved`, and bytes and
FLOPs take time one after the other. All numbers come from `machines[].devices.compute` of the resource file.

A measured table for the kind of op and the dtype (`ops`) takes precedence: the time is linear in the work
between its entries, falls to `launch` below the first, and is proportional to the work above the last. An op
that only takes longer to start than others has its own `launch` there. A kernel that accumulates into its
result (`einsum+=`) uses the table of the plain kernel if it has none itself.

A convolution that multiplies patches copied out of its input (im2col: Chellapilla et al., 2006) has three
rates instead of times, because the cost of the copies does not depend on the number of output channels:

    launch + flops * per_flop + patches * per_patch + rows * per_row

The patches have samples * channels * window * output elements, in rows as long as the last dim of the output.
Sharding the output channels therefore divides only the FLOPs. On a CPU, compiled loops multiply windows where
they lie, in tiles of several outputs and places, of which those at the edges are filled in part (Goto and van
de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008). Where these were measured (`tile_rates`):

    launch + tiles' flops * per_flop + copied elements * per_element + tiles * per_tile
"""

from __future__ import annotations

import math

import numpy as np

from distgraph.errors import ResourceError
from distgraph.ir.op_registry import MatmulDims, Patches, Tiles
from distgraph.resources.cluster import Cluster, Device, OpTable

_EXAMPLES = {"launch": "5 us", "memory_efficiency": "0.8", "lookup_efficiency": "0.3"}
_RATE = "{efficiency: 0.8, half: [128, 128, 64]}"
CLASSES = ("matmul", "memory", "lookup", "launch")


class ComputeCost:
    """Costs of computation on one cluster.

    Example:
        >>> from distgraph.resources.load import load_cluster
        >>> cost = ComputeCost(load_cluster("dgx_h100_pod"))
        >>> f"{cost.matmul_rate(0, 'bf16', (1, 8192, 8192, 8192)):.2g} FLOP/s"
        '7.6e+14 FLOP/s'
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def time(
        self,
        device: int,
        kind: str,
        flops: float,
        nbytes: float,
        dtype: str,
        dims: MatmulDims = (1, 1, 1, 1),
        op: str = "",
        patches: Patches = (0.0, 0.0),
        copied: float = 0.0,
        tiles: Tiles = (0.0, 0.0, 0.0),
    ) -> float:
        """Seconds of one op.

        Args:
            device: number of the device.
            kind: matmul, memory, lookup or launch.
            flops: floating point operations; only a matmul counts them.
            nbytes: bytes read and written.
            dtype: of the operands of a matmul.
            dims: (batch, m, n, k) of a matmul.
            op: kind of the op (see `passes.work`), where a table for it may be used.
            patches: of a convolution.
            copied: elements that a matmul copies.
            tiles: of a convolution by compiled loops.

        Raises:
            ResourceError: an unknown class, or a number that the resource file does not state.
        """
        if kind not in CLASSES:
            raise ResourceError(f"op class {kind}: unknown; use one of {', '.join(CLASSES)}")
        hardware = self.cluster.devices[device]
        seconds = self._number(hardware, "launch")
        tables = hardware.compute.ops
        table = tables.get(op, tables.get(op.removesuffix("+="), {})).get(dtype)
        if table is not None and table.launch is not None:
            seconds = table.launch
        if table is not None and table.tile_rates is not None and any(tiles):
            return seconds + float(np.dot(table.tile_rates, tiles))
        if table is not None and table.rates is not None:
            return seconds + float(np.dot(table.rates, (flops, *patches)))
        if table is not None and table.times:
            return _interpolate(table, flops if table.unit == "flops" else nbytes, seconds)
        if kind == "launch":
            return seconds
        moving = nbytes / self._rate(hardware, "lookup" if kind == "lookup" else "memory")
        if kind == "matmul":
            rate = hardware.compute.matmul.get(dtype)
            if rate is not None and rate.copied is not None:
                seconds += copied * rate.copied
            computing = flops / self.matmul_rate(device, dtype, dims)
            if rate is not None and rate.moved is not None:
                return seconds + computing + nbytes * rate.moved
            return seconds + max(computing, moving)
        return seconds + moving

    def matmul_rate(self, device: int, dtype: str, dims: MatmulDims) -> float:
        """FLOP/s of a contraction of this shape, were its bytes there at no cost.

        Raises:
            ResourceError: the file states no rate or no efficiency for the dtype.
        """
        hardware = self.cluster.devices[device]
        rate = hardware.compute.matmul.get(dtype)
        if rate is None:
            stated = ", ".join(hardware.compute.matmul) or "no dtype"
            raise self._missing(hardware, f"matmul.{dtype}", f"{hardware.model} states {stated}", _RATE)
        peak = hardware.peak[dtype] if dtype in hardware.peak else self.cluster.flops(device, dtype)
        reached = peak * rate.efficiency
        for size, half in zip(dims[1:], rate.half, strict=True):
            if half:
                reached /= 1 + (half / size) ** (rate.exponent if size > half else 1) if size else math.inf
        return max(reached, 1.0)  # an empty matrix has no FLOPs either

    def _rate(self, device: Device, kind: str) -> float:
        """Bytes/s of streaming ("memory") or of lookups."""
        if device.memory_bandwidth is None:
            raise ResourceError(
                f"{self.cluster.source}: {device.origin}.memory_bandwidth: missing, needed to price ops "
                f'on {device.model}; add memory_bandwidth such as "900 GB/s", or run distgraph profile there'
            )
        return device.memory_bandwidth * self._number(device, f"{kind}_efficiency")

    def _number(self, device: Device, name: str) -> float:
        number: float | None = getattr(device.compute, name)
        if number is None:
            why = f"needed to price computation on {device.model}"
            raise self._missing(device, name, why, _EXAMPLES[name])
        return number

    def _missing(self, device: Device, name: str, why: str, example: str) -> ResourceError:
        """An error that names the missing number and all other numbers that the device needs."""
        key = name.rpartition(".")[2]
        others = [
            f"{other}: {text}"
            for other, text in _EXAMPLES.items()
            if other != name and getattr(device.compute, other) is None
        ]
        if not device.compute.matmul and not name.startswith("matmul"):
            others.append(f"matmul: {{f32: {_RATE}}} for every dtype that is multiplied")
        also = f" (and, missing there too, {', '.join(others)})" if others else ""
        return ResourceError(
            f"{self.cluster.source}: {device.origin}.compute.{name}: missing, {why}; add it such as "
            f"{key}: {example}{also}, or run distgraph profile on that machine, which measures it"
        )


def _interpolate(table: OpTable, work: float, launch: float) -> float:
    """Seconds from a measured table: linear between its entries, proportional to the work above the last."""
    assert table.times is not None
    if work >= table.work[-1]:
        return table.times[-1] * work / table.work[-1]
    start = min(launch, table.times[0])
    return float(np.interp(work, (0.0, *table.work), (start, *table.times)))
