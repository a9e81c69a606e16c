"""Figures of the MeshSlice paper under other assumptions: what each of our differences from it depends on.

The paper (Nam et al., ISCA 2025) simulates chips in detail; `benchmarks.mesh2d` uses its closed form with its
prices. Here one assumption at a time is replaced in a copy of that closed form, and all figures are computed
again: prices, speed of a chip, whether both directions share a link, how much of a message a product hides,
what a slice reads and writes, which ring Wang's algorithm has, and which mesh its rivals have. Nothing is
fitted: every replacement is a number of the paper, of a data sheet, or one half.

The first assumption, none, has to equal the tuner (`tests/benchmarks/test_mesh2d.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

from benchmarks.support.mesh2d.torus_prices import TPU_V4
from distgraph.passes.matmul_algorithms.layer_products import (
    Flow,
    Layer,
    Mesh,
    Product,
    dataflow,
    divisors,
    illegal_sizes,
    legal_slices,
    products,
    transposed_forms,
)

SEQUENCE, BLOCK, BYTES = 2048, 8, 2
WIDTHS = {"gpt3": 12288, "megatron": 20480}
PAPER = {
    "over_wang": {"gpt3": 13.8, "megatron": 26.0},
    "mean16_over_collective": 27.8,
    "mean16_over_wang": 19.1,
    "efficiency_loss": {"gpt3": 16.8, "megatron": 5.8},
    "dataflow_gain": {"gpt3": 21.2, "megatron": 5.1},
    "over_collective_4x4": {"gpt3": 38.6, "megatron": 32.8},
}
"""Percent, and percentage points for the loss of efficiency."""


def layers_of(width: int, sequences: int) -> list[Layer]:
    """The fully connected layers of a transformer block."""
    samples, wide = sequences * SEQUENCE, 4 * width
    sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, wide), "down": (wide, width)}
    return [Layer(name, samples, *size) for name, size in sizes.items()]


def mean_gain(gains: Sequence[tuple[Product, float]]) -> float:
    """Mean in percent over the sizes of products, of which the 12 products of a block have 8.

    Products are of one size if one is the transposed form of the other; their gains are averaged first.
    """
    by_size: dict[tuple[int, ...], list[float]] = {}
    for product, gain in gains:
        by_size.setdefault((*sorted((product.m, product.n)), product.k), []).append(gain)
    return 100 * fmean(map(fmean, by_size.values()))


@dataclass(frozen=True)
class Assumptions:
    """How a product is priced.

    Attributes:
        bandwidth, send_bandwidth: factors of the bandwidths of collectives and of sends.
        columns, rows, exchanged: prices of the columns, or of the rows, for both axes; those of both axes
            exchanged.
        launches: whether operations take time to start, and steps to synchronise.
        send_launch: seconds to start a send and synchronise.
        flops: of a chip, per second.
        one_link: whether messages of both directions take turns.
        hidden: share of a message that a product hides, and of a product that a message hides.
        memory: bytes/s of the memory of a chip, from which each partial product reads its operands and the
            result so far, and to which it writes the result; None if this is free.
        shared_memory: whether messages under a product read and write this memory too.
        kept: algorithms that keep what they gather whole for the backward products.
        ring: Wang's ring along the "faster" axis, along "rows" or "cols", or where "more" bytes are sent.
        shared_mesh: whether all algorithms run on the best mesh of MeshSlice.
        own_mesh: whether each of the 16 products runs on its own best mesh.
        forward: dataflow of all layers; None for the largest matrix of each.
    """

    bandwidth: float = 1.0
    send_bandwidth: float = 1.0
    columns: bool = False
    rows: bool = False
    exchanged: bool = False
    launches: bool = True
    send_launch: float = TPU_V4.launch["send_receive"] + TPU_V4.step
    flops: float = 266e12
    one_link: bool = False
    hidden: float = 1.0
    memory: float | None = None
    shared_memory: bool = False
    kept: tuple[str, ...] = ()
    ring: str = "faster"
    shared_mesh: bool = False
    own_mesh: bool = False
    forward: str | None = None

    def message(self, kind: str, flow: Flow, mesh: Mesh, parts: int = 1) -> float:
        """Seconds of one slice of a matrix along its axis; of one step, for a send."""
        axis = 1 - flow.axis if self.exchanged else flow.axis
        axis = 1 if self.columns else 0 if self.rows else axis
        sends, chips = kind == "send_receive", mesh[flow.axis]
        steps = 1 if sends else chips - 1
        bandwidth = TPU_V4.bandwidth[kind][axis] * (self.send_bandwidth if sends else self.bandwidth)
        start = self.send_launch if sends else TPU_V4.launch[kind] + steps * TPU_V4.step
        return start * self.launches + steps * flow.shard_bytes(mesh, BYTES) / parts / bandwidth

    def together(self, message: float, product: float) -> float:
        """Seconds of a message and a product that start at the same time."""
        return max(message, product) + (1 - self.hidden) * min(message, product)

    def whole(self, algorithm: str, product: Product, flow: Flow, mesh: Mesh) -> float:
        """Seconds of a whole matrix along its axis, which may have been gathered for an earlier product."""
        known = ("X", "W") if product.role == "input_gradient" else ("X", "W", "dY")
        gathered = flow.kind == "all_gather" and flow.matrix.removesuffix("^T") in known
        free = algorithm in self.kept and product.role != "forward" and gathered
        return 0.0 if free else self.message(flow.kind, flow, mesh)

    def compute(self, product: Product, mesh: Mesh, parts: int = 1, moving: Sequence[Flow] = ()) -> float:
        """Seconds of one of the partial products, which all algorithms cut along the same index.

        `moving` are the matrices of which a part moves meanwhile.
        """
        seconds = product.flops(math.prod(mesh)) / self.flops / parts
        if self.memory is None or parts == 1:
            return seconds
        cuts = {product.sliced: parts} | dict(zip(product.split, mesh, strict=True))
        m, k, n = (getattr(product, name) / cuts[name] for name in "mkn")
        moved = m * k + k * n + m * n * (2 if product.sliced == "k" else 1)
        if self.shared_memory:  # a rank reads what it sends and writes what it receives
            steps = ((mesh[flow.axis] - 1) * flow.elements / math.prod(mesh) / parts for flow in moving)
            moved += 2 * sum(steps)
        return max(seconds, moved * BYTES / self.memory)

    def collective(self, product: Product, mesh: Mesh) -> float:
        """Collective: no message is hidden."""
        rows, cols = (self.whole("collective", product, flow, mesh) for flow in product.flows)
        gathers = product.dataflow == "OS" and not self.one_link
        return (max(rows, cols) if gathers else rows + cols) + self.compute(product, mesh)

    def meshslice(self, product: Product, mesh: Mesh, slices: int) -> float:
        """MeshSlice in a number of slices."""
        rows, cols = (self.message(flow.kind, flow, mesh, slices) for flow in product.flows)
        gathers = product.dataflow == "OS" and not self.one_link
        ends = max(rows, cols) if gathers else rows + cols
        each = rows + cols if self.one_link else max(rows, cols)
        part = self.compute(product, mesh, slices, product.flows)
        return ends + (slices - 1) * self.together(each, part) + part

    def wang(self, product: Product, mesh: Mesh) -> float:
        """Wang's algorithm with the ring that is assumed."""
        options = []
        for ring, whole in (product.flows, product.flows[::-1]):
            chips = mesh[ring.axis]
            part = self.compute(product, mesh, chips, [ring])
            shift = self.message("send_receive", ring, mesh)
            seconds = (
                self.whole("wang", product, whole, mesh) + (chips - 1) * self.together(shift, part) + part
            )
            options.append((seconds, (chips - 1) * ring.elements, ring.axis))
        axis = {"rows": 0, "cols": 1, "more": max(options, key=lambda each: each[1])[2]}.get(self.ring)
        return min(seconds for seconds, _, ring_axis in options if axis in (None, ring_axis))

    def seconds(self, algorithm: str, product: Product, mesh: Mesh) -> float:
        """Least seconds of a product on a mesh."""
        if algorithm == "wang":
            return self.wang(product, mesh)
        if algorithm == "collective":
            return self.collective(product, mesh)
        return min(self.meshslice(product, mesh, count) for count in legal_slices(product, mesh, BLOCK))


@dataclass(frozen=True)
class Best:
    """The fastest mesh, and the products with their seconds."""

    mesh: Mesh
    products: tuple[tuple[Product, float], ...]

    @property
    def seconds(self) -> float:
        """Of all products, one after another."""
        return sum(seconds for _, seconds in self.products)


@cache
def best(
    assumed: Assumptions, algorithm: str, width: int, sequences: int, chips: int, mesh: Mesh | None = None
) -> Best:
    """An algorithm on the mesh that is fastest for the layers, forward and backward, or on a given one."""
    three = _products(width, sequences, assumed.forward)
    found = []
    for shape in _meshes(chips) if mesh is None else [mesh]:
        block = BLOCK if algorithm == "meshslice" else 1
        if not any(illegal_sizes(product, shape, block) for product in three):
            timed = [(each, assumed.seconds(algorithm, each, shape)) for each in three]
            found.append(Best(shape, tuple(timed)))
    return min(found, key=lambda each: each.seconds)


def _meshes(chips: int) -> list[Mesh]:
    return [(rows, chips // rows) for rows in divisors(chips)[1:-1]]


@cache
def _products(width: int, sequences: int, forward: str | None) -> tuple[Product, ...]:
    """The products of a block in order."""
    layers = layers_of(width, sequences)
    flows = [forward or dataflow(layer) for layer in layers]
    forms = transposed_forms(flows)
    three = (products(layer, *form) for layer, *form in zip(layers, flows, forms, strict=True))
    return tuple(product for group in three for product in group)


def _gains(assumed: Assumptions, rival: str, ours: Best, theirs: Best) -> list[tuple[Product, float]]:
    """Gain of MeshSlice over a rival in every product, on the meshes of the block or its own."""
    pairs = zip(ours.products, theirs.products, strict=True)
    if not assumed.own_mesh:
        return [(product, slow / fast - 1) for (product, fast), (_, slow) in pairs]

    def least(algorithm: str, product: Product) -> float:
        legal = (mesh for mesh in _meshes(math.prod(ours.mesh)) if not illegal_sizes(product, mesh, BLOCK))
        return min(assumed.seconds(algorithm, product, mesh) for mesh in legal)

    return [(each, least(rival, each) / least("meshslice", each) - 1) for each, _ in ours.products]


def figures(assumed: Assumptions) -> dict[str, Any]:
    """The figures of the paper, in percent, and the best shapes of the mesh."""
    found: dict[str, Any] = {name: {} for name, value in PAPER.items() if isinstance(value, dict)}
    gains: dict[str, list[float]] = {"collective": [], "wang": []}
    found["mesh"] = {}
    for model, width in WIDTHS.items():
        ours = best(assumed, "meshslice", width, 128, 256)
        shape = ours.mesh if assumed.shared_mesh else None
        found["mesh"][model] = "{}x{}".format(*ours.mesh)
        for rival, over in gains.items():
            theirs = best(assumed, rival, width, 128, 256, shape)
            over.append(mean_gain(_gains(assumed, rival, ours, theirs)))
            if rival == "wang":
                found["over_wang"][model] = 100 * (theirs.seconds / ours.seconds - 1)
        small = best(assumed, "meshslice", width, 8, 16)
        found["efficiency_loss"][model] = 100 * (
            _utilisation(small, assumed, 16) - _utilisation(ours, assumed, 256)
        )
        all_os = best(replace(assumed, forward="OS"), "meshslice", width, 128, 256)
        found["dataflow_gain"][model] = 100 * (all_os.seconds / ours.seconds - 1)
        square = [best(assumed, name, width, 8, 16, (4, 4)).seconds for name in ("collective", "meshslice")]
        found["over_collective_4x4"][model] = 100 * (square[0] / square[1] - 1)
    found |= {f"mean16_over_{rival}": fmean(over) for rival, over in gains.items()}
    return found


def _utilisation(found: Best, assumed: Assumptions, chips: int) -> float:
    return sum(product.flops(chips) for product, _ in found.products) / assumed.flops / found.seconds


ASSUMPTIONS: dict[str, Assumptions] = {
    "none: prices of the paper": Assumptions(),
    "twice the bandwidth": Assumptions(bandwidth=2, send_bandwidth=2),
    "rings of rows as fast as those of columns": Assumptions(columns=True),
    "prices of rows and columns exchanged": Assumptions(exchanged=True),
    "no launches, no steps": Assumptions(launches=False),
    "half of the FLOP/s": Assumptions(flops=133e12),
    "sends start in 5 us": Assumptions(send_launch=5e-6),
    "twice the bandwidth of sends": Assumptions(send_bandwidth=2),
    "both directions share a link": Assumptions(one_link=True),
    "half of a message is hidden": Assumptions(hidden=0.5),
    "no message is hidden": Assumptions(hidden=0.0),
    "prices of rows for both axes": Assumptions(rows=True),
    "partial products read and write at 1.2 TB/s": Assumptions(memory=1.2e12),
    "they and messages share 1.2 TB/s": Assumptions(memory=1.2e12, shared_memory=True),
    "Collective keeps what it gathered": Assumptions(kept=("collective",)),
    "so does Wang": Assumptions(kept=("collective", "wang")),
    "Wang's ring along rows": Assumptions(ring="rows"),
    "Wang's ring along columns": Assumptions(ring="cols"),
    "Wang's ring where more bytes are sent": Assumptions(ring="more"),
    "rivals on the mesh of MeshSlice": Assumptions(shared_mesh=True),
    "each of the 16 products on its own mesh": Assumptions(own_mesh=True),
}


def table(found: dict[str, dict[str, Any]]) -> str:
    """All figures, an assumption a row, below those of the paper; / between GPT-3 and NLG."""

    def cells(row: dict[str, Any]) -> list[str]:
        return [
            f"{value:.1f}" if not isinstance(value, dict) else " / ".join(f"{v:.1f}" for v in value.values())
            for value in (row[name] for name in PAPER)
        ]

    rows = [["assumption", *PAPER, "mesh"], ["the paper", *cells(PAPER), "-"]]
    rows += [[name, *cells(row), " / ".join(row["mesh"].values())] for name, row in found.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def flat(row: dict[str, Any]) -> dict[str, float]:
    """The figures of the paper in a row, each model's by itself."""
    pairs = {
        name: value if isinstance(value, dict) else {"": value}
        for name, value in row.items()
        if name in PAPER
    }
    return {f"{name} {model}".strip(): v for name, value in pairs.items() for model, v in value.items()}


def explained(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Share in percent of each difference of more than 5 points from the paper that an assumption explains.

    100 is all of it; more is too much, and below 0 the difference grows.
    """
    paper, ours = flat(PAPER), flat(figures(Assumptions()))
    far = [name for name in paper if abs(paper[name] - ours[name]) > 5]
    return {
        assumption: {name: 100 * (flat(row)[name] - ours[name]) / (paper[name] - ours[name]) for name in far}
        for assumption, row in found.items()
    }


def run(names: Sequence[str] = tuple(ASSUMPTIONS)) -> dict[str, dict[str, Any]]:
    """Name of an assumption -> the figures under it."""
    return {name: figures(ASSUMPTIONS[name]) for name in names}
