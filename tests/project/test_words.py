"""Names say what a value is, and docstrings describe the arguments that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT

PRODUCT = ("distgraph", "passes", "runtime", "resources")
VAGUE = frozenset(["asked", "crew", "found", "known", "oracle", "settled", "team", "told", "twin", "wanted"])
"""Words of the history of a value, or metaphors, that do not say what it is."""


def modules(top: str) -> Iterator[tuple[Path, ast.Module]]:
    """The modules of a folder, without those behind links."""
    links = [ROOT / "distgraph" / name for name in PRODUCT[1:]]
    paths = [path for path in (ROOT / top).rglob("*.py") if not any(link in path.parents for link in links)]
    return ((path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths)


def names_given(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a module gives to variables, arguments, functions and classes, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def arguments(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Names of the arguments of a function, or of the constructor of a class; of a dataclass its fields."""
    if isinstance(node, ast.ClassDef):
        made = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        if not made:
            fields = (part.target for part in node.body if isinstance(part, ast.AnnAssign))
            return {target.id for target in fields if isinstance(target, ast.Name)}
        node = made[0]
    args = node.args
    every = (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
    return {arg.arg for arg in every if arg is not None}


def described(docstring: str) -> set[str]:
    """Names of the arguments that the section `Args` of a docstring describes."""
    section = re.split(r"\n\S", docstring.partition("Args:\n")[2])[0]
    entries = re.findall(r"^    (\S[\w*, ]*?):(?: |$)", section, re.MULTILINE)
    return {name.strip().lstrip("*") for entry in entries for name in entry.split(",")}


@pytest.mark.parametrize("top", PRODUCT)
def test_names_say_what_a_value_is_and_described_arguments_exist(top: str) -> None:
    for path, tree in modules(top):
        for name, line in names_given(tree):
            assert name.strip("_") not in VAGUE, f"{path}:{line}: name {name} for what it is"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (existing := arguments(node)):
                unknown = described(ast.get_docstring(node) or "") - existing
                assert not unknown, f"{path}:{node.lineno}: {node.name} has no argument {sorted(unknown)}"


def test_arguments_and_their_descriptions_are_read() -> None:
    docstring = "F.\n\n    Args:\n        a, d: x\n            y: z.\n        *b: x.\n    "
    source = f'def f(a, *b, c=1):\n    """{docstring}"""\n'
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert arguments(function) == {"a", "b", "c"}
    assert described(ast.get_docstring(function) or "") == {"a", "b", "d"}
    assert list(names_given(ast.parse("found = 1"))) == [("found", 1)]
