"""Keeps the doctest collection away from modules that need a device library at import and from programs that
tests run with another framework, and what tests solve out of the cache of the user. Programs that tests start
share their bytecode."""

from __future__ import annotations

import ast
import gc
import os
import sys
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent / "distgraph"
NEEDS_DEVICE = {"cupy", "mpi4py"}
OTHERS = {"torch", "jax"}
os.environ["DISTGRAPH_CACHE"] = "off"


def pytest_configure(config: pytest.Config) -> None:
    """Where Python writes no bytecode, it is kept in the cache of pytest: tests start hundreds of programs,
    and each of them would compile every module that it imports."""
    cache = getattr(config, "cache", None)  # None under -p no:cacheprovider
    if cache is not None and os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(cache.mkdir("bytecode"))
        sys.dont_write_bytecode = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Python's cyclic garbage collector stands still while the tests are collected, and leaves what was
    collected alone afterwards: every search for cycles would visit 400,000 objects that stay to the end. It
    then waits for more new objects than by default: graphs and traces are many small ones. Searches among all
    objects, half a second each among what tests keep, are ten times as rare as by default."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(5_000, 10, 100)
        gc.enable()


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
    source = collection_path.read_text(encoding="utf-8")
    if not any(name in source for name in OTHERS | NEEDS_DEVICE):
        return None  # parsing every file would take a second
    roots = imported_roots(source)
    if PACKAGE in collection_path.parents:
        missing = {framework for framework in OTHERS & roots if find_spec(framework) is None}
        return True if missing or roots & NEEDS_DEVICE else None
    return True if roots & OTHERS else None
