"""Keeps the doctest collection away from modules that need a device library at import and from programs that
tests run with another framework, and what tests solve out of the cache of the user."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent / "distgraph"
NEEDS_DEVICE = {"cupy", "mpi4py"}
OTHERS = {"torch", "jax"}
os.environ["DISTGRAPH_CACHE"] = "off"


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
    wants = NEEDS_DEVICE if PACKAGE in collection_path.parents else OTHERS
    return True if imported_roots(collection_path.read_text()) & wants else None
