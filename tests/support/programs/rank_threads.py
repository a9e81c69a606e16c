"""Runs a function on in-process ranks, a thread each, once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from distgraph.errors import RuntimeFault
from distgraph.runtime.transport.inprocess import InProcessTransport, connect

Result = TypeVar("Result")


def run_ranks(
    size: int, fn: Callable[[InProcessTransport], Result], *, limit: float | None = None, waiting: int = 0
) -> list[Result]:
    """Run `fn(transport)` on `size` ranks, one thread each, and join them all.

    Args:
        size: number of ranks.
        fn: what each does.
        limit: seconds without progress after which a wait fails.
        waiting: ranks that must wait before any wait fails, however late the machine runs their threads.

    Returns:
        The results of the ranks, in rank order.

    Raises:
        RuntimeFault: a rank raised. The message names the rank that failed first; its exception with its
            traceback is the `__cause__`, so Python prints it first. The other ranks stop at their next
            transport call.

    Example:
        >>> run_ranks(3, lambda t: t.broadcast_object(t.rank * 10, root=2))
        [20, 20, 20]
    """
    transports = connect(size, limit=limit)
    world = transports[0]._world
    results: list[Any] = [None] * size
    seconds_left = world.seconds_left

    def patient(rank: int, what: str, begun: float) -> float:
        ready = sum(bool(activity.waiting) for activity in world.activities.values()) >= waiting
        return seconds_left(rank, what, begun) if ready else world.limit

    if waiting:
        world.seconds_left = patient  # type: ignore[method-assign]

    def body(transport: InProcessTransport) -> None:
        try:
            results[transport.rank] = fn(transport)
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it again
            transport.abort(error)

    threads = [
        threading.Thread(target=body, args=(t,), name=f"rank-{t.rank}", daemon=True) for t in transports
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C in the caller ends the ranks too
        world.fail(-1, error)
        for thread in threads:
            thread.join(world.limit)
        raise
    if world.failure is not None:
        error = world.failure.error
        raise RuntimeFault(f"rank {world.failure.rank} failed: {type(error).__name__}: {error}") from error
    return results
