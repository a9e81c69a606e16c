"""The tree stays readable: sizes of files and folders, and one meaning for the name of a module."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT

MOST_LINES, MOST_ENTRIES, MOST_ENTRIES_OF_RUNTIME, MOST_LINES_OF_FUNCTION = 500, 20, 10, 50
PRODUCT = ("distgraph", "passes", "runtime", "resources")
ONE_THING = (
    {"distgraph/ops", "distgraph/kernels", "distgraph/nn"},  # an op, its kernel and its layer
    {"distgraph/frontends/torch", "distgraph/frontends/jax"},  # the same step for two frameworks
    {"distgraph/cli/calibrate.py", "runtime/profile/calibration/calibrate.py"},
    {"distgraph/cli/check.py", "distgraph/engine/commands/check.py"},  # a command and what it does
    {"distgraph/cli/cluster.py", "resources/cluster.py"},
    {"distgraph/cli/forecast.py", "runtime/forecast/forecast.py"},
    {"distgraph/cli/plan.py", "distgraph/plan/plan.py"},
    {"distgraph/ir/collectives.py", "runtime/transport/collectives.py"},  # declarations and calls
    {"distgraph/plan/decisions.py", "distgraph/engine/search_driver/explain/decisions.py"},
    {"distgraph/plan/schema.py", "resources/schema.py"},  # the schema of a file: of a plan, of a cluster
)
"""Modules with the same name that are about the same thing, as folders or as files."""


def folders(*tops: str) -> Iterator[Path]:
    """Every folder of the repository below some, without links, caches and hidden ones."""
    for top in tops:
        yield ROOT / top
        for path in (ROOT / top).rglob("*"):
            hidden = any(part.startswith(("__pycache__", ".")) for part in path.relative_to(ROOT).parts)
            if path.is_dir() and not path.is_symlink() and not hidden:
                yield path


def entries(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if not p.name.startswith((".", "__pycache__"))]


@pytest.mark.parametrize("top", [*PRODUCT, "tests", "benchmarks", "docs", "tutorials"])
def test_files_and_folders_are_small(top: str) -> None:
    for folder in folders(top):
        assert len(entries(folder)) <= MOST_ENTRIES, f"{folder} has more entries than a reader takes in"
        for path in folder.glob("*.py"):
            lines = path.read_text(encoding="utf-8").count("\n")
            assert lines <= MOST_LINES, f"{path} has {lines} lines; split it by subject"
    assert len(entries(ROOT / "runtime")) <= MOST_ENTRIES_OF_RUNTIME


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef, *, signature: bool) -> int:
    """Lines of a function without its docstring; of its body alone if the signature does not count."""
    first, *rest = function.body
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and rest
    body = rest if documented else function.body
    inside = (function.end_lineno or 0) - body[0].lineno + 1
    return inside + (first.lineno - function.lineno if signature else 0)


@pytest.mark.parametrize("top", PRODUCT)
def test_functions_are_short(top: str) -> None:
    """The signature of a command counts nothing: it is the list of its options."""
    for folder in folders(top):
        for path in folder.glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = lines_of(node, signature=folder != ROOT / "distgraph" / "cli")
                    assert lines < MOST_LINES_OF_FUNCTION, (
                        f"{path}: {node.name} has {lines} lines without its docstring; name its steps"
                    )


def test_lines_of_functions_are_counted_without_docstrings() -> None:
    source = 'def f(\n    x,\n):\n    """One.\n\n    Two."""\n    y = x\n    return y\n'
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert lines_of(function, signature=True) == 5
    assert lines_of(function, signature=False) == 2


def test_a_module_name_has_one_meaning() -> None:
    places: dict[str, set[Path]] = defaultdict(set)
    for folder in folders(*PRODUCT):
        for path in folder.glob("*.py"):
            if path.name != "__init__.py":
                places[path.name].add(path.relative_to(ROOT))
    for name, paths in places.items():
        named = {str(path) for path in paths}, {str(path.parent) for path in paths}
        same = len(paths) == 1 or any(group <= thing for group in named for thing in ONE_THING)
        assert same, f"{name} means different things: {', '.join(sorted(named[0]))}"
