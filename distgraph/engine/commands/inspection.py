"""What `distgraph check script.py` looks at: the first training step of a script, before it is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from distgraph.engine.commands.check import Report, check
from distgraph.engine.commands.script_runner import ScriptHook, run_script
from distgraph.engine.compile.compile import complete_program
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.strategy_passes import strategy_pipeline
from distgraph.engine.data import Batch
from distgraph.engine.parameter_store import Memory
from distgraph.errors import GraphError
from distgraph.kernels.random import random_key
from distgraph.resources import Cluster

_VARIED = 0.1  # how far constant parameters and states are moved: zeros would hide what is done with them


def check_step(
    request: CompileRequest, memory: Memory, batch: Batch, scalars: Mapping[str, Any], samples: int = 0
) -> Report:
    """Compare one training step with its serial meaning, value by value.

    Args:
        request: the program.
        memory: of the engine; parameters are made in it.
        batch: the first micro-batch is taken.
        scalars: inputs that are single numbers.
        samples: how many of its samples at most; 0 for all.

    Raises:
        GraphError, ShardingError: the program or its annotations do not fit, or not the plan; there is a plan
            but fewer samples are asked for than its micro-batches have.
    """
    training_spec, size = request.training_spec, request.size // request.micro_batches
    if samples and samples < size:
        if request.plan is not None:
            raise GraphError(
                f"check: {samples} samples are asked for but the plan is for micro-batches of {size}; leave "
                f"out --samples"
            )
        strategy, size = replace(training_spec.strategy, micro_batches=1), samples
        training_spec = replace(training_spec, strategy=strategy)
        request = replace(request, training_spec=training_spec, size=samples)
    serial, completed = complete_program(request)
    serial, completed = replace(serial, micro_batches=1), replace(completed, micro_batches=1)
    memory.adopt(completed)
    names = training_spec.names(tuple(request.fields), "train")
    inputs = {names[field]: np.asarray(array) for field, array in batch.block(0, size).items()}
    params = {name: _varied(name, _whole(memory, name)) for name in memory.records}
    return check(completed, {**scalars, **inputs}, params, serial, strategy_pipeline(training_spec.strategy))


def check_script(path: str | Path, argv: Sequence[str] = (), samples: int = 0) -> Report:
    """Run a script up to its first training step and check that step.

    Args:
        path: of the script.
        argv: its arguments.
        samples: most samples of the batch to look at; 0 for all.

    Raises:
        GraphError: there is no such file, or the script ends, exits or raises without a training step.
    """

    def check_first(
        request: CompileRequest,
        cluster: Cluster | None,
        memory: Memory,
        batch: Batch,
        scalars: Mapping[str, Any],
    ) -> Report:
        if request.training_spec.strategy.searches:  # most programs search nothing
            from distgraph.engine.commands.plan_search import with_searched_plan  # noqa: PLC0415

            request = with_searched_plan(request, cluster)
        return check_step(request, memory, batch, scalars, samples)

    return run_script(path, argv, ScriptHook(on_step=check_first), "check", "there is nothing to compare")


def _whole(memory: Memory, name: str) -> np.ndarray:
    record = memory.records[name]
    array: np.ndarray | None = None
    for rank in record.attr.mesh.members:
        block = memory.block(name, rank)
        if array is None:
            array = np.empty(record.shape, block.dtype)
        array[record.attr.spec.slices(record.shape, record.attr.mesh, rank)] = block
    assert array is not None  # a mesh has ranks
    return array


def _varied(name: str, array: np.ndarray) -> np.ndarray:
    """A tensor of equal numbers (a bias, a moment) with small positive ones added."""
    if array.size < 2 or array.dtype.kind in "biu" or not (array == array.flat[0]).all():
        return array
    added = np.random.default_rng(random_key(0, f"check {name}")).uniform(0, _VARIED, array.shape)
    varied: np.ndarray = array + added.astype(array.dtype)
    return varied
