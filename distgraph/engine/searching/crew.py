"""The same work on many things, on every core.

*In:* a function and items. *Out:* its results, in the order of the items. *Invariant:* they are those of a
plain loop; an exception of one item is raised here, and what a process did not come back with is done here.

Processes are copies of this one as it is when the work is handed out (`fork`), so that the function sees all
that was made before and only results are sent back, pickled. What it keeps for later (caches) stays there:
what this process is to have of it must be in the results.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import current_process, get_context
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, TypeVar

from distgraph.runtime.job import ranks_of_job

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Item = TypeVar("Item")
Result = TypeVar("Result")


def cores() -> int:
    """Processes worth having: one for each core this one may use; one where ranks of a job have the others,
    where there is no fork, and in a daemonic process, which may start none."""
    alone = sys.platform != "linux" or ranks_of_job() > 1 or current_process().daemon
    return 1 if alone else len(os.sched_getaffinity(0))


def spread(
    work: Callable[[Item], Result], items: Sequence[Item], processes: int, alone: float = 0.0
) -> list[Result]:
    """`[work(item) for item in items]`, in as many processes.

    Args:
        work: what it returns and raises can be pickled.
        items: whoever is free takes the next one.
        processes: beside this one, which waits; with one, or for one item, there are none.
        alone: seconds to work without them first, where items may take less time than copying processes.
    """
    found: dict[int, Result] = {}
    end = time.monotonic() + alone
    while len(found) < len(items) and time.monotonic() < end:
        found[len(found)] = work(items[len(found)])
    rest = range(len(found), len(items))
    if processes < 2 or len(rest) < 2:
        return [*found.values(), *map(work, items[len(found) :])]
    crew = _hired(work, items, min(processes, len(rest)))
    try:
        _handed_out(rest, list(crew), found)
    finally:
        for connection, process in crew.items():
            process.kill()
            process.join()
            connection.close()
    return [found[n] if n in found else work(item) for n, item in enumerate(items)]


def _hired(work: Callable[[Item], Result], items: Sequence[Item], count: int) -> dict[Connection, Any]:
    """Processes that wait for numbers of items, by the connection to each."""
    context, crew = get_context("fork"), {}
    for _ in range(count):
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, work, items))
        with warnings.catch_warnings():  # other threads (a progress bar) hold no lock that the work needs
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        there.close()
        crew[here] = process
    return crew


def _handed_out(numbers: Sequence[int], idle: list[Connection], found: dict[int, Result]) -> None:
    """Give every free process the next item until all are done, or nobody is left."""
    waiting, busy = list(reversed(numbers)), dict[Any, int]()
    connection: Any
    while True:
        while waiting and idle:
            connection = idle.pop()
            busy[connection] = waiting.pop()
            _tell(connection, busy[connection])
        if not busy:
            return
        for connection in wait(list(busy)):
            number = busy.pop(connection)
            try:
                good, result = connection.recv()
            except (EOFError, OSError):
                continue  # it is gone
            if not good:
                raise result
            found[number] = result
            idle.append(connection)


def _tell(connection: Connection, number: int) -> None:
    try:
        connection.send(number)
    except OSError:
        return  # it is gone, as reading tells


def _serve(connection: Connection, work: Callable[[Any], Any], items: Sequence[Any]) -> None:
    """Do the items whose numbers come, until nobody sends any more; Ctrl-C is for the first process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            number = connection.recv()
        except EOFError:
            return
        try:
            told = True, work(items[number])
        except Exception as error:  # noqa: BLE001 - raised where the result is waited for
            told = False, error
        connection.send(told)
