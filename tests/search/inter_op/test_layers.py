"""Layers of the search: the clustering programme against brute force, and the layering of real models."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops
from distgraph.engine.compile.train_graph import train_graph
from distgraph.errors import GraphError
from distgraph.ir.graph import SOURCES, Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import flops
from distgraph.models import (
    GPT,
    GPTConfig,
    GShardMoE,
    Llama,
    LlamaConfig,
    MoEConfig,
    WideResNet,
    WideResNetConfig,
    annotate,
    stages,
)
from distgraph.optim import Adafactor, AdamW
from distgraph.passes.search.layering.layer_clustering import balanced_cuts
from distgraph.passes.search.layering.layer_sequence import REST, Layer, Layering, cluster_layers, layering

TOKENS = (((4, 8), "i32"), ((4, 8), "i32"))


def gpt(layers: int = 3, **changes: object) -> GPT:
    fields = {"hidden": 16, "heads": 2, "vocabulary": 40, "sequence": 8} | changes
    return GPT(GPTConfig(layers=layers, **fields))


def layered(model: object, batch: object = TOKENS, **options: object) -> tuple[Graph, Layering]:
    graph = train_graph(model, batch, **options)
    return graph, layering(graph, cluster_layers(graph))


def traffic(reads: Sequence[tuple[int, tuple[int, ...], float]], start: int, stop: int) -> float:
    return sum(b for made, readers, b in reads if made < start and any(start <= r < stop for r in readers))


def measures(cost, reads, cuts) -> tuple[float, float, float]:
    """Greatest FLOP, greatest traffic and sum of squares of the parts."""
    borders = (0, *cuts, len(cost))
    parts = list(itertools.pairwise(borders))
    sums = [sum(cost[a:b]) for a, b in parts]
    return max(sums), max(traffic(reads, a, b) for a, b in parts), sum(x * x for x in sums)


def random_sequence(rng: np.random.Generator) -> tuple[list[float], list[tuple[int, tuple[int, ...], float]]]:
    size = int(rng.integers(2, 9))
    cost = [float(c) for c in rng.integers(0, 8, size)]
    reads = []
    for made in range(size - 1):
        readers = [r for r in range(made + 1, size) if r == made + 1 or rng.random() < 0.3]
        reads.append((made, tuple(readers), float(rng.integers(0, 6))))
    return cost, reads


@pytest.mark.parametrize("seed", range(120))
def test_cuts_equal_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost, reads = random_sequence(rng)
    count = int(rng.integers(1, len(cost) + 1))
    delta = float(rng.choice([0.0, 0.2, 0.5, 1.0]))
    every = [measures(cost, reads, c) for c in itertools.combinations(range(1, len(cost)), count - 1)]
    limit = (1 + delta) * sum(cost) / count
    limit = max(limit, min(flop for flop, _, _ in every)) * (1 + 1e-9)
    kept = [m for m in every if m[0] <= limit]
    most = min(m[1] for m in kept)
    squares = min(m[2] for m in kept if m[1] <= most)
    cuts = balanced_cuts(cost, reads, count, delta)
    assert len(cuts) == count - 1
    flop, received, sum_of_squares = measures(cost, reads, cuts)
    assert flop <= limit
    assert received == most
    assert sum_of_squares == pytest.approx(squares, rel=1e-9)


def test_ties_prefer_borders_of_modules() -> None:
    chain = [(i, (i + 1,), 1.0) for i in range(5)]
    cost = [4.0, 0.0, 0.0, 0.0, 4.0, 0.0]
    assert balanced_cuts(cost, chain, 2, 0.5, penalty=[0, 2, 2, 1, 2, 2]) == (3,)


def test_an_op_above_the_limit_is_a_layer() -> None:
    chain = [(i, (i + 1,), 1.0) for i in range(3)]
    assert balanced_cuts([1.0, 1.0, 100.0, 1.0], chain, 3, 0.0) in {(2, 3), (1, 2)}
    cuts = balanced_cuts([1.0, 1.0, 100.0, 1.0], chain, 4, 0.0)
    assert cuts == (1, 2, 3)


def test_equal_blocks_are_one_class() -> None:
    graph, found = layered(gpt(48))
    assert len(found.layers) == 50
    assert found.classes == (0, *[1] * 48, 2)
    assert found.of["tokens.weight"] == 0
    assert found.of["head.weight"] == 49
    for block in (0, 23, 47):
        inside = {op.name for op in graph.ops if op.scope.startswith(f"blocks.{block}.")}
        assert inside
        assert {found.of[name] for name in inside} == {block + 1}


def test_blocks_that_alternate_are_layers_of_two_classes() -> None:
    config = MoEConfig(hidden=16, layers=6, heads=2, experts=4, vocabulary=40, sequence=8, group=16)
    _, found = layered(GShardMoE(config))
    assert found.classes == (0, *[1, 2] * 3, 3)


def test_a_residual_network_has_a_class_for_each_shape_of_block() -> None:
    model = WideResNet(WideResNetConfig(channels=64, width=2, blocks=(3, 4, 6, 3), image=64, classes=8))
    _, found = layered(model, (((4, 3, 64, 64), "f32"), ((4,), "i32")))
    sizes = Counter(found.classes)
    # one block a resolution is projected; the first shares a layer with the stem
    assert sorted(sizes.values()) == [1, 1, 1, 1, 1, 2, 2, 3, 5]


class Chain(nn.Module):
    def __init__(self, widths: Sequence[int]) -> None:
        self.parts = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]

    def forward(self, x):
        for part in self.parts:
            x = ops.relu(part(x))
        return x

    def loss(self, y, target):
        return ops.mean(ops.square(y - target))


def test_layers_of_a_plain_chain() -> None:
    _, found = layered(Chain([32] * 13), (((8, 32), "f32"), ((8, 32), "f32")))
    assert found.classes == (0, *[1] * 11, 2)  # the first has no gradient of its input
    _, found = layered(Chain([8, 16, 24, 48, 6]), (((4, 8), "f32"), ((4, 6), "f32")))
    assert len(found.layers) == 4


def models() -> list[tuple[str, object, object, dict[str, object]]]:
    recomputed = gpt(4)
    annotate(recomputed, None, recompute=True)
    staged = gpt(4)
    stages(staged, [ProcessMesh.grid(dp=2), ProcessMesh.grid(2, dp=2)])
    moe = MoEConfig(hidden=16, layers=4, heads=2, experts=4, vocabulary=40, sequence=8, group=16, dropout=0.1)
    llama = LlamaConfig(
        hidden=16, inner=24, layers=4, heads=4, key_heads=2, vocabulary=40, sequence=8, tied=True
    )
    net = WideResNetConfig(channels=4, width=2, blocks=(2, 2), image=16, classes=8)
    images = (((4, 3, 16, 16), "f32"), ((4,), "i32"))
    clipped = {"optimizer": AdamW(clip_norm=1.0)}
    return [
        ("gpt", gpt(), TOKENS, {}),
        ("one block", gpt(1), TOKENS, {}),
        ("recompute", recomputed, TOKENS, clipped),
        ("stages", staged, TOKENS, {}),
        ("tied, dropout", gpt(4, tied=True, dropout=0.1, fused=False, packed=True), TOKENS, clipped),
        ("adafactor", gpt(), TOKENS, {"optimizer": Adafactor(clip_norm=1.0)}),
        ("moe", GShardMoE(moe), TOKENS, {}),
        ("llama", Llama(llama), TOKENS, {}),
        ("conv", WideResNet(net), images, {}),
    ]


@pytest.mark.parametrize(
    ("model", "batch", "options"), [m[1:] for m in models()], ids=[m[0] for m in models()]
)
@pytest.mark.parametrize("count", [None, 1, 5])
def test_every_op_has_a_layer_and_positions_biject(model, batch, options, count) -> None:
    graph = train_graph(model, batch, **options)
    forward = [op.name for op in graph.ops if op.role == "forward" and op.kind not in SOURCES]
    if count is None:
        found = layering(graph, cluster_layers(graph))
    else:
        borders = np.linspace(0, len(forward), count + 1).astype(int)
        found = layering(graph, [Layer(tuple(forward[a:b])) for a, b in itertools.pairwise(borders)])
    assert [name for layer in found.layers for name in layer.ops] == forward
    assert set(found.of) == {op.name for op in graph.ops} == set(found.position)
    assert set(found.of.values()) <= {REST, *range(len(found.layers))}
    # (layer, position) names one op, and equal positions hold the same work
    assert len({(found.of[n], at) for n, (_, at) in found.position.items()}) == len(graph.ops)
    work: dict[tuple[int, int], set[object]] = {}
    members = Counter(found.classes)
    for op in graph.ops:
        kind, at = found.position[op.name]
        assert kind == (REST if found.of[op.name] == REST else found.classes[found.of[op.name]])
        described = op.kind, op.role, tuple(v.type for v in (*op.operands, *op.results)), flops(op)
        work.setdefault((kind, at), set()).add(described)
    assert all(len(same) == 1 for same in work.values())
    sizes = Counter(kind for kind, _ in work)
    whole = sum(sizes[kind] * members[kind] for kind in members) + sizes[REST]
    assert whole == len(graph.ops)


def test_what_belongs_together_is_in_one_layer() -> None:
    model = gpt(4)
    annotate(model, None, recompute=True)
    graph, found = layered(model, optimizer=AdamW(clip_norm=1.0))
    layer = found.of["blocks.2.mlp.up.weight"]
    assert found.of["blocks.2.mlp.up.weight.adam_m"] == layer
    update = next(op for op in graph.ops if op.kind == "adam" and op.link == "blocks.2.mlp.up.weight")
    assert found.of[update.name] == layer
    for op in graph.ops:
        if op.role == "backward" and op.link in found.of:
            assert found.of[op.name] == found.of[op.link]
    assert found.of["lr"] == REST
    norm = next(op for op in graph.ops if op.kind == "sqrt" and op.role == "optimize")
    assert found.of[norm.name] == REST
    assert all(v.shape == () for op in graph.ops if found.of[op.name] == REST for v in op.results)


def test_running_statistics_lie_with_their_layer() -> None:
    net = WideResNetConfig(channels=4, width=2, blocks=(2, 2), image=16, classes=8)
    _, found = layered(WideResNet(net), (((4, 3, 16, 16), "f32"), ((4,), "i32")))
    assert found.of["blocks.3.bn2.running_mean"] == found.of["blocks.3.bn2.weight"]


def test_annotations_tell_layers_apart() -> None:
    model = gpt(4)
    stages(model, [ProcessMesh.grid(dp=2), ProcessMesh.grid(2, dp=2)])
    _, found = layered(model)
    assert found.classes == (0, 1, 1, 2, 2, 3)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 9])
def test_a_number_of_layers(count: int) -> None:
    """Fewer than the program has are runs of its layers, of similar FLOP; more are cut anew."""
    graph = train_graph(gpt(4), TOKENS)
    own, found = cluster_layers(graph), cluster_layers(graph, count)
    assert len(found) == count
    assert [op for layer in found for op in layer.ops] == [op for layer in own for op in layer.ops]
    if count <= len(own):
        assert {layer.ops[0] for layer in found} <= {layer.ops[0] for layer in own}
    if count == 2:
        work = [sum(flops(graph.producers[op]) for op in layer.ops) for layer in found]
        assert max(work) <= 2 * min(work)


class Marked(nn.Module):
    """Four linear layers with a mark behind the first and the third."""

    def __init__(self) -> None:
        self.layers = [nn.Linear(8, 8) for _ in range(4)]

    def forward(self, x: Any) -> Any:
        for number, layer in enumerate(self.layers):
            x = ops.relu(layer(x))
            if number in (0, 2):
                dg.pipeline_boundary(x)
        return x


def test_marked_layers() -> None:
    """In the training graph too; a mark with no op before it marks nothing, and None is no mark."""
    graph = train_graph(Marked(), (((4, 8), "f32"), ((4, 8), "f32")), nn.MeanSquaredError())
    found = cluster_layers(graph)
    products = [[op for op in layer.ops if graph.producers[op].kind == "matmul"] for layer in found]
    assert [len(layer) for layer in products] == [1, 2, 1]
    assert cluster_layers(graph, 3) == found
    with pytest.raises(
        GraphError, match=r"is marked to have 3 layers but 2 are given; take dg.pipeline_bound"
    ):
        cluster_layers(graph, 2)
    with pytest.raises(GraphError, match="forward ops, which make no 500 layers; take fewer"):
        cluster_layers(train_graph(gpt(1), TOKENS), 500)


def test_mistakes_are_named() -> None:
    graph = train_graph(gpt(), TOKENS)
    found = cluster_layers(graph)
    with pytest.raises(GraphError, match="in no layer"):
        layering(graph, found[1:])
    with pytest.raises(GraphError, match="in layer 0 and in layer 5"):
        layering(graph, [*found, found[0]])
    with pytest.raises(GraphError, match="has op %nothing"):
        layering(graph, [*found, Layer(("nothing",))])


def test_time_of_large_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    graph = train_graph(gpt(96, fused=False), TOKENS)
    start = time.process_time()
    found = layering(graph, cluster_layers(graph))
    took = time.process_time() - start
    with capsys.disabled():
        print(f"\n{len(graph.ops)} ops in {len(found.layers)} layers: {took:.2f} s of CPU")
    assert Counter(found.classes)[1] == 96
