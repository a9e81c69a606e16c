"""The same work on many things, on every core.

*In:* a function and items. *Out:* its results, in the order of the items. *Invariant:* they are those of a
plain loop; an exception of one item is raised here, and what a process did not come back with is done here.

Processes are copies of this one as it is when the work is handed out (`fork`), so that the function sees all
that was made before and only results are sent back, pickled. What it keeps for later (caches) stays there:
what this process is to have of it must be in the results. This process works, too, and takes the first item:
what it keeps is kept.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import current_process, get_context
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, TypeVar

from distgraph.runtime.job.job_files import ranks_of_job

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Item = TypeVar("Item")
Result = TypeVar("Result")

_TICKET = 4  # bytes
_TICKETS = 10_000  # at once: a pipe holds 64 KiB


def cores() -> int:
    """Processes worth having: one for each core this one may use; one where ranks of a job have the others,
    where there is no fork, and in a daemonic process, which may start none."""
    alone = sys.platform != "linux" or ranks_of_job() > 1 or current_process().daemon
    return 1 if alone else len(os.sched_getaffinity(0))


def spread(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    alone: float = 0.0,
    packed: Callable[[Result], Result] = lambda result: result,
) -> list[Result]:
    """`[work(item) for item in items]`, in as many processes.

    Args:
        work: what it raises can be pickled.
        items: whoever is free takes the next one.
        processes: this one and others; with one, or for one item, there are no others.
        alone: seconds to work without them first, where items may take less time than copying processes.
        packed: of a result of another process: as it is sent, which can be pickled.
    """
    found: dict[int, Result] = {}
    end = time.monotonic() + alone
    while len(found) < len(items) and time.monotonic() < end:
        found[len(found)] = work(items[len(found)])
    while len(found) < len(items):
        first = len(found)
        numbers = range(first, min(first + _TICKETS, len(items)))
        if processes > 1 and len(numbers) > 1:
            _share(work, items, packed, numbers, processes, found)
        for number in numbers:
            if number not in found:
                found[number] = work(items[number])
    return [found[number] for number in range(len(items))]


def _share(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    packed: Callable[[Result], Result],
    numbers: Sequence[int],
    processes: int,
    found: dict[int, Result],
) -> None:
    """Do some items together with copies of this process; those that copies were killed over stay undone."""

    def serve(connection: Connection) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process
        for number in _drawn(tickets):
            told: tuple[int, bool, Any]
            try:
                told = number, True, packed(work(items[number]))
            except Exception as error:  # noqa: BLE001 - raised where the result is waited for
                told = number, False, error
            connection.send(told)

    own, *rest = numbers
    with _tickets(rest) as tickets, _hired(serve, min(processes - 1, len(rest))) as crew:
        found[own] = work(items[own])
        for number in _drawn(tickets):
            _heard(crew, found, seconds=0.0)
            found[number] = work(items[number])
        while crew:
            _heard(crew, found, seconds=None)


@contextmanager
def _tickets(numbers: Sequence[int]) -> Iterator[int]:
    """A pipe from which each number can be read once, by whoever comes first."""
    tickets, fill = os.pipe()
    try:
        os.write(fill, b"".join(number.to_bytes(_TICKET, "big") for number in numbers))
        os.close(fill)
        yield tickets
    finally:
        os.close(tickets)


def _drawn(tickets: int) -> Iterator[int]:
    while ticket := os.read(tickets, _TICKET):
        yield int.from_bytes(ticket, "big")


@contextmanager
def _hired(serve: Callable[[Connection], None], count: int) -> Iterator[set[Connection]]:
    """Processes that serve, by the connection to each; they are gone behind."""
    context = get_context("fork")
    crew: dict[Connection, Any] = {}
    try:
        for _ in range(count):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_begin, args=(serve, there, [*crew, here]))
            with warnings.catch_warnings():  # other threads (a progress bar) hold no lock that the work needs
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            there.close()
            crew[here] = process
        yield set(crew)
    finally:
        for connection, process in crew.items():
            process.kill()
            process.join()
            connection.close()


def _begin(serve: Callable[[Connection], None], there: Connection, others: Sequence[Connection]) -> None:
    """Serve, with no hold on the ends that the first process reads: once it is gone, sending fails."""
    for connection in others:
        connection.close()
    serve(there)


def _heard(crew: set[Connection], found: dict[int, Any], seconds: float | None) -> None:
    """Take in what the others have done; whoever is done with all, or gone, is crossed off.

    Args:
        crew: connections to them.
        found: results by number.
        seconds: to wait for the next word; None for ever.
    """
    connection: Any
    for connection in wait(list(crew), seconds):
        try:
            number, good, result = connection.recv()
        except (EOFError, OSError):
            crew.discard(connection)
            continue
        if not good:
            raise result
        found[number] = result
