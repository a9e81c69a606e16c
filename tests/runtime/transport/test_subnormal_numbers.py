"""Subnormal numbers are zero in a step, and nowhere else."""

from __future__ import annotations

import platform
import sys
import threading
import time

import numpy as np
import pytest

from distgraph.array_api.trace import trace
from distgraph.errors import RuntimeFault
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.pass_pipeline import run_passes
from distgraph.passes.pass_registry import PassContext
from distgraph.runtime.execute.worker import Worker
from distgraph.runtime.program.build import build
from distgraph.runtime.transport.progress_thread import ProgressThread
from distgraph.runtime.transport.subnormal_numbers import FlushedToZero

TINY = np.full(8, 1e-40, np.float32)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the mode is set on x86-64 Linux alone"
)


def flushes() -> bool:
    return not (TINY * np.float32(1)).any()


def test_the_mode_ends_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTGRAPH_FLUSH_SUBNORMALS", "1")
    assert not flushes()
    with FlushedToZero():
        assert flushes()
        with FlushedToZero():
            assert flushes()
        assert flushes()
    assert not flushes()
    with pytest.raises(KeyError), FlushedToZero():
        raise KeyError
    assert not flushes()


def doubled(x: np.ndarray) -> np.ndarray:
    graph = trace(lambda x: x * 2.0, (x.shape, "f32"))
    context = PassContext(mesh=ProcessMesh.grid(serial=1))
    compiled = build(run_passes(graph, ("complete",), context))
    worker = Worker(compiled.program(0), compiled.schedule, None, np, {})
    (name,) = (str(op.attrs["name"]) for op in worker.program.graph.sources("input"))
    (block,) = worker.step({name: [x]}).values()
    return np.array(block[0] if isinstance(block, list) else block)


def test_steps_flush_subnormal_numbers_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    np.testing.assert_array_equal(doubled(TINY), 2 * TINY)
    monkeypatch.setenv("DISTGRAPH_FLUSH_SUBNORMALS", "1")
    np.testing.assert_array_equal(doubled(TINY), 0 * TINY)
    assert not flushes()


def test_other_values_of_the_variable_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTGRAPH_FLUSH_SUBNORMALS", "yes")
    with pytest.raises(RuntimeFault, match="FLUSH_SUBNORMALS is 'yes' but must be 0 or 1"):
        FlushedToZero()


def test_the_thread_that_adds_up_messages_flushes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTGRAPH_FLUSH_SUBNORMALS", "1")
    modes: list[bool] = []
    thread = ProgressThread(lambda: bool(modes.append(flushes())), threading.Lock())
    thread.wake()
    while not modes:
        time.sleep(0.001)
    thread.stop()
    assert all(modes)
