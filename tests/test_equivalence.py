"""Training in every layout gives what one rank gives: losses, parameters and states of the optimiser."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from equivalence import MODELS, NO_GRADIENT, SEED, STEPS, Case, Layout, batches, cases, check, layouts, reference

from distgraph.data import POSITION
from distgraph.dtypes import short
from distgraph.init import materialize
from distgraph.interpret import interpret
from distgraph.kernels.random import random_key


@pytest.mark.parametrize("case", cases(), ids=str)
def test_training_is_that_of_one_rank(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(("model", "micro"), [("gpt", 1), ("gpt", 2), ("gpt", 4), ("conv", 1)])
def test_one_rank_trains_as_the_interpreter_does(model: str, micro: int) -> None:
    """The reference of all the others, against ops called one by one on the whole batch, with no pass between.

    Micro-batches change nothing but for batch norm, whose statistics are those of a micro-batch.
    """
    case = Case(model, Layout("serial"), micro)
    found, data, engine = reference(case), batches(model, "f64", case.size), case.engine()
    fields = {f"{POSITION}{i}": (array.shape, short(array.dtype)) for i, array in enumerate(data[0])}
    graph, optimizer = engine.recipe.trace("train", fields, {}), engine.recipe.optimizer
    assert optimizer is not None
    names = [op.attrs["name"] for op in graph.sources("input") if op.result.shape]
    state = {
        op.attrs["name"]: materialize(op.attrs["init"], op.attrs["name"], SEED, op.result.shape, dtype=op.result.dtype)
        for op in graph.sources("param", "state")
    }
    losses = []
    for number, arrays in enumerate(data):
        inputs = dict(zip(names, arrays, strict=True)) | {"key": np.uint64(random_key(SEED, "step", number))}
        inputs |= {name: np.float32(value) for name, value in optimizer.inputs(number).items()}
        outputs, updates = interpret(graph, inputs, state)
        state |= updates
        losses.append(float(outputs["loss"]))
    assert len(losses) == STEPS
    np.testing.assert_allclose(found.losses, losses, rtol=1e-10)
    assert set(found.tensors) == set(state)
    for name, tensor in state.items():
        if not name.endswith(NO_GRADIENT):
            np.testing.assert_allclose(found.tensors[name], tensor, rtol=1e-10, atol=1e-10, err_msg=name)
