"""Documents from outside: what is read, what is refused, and how mistakes are told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BeforeValidator, Field

from distgraph.errors import GraphError, ResourceError
from distgraph.ir.mesh import ProcessMesh
from distgraph.serialization import documents
from distgraph.serialization.documents import check_data, parse_json, read_json, refuse
from distgraph.serialization.fields import parsed
from distgraph.serialization.models import Entry, validate


class Leaf(Entry):
    """An object inside another one."""

    size: Annotated[int, Field(gt=0)]
    rate: float = 1.0


class Tree(Entry):
    """A whole document."""

    name: str
    leaves: list[Leaf] = Field(default_factory=list)
    by_name: dict[str, Leaf] = Field(default_factory=dict)
    mesh: Annotated[str, BeforeValidator(parsed(str.strip, 'a mesh such as "dp=2"'))] = ""
    pair: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2)] = Field(default_factory=list)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"x.json:1:1: not JSON: Expecting value; fix the line"),
        ('{"a": 1,\n "b" 2}', r"x.json:2:6: not JSON: Expecting ':' delimiter"),
        ('{"a": {"b": 1, "b": 2}}', r'x.json: a: expected each key once, but "b" is given twice'),
        ('{"a": [1, NaN]}', r"x.json: a\[1\]: expected a number within 1e\+40, got NaN"),
        ('{"a": -Infinity}', r"x.json: a: expected a number within 1e\+40, got -Infinity"),
        ('{"a": 1e999}', r"x.json: a: expected a number within 1e\+40, got Infinity"),
        ('{"a": 1e40}', r"x.json: a: expected a number within 1e\+40, got 1e\+40"),
        ('{"a": ' + "9" * 5000 + "}", r"x.json: a: expected a number within 1e\+40, got Infinity"),
        ('{"a": "b\\u0000"}', r'x.json: a: expected a text without NUL .*, got "b\\u0000"'),
        ('{"a": ["\\ud800"]}', r'x.json: a\[0\]: expected a text without NUL .*, got "\\ud800"'),
        ('{"a": {"\\ud800": 1}}', r'x.json: a: expected keys without NUL .*, got "\\ud800"'),
        ("[" * 100_000, r"x.json: objects and lists are nested more than 64 deep"),
        ("[" * 100 + "]" * 100, r"x.json: objects and lists are nested more than 64 deep"),
        ('{"a":' * 100 + "1" + "}" * 100, r"x.json: objects and lists are nested more than 64 deep"),
    ],
)
def test_what_no_document_holds_is_refused_with_its_path(text: str, message: str) -> None:
    with pytest.raises(ResourceError, match=message):
        parse_json(text, "x.json", ResourceError)


def test_large_numbers_and_odd_texts_that_are_legal_are_read() -> None:
    found = {"seed": 2**128 - 1, "small": -(2**63), "text": "\u03bc \U0001f600\n", "zero": -0.0}
    assert parse_json(json.dumps(found), "x.json", GraphError) == found


def test_a_document_of_many_entries_is_refused() -> None:
    check_data([[0] * 9], "x.json", GraphError, items=10)
    with pytest.raises(GraphError, match=r"x.json: has more than 10 entries, the limit for such a file"):
        check_data([[0] * 10], "x.json", GraphError, items=10)


def test_data_that_stands_in_several_places_counts_in_each() -> None:
    """As an alias bomb does: 9 lists of 10 are 10**9 entries."""
    bomb: Any = "x"
    for _ in range(9):
        bomb = [bomb] * 10
    with pytest.raises(GraphError, match="has more than 4000000 entries"):
        check_data(bomb, "x.yaml", GraphError)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(GraphError, match="nested more than 64 deep"):
        check_data(endless, "x.yaml", GraphError)


@pytest.mark.parametrize(
    ("document", "messages"),
    [
        ([], ["x.json: expected a mapping of fields, got []"]),
        ({}, ["x.json: name: missing; add the field, see docs/planning/plan.md for its form"]),
        (
            {"name": "a", "colour": 1},
            ["x.json: colour: unknown field; check its spelling against docs/planning/plan.md"],
        ),
        (
            {"name": 3, "leaves": [{"size": 1}, {"size": 0, "rate": "fast"}]},
            [
                "x.json: name: expected a text, got 3",
                "x.json: leaves[1].size: expected a number greater than 0, got 0",
                'x.json: leaves[1].rate: expected a number, got "fast"',
            ],
        ),
        ({"name": "a", "leaves": {}}, ["x.json: leaves: expected a list, got {}"]),
        ({"name": "a", "pair": [1]}, ["x.json: pair: expected 2 or more entries, got [1]"]),
        ({"name": "a", "pair": [1, -1]}, ["x.json: pair[1]: expected a number from 0 up, got -1"]),
        (
            {"name": "a", "by_name": {"b.0 c": {"size": True}}},
            ["x.json: by_name['b.0 c'].size: expected a whole number, got true"],
        ),
        ({"name": "a", "mesh": 3}, ['x.json: mesh: expected a mesh such as "dp=2", got 3']),
    ],
)
def test_mistakes_are_told_with_file_and_path(document: Any, messages: list[str]) -> None:
    with pytest.raises(GraphError) as told:
        validate(Tree, document, "x.json", GraphError, "docs/planning/plan.md")
    assert str(told.value).split("\n") == messages


def test_of_many_mistakes_some_are_told() -> None:
    with pytest.raises(GraphError) as told:
        validate(Tree, {"name": "a", "leaves": [0] * 100}, "x.json", GraphError)
    lines = str(told.value).split("\n")
    assert lines[0] == "x.json: leaves[0]: expected a mapping of fields, got 0"
    assert lines[20:] == ["x.json: 80 more mistakes"]


def test_what_is_shown_of_a_file_is_short_and_ascii() -> None:
    document = {"name": {"\u03bc" * 1000: ["\u202e" * 10**6] * 100}}
    with pytest.raises(GraphError) as told:
        validate(Tree, document, "x.json", GraphError)
    assert str(told.value).isascii()
    assert len(str(told.value)) < 120
    with pytest.raises(GraphError) as told:
        refuse(GraphError, "x.json", ["a", "\u202e" * 1000, 3], "a text", None)
    assert str(told.value).isascii()
    assert len(str(told.value)) < 120


def test_a_house_error_of_a_parser_becomes_what_is_expected() -> None:
    def parse(text: str) -> ProcessMesh:
        return ProcessMesh([0, 0], [text])

    with pytest.raises(ValueError, match="distinct ranks"):
        parsed(parse, "distinct ranks")("dp")


@pytest.mark.parametrize("most", [9, 10])
def test_a_file_is_read_up_to_its_limit(tmp_path: Path, most: int) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b" " * 8 + b"{}")
    if most == 10:
        assert read_json(path, GraphError, most) == {}
        return
    with pytest.raises(GraphError, match=r"x.json: cannot be read: it has more than 9 bytes, the limit"):
        read_json(path, GraphError, most)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/dev/zero", "/dev/zero: cannot be read: it has more than 1000 bytes"),
        (".", r"\.: cannot be read: Is a directory"),
        ("no/such/file", "no/such/file: cannot be read: No such file or directory; give the path of a file"),
        ("a\0b", r"'a\\x00b': cannot be read: embedded null byte"),
        ("\ud800", r"'\\ud800': cannot be read: "),
    ],
)
def test_what_cannot_be_read_is_a_house_error(path: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        documents.read_text(path, GraphError, 1000)


def test_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(GraphError, match=r"x.json: cannot be read: byte 7 is not UTF-8; write the file as"):
        read_json(tmp_path / "x.json", GraphError)


def test_limits_are_above_what_python_refuses_by_itself() -> None:
    assert len(str(documents.MOST_NUMBER)) < sys.get_int_max_str_digits()
    assert sys.getrecursionlimit() > documents.MOST_DEPTH * 4
