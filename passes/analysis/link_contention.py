"""Queues of messages on directed links: what follows when several messages need one link at a time.

*In:* the messages that a step sends, each with the seconds for which it occupies every link on its way.
*Out:* when a message that is handed over at some time arrives. *Invariant:* no two messages occupy a link at
the same time; messages over links without a common one do not delay each other.

A message begins when all its links are free, and occupies each for bytes / bandwidth; what does not depend on
its bytes (launch, latency) is spent before that, while earlier messages may be on their way. Messages over a
link follow one another in the order in which they are handed over, as sends of one NCCL communicator or over
one connection do. Where a network divides its bandwidth among them instead, the last of them arrives at the
same time.

A link is left out if another one is used by the same messages, and perhaps more, and for as long by each: it
is never the last to become free. The step of a large pipeline is left with one or two links for a message.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

LinkSeconds = Mapping[int, float]
"""Directed link -> seconds for which a message occupies it."""


class LinkQueues(Generic[Key]):
    """The links of one step, in the order of time.

    Args:
        messages: message -> what it occupies; the same message may be sent many times.

    Attributes:
        longest: message -> the longest time for which it occupies a link; those without bytes are left out.

    Example:
        >>> queues = LinkQueues({"first": {0: 2.0}, "second": {0: 3.0, 1: 1.0}})
        >>> queues.send("first", 10.0), queues.send("second", 10.5), queues.send("first", 20.0)
        (12.0, 15.0, 22.0)
    """

    def __init__(self, messages: Mapping[Key, LinkSeconds]) -> None:
        self.longest = {key: max(links.values()) for key, links in messages.items() if any(links.values())}
        self._links = decisive_links({key: messages[key] for key in self.longest})
        self._free = dict.fromkeys((link for links in self._links.values() for link, _ in links), 0.0)

    def send(self, message: Key, time: float) -> float:
        """Seconds on the clock at which a message arrives that is handed over at a time.

        Messages are handed over in the order of time.
        """
        links = self._links[message]
        begin = time
        for link, _ in links:
            begin = max(begin, self._free[link])
        for link, seconds in links:
            self._free[link] = begin + seconds
        return begin + self.longest[message]


def decisive_links(messages: Mapping[Key, LinkSeconds]) -> dict[Key, tuple[tuple[int, float], ...]]:
    """Of every message the (link, seconds) that may delay another message or itself.

    Example:
        >>> decisive_links({"a": {0: 1.0, 1: 2.0}, "b": {1: 2.0, 2: 2.0}})
        {'a': ((1, 2.0),), 'b': ((1, 2.0),)}
    """
    users: dict[int, dict[Key, float]] = {}
    for key, links in messages.items():
        for link, seconds in links.items():
            if seconds > 0:
                users.setdefault(link, {})[key] = seconds
    decisive: list[int] = []
    seen = set()
    for link in sorted(users, key=lambda link: (-len(users[link]), -sum(users[link].values()), link)):
        mine = users[link]
        same = frozenset(mine.items())
        if same in seen:
            continue
        seen.add(same)
        if not any(_covers(users[other], mine) for other in decisive):
            decisive.append(link)
    return {
        key: tuple((link, users[link][key]) for link in decisive if key in users[link]) for key in messages
    }


def _covers(longer: Mapping[Key, float], seconds: Mapping[Key, float]) -> bool:
    """Whether a link is used by all messages of another one for at least as long."""
    return all(longer.get(key, 0.0) >= value for key, value in seconds.items())


def link_totals(messages: Mapping[Key, LinkSeconds]) -> dict[int, float]:
    """Seconds for which each link is occupied where every message is sent once."""
    totals: dict[int, float] = {}
    for links in messages.values():
        for link, seconds in links.items():
            totals[link] = totals.get(link, 0.0) + seconds
    return totals
