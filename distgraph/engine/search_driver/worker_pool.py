"""Work in several processes, for functions that use what this process has made so far: a parallel map over
the cores of this machine, and a call in the background.

*In:* a function and items. *Out:* its results, in the order of the items. *Invariant:* the results are those
of a plain loop. An exception of one item is raised in the calling process; an item whose worker process was
killed, or whose result cannot be pickled, is computed in the calling process. The calling process goes on
during a `BackgroundCall`, which may come to nothing.

The worker processes belong to a `concurrent.futures.ProcessPoolExecutor` that forks them for one call of
`parallel_map`. A forked process shares traces, formulations and solved problems with the process that called,
and the user's script is not imported again, as the start methods "spawn" and "forkserver" would do. Only
results are pickled. What a worker process keeps for later (caches) ends with it: what the calling process is
to have of it must be part of the results. The calling process computes items too, and always the first one.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib import import_module
from multiprocessing import active_children, current_process, get_context, parent_process
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from distgraph.kernels._jit import has_numba
from distgraph.runtime.job.job_files import ranks_of_job

Item = TypeVar("Item")
Result = TypeVar("Result")


def available_processes() -> int:
    """Processes worth having: one for each core that this process may use.

    One only where ranks of a job have the other cores, where processes cannot be forked, and in a daemonic
    process, which may start none.
    """
    single = sys.platform != "linux" or ranks_of_job() > 1 or current_process().daemon
    return 1 if single else len(os.sched_getaffinity(0))


def parallel_map(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    alone: Callable[[], bool] = lambda: False,
    pack: Callable[[Result], Result] = lambda result: result,
) -> list[Result]:
    """`[function(item) for item in items]`, computed in several processes.

    Args:
        function: may be a closure; what it raises can be pickled.
        items: a process that is free takes the next one.
        processes: the calling process and its workers; with one, or for one item, there are no workers.
        alone: whether the calling process computes the next item without workers; once it does not, workers
            take part to the end.
        pack: makes of a result of a worker process one that can be pickled.
    """
    results: dict[int, Result] = {}
    while len(results) < len(items) and alone():
        results[len(results)] = function(items[len(results)])
    rest = range(len(results), len(items))
    if processes > 1 and len(rest) > 1:
        _map_with_workers(function, items, pack, rest, processes, results)
    for number in rest:
        if number not in results:
            results[number] = function(items[number])
    return [results[number] for number in range(len(items))]


class BackgroundCall(Generic[Result]):
    """A call of a function in a worker process, which begins at once.

    Args:
        function: may be a closure; it starts no processes of its own. Its result can be pickled.
    """

    def __init__(self, function: Callable[[], Result]) -> None:
        _import_before_forking()
        context = get_context("fork")
        self._results, there = context.Pipe(duplex=False)
        arguments = function, self._results, there
        self._process = context.Process(target=_call_in_worker, args=arguments, daemon=True)
        with _without_fork_warnings():
            self._process.start()
        there.close()  # so that the pipe ends with the worker process

    @property
    def running(self) -> bool:
        """Whether the worker process still computes."""
        return self._process.is_alive() and not self._results.poll()

    def result(self) -> Result | None:
        """What the function returned; waits for it. None where it raised an exception, or the worker process
        was killed. To be called once."""
        try:
            return pickle.loads(self._results.recv_bytes())  # type: ignore[no-any-return]
        except EOFError:
            return None
        finally:
            self.end()

    def end(self) -> None:
        """Kill the worker process, if it still runs, and let go of it."""
        self._process.kill()
        self._process.join()
        self._results.close()


def _call_in_worker(function: Callable[[], Result], here: Connection, there: Connection) -> None:
    """Send the result of a function; nothing where it raises an exception."""
    here.close()
    _start_worker()
    with suppress(Exception):
        there.send_bytes(pickle.dumps(function()))


def _map_with_workers(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    pack: Callable[[Result], Result],
    numbers: Sequence[int],
    processes: int,
    results: dict[int, Result],
) -> None:
    """Compute items of some numbers together with worker processes, and add their results.

    Items of workers that were killed, and results that cannot be pickled, are left out.
    """

    def compute(number: int) -> bytes | None:
        result = pack(function(items[number]))
        try:
            return pickle.dumps(result)
        except Exception:  # noqa: BLE001 - objects raise what they like when they cannot be pickled
            return None

    _import_before_forking()
    first, *rest = numbers
    with _workers(compute, min(processes - 1, len(rest))) as pool:
        queue = _Queue(pool, rest)
        for _ in range(min(processes - 1, len(rest))):
            queue.submit()
        try:
            results[first] = function(items[first])
            while (number := queue.take()) is not None:
                results[number] = function(items[number])
            for number, pickled in queue.wait():
                results[number] = pickle.loads(pickled)
        finally:
            queue.close()


def _import_before_forking() -> None:
    """Import what a search imports at its first use, so that not every worker process imports it."""
    has_numba()
    import_module("networkx")
    import_module("scipy.optimize")


class _Queue:
    """The numbers of the items that wait: the calling process takes some, worker processes the others.

    A worker process has one item at a time, so that none waits in a pool while the calling process is free.
    """

    def __init__(self, pool: ProcessPoolExecutor, numbers: Sequence[int]) -> None:
        self._pool = pool
        self._waiting = deque(numbers)
        self._futures: dict[int, Future[bytes | None]] = {}
        self._lock = threading.Lock()  # the pool reports the end of an item in a thread of its own

    def submit(self) -> None:
        """Give the next item to the pool."""
        with self._lock:
            if not self._waiting:
                return
            number = self._waiting.popleft()
            try:
                future = self._pool.submit(_compute_in_worker, number)
            except BrokenProcessPool:
                return
            self._futures[number] = future
        future.add_done_callback(self._submit_after)

    def _submit_after(self, future: Future[bytes | None]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.submit()

    def take(self) -> int | None:
        """The next item for the calling process; None where none waits. Raises what an item has raised."""
        with self._lock:
            failures = [f.exception() for f in self._futures.values() if f.done()]
            number = self._waiting.popleft() if self._waiting else None
        for failure in failures:
            if failure is not None and not isinstance(failure, BrokenProcessPool):
                raise failure
        return number

    def wait(self) -> Iterator[tuple[int, bytes]]:
        """The pickled results of worker processes, as far as there are any, once none waits."""
        with self._lock:
            futures = dict(self._futures)
        for number, future in futures.items():
            try:
                pickled = future.result()
            except BrokenProcessPool:
                continue
            if pickled is not None:
                yield number, pickled

    def close(self) -> None:
        """Give nothing more to the pool, and let go of it."""
        with self._lock:
            self._waiting.clear()
            self._futures.clear()


@contextmanager
def _workers(compute: Callable[[int], bytes | None], count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of forked processes that know a function; all have ended behind, at once after an exception."""
    others = set(active_children())
    with ProcessPoolExecutor(count, get_context("fork"), _start_pool_worker, (compute,)) as pool:
        try:
            with _without_fork_warnings():
                pool.submit(_compute_in_worker, None)  # forks all of them
            yield pool
        except BaseException:
            for process in set(active_children()) - others:
                process.kill()
            raise


@contextmanager
def _without_fork_warnings() -> Iterator[None]:
    """Other threads (a progress bar) hold no lock that worker processes need."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called.*JAX", RuntimeWarning)
        yield


_COMPUTE: ContextVar[Callable[[int], bytes | None]] = ContextVar("distgraph_worker_compute")
"""The function of a worker process; set when the process starts."""


def _start_pool_worker(compute: Callable[[int], bytes | None]) -> None:
    _start_worker()
    _COMPUTE.set(compute)


def _start_worker() -> None:
    """Begin a worker process: Ctrl-C is for the calling process, with which this one ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_caller, daemon=True).start()


def _end_with_caller() -> None:
    caller: Any = parent_process()
    caller.join()
    os._exit(1)


def _compute_in_worker(number: int | None) -> bytes | None:
    return None if number is None else _COMPUTE.get()(number)
