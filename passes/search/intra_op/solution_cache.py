"""The solution cache: solutions of intra-operator problems on disk, so that no problem is solved twice.

The name of an entry is the SHA-256 of the problem (costs, edges, uses and limit as 64-bit numbers; not names
and labels) and of the version of the solver. A solution in the cache is returned if it reaches the requested
gap, or if at least the requested limit was given to it. Otherwise the solver starts from it.

An entry is verified before use. A checksum covers its content and its name. The choice is tested against the
constraints, its cost is recomputed, and the bound is refused if a change of one node of the choice gives a
cost below it. "Infeasible" is accepted only if the least use of every node proves it; otherwise the problem
is solved again. An entry that fails is ignored with a warning. A damaged, stale or forged entry therefore
never leads to an illegal plan, at worst to a plan that is slower than the best.

The folder is `distgraph/solved` in `$XDG_CACHE_HOME` (by default `~/.cache`). With `DISTGRAPH_CACHE=folder`
it is `folder/distgraph-solved`; `DISTGRAPH_CACHE=off` disables the cache. The folder may be deleted at any
time. When its entries exceed 64 MiB, those that were not used for longest are deleted; files with other names
never are. A process measures the folder when it first writes to it, and again after every MiB that it writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import stat
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import Field, PlainValidator

from distgraph.errors import GraphError, RuntimeFault
from distgraph.passes.search.solver import solve
from distgraph.passes.search.solver.problem import Problem, Solution, gap_of
from distgraph.serialization.atomic_files import write_atomically
from distgraph.serialization.documents import Record, dumps, read_json
from distgraph.serialization.fields import parsed
from distgraph.serialization.models import Entry as FileEntry
from distgraph.serialization.models import validate

VARIABLE = "DISTGRAPH_CACHE"
SOLVER = 4
"""Version of the solver, part of every name. Raise it when the solver gives better solutions."""

_LIMIT = 64 << 20
_MEASUREMENTS = 64  # of the folder, while a process writes as many bytes as the limit: files are small
_ROUNDING = 1e-9  # relative difference between the objective in an entry and the recomputed one
_BELOW = 1e-6  # a choice must be below a bound by this fraction to disprove it: bounds are rounded too
_MOVES = 20  # single changes of a choice, the best ones, that are tested against the memory limit
_FOLDER: Final = "distgraph-solved"
_ENTRY_NAME: Final = re.compile(
    r"[0-9a-f]{64}\.json|\.[0-9a-f]{32}\.[0-9a-f]{16}\.tmp"
)  # entries, and temporary files of entries that are being written
_written: dict[Path, int] = {}
"""Bytes that this process has written to a folder since it last measured the folder."""


def solve_cached(
    problem: Problem,
    *,
    seconds: float = 60.0,
    gap: float = 0.0,
    cache: Cache | None = None,
    start: Sequence[int] | None = None,
    explained: bool = True,
    exact: bool = True,
) -> Solution:
    """`solver.solve` with a cache: a problem that was solved before is read from disk.

    Args:
        problem: the problem.
        seconds: limit of the work, see `solver.solve`.
        gap: stop when (objective - bound) / |objective| is at most this.
        cache: the cache; by default that in `cache_directory`.
        start: a choice to be at least as good as, where the cache has none.
        explained: whether to find out why a problem has no choice.
        exact: whether SCIP may be used, see `solver.solve`.

    Raises:
        GraphError: an argument is out of range.
    """
    cache = Cache(cache_directory()) if cache is None else cache
    name = digest(problem)
    entry = cache.get(name, problem)
    if entry is not None and entry.suffices(seconds, gap):
        return entry.solution
    start = start if entry is None else entry.solution.choice
    solution = solve(problem, seconds=seconds, gap=gap, start=start, explained=explained, exact=exact)
    whole = not (solution.interrupted or solution.cut)  # else asking again may give a better one
    cache.put(name, solution, seconds if whole else 0.0)
    return solution


def cache_directory() -> Path | None:
    """The folder of the cache; None if the cache is off."""
    setting = os.environ.get(VARIABLE)
    if setting is not None:
        return None if setting.lower() in ("", "0", "off", "no", "none") else Path(setting) / _FOLDER
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        return None
    return base / "distgraph" / "solved"


def digest(problem: Problem) -> str:
    """Name of a problem; equal problems have equal names, whatever their labels are."""
    hashed = hashlib.sha256(f"distgraph solver {SOLVER} limit {problem.limit!r}\n".encode())

    def add(array: Any, kind: str) -> None:
        data = np.ascontiguousarray(array, dtype=kind)
        hashed.update(f"{data.shape}".encode())
        hashed.update(data.tobytes())

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
    return hashed.hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """A solution, and the limit in seconds of work that the solver had for it; 0 where it did not use it."""

    solution: Solution
    seconds: float

    def suffices(self, seconds: float, gap: float) -> bool:
        """Whether solving again with this gap and time limit would give no better solution."""
        proved = self.solution.status in ("optimal", "infeasible")
        return proved or self.solution.gap <= gap or self.seconds >= seconds


@dataclass(frozen=True, slots=True)
class Cache:
    """Solutions on disk by the name of their problem.

    Attributes:
        directory: the folder of the entries; None for a cache that stores nothing.
        limit: bytes of all entries.
    """

    directory: Path | None
    limit: int = _LIMIT

    def get(self, name: str, problem: Problem) -> Entry | None:
        """The entry of the problem with this `digest`, verified against it; None if there is none."""
        if self.directory is None:
            return None
        path = self.directory / f"{name}.json"
        if not _is_regular(path):
            return None
        try:
            entry = _verified(_read(path, name), problem, str(path))
        except GraphError as error:
            warnings.warn(f"{error}; the problem is solved anew", RuntimeWarning, stacklevel=2)
            return None
        with contextlib.suppress(OSError):  # the folder may belong to another user
            path.touch()  # its time of last use
        return entry

    def put(self, name: str, solution: Solution, seconds: float) -> None:
        """Store the solution that the solver gave after `seconds`; warn if it cannot be written."""
        if self.directory is None or solution.status == "unknown":
            return
        path = self.directory / f"{name}.json"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            text = _text_of(name, solution, seconds)
            write_atomically(path, text, RuntimeFault, durable=False, follow=False)
            written = _written.get(self.directory, self.limit) + len(text)
            if _MEASUREMENTS * written >= self.limit:
                self._shrink()
                written = 0
            _written[self.directory] = written
        except (OSError, ValueError, RuntimeFault) as error:
            warnings.warn(f"cache {self.directory}: {error}; set {VARIABLE}", RuntimeWarning, stacklevel=2)

    def _shrink(self) -> None:
        """Delete entries, the longest unused first, until their bytes are within the limit."""
        assert self.directory is not None
        entries = []
        for path in self.directory.iterdir():
            if not _ENTRY_NAME.fullmatch(path.name):
                continue
            try:
                status = path.lstat()
            except FileNotFoundError:  # another process has deleted it
                continue
            entries.append((status.st_mtime_ns, status.st_size, path))
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
    number = float(text)
    if math.isnan(number):
        raise ValueError(text)
    return number


def _strategies(text: str) -> tuple[int, ...]:
    numbers = text.split()
    if any(not (number.isascii() and number.isdecimal()) or len(number) > 9 for number in numbers):
        raise ValueError(text)
    return tuple(map(int, numbers))


Number = Annotated[float, PlainValidator(parsed(_number_of, "a number as text"))]
Choice = Annotated[tuple[int, ...], PlainValidator(parsed(_strategies, "numbers of strategies"))]


class EntryFile(FileEntry):
    """The file of an entry; numbers that may be infinite are stored as text."""

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
    file = validate(EntryFile, document, str(path), GraphError)
    content = {key: value for key, value in document.items() if key != "checksum"}
    content["seconds"] = Record(content["seconds"])
    if file.checksum != _checksum(content):
        raise GraphError(
            f"{path}: the content does not have the checksum {file.checksum[:16]} that it states"
        )
    if file.problem != name:
        raise GraphError(f"{path}: the entry is of problem {file.problem[:16]}, not of {name[:16]}")
    return file


def _verified(file: EntryFile, problem: Problem, path: str) -> Entry | None:
    """The entry of a file; None if it states that the problem is infeasible and this is not evident.

    Raises:
        GraphError: the problem contradicts the file.
    """
    if file.choice is None:
        time_, least = problem.least_peak()
        if problem.limit is None or least <= problem.limit * (1 + 1e-12):
            return None
        reason = {"time": time_, "missing": least - problem.limit, "message": file.message}
        if file.time is not None:  # the solver's explanation is more precise than the least uses
            reason |= {"time": file.time, "missing": max(file.missing, 0.0)}
        infeasible = Solution(None, math.inf, math.inf, math.inf, "infeasible", file.seconds, **reason)  # type: ignore[arg-type]
        return Entry(infeasible, file.spent)
    if not problem.feasible(file.choice):
        raise GraphError(f"{path}: the choice breaks a constraint of {problem.name}")
    cost = problem.objective(file.choice)
    if not math.isclose(cost, file.objective, rel_tol=_ROUNDING):
        raise GraphError(f"{path}: the choice costs {cost} but the entry says {file.objective}")
    bound = min(file.bound, cost)
    disproved = bound - _BELOW * abs(bound)
    if math.isfinite(bound) and _cost_after_best_move(problem, file.choice, cost) < disproved:
        raise GraphError(f"{path}: the bound is {bound}, but another choice costs less")
    gap = gap_of(cost, bound)
    status: Literal["optimal", "feasible"] = "optimal" if gap <= _ROUNDING else "feasible"
    solution = Solution(file.choice, cost, bound, gap, status, file.seconds, message=file.message)
    return Entry(solution, file.spent)


def _cost_after_best_move(problem: Problem, choice: tuple[int, ...], cost: float) -> float:
    """The least cost of a feasible choice that differs in one node, among the `_MOVES` best; else `cost`."""
    costs = [of_node.copy() for of_node in problem.costs]
    for (u, v), pairs in zip(problem.edges, problem.edge_costs, strict=True):
        costs[u] += pairs[:, choice[v]]
        costs[v] += pairs[choice[u], :]
    moves = [
        (float(of_node[option] - of_node.min()), node)
        for node, (of_node, option) in enumerate(zip(costs, choice, strict=True))
    ]
    for gain, node in sorted(moves, reverse=True)[:_MOVES]:
        other = (*choice[:node], int(np.argmin(costs[node])), *choice[node + 1 :])
        if gain > 0 and problem.feasible(other):
            return cost - gain
    return cost
