"""Solved problems on disk, so that what was searched once is found at once.

The name of an entry is the SHA-256 of the problem (costs, edges, uses and limit as 64-bit numbers; not names
and labels) and of the version of the solver. An entry answers a question whose gap it reaches or that asks
for no more time than was spent on it; for others it is where the search starts.

An entry is trusted as far as it can be checked. It has a checksum over all of it and its name. Its choice is
held against the constraints, its cost is computed anew, and its bound is refused where changing one node of
the choice costs less than it. That nothing fits is believed where the least use of every node shows it, and
solved again otherwise. What fails is ignored with a warning. So a damaged, stale or forged entry gives no
illegal plan; at worst one that takes longer than the best.

The folder is `distgraph/solved` in `$XDG_CACHE_HOME` (by default `~/.cache`); with `DISTGRAPH_CACHE=folder`
it is `folder/distgraph-solved`, and `DISTGRAPH_CACHE=off` does without. It may be deleted at any time. Of
more than 64 MiB of entries, what was not used for longest goes, and nothing that has another name; how much
there is, a process looks when it first writes and again for every MiB of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import stat
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field, PlainValidator

from distgraph.errors import GraphError, RuntimeFault
from distgraph.passes.search.solver import solve
from distgraph.passes.search.solver.problem import Problem, Solution, gap_of
from distgraph.serialization.atomic_files import write_atomically
from distgraph.serialization.documents import Entry as FileEntry
from distgraph.serialization.documents import Record, dumps, parsed, read_json, validate

VARIABLE = "DISTGRAPH_CACHE"
SOLVER = 2
"""Version of the solver: entries of another one are not found. Raise it where answers get better."""

_LIMIT = 64 << 20
_LOOKS = 64  # at the folder, while a process writes as much as the limit: there are many small files in it
_ROUNDING = 1e-9  # of an objective, between the sum that was kept and that of the problem
_BELOW = (
    1e-6  # of a bound, by which a choice must be below it to show that it is none: bounds are rounded too
)
_MOVES = 20  # single changes of a choice, the best ones, that are held against the memory limit
_FOLDER: Final = "distgraph-solved"
_OWN: Final = re.compile(
    r"[0-9a-f]{64}\.json|\.[0-9a-f]{32}\.[0-9a-f]{16}\.tmp"
)  # entries, and drafts of them
_written: dict[Path, int] = {}
"""Bytes that this process has written to a folder since it looked at all that is there."""


def solve_cached(
    problem: Problem, *, seconds: float = 60.0, gap: float = 0.0, cache: Cache | None = None
) -> Solution:
    """As `intra.solve`, from the disk where the problem was solved before.

    Args:
        problem: what to solve.
        seconds: wall-clock limit.
        gap: stop when (objective - bound) / |objective| is at most this.
        cache: where to look; by default that of `cache_directory`.

    Raises:
        GraphError: an argument makes no sense.
    """
    cache = Cache(cache_directory()) if cache is None else cache
    name = digest(problem)
    known = cache.get(name, problem)
    if known is not None and known.answers(seconds, gap):
        return known.solution
    start = None if known is None else known.solution.choice
    began = time.perf_counter()
    found = solve(problem, seconds=seconds, gap=gap, start=start)
    spent = time.perf_counter() - began  # less than asked for where it was interrupted
    cache.put(name, found, min(seconds, spent))
    return found


def cache_directory() -> Path | None:
    """Where solved problems are kept; None where they are not."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return None if given.lower() in ("", "0", "off", "no", "none") else Path(given) / _FOLDER
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        return None
    return base / "distgraph" / "solved"


def digest(problem: Problem) -> str:
    """Name of a problem: equal for equal ones, whatever they and their nodes are called."""
    found = hashlib.sha256(f"distgraph solver {SOLVER} limit {problem.limit!r}\n".encode())

    def add(array: Any, kind: str) -> None:
        data = np.ascontiguousarray(array, dtype=kind)
        found.update(f"{data.shape}".encode())
        found.update(data.tobytes())

    add([len(costs) for costs in problem.costs], "<i8")
    for costs in problem.costs:
        add(costs, "<f8")
    add(np.array(problem.edges, dtype=np.int64).reshape(-1, 2), "<i8")
    for costs in problem.edge_costs:
        add(costs, "<f8")
    for uses in problem.uses:
        add(np.array([(use.start, use.stop) for use in uses], dtype=np.int64).reshape(-1, 2), "<i8")
        for use in uses:
            add(use.amounts, "<f8")
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """A solution and the seconds that the search for it took, at most those that it was given."""

    solution: Solution
    seconds: float

    def answers(self, seconds: float, gap: float) -> bool:
        """Whether a search that stops at this gap or after so many seconds would find no more."""
        proved = self.solution.status in ("optimal", "infeasible")
        return proved or self.solution.gap <= gap or self.seconds >= seconds


@dataclass(frozen=True, slots=True)
class Cache:
    """Solutions by the name of their problem.

    Attributes:
        directory: of the entries; None for a cache that keeps nothing.
        limit: bytes that it may hold.
    """

    directory: Path | None
    limit: int = _LIMIT

    def get(self, name: str, problem: Problem) -> Entry | None:
        """What is known of a problem.

        Args:
            name: `digest` of the problem.
            problem: checks the choice.
        """
        if self.directory is None:
            return None
        path = self.directory / f"{name}.json"
        if not _is_regular(path):
            return None
        try:
            found = _checked(_read(path, name), problem, str(path))
        except GraphError as error:
            warnings.warn(f"{error}; the problem is solved anew", RuntimeWarning, stacklevel=2)
            return None
        with contextlib.suppress(OSError):  # a folder that others fill
            path.touch()  # used last
        return found

    def put(self, name: str, solution: Solution, seconds: float) -> None:
        """Keep what a search of so many seconds found; where the disk does not take it, a warning."""
        if self.directory is None or solution.status == "unknown":
            return
        path = self.directory / f"{name}.json"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            text = _text_of(name, solution, seconds)
            write_atomically(path, text, RuntimeFault, durable=False, follow=False)
            written = _written.get(self.directory, self.limit) + len(text)
            if _LOOKS * written >= self.limit:
                self._shrink()
                written = 0
            _written[self.directory] = written
        except (OSError, ValueError, RuntimeFault) as error:
            warnings.warn(f"cache {self.directory}: {error}; set {VARIABLE}", RuntimeWarning, stacklevel=2)

    def _shrink(self) -> None:
        """Drop entries, longest unused first, until the limit is kept."""
        assert self.directory is not None
        entries = []
        for path in self.directory.iterdir():
            if not _OWN.fullmatch(path.name):
                continue
            try:
                found = path.lstat()
            except FileNotFoundError:  # another process was faster
                continue
            entries.append((found.st_mtime_ns, found.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= size


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def _number_of(text: str) -> float:
    found = float(text)
    if math.isnan(found):
        raise ValueError(text)
    return found


def _strategies(text: str) -> tuple[int, ...]:
    numbers = text.split()
    if any(not (number.isascii() and number.isdecimal()) or len(number) > 9 for number in numbers):
        raise ValueError(text)
    return tuple(map(int, numbers))


Number = Annotated[float, PlainValidator(parsed(_number_of, "a number as text"))]
Choice = Annotated[tuple[int, ...], PlainValidator(parsed(_strategies, "numbers of strategies"))]


class EntryFile(FileEntry):
    """The file of an entry; numbers that may be infinite are texts."""

    format: Literal["distgraph solved problem 2"]
    problem: str
    spent: Annotated[float, Field(ge=0)]
    choice: Choice | None
    objective: Number
    bound: Number
    time: int | None
    missing: float
    seconds: dict[str, float]
    message: str
    checksum: str


def _text_of(name: str, solution: Solution, seconds: float) -> str:
    document = {
        "format": "distgraph solved problem 2",
        "problem": name,
        "spent": seconds,
        "choice": None if solution.choice is None else " ".join(map(str, solution.choice)),
        "objective": repr(float(solution.objective)),
        "bound": repr(float(solution.bound)),
        "time": solution.time,
        "missing": solution.missing,
        "seconds": Record(solution.seconds),
        "message": solution.message,
    }
    return dumps({**document, "checksum": _checksum(document)})


def _checksum(document: dict[str, Any]) -> str:
    return hashlib.sha256(dumps(document).encode()).hexdigest()


def _read(path: Path, name: str) -> EntryFile:
    document = read_json(path, GraphError, _LIMIT)
    found = validate(EntryFile, document, str(path), GraphError)
    content = {key: value for key, value in document.items() if key != "checksum"}
    content["seconds"] = Record(content["seconds"])
    if found.checksum != _checksum(content):
        raise GraphError(
            f"{path}: the content does not have the checksum {found.checksum[:16]} that it states"
        )
    if found.problem != name:
        raise GraphError(f"{path}: the entry is of problem {found.problem[:16]}, not of {name[:16]}")
    return found


def _checked(found: EntryFile, problem: Problem, path: str) -> Entry | None:
    """What an entry says, as far as the problem confirms it; None where it may be so but is not shown.

    Raises:
        GraphError: the problem shows that it is not so.
    """
    if found.choice is None:
        time_, least = problem.least_peak()
        if problem.limit is None or least <= problem.limit * (1 + 1e-12):
            return None
        short = {"time": time_, "missing": least - problem.limit, "message": found.message}
        if found.time is not None:  # where the explanation looked closer than at the least uses
            short |= {"time": found.time, "missing": max(found.missing, 0.0)}
        none = Solution(None, math.inf, math.inf, math.inf, "infeasible", found.seconds, **short)  # type: ignore[arg-type]
        return Entry(none, found.spent)
    if not problem.feasible(found.choice):
        raise GraphError(f"{path}: the choice breaks a constraint of {problem.name}")
    cost = problem.objective(found.choice)
    if not math.isclose(cost, found.objective, rel_tol=_ROUNDING):
        raise GraphError(f"{path}: the choice costs {cost} but the entry says {found.objective}")
    bound = min(found.bound, cost)
    if math.isfinite(bound) and _after_best_move(problem, found.choice, cost) < bound - _BELOW * abs(bound):
        raise GraphError(f"{path}: no choice is to cost less than {bound}, but one does")
    gap = gap_of(cost, bound)
    status: Literal["optimal", "feasible"] = "optimal" if gap <= _ROUNDING else "feasible"
    solution = Solution(found.choice, cost, bound, gap, status, found.seconds, message=found.message)
    return Entry(solution, found.spent)


def _after_best_move(problem: Problem, choice: tuple[int, ...], cost: float) -> float:
    """The least cost of a feasible choice that differs in one node, among the best changes; or the cost."""
    costs = [own.copy() for own in problem.costs]
    for (u, v), pairs in zip(problem.edges, problem.edge_costs, strict=True):
        costs[u] += pairs[:, choice[v]]
        costs[v] += pairs[choice[u], :]
    moves = [
        (float(own[taken] - own.min()), i) for i, (own, taken) in enumerate(zip(costs, choice, strict=True))
    ]
    for gain, node in sorted(moves, reverse=True)[:_MOVES]:
        other = (*choice[:node], int(np.argmin(costs[node])), *choice[node + 1 :])
        if gain > 0 and problem.feasible(other):
            return cost - gain
    return cost
