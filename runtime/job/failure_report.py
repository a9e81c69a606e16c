"""What the ranks of a launched job say when it fails: left in the job's directory, told by the launcher.

A mistake is mostly made on all ranks at once, and a rank that fails takes all others along. So every distinct
error is told once, with the ranks that met it, and those that only follow in one list:

    error: ranks 0-3: spec [_, tp] names axis 'tp' but mesh(dp=2) has dp
    error: rank 1: ValueError: page 17 is torn; ranks 0, 2-3 stop too
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from distgraph.ir.name_ranges import spans


@dataclass(frozen=True, slots=True)
class LastWords:
    """What one rank says.

    Attributes:
        rank: who.
        seconds: when, by the clock of the machine; earlier errors are told first.
        text: the error in one line; empty where an exit code says all.
        traceback: that goes before; empty for a mistake that distgraph explains.
        follows: the rank only stops because another failed, which `text` says.
    """

    rank: int
    seconds: float
    text: str
    traceback: str = ""
    follows: bool = False


def leave(job: Path, words: LastWords) -> None:
    """Write what a rank says where the launcher finds it, whole or not at all."""
    draft = job / f"draft.words.{words.rank}"
    draft.write_text(json.dumps(asdict(words)))
    draft.replace(job / f"words.{words.rank}")


def left(job: Path) -> list[LastWords]:
    """What the ranks of a job have said, in order."""
    found = [LastWords(**json.loads(path.read_text())) for path in job.glob("words.*")]
    return sorted(found, key=lambda words: (words.seconds, words.rank))


def told(said: Sequence[LastWords], ranks: int, died: bool = False) -> str:
    """All of it as text: tracebacks and errors, each once.

    Args:
        said: by the ranks, in order.
        ranks: of the job; one alone needs no name.
        died: a rank was killed, so that whoever follows has nothing to add.
    """
    errors: dict[tuple[str, str], list[int]] = {}
    followers: dict[str, list[int]] = {}
    for words in said:
        if words.follows:
            followers.setdefault(words.text, []).append(words.rank)
        elif words.text:
            errors.setdefault((words.traceback, words.text), []).append(words.rank)
    parts = [f"{trace}error: {_named(who, ranks)}{text}" for (trace, text), who in errors.items()]
    if followers and not died:
        everyone = sorted(rank for some in followers.values() for rank in some)
        parts = parts or [f"error: {next(iter(followers))}"]
        parts[-1] += f"; {_ranks(everyone)} stop{'s' * (len(everyone) == 1)} too"
    return "".join(f"{part}\n" for part in parts)


def _named(who: Sequence[int], ranks: int) -> str:
    return f"{_ranks(sorted(who))}: " if ranks > 1 else ""


def _ranks(who: Sequence[int]) -> str:
    return f"rank{'s' * (len(who) > 1)} {spans(who)}"
