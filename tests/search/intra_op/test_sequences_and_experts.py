"""Sequences and experts that the search splits unasked, by forecast on shipped clusters."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph.engine.commands.plan_search import SearchOptions, search
from distgraph.engine.compile.plan_apply import apply_plan
from distgraph.engine.data import whole
from distgraph.engine.search_driver.baselines import baselines
from distgraph.models import GShardMoE, Llama, LlamaConfig, MoEConfig
from distgraph.passes.lower import lower
from distgraph.passes.reshard import reshard
from distgraph.plan.constraints import SearchConstraints
from distgraph.plan.plan import Plan
from distgraph.resources import load_cluster


def request(model: Any, batch: int, length: int, **given: Any) -> tuple[dg.Engine, Any]:
    """An engine for a model of tokens, and what is searched."""
    engine = dg.Engine(model, model.loss, dg.optim.AdamW(), **given)
    ids = np.zeros((batch, length), "i4")
    return engine, engine._session.compile_request("train", whole((ids, ids)))


def found(model: Any, batch: int, length: int, cluster: str, devices: int) -> Plan:
    """The plan of a search on some devices, one stage and one micro-batch."""
    given = SearchConstraints(devices=devices, micro_batches=1, stages=1)
    options = SearchOptions(seconds=120, processes=1, constraints=given)
    plan = search(request(model, batch, length)[1], load_cluster(cluster), options)
    return Plan.parse(plan.text())


def long_llama(key_heads: int) -> Llama:
    """One layer with two heads: fewer than ranks."""
    config = LlamaConfig(hidden=256, inner=512, layers=1, heads=2, key_heads=key_heads, vocabulary=256)
    return Llama(config)


def test_a_ring_for_a_long_sequence_between_machines() -> None:
    """Keys that are gathered over 25 Gbit/s take long; in a ring they move under attention."""
    length, cluster = 65536, "p3_16xlarge_x8"
    plan = found(long_llama(1), 1, length, cluster, 16)
    assert re.search(r'"attention by ring \{s:\w+\} -> ', plan.text())
    assert plan.forecast is not None
    others = [each for each in plan.baselines.values() if not isinstance(each, str)]
    assert min(others) >= plan.forecast.seconds
    assert max(others) > plan.forecast.seconds
    assert plan.decisions["products"].chosen == "by ring"
    assert plan.decisions["stages"].chosen == "layers 0-8 on dp=1 x sp=16"
    engine, _ = request(long_llama(1), 1, length, plan=plan, cluster=load_cluster(cluster))
    ids = np.zeros((1, length), "i4")
    engine.prepare((ids, ids))
    assert engine.forecast().step_seconds == plan.forecast.seconds


def test_a_split_sequence_where_heads_are_fewer_than_ranks() -> None:
    plan = found(long_llama(2), 2, 8192, "dgx_a100_pod", 8)
    assert re.search(r'"attention (by ring )?\{[^}]*s:\w+\} -> ', plan.text())


def test_rings_of_many_steps_are_left_out_where_another_program_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def context_parallel() -> dict[str, float | str]:
        baselines = found(long_llama(2), 2, 2048, "dgx_a100_pod", 4).baselines
        return {name: each for name, each in baselines.items() if name.startswith("context parallel: ")}

    shortest, longest = context_parallel().items()
    assert isinstance(shortest[1], float)
    assert isinstance(longest[1], float)
    monkeypatch.setattr(baselines, "_MOST_RING_STEPS", 3)
    assert context_parallel() == {
        shortest[0]: shortest[1],
        longest[0]: "left out: 1 x 4 steps of rings are more than 3, and another program fits",
    }


def test_experts_are_split_and_tokens_sent_to_them() -> None:
    config = MoEConfig(hidden=256, layers=2, experts=32, heads=4, vocabulary=256, sequence=512, group=512)
    plan = found(GShardMoE(config), 16, 512, "dgx_a100_pod", 4)
    _, wanted = request(GShardMoE(config), 16, 512)
    _, completed = apply_plan(replace(wanted, plan=plan), plan)
    (experts,) = (op for op in completed.sources("param") if op.attrs["name"].endswith("mlp.up"))
    layout = completed.attrs[experts.name]
    assert layout.mesh.count(layout.spec.dims[0]) > 1
    sent = Counter(op.role for op in lower(reshard(completed)).ops if op.kind == "comm.all_to_all")
    assert sent["forward"] >= 2
    assert sent["backward"] >= 2
