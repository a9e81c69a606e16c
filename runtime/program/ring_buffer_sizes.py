"""Ring buffer sizes: how many buffers a rank allocates for a value that exists once per micro-batch.

*In:* the clocks of the schedule. *Out:* numbers of buffers.
*Invariant:* the data of micro-batch m are not overwritten while a task still reads them, and no rank waits
for a send, in order to write a buffer, whose receive is posted later in the schedule.

A buffer from which a message is sent is written again only when the message has been received, which needs a
posted receive. Receives are posted one place ahead in the order of a rank: those of place p when the task of
place p - 2 is done. By the schedule's clocks (every task takes one) that is a *post clock*:

    post(p) = clock(p - 2) + 1, and 0 for the first two places.

A task that runs at clock c may wait for messages whose receives are posted at clock c or before. A receive
that is posted into the buffer itself, at post clock c, may wait only for those posted before c. Then all
waits follow the order (clock, post before task), so they form no cycle, whatever the real durations are.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distgraph.passes.split_tasks import Parts
from distgraph.runtime.schedule.task_order import Schedule

Clocks = NDArray[np.int64]
"""One number for each micro-batch, ascending."""


@dataclass(frozen=True, slots=True)
class RankClocks:
    """The clocks at which one rank runs its tasks and posts receives, and others post those of its sends.

    Attributes:
        places: task -> for each micro-batch its place in the rank's order, -1 where it has none.
        starts: task -> for each micro-batch the clock at which it runs.
        posts: task -> for each micro-batch the clock at which this rank posts its receives.
        receiver_posts: transfer that the rank sends -> for each micro-batch the clock at which all receivers
            have posted their receives.
    """

    places: Mapping[str, Clocks]
    starts: Mapping[str, Clocks]
    posts: Mapping[str, Clocks]
    receiver_posts: Mapping[str, Clocks]

    def renamed(self, tasks: Mapping[str, str], transfers: Mapping[str, str]) -> RankClocks:
        """These clocks with the names of a corresponding rank, whose tasks and transfers have other names."""
        places, starts, posts = (
            {tasks[name]: clocks for name, clocks in clocks_of.items()}
            for clocks_of in (self.places, self.starts, self.posts)
        )
        return RankClocks(
            places, starts, posts, {transfers[name]: c for name, c in self.receiver_posts.items()}
        )


def rank_clocks(schedule: Schedule, parts: Parts, rank: int) -> RankClocks:
    """The clocks of one rank under a schedule; empty where it runs no task."""
    column = next((column for column in schedule.columns if rank in column.ranks), None)
    if column is None:
        return RankClocks({}, {}, {}, {})
    count = schedule.micro_batches
    places = {task: np.full(count, -1) for _, task in column.names}
    for place, step in enumerate(column.steps):
        places[step.task][step.micro] = place
    clocks = np.array([step.clock for step in column.steps], np.int64)
    posting_clocks = np.concatenate([np.zeros(2, np.int64), clocks + 1])
    run = {task: place_of_micro[place_of_micro >= 0] for task, place_of_micro in places.items()}
    receiver_posts = {
        sent: schedule.posts[target]
        for sent, (source, target) in parts.transfers.items()
        if source in places and target in schedule.posts
    }
    return RankClocks(
        places,
        {task: clocks[place_of_micro] for task, place_of_micro in run.items()},
        {task: posting_clocks[place_of_micro] for task, place_of_micro in run.items()},
        receiver_posts,
    )


def window(starts: Clocks, ends: Clocks) -> int:
    """Largest (newest - oldest + 1) micro-batch alive at any time.

    Args:
        starts, ends: of every micro-batch, first and last place in the order at which it is alive.
    """
    if (starts[:-1] <= starts[1:]).all() and (ends[:-1] <= ends[1:]).all():  # first in, first out
        newest = np.searchsorted(starts, starts, "right") - 1
        oldest = np.searchsorted(ends, starts, "left")
        return int((newest - oldest).max()) + 1
    return _window_in_any_order(list(zip(starts.tolist(), ends.tolist(), strict=True)))


def _window_in_any_order(intervals: list[tuple[int, int]]) -> int:
    """`window` for any order of the micro-batches: a sweep over starts and ends."""
    starting = sorted(range(len(intervals)), key=lambda m: intervals[m])
    oldest: list[tuple[int, int]] = []  # heap of (micro-batch, end) of the started ones
    newest: list[tuple[int, int]] = []  # heap of (-micro-batch, end)
    widest = 1
    for m in starting:
        start, end = intervals[m]
        heapq.heappush(oldest, (m, end))
        heapq.heappush(newest, (-m, end))
        for heap in (oldest, newest):
            while heap[0][1] < start:
                heapq.heappop(heap)
        widest = max(widest, -newest[0][0] - oldest[0][0] + 1)
    return widest


def outstanding(written: Clocks, receiver_posts: Clocks, *, posting: bool) -> int:
    """Number of buffers of a ring with which no write waits for a receive that is posted later.

    Args:
        written: for each micro-batch the clock at which its buffer is written.
        receiver_posts: for each micro-batch the clock at which the receives of the messages from it are
            posted.
        posting: the buffer is written by a receive that is posted at these clocks, not by a task.
    """
    micro = np.arange(len(written))
    # first micro-batch whose receive is not posted when the buffer is written
    first_late = np.searchsorted(receiver_posts, written, "left" if posting else "right")
    return int((micro - np.minimum(first_late, micro)).max()) + 1
