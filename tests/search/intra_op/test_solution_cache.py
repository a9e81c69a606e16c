"""Solved problems on disk: what is found again, what is not, and what becomes of damage."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distgraph.passes.search.intra_op import solution_cache as module
from distgraph.passes.search.intra_op.solution_cache import Cache, cache_directory, digest, solve_cached
from distgraph.passes.search.solver.problem import Problem, Solution, Use
from distgraph.serialization.documents import Record


def problem(limit: float | None = 6.0, name: str = "two", cost: float = 5.0) -> Problem:
    """Two nodes that want different strategies; the cheapest pair needs 6 units."""
    uses = ((Use(0, 2, np.array([4.0, 1.0])),), (Use(1, 3, np.array([3.0, 2.0])),))
    edges = (np.array([[9.0, 0.0], [0.0, 9.0]]),)
    return Problem(name, (np.array([1.0, cost]), np.array([4.0, 2.0])), ((0, 1),), edges, uses, limit)


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the problems that were really solved."""
    names: list[str] = []
    real = module.solve

    def solve(given: Problem, **options: Any) -> Solution:
        start = options.get("start")
        names.append(given.name if start is None else f"{given.name} from {start}")
        return real(given, **options)

    monkeypatch.setattr(module, "solve", solve)
    return names


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def test_a_problem_is_solved_once(tmp_path: Path, solved: list[str]) -> None:
    kept = Cache(tmp_path / "new" / "folder")
    first = solve_cached(problem(), cache=kept)
    again = solve_cached(problem(name="under another name"), cache=kept)
    assert (first.choice, first.objective, first.status) == ((0, 1), 3.0, "optimal")
    assert (again.choice, again.objective, again.bound, again.gap, again.status) == (
        first.choice, first.objective, first.bound, first.gap, first.status
    )  # fmt: skip
    assert solved == ["two"]


@pytest.mark.parametrize("other", [problem(limit=5.0), problem(limit=None), problem(cost=5.5)])
def test_another_problem_has_another_name(other: Problem) -> None:
    assert digest(other) != digest(problem())
    assert digest(problem(name="b")) == digest(problem())


def test_infeasible_is_remembered(tmp_path: Path, solved: list[str]) -> None:
    for _ in range(2):
        found = solve_cached(problem(limit=2.5), cache=Cache(tmp_path))
        assert (found.status, found.choice, found.time) == ("infeasible", None, 1)
        assert found.missing == pytest.approx(0.5)
        assert found.message
    assert len(solved) == 1


def test_a_poor_answer_serves_questions_that_ask_no_more(tmp_path: Path, solved: list[str]) -> None:
    kept, name = Cache(tmp_path), digest(problem())
    kept.put(name, Solution((0, 1), 3.0, 1.5, 0.5, "feasible"), seconds=2.0)
    assert solve_cached(problem(), seconds=1.0, cache=kept).bound == 1.5  # no more time than it took
    assert solve_cached(problem(), seconds=9.0, gap=0.6, cache=kept).bound == 1.5  # its gap is enough
    assert not solved
    assert solve_cached(problem(), seconds=9.0, gap=0.1, cache=kept).status == "optimal"
    assert solved == ["two from (0, 1)"]  # what is known is where the search starts
    assert solve_cached(problem(), seconds=9.0, cache=kept).status == "optimal"
    assert len(solved) == 1


def test_what_was_interrupted_is_no_answer_to_the_same_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept for the little time that it took, and the next search starts from it."""
    starts: list[Any] = []

    def solve(given: Problem, **options: Any) -> Solution:
        starts.append(options["start"])
        return Solution((0, 1), 3.0, 1.5, 0.5, "feasible", message="interrupted", interrupted=True)

    monkeypatch.setattr(module, "solve", solve)
    for _ in range(2):
        solve_cached(problem(), seconds=60.0, cache=Cache(tmp_path))
    assert starts == [None, (0, 1)]
    solve_cached(problem(), seconds=0.0, cache=Cache(tmp_path))
    assert len(starts) == 2


def forged(text: str, **changes: Any) -> str:
    """An entry that says something else, with the checksum that goes with it."""
    document = {**json.loads(text), **changes}
    document.pop("checksum")
    document["seconds"] = Record(document["seconds"])
    return json.dumps({**document, "checksum": module._checksum(document)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "not JSON"),
        (lambda text: "", "not JSON"),
        (
            lambda text: text.replace('"choice": "0 1"', '"choice": "1 1"'),
            "does not have the checksum",
        ),
        (lambda text: forged(text, problem="0" * 64), "the entry is of problem 0000000000000000, not of"),
        (lambda text: forged(text, choice="1 0"), "the choice breaks|the choice costs"),
        (lambda text: forged(text, choice="0 0"), "the choice breaks a constraint"),
        (lambda text: forged(text, choice="0 7"), "has 2 strategies"),
        (lambda text: forged(text, choice="0"), "1 strategies for 2 nodes"),
        (lambda text: forged(text, choice="9" * 30), "choice: expected numbers of strategies"),
        (lambda text: forged(text, objective="2.0"), "costs 3.0 but the entry says 2.0"),
        (lambda text: forged(text, objective="nan"), "objective: expected a number as text"),
        (lambda text: forged(text, spent=-1), "spent: expected a number from 0 up"),
        (lambda text: forged(text, colour="blue"), "colour: unknown field"),
        (lambda text: json.dumps({"solver": 1}), "format: missing"),
        (lambda text: "[" * 100_000, "nested more than 64 deep"),
    ],
)
def test_a_damaged_entry_is_ignored_with_a_warning(
    tmp_path: Path, solved: list[str], damage: Any, message: str
) -> None:
    kept = Cache(tmp_path)
    solve_cached(problem(), cache=kept)
    (path,) = entries(tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.warns(RuntimeWarning, match=message):
        found = solve_cached(problem(), cache=kept)
    assert (found.choice, found.status) == ((0, 1), "optimal")
    assert len(solved) == 2
    assert solve_cached(problem(), cache=kept).status == "optimal"  # and it is whole again
    assert len(solved) == 2


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    kept = Cache(tmp_path)
    problems = [problem(cost=5.0 + i) for i in range(4)]
    for age, each in enumerate(problems):
        solve_cached(each, cache=kept)
        os.utime(tmp_path / f"{digest(each)}.json", (1000 + age, 1000 + age))
    solve_cached(problems[0], cache=kept)  # used again
    size = max(path.stat().st_size for path in entries(tmp_path)) + 9  # digits of seconds differ
    last = problem(cost=50.0)
    solve_cached(last, cache=Cache(tmp_path, limit=3 * size))
    assert {path.stem for path in entries(tmp_path)} == {digest(p) for p in (problems[0], problems[3], last)}


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solved: list[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv(module.VARIABLE, raising=False)
    assert cache_directory() == tmp_path / "xdg" / "distgraph" / "solved"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "distgraph" / "solved"
    monkeypatch.setenv(module.VARIABLE, str(tmp_path / "own"))
    solve_cached(problem())
    assert len(entries(tmp_path / "own" / "distgraph-solved")) == 1
    monkeypatch.setenv(module.VARIABLE, "off")
    assert cache_directory() is None
    solve_cached(problem())
    assert len(solved) == 2


def test_a_disk_that_takes_nothing_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(RuntimeWarning, match=r"cache .*file.*; set DISTGRAPH_CACHE"):
        assert solve_cached(problem(), cache=Cache(tmp_path / "file")).status == "optimal"


def test_the_folder_is_looked_at_for_every_64th_of_the_limit_that_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit holds 4096 entries, so that these are counted with the first and with the 64th behind it."""
    looks: list[int] = []
    monkeypatch.setattr(Cache, "_shrink", lambda self: looks.append(len(entries(self.directory))))
    solution = solve_cached(problem(), cache=Cache(None))
    Cache(tmp_path / "one").put("0", solution, 0.0)
    (one,) = entries(tmp_path / "one")
    many = Cache(tmp_path / "many", limit=64 * 64 * one.stat().st_size)
    for number in range(128):
        many.put(str(number), solution, 0.0)
    assert looks == [1, 1, 65]


def test_what_a_forged_entry_claims_to_be_best_is_solved_again(tmp_path: Path, solved: list[str]) -> None:
    """A legal but poor choice: changing one node of it costs less than the bound that the entry states."""
    easy = problem(limit=None, cost=2.0)
    name, kept = digest(easy), Cache(tmp_path)
    kept.put(name, Solution((0, 0), 14.0, 14.0, 0.0, "optimal"), seconds=60.0)
    with pytest.warns(RuntimeWarning, match=r"the bound is 14.0, but another choice costs less"):
        found = solve_cached(easy, cache=kept)
    assert (found.choice, found.objective) == ((0, 1), 3.0)


def test_that_nothing_fits_is_believed_where_the_problem_shows_it(tmp_path: Path, solved: list[str]) -> None:
    kept, none = Cache(tmp_path), Solution(None, np.inf, np.inf, np.inf, "infeasible", message="nothing")
    kept.put(digest(problem()), none, 60.0)
    assert solve_cached(problem(), cache=kept).choice == (0, 1)
    assert solved == ["two"]
    kept.put(digest(problem(limit=2.5)), none, 60.0)
    found = solve_cached(problem(limit=2.5), cache=kept)
    assert (found.status, found.time, found.missing) == ("infeasible", 1, pytest.approx(0.5))
    assert solved == ["two"]


def test_files_of_others_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a user who pointed the cache at one with results in it lost them."""
    monkeypatch.setenv(module.VARIABLE, str(tmp_path))
    folder = cache_directory()
    assert folder is not None
    folder.mkdir()
    others = [tmp_path / "results.json", folder / "results.json", folder / ("f" * 63 + ".json")]
    for path in others:
        path.write_text("x" * 10_000)
        os.utime(path, (0, 0))
    victim = tmp_path / "victim"
    victim.write_text("x" * 10_000)
    (folder / f"{'a' * 64}.json").symlink_to(victim)
    solve_cached(problem(), cache=Cache(folder, limit=0))
    assert all(path.exists() for path in [*others, victim])
    assert {path.name for path in folder.iterdir()} == {path.name for path in others[1:]}


def test_an_entry_that_is_a_link_is_not_read(tmp_path: Path, solved: list[str]) -> None:
    solve_cached(problem(), cache=Cache(tmp_path))
    (path,) = entries(tmp_path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    solve_cached(problem(), cache=Cache(tmp_path))
    assert len(solved) == 2
    assert not path.is_symlink()
    assert (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("folder", ["a\0b", "\ud800", "x" * 300])
def test_a_folder_that_cannot_be_is_a_warning(folder: str) -> None:
    with pytest.warns(RuntimeWarning, match=r"cache .*; set DISTGRAPH_CACHE"):
        assert solve_cached(problem(), cache=Cache(Path(folder))).status == "optimal"
