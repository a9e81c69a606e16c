"""The registry of distributed algorithms for contractions.

An algorithm turns one contraction of a completed graph into explicit ops: slices, changes of layout (which
start a collective where they stand, and are awaited by their first reader), partial products and sums.

    @register_matmul_algorithm("meshslice", options=("slices", "block"))
    def meshslice(product: Product, algorithm: MatmulAlgorithm) -> None: ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distgraph.errors import ShardingError
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.passes.matmul_algorithms.product import Product

Rewrite = Callable[[Product, MatmulAlgorithm], None]
MATMUL_ALGORITHMS: dict[str, Rewrite] = {}
"""Name -> function that emits the ops of a contraction."""


_OPTIONS: dict[str, tuple[str, ...]] = {}
"""Name -> the options of `MatmulAlgorithm` that the algorithm has."""


def register_matmul_algorithm(name: str, options: Sequence[str] = ()) -> Callable[[Rewrite], Rewrite]:
    """Register an algorithm under the name in annotations and plans.

    Args:
        name: of the algorithm.
        options: those of "slices", "block" and "ring" that it has; others are refused.

    Raises:
        ShardingError: the name is taken.
    """

    def register(rewrite: Rewrite) -> Rewrite:
        if name in MATMUL_ALGORITHMS:
            raise ShardingError(
                f"algorithm {name} for matrix products is registered twice; choose another name"
            )
        MATMUL_ALGORITHMS[name] = rewrite
        _OPTIONS[name] = tuple(options)
        return rewrite

    return register


def find_matmul_algorithm(algorithm: MatmulAlgorithm) -> Rewrite:
    """The function of an algorithm. Raises ShardingError for an unknown one, or an option that it has not."""
    name = algorithm.name
    if name not in MATMUL_ALGORITHMS:
        raise ShardingError(
            f"algorithm {name!r} for matrix products does not exist; the algorithms are "
            f"{', '.join(MATMUL_ALGORITHMS)}"
        )
    for option in algorithm.options:
        if option not in _OPTIONS[name]:
            others = [other for other, options in _OPTIONS.items() if option in options]
            raise ShardingError(
                f"algorithm {algorithm}: {option} is {getattr(algorithm, option)} but {name} has no such "
                f"option; leave it out, or use algorithm {' or '.join(others)}"
            )
    return MATMUL_ALGORITHMS[name]
