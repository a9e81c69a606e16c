"""Solved problems on disk, so that what was searched once is found at once.

The name of an entry is the SHA-256 of the problem (costs, edges, uses and limit as 64-bit numbers; not names
and labels) and of the version of the solver. An entry answers a question whose gap it reaches or that asks
for no more time than was spent on it; for others it is where the search starts. A choice is checked against
the problem before it is trusted. What cannot be read is ignored with a warning, so the folder may be deleted,
or its files cut short, at any time.

The folder is `distgraph/solved` in `$XDG_CACHE_HOME` (by default `~/.cache`); `DISTGRAPH_CACHE=folder` moves
it and `DISTGRAPH_CACHE=off` does without. Of more than 64 MiB, what was not used for longest goes; how much
there is, a process looks when it first writes and again for every MiB of its own; what its copies write
counts for each of them alone.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distgraph.documents import Node, Record, dumps
from distgraph.errors import GraphError, RuntimeFault
from distgraph.files import write_atomically
from distgraph.passes.search.intra import solve
from distgraph.passes.search.problem import Problem, Solution, gap_of

__all__ = ["Cache", "VARIABLE", "cache_directory", "digest", "solve_cached"]

VARIABLE = "DISTGRAPH_CACHE"
SOLVER = 1
"""Version of the solver: entries of another one are not found. Raise it where answers get better."""

_LIMIT = 64 << 20
_LOOKS = 64  # at the folder, while a process writes as much as the limit: there are many small files in it
_ROUNDING = 1e-9  # of an objective, between the sum that was kept and that of the problem
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
        return None if given.lower() in ("", "0", "off", "no", "none") else Path(given)
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
        if not path.is_file():
            return None
        try:
            found = _read(Node.load(path, GraphError))
            _check(found.solution, problem, str(path))
        except GraphError as error:
            warnings.warn(f"{error}; the problem is solved anew", RuntimeWarning, stacklevel=2)
            return None
        path.touch()  # used last
        return found

    def put(self, name: str, solution: Solution, seconds: float) -> None:
        """Keep what a search of so many seconds found; where the disk does not take it, a warning."""
        if self.directory is None or solution.status == "unknown":
            return
        path = self.directory / f"{name}.json"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            text = dumps(_document(solution, seconds))
            write_atomically(path, text, RuntimeFault)
            written = _written.get(self.directory, self.limit) + len(text)
            if _LOOKS * written >= self.limit:
                self._shrink()
                written = 0
            _written[self.directory] = written
        except (OSError, RuntimeFault) as error:
            warnings.warn(f"cache {self.directory}: {error}; set {VARIABLE}", RuntimeWarning, stacklevel=2)

    def _shrink(self) -> None:
        """Drop entries, longest unused first, until the limit is kept."""
        assert self.directory is not None
        entries = []
        for path in self.directory.glob("*.json"):
            try:
                found = path.stat()
            except FileNotFoundError:  # another process was faster
                continue
            entries.append((found.st_mtime_ns, found.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit:
                return
            path.unlink(missing_ok=True)
            total -= size


def _document(solution: Solution, seconds: float) -> dict[str, Any]:
    return {
        "solver": SOLVER,
        "spent": seconds,
        "status": solution.status,
        "objective": _text(solution.objective),
        "bound": _text(solution.bound),
        "time": solution.time,
        "missing": solution.missing,
        "seconds": Record(solution.seconds),
        "message": solution.message,
        "choice": None if solution.choice is None else " ".join(map(str, solution.choice)),
    }


def _read(node: Node) -> Entry:
    node.only(
        "solver", "spent", "status", "objective", "bound", "time", "missing", "seconds", "message", "choice"
    )
    objective, bound = (node[name].read(float, "a number as text") for name in ("objective", "bound"))
    status = node["status"].text()
    if status not in ("optimal", "feasible", "infeasible"):
        node["status"].refuse("optimal, feasible or infeasible")
    choice = node["choice"]
    found = Solution(
        None if choice.value is None else choice.read(_numbers, "numbers of strategies"),
        objective,
        bound,
        gap_of(objective, bound),
        status,  # type: ignore[arg-type]  # one of three, as above
        {name: entry.number() for name, entry in node["seconds"].items()},
        None if node["time"].value is None else int(node["time"].number()),
        node["missing"].number(),
        node["message"].text(),
    )
    return Entry(found, node["spent"].number())


def _check(found: Solution, problem: Problem, path: str) -> None:
    """Raises GraphError where a choice does not fit the problem, or does not cost what the entry says."""
    if found.choice is None:
        if found.status != "infeasible":
            raise GraphError(f"{path}: {found.status} without a choice")
        return
    if not problem.feasible(found.choice):
        raise GraphError(f"{path}: the choice breaks a constraint of {problem.name}")
    cost = problem.objective(found.choice)
    if not math.isclose(cost, found.objective, rel_tol=_ROUNDING):
        raise GraphError(f"{path}: the choice costs {cost} but the entry says {found.objective}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split())


def _text(number: float) -> str:
    """A number that may be infinite."""
    return repr(float(number))
