"""Work in several processes: as a plain loop, whatever happens to one. A search in two is as in one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import active_children, get_context

import pytest
from support.programs.searched import PROGRAMS, SECONDS, finished_search, two_by_two

from distgraph.engine.commands.plan_search import SearchOptions, search
from distgraph.engine.search_driver import search_state
from distgraph.engine.search_driver.baselines import data_parallel_zero
from distgraph.engine.search_driver.layout_variants import Solutions, SolvingProcesses
from distgraph.engine.search_driver.run_search import plan_of_search, run_search
from distgraph.engine.search_driver.search_state import Event, SearchState
from distgraph.engine.search_driver.worker_pool import BackgroundCall, available_processes, parallel_map
from distgraph.errors import GraphError, InfeasibleError

HERE = os.getpid()


@pytest.mark.parametrize("processes", [1, 2, 3, 9])
def test_results_come_in_the_order_of_the_items(processes: int) -> None:
    before = {"seen": 5}  # made before: copies of this process have it

    def work(n: int) -> tuple[int, bool]:
        time.sleep(0.02 * (4 - n))  # the first item ends last
        return n * before["seen"], os.getpid() == HERE

    results = parallel_map(work, range(5), processes)
    assert [product for product, _ in results] == [0, 5, 10, 15, 20]
    assert results[0] == (0, True)
    assert {here for _, here in results} == ({True} if processes == 1 else {True, False})
    assert parallel_map(work, [3], processes) == [(15, True)]
    assert parallel_map(work, [], processes) == []


def test_what_fails_there_fails_here() -> None:
    def work(n: int) -> int:
        if os.getpid() != HERE:
            raise InfeasibleError(f"item {n}")
        time.sleep(0.3)
        return n

    with pytest.raises(InfeasibleError, match=r"^item 1$"):
        parallel_map(work, range(4), 2)


def test_what_a_killed_process_had_in_hand_is_done_here() -> None:
    def work(n: int) -> tuple[int, bool]:
        if n % 2 and os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGKILL)
        return n, os.getpid() == HERE

    assert parallel_map(work, range(6), 2)[1] == (1, True)
    assert [n for n, _ in parallel_map(work, range(6), 3)] == list(range(6))


def test_what_cannot_be_sent_is_done_here() -> None:
    results = parallel_map(lambda n: (lambda: n) if n else n, range(3), 2)
    assert results[0] == 0
    assert [each() for each in results[1:] if callable(each)] == [1, 2]


def test_an_interrupt_leaves_no_process_behind() -> None:
    pids: list[int | None] = []

    def interrupt() -> None:
        pids.extend(process.pid for process in active_children())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.5, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        parallel_map(time.sleep, [60.0, 60.0, 60.0], 3)
    assert len(pids) == 2
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_end_with_a_caller_that_is_killed() -> None:
    """Each of the three processes says that it is at work; the pipe ends once none of them is left."""
    there, here = os.pipe()

    def work(n: int) -> None:
        os.write(here, b".")
        time.sleep(600)

    caller = get_context("fork").Process(target=parallel_map, args=(work, range(3), 3))
    caller.start()
    os.close(here)
    with os.fdopen(there, "rb", buffering=0) as pipe:
        at_work = b"".join(pipe.read(1) or b"" for _ in range(3))
        caller.kill()
        caller.join()
        assert at_work == b"..."
        assert pipe.read() == b""


def test_results_come_packed_from_other_processes_only() -> None:
    def work(n: int) -> tuple[int, object]:
        time.sleep(0.05)
        return n, lambda: n

    results = parallel_map(work, range(6), 2, pack=lambda result: (result[0], None))
    assert [n for n, _ in results] == list(range(6))
    assert results[0][1] is not None
    assert None in [rest for _, rest in results]


def test_more_items_than_a_pipe_holds() -> None:
    assert parallel_map(lambda n: -n, range(10_003), 2) == [-n for n in range(10_003)]


def test_a_call_in_the_background_gives_its_result() -> None:
    before = {"seen": 5}
    call = BackgroundCall(lambda: (before["seen"] * 3, os.getpid() == HERE))
    assert call.result() == (15, False)
    assert not active_children()


def test_a_call_in_the_background_runs_until_its_result_is_there() -> None:
    there, here = os.pipe()
    call = BackgroundCall(lambda: os.read(there, 1))
    assert call.running
    os.write(here, b".")
    assert call.result() == b"."
    os.close(there)
    os.close(here)


@pytest.mark.parametrize("failure", ["raises", "killed", "cannot be pickled"])
def test_a_call_in_the_background_may_come_to_nothing(failure: str) -> None:
    def work() -> object:
        if failure == "raises":
            raise InfeasibleError("nothing fits")
        if failure == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return lambda: None

    assert BackgroundCall(work).result() is None
    assert not active_children()


def test_a_call_in_the_background_is_given_up() -> None:
    call = BackgroundCall(lambda: time.sleep(600))
    assert call.running
    call.end()
    assert not active_children()


def test_a_map_is_alone_while_a_call_in_the_background_has_the_other_process() -> None:
    there, here = os.pipe()
    solving = SolvingProcesses()
    wait = solving.in_background(lambda: os.read(there, 1))
    assert solving.parallel_map(lambda n: os.getpid() == HERE, range(3), 2) == [True, True, True]
    os.write(here, b".")
    assert wait() == b"."
    os.close(there)
    os.close(here)


def test_choices_that_a_call_in_the_background_solved_are_known_afterwards() -> None:
    solving = SolvingProcesses()

    def solve() -> int:
        solving.solutions.choices["problem"] = (1, 2), 3.0
        solving.solutions.bases["shape"] = {4: 0.0}
        return 5

    assert solving.in_background(solve)() == 5
    assert solving.solutions == Solutions({"problem": ((1, 2), 3.0)}, {}, {})


def test_a_call_that_was_given_up_has_no_result() -> None:
    solving = SolvingProcesses()
    first = solving.in_background(lambda: time.sleep(600))
    second = solving.in_background(lambda: 5)
    assert (first(), second()) == (None, 5)
    third = solving.in_background(lambda: 5)
    solving.end_background()
    assert third() is None


def test_what_is_rehearsed_starts_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_state, "FORK_SECONDS", 0.0)
    state = SearchState(PROGRAMS["gpt"].compile_request(), two_by_two(), "auto", SECONDS, processes=2)

    def phase() -> Iterator[Event]:
        pids = state.layout_costs.solving.parallel_map(
            lambda n: os.getpid(), range(3), state.layout_costs.processes
        )
        state.evaluations.once("pids", lambda: str(set(pids) == {os.getpid()}))
        yield Event("rehearsed")

    assert state.rehearse(phase)
    assert state.evaluations.once("pids", lambda: "made here") == "True"


def test_a_map_within_a_map_starts_no_processes() -> None:
    solving = SolvingProcesses()

    def outer(n: int) -> tuple[int, list[int]]:
        time.sleep(0.05)
        return os.getpid(), solving.parallel_map(lambda _: os.getpid(), range(3), 2)

    results = solving.parallel_map(outer, range(4), 2)
    assert len({pid for pid, _ in results}) == 2
    assert all(set(within) == {pid} for pid, within in results)


def test_a_search_that_is_given_up_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data parallelism with ZeRO is forecast in the background and takes forever."""
    monkeypatch.setattr(data_parallel_zero, "_built", lambda *_, **__: time.sleep(600))
    monkeypatch.setattr(search_state, "FORK_SECONDS", 0.0)
    program = PROGRAMS["gpt"].compile_request()
    events = run_search(SearchState(program, two_by_two(), "auto", SECONDS, processes=2))
    assert any(active_children() for _ in events)
    events.close()
    assert not active_children()


def test_the_first_items_wait_for_no_worker() -> None:
    alone = iter([True, True, False])

    def work(n: int) -> tuple[int, bool]:
        time.sleep(0.05)
        return n, os.getpid() == HERE

    results = parallel_map(work, range(8), 2, lambda: next(alone))
    assert [n for n, _ in results] == list(range(8))
    assert [here for _, here in results[:3]] == [True, True, True]
    assert not all(here for _, here in results)


def test_ranks_of_a_job_search_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PMI_SIZE", raising=False)
    assert available_processes() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("PMI_SIZE", "2")
    assert available_processes() == 1


def test_a_daemonic_process_searches_alone() -> None:
    with get_context("fork").Pool(1) as pool:
        assert pool.apply(available_processes) == 1


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_more_processes_find_the_same_plan(name: str) -> None:
    options = SearchOptions(seconds=SECONDS, processes=3)
    alone = plan_of_search(finished_search(PROGRAMS[name]), options.settings())
    together = search(PROGRAMS[name].compile_request(), two_by_two(), options)
    one, three = (replace(plan, search=replace(plan.search, seconds=0.0)) for plan in (alone, together))
    assert one == three


def test_no_process_is_too_few() -> None:
    with pytest.raises(GraphError, match="processes of the search is 0 but must be 1 or more"):
        SearchOptions(processes=0)
