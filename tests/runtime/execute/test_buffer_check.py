"""The check of buffers is tested: mistakes put into the memory plan, and bytes that change on their way, are
each caught with the rank, the value, the task and the micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.pipelines.forwarding import Case, feeds, params
from support.programs.partitioned import run_partitioned
from support.programs.training import data, engine

from distgraph.errors import RuntimeFault
from distgraph.passes.partition import RankProgram
from distgraph.runtime.execute import worker
from distgraph.runtime.execute.buffer_check import checksum
from distgraph.runtime.program import memory_plan, ring_buffer_sizes
from distgraph.runtime.program.memory_packing import Block
from distgraph.runtime.program.memory_plan import StoragePlan, plan_storage
from distgraph.runtime.program.storage import Storage
from distgraph.runtime.schedule.actor_group import AliveLimits
from distgraph.runtime.schedule.task_order import Schedule
from distgraph.runtime.transport.transport import Transport

WHERE = r"rank \d: %\S+ .*(forward|backward|optimize)\.s\d.* of micro-batch \d"
Mutate = Callable[[Callable[[RankProgram, Schedule, AliveLimits | None], Storage]], None]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTGRAPH_CHECK", "1")


@pytest.fixture
def planned_by(monkeypatch: pytest.MonkeyPatch) -> Mutate:
    """Workers get another memory plan."""
    return lambda plan: monkeypatch.setattr(worker, "plan_storage", plan)


def run(case: Case, wrap: Callable[[Transport], Any] = lambda transport: transport) -> None:
    run_partitioned(case.completed(), feeds(case.micro), params(), case.policy, wrap)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("policy", ["1f1b", "gpipe", "eager-1f1b"])
@pytest.mark.parametrize("stages", ["one rank each", "2, 1 and 1 ranks"])
def test_memory_that_is_received_into_while_a_view_of_it_is_sent(
    policy: str, stages: str, planned_by: Mutate
) -> None:
    """Sends do not hold their memory, as it was with those of views."""

    def careless(program: RankProgram, schedule: Schedule, limits: AliveLimits | None) -> Storage:
        found = plan_storage(program, schedule, limits)
        found.sent = frozenset()
        return found

    case = Case("reshape", stages, policy, 4)
    run(case)
    planned_by(careless)
    with pytest.raises(RuntimeFault, match=WHERE):
        run(case)


@pytest.mark.usefixtures("checked")
def test_scratch_memory_that_is_reused_while_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def stacked(parts: object, blocks: list[Block]) -> int:
        for block in blocks:
            block.offset = 0
        return max((block.nbytes for block in blocks), default=0)

    monkeypatch.setattr(memory_plan, "pack_once", stacked)
    with pytest.raises(RuntimeFault, match=r"overwritten before .* read it"):
        trained(2)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("policy", ["1f1b", "gpipe", "eager-1f1b"])
def test_ring_that_is_one_buffer_too_short(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ring_buffer_sizes.window
    monkeypatch.setattr(memory_plan, "window", lambda starts, ends: max(1, right(starts, ends) - 1))
    monkeypatch.setattr(StoragePlan, "_send_depths", lambda *_: (1, 1))
    monkeypatch.setattr(StoragePlan, "verify", lambda *_: None)  # it finds some of this before the run
    with pytest.raises(RuntimeFault, match=r"rank \d: %"):
        run(Case("reshape", "one rank each", policy, 4))


class Flipping:
    """A transport that changes one bit of every long message before it is sent."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, buffer: Any, dest: int, tag: int) -> Any:
        changed = buffer.copy()
        if buffer.dtype == np.float64:
            changed.view(np.uint8)[3] ^= 16
        return self._transport.send(changed, dest, tag)


@pytest.mark.usefixtures("checked")
def test_message_that_changes_in_transit() -> None:
    with pytest.raises(RuntimeFault, match=WHERE + r": what arrived from rank \d is not what it sent"):
        run(Case("identity", "one rank each", "1f1b", 2), Flipping)


def trained(micro: int, layout: str = "dp2tp3") -> list[float]:
    model = engine(layout, dropout=0.3, micro=micro)
    try:
        model.fit(data(32), epochs=1, batch_size=16, progress=False)
        return model.history.losses
    finally:
        model.close()


@pytest.mark.parametrize("layout", ["dp2tp3", "pp1_3"])
def test_checked_run_gives_the_numbers_of_a_plain_one(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained(2, layout)
    monkeypatch.setenv("DISTGRAPH_CHECK", "1")
    assert trained(2, layout) == plain


def test_other_values_of_the_switch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTGRAPH_CHECK", "yes")
    with pytest.raises(RuntimeFault, match="DISTGRAPH_CHECK is 'yes' but must be 0 or 1"):
        trained(1, "serial")


def test_checksum_sees_views_and_numbers() -> None:
    array = np.arange(12.0).reshape(3, 4)
    assert checksum(array.T) == checksum(np.ascontiguousarray(array.T)) != checksum(array)
    assert checksum(np.float32(2)) == checksum(np.full((), 2, np.float32))
    assert checksum(array[:0]) == 0
