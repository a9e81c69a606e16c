"""Every uniform pipeline of a program, where the search takes only the best."""

from __future__ import annotations

from collections.abc import Iterator

from distgraph.engine.search_driver.candidate import Candidate
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.uniform_pipelines import candidate_of, pipelines_of
from distgraph.passes.search.intra_op.restrictions import Restriction


def uniform_pipelines(
    layout_costs: LayoutCosts, micro_batches: int, restriction: Restriction
) -> Iterator[Candidate]:
    """Every dp x tp x pp that fits by the estimate, layers divided by their work.

    Where it does not fit otherwise, all layers are recomputed. None in a cluster of several kinds (see
    `costs_of_equal_devices`).

    Args:
        layout_costs: of the program.
        micro_batches: in a step.
        restriction: what dp may split.
    """
    for pipeline in pipelines_of(layout_costs, micro_batches):
        candidate = None if layout_costs.expired() else candidate_of(layout_costs, pipeline, restriction)
        if candidate is not None:
            yield candidate
