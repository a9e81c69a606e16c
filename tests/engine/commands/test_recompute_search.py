"""Recomputation by list, by module and by memory, of programs in which nothing else is searched."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.files.clusters import cluster_of
from support.programs.searched import slow

import distgraph as dg
from distgraph import nn, ops
from distgraph.engine.commands.plan_search import SearchOptions, search
from distgraph.engine.commands.recompute_search import Choice, RecomputeSearch
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.data import whole
from distgraph.errors import GraphError, InfeasibleError, ResourceError, ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.models import GPT, GPTConfig
from distgraph.plan.constraints import SearchConstraints
from distgraph.plan.plan import Plan
from distgraph.resources import Cluster

pytestmark = pytest.mark.timeout(600)
AUTO = dg.Strategy(recompute="auto")


def one() -> Cluster:
    """One device."""
    return cluster_of(slow(1))


def config(layers: int, **fields: Any) -> GPTConfig:
    return GPTConfig(hidden=16, layers=layers, heads=2, vocabulary=24, sequence=8, dtype="f64", **fields)


def batch(size: int = 8) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.random.default_rng(1).integers(0, 24, (2, size, 8), dtype="i4")
    return x, y


def engine(layers: int, strategy: dg.Strategy | None = None, **given: Any) -> dg.Engine:
    fields = given.pop("fields", {})
    optimizer = dg.optim.Adam(lr=0.01)
    return dg.Engine(
        GPT(config(layers, **fields)), nn.CrossEntropy(), optimizer, strategy=strategy, seed=3, **given
    )


def request_of(layers: int, strategy: dg.Strategy = AUTO) -> CompileRequest:
    return engine(layers, strategy)._session.compile_request("train", whole(batch()))


def limited(request: CompileRequest, memory: float) -> CompileRequest:
    strategy = replace(request.training_spec.strategy, memory=memory)
    return replace(request, training_spec=replace(request.training_spec, strategy=strategy))


def losses(trained: dg.Engine, size: int = 8) -> list[float]:
    return trained.fit(batch(2 * size), epochs=2, batch_size=size, progress=False).losses


@pytest.fixture(scope="module")
def deep() -> tuple[RecomputeSearch, tuple[Choice, ...]]:
    """A GPT of 24 blocks, and every subset of three groups of its layers, all of them forecast."""
    every = RecomputeSearch(request_of(24), one())
    every.evaluate(())
    groups = [tuple(map(int, part)) for part in np.array_split(np.arange(len(every.kinds)), 3)]
    for size in range(1, 4):
        for chosen in itertools.combinations(groups, size):
            every.evaluate(sum(chosen, ()))
    return every, tuple(every.evaluated)


@pytest.mark.parametrize("share", [0.02, 0.25, 0.5, 0.75, 0.98])
def test_five_budgets_against_all_subsets_of_a_coarse_chain(
    share: float, deep: tuple[RecomputeSearch, tuple[Choice, ...]]
) -> None:
    every, subsets = deep
    coarse = [every.evaluated[choice] for choice in subsets]
    least, most = (pick(each.peak for each in coarse) for pick in (min, max))
    budget = least + share * (most - least)
    known = {"evaluated": every.evaluated, "kinds": every.kinds, "ranks": every.ranks}
    layers = RecomputeSearch(limited(every.request, budget), one(), **known)
    list(layers.run())
    chosen = layers.evaluated[layers.chosen]
    assert layers.chosen
    assert chosen.peak <= budget
    assert chosen.seconds <= 1.05 * min(each.seconds for each in coarse if each.peak <= budget)


class Unlike(nn.Module):
    """Five layers of different widths, each with a part that takes memory and little time."""

    def __init__(self) -> None:
        widths = (24, 64, 16, 96, 32, 24)
        self.layers = [nn.Linear(a, b, dtype="f64") for a, b in itertools.pairwise(widths)]
        self.norms = [nn.LayerNorm(width, dtype="f64") for width in widths[1:]]

    def forward(self, x: dg.Tensor) -> dg.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = dg.pipeline_boundary(ops.gelu(norm(layer(x))))
        return x


def test_no_subset_of_unlike_layers_is_faster() -> None:
    """By the forecast of every subset, with the memory between the least and the most."""
    data = np.zeros((64, 24)), np.zeros((64, 24))
    trained = dg.Engine(Unlike(), nn.MeanSquaredError(), dg.optim.SGD(lr=0.1), strategy=AUTO)
    every = RecomputeSearch(trained._session.compile_request("train", whole(data)), one())
    numbers = range(5)
    for chosen in itertools.chain.from_iterable(itertools.combinations(numbers, n) for n in range(6)):
        every.evaluate(chosen)
    assert len(every.kinds) == 6  # the loss is one more
    least = min(each.peak for each in every.evaluated.values())
    for share in (0.3, 0.6, 0.85):
        budget = least + share * (every.evaluated[()].peak - least)
        layers = RecomputeSearch(limited(every.request, budget), one())
        list(layers.run())
        assert layers.chosen
        best = min(each.seconds for each in every.evaluated.values() if each.peak <= budget)
        assert layers.evaluated[layers.chosen].seconds == pytest.approx(best, rel=1e-12)


def test_everything_fits_or_nothing_does() -> None:
    """No layer is recomputed without need; the error says what is reached, and a rank more memory fits."""
    request = request_of(3)
    free = search(request, one(), SearchOptions(mode="semi"))
    assert free.recompute == ()
    assert "without recomputation" in free.explain("recompute")
    with pytest.raises(InfeasibleError) as error:
        search(limited(request, 1000), one(), SearchOptions(mode="semi"))
    text = str(error.value)
    assert "no choice of layers fits into 1000 B: the smallest memory that recomputation reaches is" in text
    assert "use more ranks, Strategy(zero=1) to 3, or smaller micro-batches than 8 samples" in text
    least = int(text.partition("give memory=")[2].partition(" ")[0])
    plan = search(limited(request, least), one(), SearchOptions(mode="semi"))
    assert plan.forecast is not None
    assert plan.recompute
    assert max(plan.forecast.memory) == least


MESH = ProcessMesh.grid(dp=2)
TRAINED = {
    "data parallel": dg.Strategy(mesh=MESH, batch_axis="dp", micro_batches=2),
    "ZeRO-3": dg.Strategy(mesh=MESH, batch_axis="dp", zero=3),
}


@pytest.mark.parametrize("name", TRAINED)
def test_training_equals_serial_training(name: str) -> None:
    """With dropout, for batches of another size too; the plan is kept, explained and applied again."""
    strategy, cluster = TRAINED[name], cluster_of(slow(2))
    fields = {"dropout": 0.1}
    plain = engine(4, strategy, cluster=cluster, fields=fields)
    plain.prepare(batch())
    whole_memory = plain.forecast().peak_memory
    chosen = replace(strategy, recompute="auto", memory=0.95 * whole_memory)
    trained = engine(4, chosen, cluster=cluster, fields=fields)
    serial = losses(engine(4, fields=fields))
    np.testing.assert_allclose(losses(trained), serial, rtol=1e-12)
    plan = trained.plan.portable
    assert plan.forecast is not None
    assert plan.recompute
    assert max(plan.forecast.memory) <= 0.95 * whole_memory
    assert plan.zero == (strategy.zero or 0)
    assert trained.forecast().peak_memory == max(plan.forecast.memory)
    text = plan.explain("recompute")
    assert f"chosen: {len(plan.recompute)} of {len(plan.layers)} layers (recomputation" in text
    assert "runner-up:" in text
    assert "recomputed in the backward part" in plan.explain(f"layer {plan.recompute[0]}")
    again = engine(4, plan=Plan.parse(plan.text()), fields=fields)
    np.testing.assert_allclose(losses(again), serial, rtol=1e-12)


class Staged(nn.Module):
    """Blocks on two stages of a pipeline."""

    def __init__(self, meshes: Any) -> None:
        self.blocks = [nn.TransformerBlock(8, 2, dropout=0.1, dtype="f64") for _ in range(6)]
        self.meshes = meshes

    def forward(self, x: dg.Tensor) -> dg.Tensor:
        for number, block in enumerate(self.blocks):
            if self.meshes is not None and number % 3 == 0:
                x = dg.pipeline_boundary(x, self.meshes[number // 3])
            x = block(x)
        return x


def test_every_stage_of_a_pipeline_fits() -> None:
    """The first stage has two micro-batches in flight, and recomputes more than the second."""
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(2, 8, 5, 8))
    cluster, meshes = cluster_of(slow(2)), (ProcessMesh.grid(pp=1), ProcessMesh.grid(1, pp=1))

    def staged(meshes: Any, **fields: Any) -> dg.Engine:
        strategy = dg.Strategy(micro_batches=4, **fields)
        optimizer = dg.optim.Adam(lr=0.01)
        return dg.Engine(
            Staged(meshes), nn.MeanSquaredError(), optimizer, strategy=strategy, seed=3, cluster=cluster
        )

    plain = staged(meshes)
    plain.prepare((x, y))
    peaks = [memory.total for memory in plain.forecast().memory.values()]
    budget = 0.97 * min(peaks)
    trained = staged(meshes, recompute="auto", memory=budget)
    found = trained.fit((x, y), batch_size=8, epochs=2, progress=False).losses
    plan = trained.plan.portable
    assert plan.forecast is not None
    assert max(plan.forecast.memory) <= budget
    first, second = (
        [number for number in plan.recompute if stage.first <= number < stage.last] for stage in plan.stages
    )
    assert len(first) > len(second) > 0
    serial = staged(None).fit((x, y), batch_size=8, epochs=2, progress=False).losses
    np.testing.assert_allclose(found, serial, rtol=1e-12)


def test_layers_by_number_and_by_module() -> None:
    """The plan has the numbers, also of a shorter batch; the same losses."""
    serial = losses(engine(3))
    plans = {}
    for given in ((1, 2), ("blocks.0", "blocks.1"), ("blocks",), True, False):
        trained = engine(3, dg.Strategy(recompute=given))
        assert losses(trained) == serial
        plans[given] = trained.plan.portable
        last = trained.fit(batch(5), batch_size=5, progress=False).losses
        assert np.isfinite(last).all()
    plan = plans[1, 2]
    assert [layer.scope for layer in plan.layers][1:4] == [
        "blocks.0.norm1",
        "blocks.1.norm1",
        "blocks.2.norm1",
    ]
    assert plans["blocks.0", "blocks.1"].recompute == plan.recompute == (1, 2)
    assert plans["blocks",].recompute == (1, 2, 3)
    assert plans[True].recompute == tuple(range(len(plan.layers)))
    assert plans[False].recompute == ()
    assert losses(engine(3, plan=Plan.parse(plan.text()))) == serial


class Activated(nn.Module):
    """Linear layers with an activation of the model itself and one dropout module of all behind each."""

    def __init__(self, rate: float) -> None:
        self.layers = [nn.Linear(8, 8, dtype="f64") for _ in range(3)]
        self.dropout = nn.Dropout(rate)

    def forward(self, x: dg.Tensor) -> dg.Tensor:
        for layer in self.layers:
            x = self.dropout(ops.tanh(layer(x)))
        return x


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_a_layer_of_a_module_may_have_ops_of_others_without_parameters(rate: float) -> None:
    x, y = np.random.default_rng(4).normal(size=(2, 8, 8))

    def losses_and_layers(recompute: Any) -> tuple[list[float], tuple[int, ...]]:
        strategy = dg.Strategy(recompute=recompute)
        trained = dg.Engine(
            Activated(rate), nn.MeanSquaredError(), dg.optim.SGD(lr=0.1), strategy=strategy, seed=3
        )
        steps = trained.fit((x, y), batch_size=4, epochs=2, progress=False).losses
        return steps, trained.plan.portable.recompute

    serial, none = losses_and_layers(False)
    assert none == ()
    assert losses_and_layers(["layers.1"]) == (serial, (1,))
    assert losses_and_layers(["layers.0", "layers.2"]) == (serial, (0, 2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"recompute": (9,)},
            r"recompute of Strategy names layer 9 but the program has layers 0 to",
        ),
        (
            {"recompute": ("blocks.0.mlp",)},
            r"'blocks.0.mlp' but layer 1, which .*, also has ops of module 'blocks.0.norm1' that read",
        ),
        (
            {"recompute": ("other",)},
            r"names module 'other' but no layer of the program has ops of it; layers",
        ),
        (
            {"recompute": "all"},
            r"recompute is 'all' but must be numbers of layers",
        ),
        ({"recompute": (1, 1)}, r"recompute is \(1, 1\) but must ascend"),
        ({"recompute": (True,)}, r"recompute of Strategy is \(True,\) but must be"),
        (
            {"mode": "auto", "recompute": ("blocks.0",)},
            r"module 'blocks.0' but mode 'auto' takes numbers",
        ),
        ({"recompute": (1,), "memory": "1 GiB"}, r"memory of Strategy is '1 GiB' but mode 'semi' does not"),
        ({"recompute": "auto", "memory": "8"}, r"memory of the search is '8' but must be a size such as"),
    ],
)
def test_mistakes(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        engine(2, dg.Strategy(**given), cluster=one()).prepare(batch())


def test_a_choice_needs_a_cluster_and_a_training_program() -> None:
    with pytest.raises(ResourceError, match=r"recompute 'auto' of Strategy searches .* numbers of layers"):
        engine(2, AUTO).prepare(batch())
    with pytest.raises(GraphError, match=r"recompute 'auto' of Strategy .* one to evaluate"):
        engine(2, AUTO, cluster=one()).evaluate(batch())


def test_mode_auto_recomputes_under_a_memory_limit() -> None:
    """Layers are recomputed where memory asks for it, none where it does not; "auto" is no constraint."""
    request = request_of(4, dg.Strategy(mode="auto"))
    given = SearchConstraints(micro_batches=1, recompute="auto")
    options = SearchOptions(seconds=3600, processes=1, constraints=given)
    free = search(request, one(), options)
    assert free.forecast is not None
    assert free.recompute == ()
    budget = 0.75 * max(free.forecast.memory)
    plan = search(request, one(), replace(options, constraints=replace(given, memory=budget)))
    assert plan.forecast is not None
    assert max(plan.forecast.memory) <= budget
    assert plan.recompute
    alone = search(limited(request_of(4), budget), one(), SearchOptions(mode="semi"))
    assert alone.forecast is not None
    assert plan.forecast.seconds <= 1.05 * alone.forecast.seconds
    assert "given" not in plan.explain("recompute")
