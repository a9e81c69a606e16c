"""Keeps the doctest collection away from modules that need a device library at import and from programs that
tests run with another framework, and what tests solve out of the cache of the user. Programs that tests start
share their bytecode."""

from __future__ import annotations

import ast
import os
import shutil
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent / "distgraph"
NEEDS_DEVICE = {"cupy", "mpi4py"}
OTHERS = {"torch", "jax"}
os.environ["DISTGRAPH_CACHE"] = "off"


def pytest_configure(config: pytest.Config) -> None:
    """Where Python writes no bytecode, it is kept in a temporary folder: tests start hundreds of programs,
    and each of them would compile every module that it imports."""
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        folder = tempfile.mkdtemp(prefix="distgraph-bytecode-")
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))


def imported_roots(source: str) -> set[str]:
    """Names of the top-level packages that a module imports when it is itself imported."""
    roots: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            roots.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            roots.add(node.module.partition(".")[0])
    return roots


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collecting doctests imports: importing mpi4py starts MPI, importing cupy wants a GPU's libraries."""
    if collection_path.suffix != ".py":
        return None
    for framework in OTHERS:
        if PACKAGE / "frontends" / framework in collection_path.parents and find_spec(framework) is None:
            return True
    roots = imported_roots(collection_path.read_text())
    if PACKAGE in collection_path.parents:
        missing = {framework for framework in OTHERS & roots if find_spec(framework) is None}
        return True if missing or roots & NEEDS_DEVICE else None
    return True if roots & OTHERS else None
