"""What error messages advise exists: names of the package, methods, options, commands, variables."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs.training import engine
from typer import Context
from typer.main import get_command

import distgraph as dg
from distgraph import errors
from distgraph.cli.application import app

ROOT = Path(dg.__file__).parent
CLASSES = {name for name, found in vars(errors).items() if isinstance(found, type)} | {"MissingPart"}
FILES = sorted(
    {path.resolve() for path in ROOT.rglob("*.py")} | {p.resolve() for p in (ROOT / "runtime").rglob("*.py")}
)


ATTRIBUTES = vars(engine())
FIELDS = {each.name for each in dataclasses.fields(dg.Strategy)}
COMMAND_LINE: Any = get_command(app)
COMMANDS = set(COMMAND_LINE.list_commands(Context(COMMAND_LINE)))


def messages() -> Iterator[tuple[str, str]]:
    """(file:line, text) of every error that is made, with a gap for what is filled in."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", getattr(node.func, "attr", "")) in CLASSES
            ):
                for given in node.args:
                    yield f"{path.name}:{node.lineno}", "".join(_pieces(given))


def _pieces(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:
            yield from _pieces(part)
    else:
        yield " {} "


def exists(dotted: str) -> bool:
    """Whether a dotted name leads somewhere from the package, `dg` and `distgraph` being one."""
    found: Any = dg
    for number, name in enumerate(dotted.split(".")[1:]):
        try:
            found = getattr(found, name)
        except errors.RuntimeFault:  # the framework of a frontend is not installed
            return set(dotted.split(".")[number + 2 :]) <= _imported_by(
                ROOT / "frontends" / name / "__init__.py"
            )
        except AttributeError:
            try:
                found = import_module(".".join(["distgraph", *dotted.split(".")[1 : number + 2]]))
            except ImportError:
                return False
    return True


def _imported_by(path: Path) -> set[str]:
    """Names that a module imports from others, read from its source."""
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports for alias in node.names}


def strangers(text: str) -> list[str]:
    """What a message names that does not exist."""
    found = [name for name in re.findall(r"\b(?:dg|distgraph)(?:\.[A-Za-z_]\w*)+", text) if not exists(name)]
    found += [
        f"engine.{n}"
        for n in re.findall(r"\bengine\.([a-z_]\w*)", text)
        if not hasattr(dg.Engine, n) and n not in ATTRIBUTES
    ]
    found += [f"Strategy({n}=)" for n in re.findall(r"Strategy\((\w+)=", text) if n not in FIELDS]
    found += [f"optim.{n}" for n in re.findall(r"(?<!\.)\boptim\.(\w+)", text) if not hasattr(dg.optim, n)]
    found += [f"nn.{n}" for n in re.findall(r"(?<!\.)\bnn\.(\w+)", text) if not hasattr(dg.nn, n)]
    found += [f"ops.{n}" for n in re.findall(r"(?<!\.)\bops\.(\w+)", text) if not hasattr(dg.ops, n)]
    found += [
        f"distgraph {n}"
        for n in re.findall(r"\bdistgraph (run|[a-z]+) (?=[-{.\w]*(?:-|\.py|\{))", text)
        if n not in COMMANDS
    ]
    return found


def test_advice_names_what_exists() -> None:
    every = list(messages())
    assert len(every) > 400
    wrong = {place: names for place, text in every if (names := strangers(text))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("use dg.where instead", ["dg.where"]),
        ("use dg.ops.where and engine.load, or Strategy(device=1)", []),
        ("call engine.restore", ["engine.restore"]),
        ("try Strategy(phases=2)", ["Strategy(phases=)"]),
        ("start it with distgraph go -n 4", ["distgraph go"]),
        ("start it with distgraph run -n 4", []),
    ],
)
def test_the_test_finds_what_does_not_exist(text: str, wrong: list[str]) -> None:
    assert strangers(text) == wrong


def test_traced_condition_is_told_what_to_use() -> None:
    branches = dg.Engine(lambda x: x if x.sum() > 0 else -x)
    with pytest.raises(
        errors.GraphError, match=r"use dg.ops.where or dg.ops.while_loop instead of if and while"
    ):
        branches.predict(np.ones((2, 3)))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("load_state_dict", "engine.load"),
        ("state_dict", "named_tensors"),
        ("eval", "engine.evaluate"),
        ("cuda", 'Strategy(device="gpu")'),
        ("nowhere", "set it in __init__"),
    ],
)
def test_names_of_other_frameworks_are_told_the_way(name: str, advice: str) -> None:
    with pytest.raises(errors.GraphError) as caught:
        getattr(dg.nn.Linear(2, 2), name)
    assert advice in str(caught.value)
    assert not hasattr(dg.nn.Linear(2, 2), name)
