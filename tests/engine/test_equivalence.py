"""Training in every layout gives what one rank gives: losses, parameters and states of the optimiser."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from support.programs.equivalence import (
    MODELS,
    NO_GRADIENT,
    SEED,
    STEPS,
    Case,
    Layout,
    batches,
    cases,
    check,
    grid,
    layouts,
    reference,
)

from distgraph.engine.data import POSITION
from distgraph.ir.dtypes import short
from distgraph.ir.reference_interpreter import interpret
from distgraph.kernels.random import random_key
from distgraph.nn.initializers import materialize


@pytest.mark.filterwarnings("ignore:loss depends on flip")  # of the samples, on one rank too
@pytest.mark.parametrize("case", cases(), ids=str)
def test_training_is_that_of_one_rank(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(("model", "micro"), [("gpt", 1), ("gpt", 2), ("gpt", 4), ("conv", 1)])
def test_one_rank_trains_as_the_interpreter_does(model: str, micro: int) -> None:
    """The reference of all the others, against ops called one by one on the whole batch and no pass between.

    Micro-batches change nothing but for batch norm, whose statistics are those of a micro-batch.
    """
    case = Case(model, Layout("serial"), micro)
    found, data, engine = reference(case), batches(model, "f64", case.size), case.engine()
    fields = {f"{POSITION}{i}": (array.shape, short(array.dtype)) for i, array in enumerate(data[0])}
    graph, optimizer = engine.training_spec.trace("train", fields, {}), engine.training_spec.optimizer
    assert optimizer is not None
    names = [op.attrs["name"] for op in graph.sources("input") if op.result.shape]
    state = {
        op.attrs["name"]: materialize(
            op.attrs["init"], op.attrs["name"], SEED, op.result.shape, dtype=op.result.dtype
        )
        for op in graph.sources("param", "state")
    }
    losses = []
    for number, arrays in enumerate(data):
        inputs = dict(zip(names, arrays, strict=True)) | {"key": np.uint64(random_key(SEED, "step", number))}
        inputs |= {name: float(value) for name, value in optimizer.inputs(number).items()}
        outputs, updates = interpret(graph, inputs, state)
        state |= updates
        losses.append(float(outputs["loss"]))
    assert len(losses) == STEPS
    np.testing.assert_allclose(found.losses, losses, rtol=1e-10)
    assert set(found.tensors) == set(state)
    for name, tensor in state.items():
        if not name.endswith(NO_GRADIENT):
            np.testing.assert_allclose(found.tensors[name], tensor, rtol=1e-10, atol=1e-10, err_msg=name)


# What is sent in a step of four micro-batches

BLOCKS, MICRO = 2, 4


def counted(name: str) -> Counter[tuple[str, str, str]]:
    """(collective, axis or "transfer", role) -> how many in a step, on the rank that has most."""
    (layout,) = (layout for layout in layouts("gpt") if layout.name == name)
    case = Case("gpt", layout, MICRO, refine="never")
    engine = case.engine()
    plan = engine.prepare(batches("gpt", "f64", case.size)[0])
    found: Counter[tuple[str, str, str]] = Counter()
    for each in plan.collectives:
        found[each.kind, "" if "->" in each.where else each.where, each.role] += each.count
    buckets = [op for op in plan.build.lowered.ops if op.kind.startswith("comm.") and len(op.results) > 1]
    for op in buckets:  # each tensor counts, of those that share a message
        found[op.kind.removeprefix("comm."), "*".join(op.attrs["axes"]), op.role] += len(op.results) - 1
    gradients = {("all_reduce", "dp", "backward"), ("reduce_scatter", "dp", "backward")}
    assert bool(buckets) == bool(gradients & found.keys())
    return found


def parameters() -> int:
    return len(MODELS["gpt"](Layout("serial"), "f64").parameters())


def test_tensor_parallelism_reduces_twice_a_block_each_way() -> None:
    each = 2 * BLOCKS * MICRO
    assert counted("tp4") == {("all_reduce", "tp", "forward"): each, ("all_reduce", "tp", "backward"): each}


def test_data_parallelism_reduces_each_gradient_once_a_step() -> None:
    assert counted("dp4") == {
        ("all_reduce", "dp", "backward"): parameters(),
        ("all_reduce", "dp", "forward"): 1,
    }


def test_data_and_tensor_parallelism_together_send_what_each_sends() -> None:
    assert counted("dp2_tp2") == counted("tp4") + Counter(
        {("all_reduce", "dp", "backward"): parameters(), ("all_reduce", "dp", "forward"): 1}
    )


@pytest.mark.parametrize("name", ["zero", "zero3"])
def test_split_states_scatter_each_gradient_and_gather_each_parameter_once_a_step(name: str) -> None:
    assert counted(name) == {
        ("reduce_scatter", "dp", "backward"): parameters(),
        ("all_gather", "dp", "forward"): parameters(),
        ("all_reduce", "dp", "forward"): 1,
    }


@pytest.mark.parametrize(("name", "borders"), [("pp2", 1), ("pp4", 3)])
def test_a_pipeline_sends_once_a_micro_batch_over_each_border_each_way(name: str, borders: int) -> None:
    each = borders * MICRO
    assert counted(name) == {("transfer", "", "forward"): each, ("transfer", "", "backward"): each}


def test_split_states_of_a_pipeline_stay_on_the_stage_of_their_parameter() -> None:
    layout = Layout("zero_pp2", (grid(0, dp=2), grid(2, dp=2)), rows="dp", states="dp")
    engine = Case("gpt", layout, MICRO, refine="never").engine()
    engine.prepare(batches("gpt", "f64", 16)[0])
    records = engine.memory.records
    states = {name: record for name, record in records.items() if name.endswith(("adam_m", "adam_v"))}
    assert len(states) == 2 * parameters()
    for name, record in states.items():
        assert record.attr.mesh == records[name.rpartition(".")[0]].attr.mesh, name
        assert "dp" in record.attr.spec.axes, name
