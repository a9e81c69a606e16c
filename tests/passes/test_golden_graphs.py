"""The small MLP after each pass, as reviewed text: what the passes do is seen at a glance when it changes."""

from __future__ import annotations

import pytest
from support.ops.graph_equality import same_graph
from support.programs.small_graphs import mlp

from distgraph.ir.parser import parse_graph, print_graph
from distgraph.passes.pass_pipeline import run_passes

STAGES = {
    "mlp.1.serial": [],
    "mlp.2.completed": ["complete"],
    "mlp.3.refined": ["complete", "layout_local_search"],
    "mlp.4.resharded": ["complete", "layout_local_search", "reshard"],
    "mlp.5.lowered": ["complete", "layout_local_search", "reshard", "lower"],
}


@pytest.mark.parametrize("name", STAGES)
def test_text_of_each_stage(name, golden):
    graph = run_passes(mlp(), STAGES[name])
    text = print_graph(graph)
    assert same_graph(parse_graph(text), graph)
    golden(name, text)
