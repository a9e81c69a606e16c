"""The registry of distributed algorithms for contractions.

An algorithm turns one contraction of a completed graph into explicit ops: slices, changes of layout (which
start a collective where they stand, and are awaited by their first reader), partial products and sums.

    @register_matmul_algorithm("meshslice")
    def meshslice(product: Product, algorithm: MatmulAlgorithm) -> None: ...
"""

from __future__ import annotations

from collections.abc import Callable

from distgraph.errors import ShardingError
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.passes.matmul_algorithms.product import Product

Rewrite = Callable[[Product, MatmulAlgorithm], None]
MATMUL_ALGORITHMS: dict[str, Rewrite] = {}
"""Name -> function that emits the ops of a contraction."""


def register_matmul_algorithm(name: str) -> Callable[[Rewrite], Rewrite]:
    """Register an algorithm under the name in annotations and plans. Raises ShardingError: it is taken."""

    def register(rewrite: Rewrite) -> Rewrite:
        if name in MATMUL_ALGORITHMS:
            raise ShardingError(
                f"algorithm {name} for matrix products is registered twice; choose another name"
            )
        MATMUL_ALGORITHMS[name] = rewrite
        return rewrite

    return register


def find_matmul_algorithm(name: str) -> Rewrite:
    """The algorithm of a name. Raises ShardingError for an unknown one."""
    if name not in MATMUL_ALGORITHMS:
        raise ShardingError(
            f"algorithm {name!r} for matrix products does not exist; the algorithms are "
            f"{', '.join(MATMUL_ALGORITHMS)}"
        )
    return MATMUL_ALGORITHMS[name]
