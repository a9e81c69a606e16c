"""Failure reports: what each rank of a launched job reports when it fails.

A rank writes its report into the job's directory, and the launcher prints the reports of all ranks. A mistake
is mostly made on all ranks at once, and the failure of one rank stops all others. So every distinct error is
printed once, with the ranks that had it, followed by one list of the ranks that stopped only because of it:

    error: ranks 0-3: spec [_, tp] names axis 'tp' but mesh(dp=2) has dp
    error: rank 1: ValueError: page 17 is torn; ranks 0, 2-3 stop too
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from distgraph.ir.range_notation import spans


@dataclass(frozen=True, slots=True)
class FailureReport:
    """The failure of one rank.

    Attributes:
        rank: the rank that failed.
        seconds: time of the failure by the clock of the machine; earlier failures are printed first.
        text: the error in one line; empty where the exit code is all there is to say.
        traceback: printed before the error; empty for a mistake that distgraph explains.
        follows: the rank stops only because another rank failed; `text` is the error of that rank.
    """

    rank: int
    seconds: float
    text: str
    traceback: str = ""
    follows: bool = False


def write_report(job: Path, report: FailureReport) -> None:
    """Write the report of a rank into the job's directory. The file appears whole or not at all."""
    draft = job / f"draft.failure.{report.rank}"
    draft.write_text(json.dumps(asdict(report)))
    draft.replace(job / f"failure.{report.rank}")


def read_reports(job: Path) -> list[FailureReport]:
    """The reports in a job's directory, in order of time."""
    reports = [FailureReport(**json.loads(path.read_text())) for path in job.glob("failure.*")]
    return sorted(reports, key=lambda report: (report.seconds, report.rank))


def summary(reports: Sequence[FailureReport], ranks: int, died: bool = False) -> str:
    """The reports as text: every traceback and error once.

    Args:
        reports: in order of time.
        ranks: number of ranks of the job; a job of one rank does not name it.
        died: a rank was killed, so that the ranks that only follow have nothing to add.
    """
    errors: dict[tuple[str, str], list[int]] = {}
    followers: dict[str, list[int]] = {}
    for report in reports:
        if report.follows:
            followers.setdefault(report.text, []).append(report.rank)
        elif report.text:
            errors.setdefault((report.traceback, report.text), []).append(report.rank)
    parts = [f"{trace}error: {_prefix(members, ranks)}{text}" for (trace, text), members in errors.items()]
    if followers and not died:
        stopped = sorted(rank for members in followers.values() for rank in members)
        parts = parts or [f"error: {next(iter(followers))}"]
        parts[-1] += f"; {_ranks(stopped)} stop{'s' * (len(stopped) == 1)} too"
    return "".join(f"{part}\n" for part in parts)


def _prefix(members: Sequence[int], ranks: int) -> str:
    return f"{_ranks(sorted(members))}: " if ranks > 1 else ""


def _ranks(members: Sequence[int]) -> str:
    return f"rank{'s' * (len(members) > 1)} {spans(members)}"
