"""A matrix product and both gradients, on a mesh of two axes, by a distributed algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from distgraph import ops
from distgraph.ir.graph import Graph
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.complete import complete
from distgraph.passes.serial.backward import differentiate
from distgraph.passes.serial.dead_code_elimination import prune
from distgraph.tracing.annotations import shard_op, shard_tensor
from distgraph.tracing.tracer import Trace

MESHES = ((4, 4), (2, 4), (4, 2), (2, 8), (8, 2), (3, 6))
NARROW = ((1, 4), (4, 1), (1, 1))
FLOWS = ("OS", "LS", "RS")


@dataclass(frozen=True)
class Product:
    """y[m, n] = x[m, k] w[k, n], dx and dw for a given dy, all in float64; samples m also split by dp."""

    rows: int
    cols: int
    flow: str
    algorithm: MatmulAlgorithm
    m: int
    k: int
    n: int
    data: int = 1

    @property
    def mesh(self) -> ProcessMesh:
        axes = {"rows": self.rows, "cols": self.cols}
        return ProcessMesh.grid(**axes) if self.data == 1 else ProcessMesh.grid(dp=self.data, **axes)

    def graph(self, *, pruned: bool = True, accumulated: bool = False) -> Graph:
        """Without the loss, whose sum over all ranks is no part of the products, unless not `pruned`.

        With dw accumulated over micro-batches if `accumulated`.
        """
        trace, a = Trace("product"), self.algorithm
        with trace.activate():
            x = trace.source("input", "x", (self.m, self.k), "f64")
            dy = trace.source("input", "dy", (self.m, self.n), "f64")
            w = trace.source("param", "w", (self.k, self.n), "f64")
            first, last = ("cols", "rows") if self.flow == "RS" else ("rows", "cols")
            data = self.mesh.axes[:-2]
            shard_tensor(x, self.mesh, [(*data, first), last], gradient=True)
            shard_tensor(dy, self.mesh, [(*data, "rows"), "cols"])
            weight = ["cols", "rows"] if self.flow == "LS" else ["rows", "cols"]
            attr = DistAttr(self.mesh, ShardSpec.of(weight), Origin("user", ""))
            trace.annotate(w.value, attr)
            options = {"slices": a.slices, "block": a.block, "ring": a.ring}
            multiply = shard_op(ops.matmul, self.mesh, algorithm=a.name, dataflow=self.flow, **options)
            y = multiply(x, w)
            dx, dw = differentiate(trace, ops.reduce("sum", y * dy), [x, w])
            dw = ops.accumulate(dw) if accumulated else dw
        graph = trace.finish({"y": y, "dx": dx, "dw": dw})
        return prune(graph) if pruned else graph

    def completed(self, *, pruned: bool = True, accumulated: bool = False) -> Graph:
        return complete(self.graph(pruned=pruned, accumulated=accumulated), self.mesh)

    def arrays(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Inputs and parameters."""
        return _arrays(self.m, self.k, self.n)

    def expected(self) -> dict[str, np.ndarray]:
        """y, dx and dw by NumPy."""
        (feeds, params) = self.arrays()
        x, dy, w = feeds["x"], feeds["dy"], params["w"]
        return {"y": x @ w, "dx": dy @ w.T, "dw": x.T @ dy}

    def reduced_bytes(self) -> float:
        """Bytes that a rank sends to reduce its block of dw over data parallelism."""
        return 2 * 8.0 * self.k * self.n * (self.data - 1) / self.data / (self.rows * self.cols)

    def moved_bytes(self, *, reduced: bool = True) -> float:
        """Bytes that a rank sends on average in the three products, of which each moves two matrices.

        Those that do not stay (paper, 2.3.1): shards of one along a row of the mesh, of the other
        along a column. P ranks pass on P - 1 shards of P; in the broadcasts and reductions of SUMMA all P; in
        Cannon's algorithm they send P - 1 shards of P, and P - 1 of P ranks one more to skew the blocks.
        With data parallelism dw is reduced over it, unless not `reduced`: two times P - 1 of P shards.
        """
        m = self.m // self.data
        x, w, y = (8.0 * size for size in (m * self.k, self.k * self.n, m * self.n))
        by_flow = {"OS": (w, x), "LS": (w, y), "RS": (y, x)}
        along_rows, along_cols = by_flow[self.flow]
        ranks = self.rows * self.cols
        shards = {
            "summa": lambda size: size if size > 1 else 0,
            "cannon": lambda size: (size - 1) * (size + 1) / size,
        }
        rows, cols = (
            shards.get(self.algorithm.name, lambda size: size - 1)(size) for size in (self.rows, self.cols)
        )
        moved = 3 * (rows * along_rows + cols * along_cols) / ranks
        return moved + self.reduced_bytes() if reduced else moved


@cache
def _arrays(m: int, k: int, n: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rng = np.random.default_rng(9)
    return (
        {"x": rng.normal(size=(m, k)), "dy": rng.normal(size=(m, n))},
        {"w": rng.normal(size=(k, n))},
    )


def product(
    rows: int, cols: int, flow: str, name: str, slices: int = 1, block: int = 1, data: int = 1
) -> Product:
    """A product whose sizes fit mesh, slices and block, all different."""
    unit = int(np.lcm(rows, cols)) * slices * block
    return Product(
        rows, cols, flow, MatmulAlgorithm(name, slices, block), 3 * unit * data, unit, 2 * unit, data
    )
