"""What the fields of documents have to be, stated in the annotations of the classes that documents become.

A class of distgraph may be an entry of a document as it is: its annotations carry limits and validators, and
pydantic is loaded when the first document is read. Programs that read no document start without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from distgraph.errors import DistGraphError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

Parsed = TypeVar("Parsed")

_SCHEMA_METHOD: Final = "__get_pydantic_core_schema__"


class Limits:
    """Of a number, text or list: the limits of pydantic's `Field`, such as gt, le, min_length and strict."""

    def __init__(self, **limits: float | bool) -> None:
        self.limits = limits

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = {**handler(source), **self.limits}
        return schema  # type: ignore[no-any-return]


class _Validator:
    """A function that is called with a value of a document; `kind` is the validator of pydantic."""

    kind = ""

    def __init__(self, function: Callable[[Any], object]) -> None:
        self.function = function

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        import pydantic  # noqa: PLC0415 (see the text of the module)

        validator = getattr(pydantic, self.kind)(self.function)
        return validator.__get_pydantic_core_schema__(source, handler)  # type: ignore[no-any-return]


class AfterValidator(_Validator):
    """Called with the value of the declared type."""

    kind = "AfterValidator"


class BeforeValidator(_Validator):
    """Called with what stands in the document; what it returns has to be of the declared type."""

    kind = "BeforeValidator"


class PlainValidator(_Validator):
    """Called with what stands in the document; it returns the value."""

    kind = "PlainValidator"


def documented(*optional: str, complete: bool = True) -> Callable[[type[Parsed]], type[Parsed]]:
    """Decorate a dataclass that is an entry of a document as it is; its numbers have to be declared strict.

    Args:
        optional: fields with a default that documents may leave out.
        complete: whether the other fields with a default are required in documents.
    """

    def schema_of(source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler.resolve_ref_schema(handler(source))
        while "fields" not in (arguments := schema["schema"]):
            schema = arguments
        for field in arguments["fields"] if complete else ():
            if field["schema"]["type"] == "default" and field["name"] not in optional:
                field["schema"] = field["schema"]["schema"]
        return schema  # type: ignore[no-any-return]

    def decorate(cls: type[Parsed]) -> type[Parsed]:
        setattr(cls, _SCHEMA_METHOD, staticmethod(schema_of))
        return known_fields(cls)

    return decorate


def known_fields(cls: type[Parsed]) -> type[Parsed]:
    """Decorate a dataclass that is an entry of a document: unknown fields, infinity and NaN are refused."""
    cls.__pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # type: ignore[attr-defined]
    return cls


def documented_as_text(expected: str) -> Callable[[type[Parsed]], type[Parsed]]:
    """Decorate a class that is a text in documents: `cls.parse` reads it, `str` writes it.

    Args:
        expected: the form of the text, in words.
    """

    def decorate(cls: Any) -> Any:
        def schema_of(source: object, handler: object) -> CoreSchema:
            from pydantic_core import core_schema  # noqa: PLC0415 (see the text of the module)

            return core_schema.no_info_plain_validator_function(parsed(cls.parse, expected))

        setattr(cls, _SCHEMA_METHOD, staticmethod(schema_of))
        return cls

    return decorate


def parsed(parse: Callable[[str], Parsed], expected: str) -> Callable[[object], Parsed]:
    """A validator for text fields that `parse` reads.

    Args:
        parse: raises ValueError or DistGraphError for malformed text.
        expected: the form, in words.
    """

    def read(value: object) -> Parsed:
        if not isinstance(value, str):
            raise ValueError(expected)
        try:
            return parse(value)
        except (ValueError, DistGraphError) as reason:
            raise ValueError(expected) from reason

    return read


Count = Annotated[int, Limits(ge=0, lt=2**63, strict=True)]
Some = Annotated[int, Limits(ge=1, lt=2**63, strict=True)]
Seconds = Annotated[float, Limits(gt=0, le=1e18, strict=True)]
Number = Annotated[float, Limits(ge=-1e30, le=1e30, strict=True)]
