"""Learning rates over time: functions from the number of finished steps to a rate, evaluated on the host.

Example:
    >>> rate = warmup(cosine(1e-3, steps=100), steps=10)
    >>> rate(0), rate(10) == cosine(1e-3, steps=100)(0), rate(110)
    (0.0001, True, 0.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

from distgraph.errors.arguments import Bounds, NonNegative, checked_arguments

Schedule = Callable[[int], float]
Steps = Annotated[float, Bounds(least=1)]


@checked_arguments()
def constant(rate: NonNegative) -> Schedule:
    """The same rate at every step."""
    return lambda step: rate


@checked_arguments()
def linear(rate: NonNegative, steps: Steps, final: NonNegative = 0.0) -> Schedule:
    """From `rate` down (or up) to `final` in a straight line over `steps`, then `final`."""
    return lambda step: rate + (final - rate) * min(step / steps, 1.0)


@checked_arguments()
def cosine(rate: NonNegative, steps: Steps, final: NonNegative = 0.0) -> Schedule:
    """From `rate` to `final` along half a cosine over `steps` (Loshchilov and Hutter, 2017, eq. 5)."""
    return lambda step: final + (rate - final) * 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0)))


@checked_arguments()
def warmup(after: Schedule | NonNegative, steps: Steps) -> Schedule:
    """A straight line up to the first rate of `after` over `steps`, then `after` from its start."""
    follow = after if callable(after) else constant(after)
    return lambda step: follow(0) * (step + 1) / steps if step < steps else follow(step - math.ceil(steps))
