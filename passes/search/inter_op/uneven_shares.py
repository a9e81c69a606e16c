"""Uneven data parallelism: how many samples each of several unequal devices computes.

*In:* what a sample costs on each member of a data-parallel group. *Out:* whole samples for each.
*Invariant:* the shares add up to the batch, every member keeps within its memory, and no other whole shares
have a faster slowest member.

With b_i samples on member i, which takes a_i seconds to start and c_i more for each sample, and keeps f_i +
g_i b_i of its M_i bytes,

    minimise T  subject to  sum_i b_i = B,  0 <= b_i <= cap_i = floor((M_i - f_i) / g_i),
                            a_i z_i + c_i b_i <= T,  b_i <= cap_i z_i,  z_i in {0, 1},  b_i whole.

Its linear relaxation (z_i = b_i / cap_i, b_i real), solved by cvxpy, bounds T from below. From there T
rises to the least value at which members can take all samples, sum_i min(cap_i, floor((T - a_i) / c_i)) >=
B: as T is one of the a_i + c_i k, that is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distgraph.errors import InfeasibleError

__all__ = ["Member", "Shares", "shares"]

_ROUNDING = 1e-9  # relative: seconds this close are equal


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a data-parallel group: a device, or several that compute a sample together.

    Attributes:
        name: for messages.
        seconds: c, of one sample, forward and backward.
        start: a, seconds that any number of samples costs besides.
        nbytes: g, bytes of one sample on each device.
        fixed: f, bytes that are held in any case.
        memory: M, bytes of a device.
    """

    name: str
    seconds: float
    start: float = 0.0
    nbytes: float = 0.0
    fixed: float = 0.0
    memory: float = math.inf

    def most(self, batch: int) -> int:
        """Samples that fit into memory, at most the batch."""
        room = self.memory - self.fixed
        if room < 0:
            return 0
        return batch if self.nbytes * batch <= room else math.floor(room / self.nbytes * (1 + _ROUNDING))

    def within(self, seconds: float, batch: int) -> int:
        """Samples that it computes in some time, as far as they fit."""
        left = (seconds - self.start) * (1 + _ROUNDING)
        done = batch if left >= self.seconds * batch else math.floor(left / self.seconds)
        return max(0, min(self.most(batch), done))


@dataclass(frozen=True, slots=True)
class Shares:
    """How a batch is shared.

    Attributes:
        samples: of each member, whole; 0 where it is better left out.
        seconds: of the slowest.
        bound: no shares, whole or not, take less.
    """

    samples: tuple[int, ...]
    seconds: float
    bound: float


def shares(batch: int, members: Sequence[Member]) -> Shares:
    """Whole shares of a batch with the fastest slowest member; faster ones get more, equal ones equally many.

    Args:
        batch: B, samples.
        members: at least one; seconds above 0.

    Raises:
        InfeasibleError: the samples do not fit into the memory of all members together.

    Example:
        >>> shares(12, [Member("a100", 1.0), Member("v100", 2.0)]).samples
        (8, 4)
    """
    most = [member.most(batch) for member in members]
    if batch > sum(most):
        room = ", ".join(f"{member.name}: {n}" for member, n in zip(members, most, strict=True))
        raise InfeasibleError(
            f"batch of {batch} samples does not fit: members take at most {sum(most)} ({room}); make it "
            f"smaller, or give the group more devices"
        )
    bound = _relaxed(batch, members, most)
    seconds = _least(batch, members, bound)
    taken = [member.within(seconds, batch) for member in members]
    for _ in range(sum(taken) - batch):
        most_of_slowest = max(range(len(members)), key=lambda i: (taken[i] > 0, members[i].seconds, taken[i]))
        taken[most_of_slowest] -= 1
    finish = [m.start + m.seconds * n for m, n in zip(members, taken, strict=True) if n]
    return Shares(tuple(taken), max(finish, default=0.0), min(bound, max(finish, default=0.0)))


def _least(batch: int, members: Sequence[Member], bound: float) -> float:
    """Least time in which the members compute the batch; one of start + samples * seconds of a member."""

    def enough(seconds: float) -> bool:
        return sum(member.within(seconds, batch) for member in members) >= batch

    found = math.inf
    for member in members:
        low = max(0, math.floor((bound - member.start) / member.seconds * (1 - _ROUNDING)))
        high = member.most(batch) + 1
        while low < high:
            middle = (low + high) // 2
            if enough(member.start + member.seconds * middle):
                high = middle
            else:
                low = middle + 1
        if low <= member.most(batch):
            found = min(found, member.start + member.seconds * low)
    return found if batch else 0.0


def _relaxed(batch: int, members: Sequence[Member], most: Sequence[int]) -> float:
    """The linear relaxation's value; no whole shares take less."""
    cp: Any = import_module("cvxpy")  # a second of start-up time: only for mixed clusters
    cap: NDArray[np.float64] = np.array(most, dtype=np.float64)
    rate = np.array([m.seconds + (m.start / n if n else 0.0) for m, n in zip(members, most, strict=True)])
    scale = float(rate.max()) * max(batch, 1)
    samples, slowest = cp.Variable(len(members), nonneg=True), cp.Variable()
    limits = [cp.sum(samples) == batch, samples <= cap, cp.multiply(rate / scale, samples) <= slowest]
    problem = cp.Problem(cp.Minimize(slowest), limits)
    problem.solve(solver=cp.HIGHS)
    if problem.value is None:
        raise InfeasibleError(f"shares of {batch} samples: the solver ended with {problem.status}")
    return max(0.0, float(problem.value)) * scale * (1 - _ROUNDING)
