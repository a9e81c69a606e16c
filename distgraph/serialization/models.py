"""Models of documents: plain data is checked against pydantic models.

This is a module of its own because pydantic takes as long to load as NumPy: modules that programs load
although they may read no document import it when they read one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final, TypeVar, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from distgraph.errors import DistGraphError
from distgraph.serialization.documents import Step, path_text, shown

Parsed = TypeVar("Parsed")

_MOST_TOLD: Final = 20  # mistakes of one document that a message lists


class Entry(BaseModel):
    """Base of the models of documents: unknown fields and values of another type are refused.

    The validator of a model is built when the first document is read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """What reads and writes documents of a dataclass."""
    return TypeAdapter(kind)


def validate(
    kind: type[Parsed],
    document: object,
    file: str,
    error: type[DistGraphError],
    see: str = "",
    *,
    written: object = None,
) -> Parsed:
    """The model of plain data.

    Args:
        kind: a model such as an `Entry`, or a dataclass. Custom validators raise ValueError with the expected
            form, such as 'a mesh such as "dp=2"'.
        document: as `read_json` gives it.
        file: where it comes from, for messages.
        error: what is raised.
        see: page of the documentation on the format, for messages.
        written: the document of the user, if it was normalised before validation, such as one mapping to a
            list of one.

    Raises:
        error: one line for each mistake: file, path in the document, expected and actual value.
    """
    try:
        if issubclass(kind, BaseModel):
            return kind.model_validate(document)
        return cast("Parsed", adapter(cast("Any", kind)).validate_python(document))
    except ValidationError as errors:
        details = _independent(errors.errors(include_url=False))
        shown_in = document if written is None else written
        lines = list(dict.fromkeys(_describe(detail, shown_in, file, see) for detail in details[:_MOST_TOLD]))
        if len(details) > _MOST_TOLD:
            lines.append(f"{file}: {len(details) - _MOST_TOLD} more mistakes")
        raise error("\n".join(lines)) from None


def _independent(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """The errors that do not follow from others: a list with wrong entries counts as too short."""
    wrong = {detail["loc"][:-1] for detail in details}
    return [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in wrong]


def _describe(error: ErrorDetails, document: object, file: str, see: str) -> str:
    path, value = _path_in(document, error["loc"])
    subject = f"{file}: {path_text(path)}" if path else file
    if error["type"] == "missing":
        return f"{subject}: missing; add the field" + (f", see {see} for its form" if see else "")
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{subject}: unknown field; " + (
            f"check its spelling against {see}" if see else "leave it out"
        )
    return f"{subject}: expected {_expectation(error)}, got {shown(value)}"


_EXPECTATIONS: Final = {
    "model_type": "a mapping of fields",
    "model_attributes_type": "a mapping of fields",
    "dataclass_type": "a mapping of fields",
    "dict_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
    "string_type": "a text",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "float_type": "a number",
    "finite_number": "a finite number",
    "greater_than": "a number greater than {gt:g}",
    "greater_than_equal": "a number from {ge:g} up",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number up to {le:g}",
    "too_short": "{min_length} or more entries",
    "too_long": "at most {max_length} entries",
    "string_too_short": "a text of at least {min_length} characters",
    "string_too_long": "a text of at most {max_length} characters",
    "literal_error": "one of {expected}",
}


def _expectation(error: ErrorDetails) -> str:
    context: dict[str, Any] = error.get("ctx", {})
    if error["type"] in _EXPECTATIONS:
        return _EXPECTATIONS[error["type"]].format(**context)
    if error["type"] == "value_error":
        return str(context["error"])
    return error["msg"]


def _path_in(document: object, location: Sequence[Step]) -> tuple[list[Step], object]:
    """The path and the value in the document of the user for a location that pydantic reports.

    It has no names of alternatives, and no index where the user wrote one mapping for a list of one.
    """
    path: list[Step] = []
    node = document
    for step in location:
        if isinstance(step, int) and isinstance(node, list):
            node = node[step] if step < len(node) else None
        elif isinstance(step, str) and step != "[key]" and isinstance(node, dict):
            node = node.get(step)
        else:
            continue
        path.append(step)
    return path, node
