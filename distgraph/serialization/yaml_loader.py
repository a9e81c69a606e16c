"""PyYAML's loader of resource files: plain data only, within limits.

Its tags for dates, sets and binary data, which no resource file has, are left out. It refuses duplicate keys,
and limits what can grow while it is read: nesting depth, merge keys of merge keys, and aliases of aliases,
which count once for every expansion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final

import yaml

from distgraph.errors import ResourceError
from distgraph.serialization.documents import MOST_DEPTH, MOST_NUMBER, check_data

MOST_ITEMS: Final = 200_000
"""Entries of all lists and mappings, aliases counted where they stand: as many as a file of `MOST_BYTES`
holds."""
_TAGS: Final = ("null", "bool", "int", "float", "seq", "map", "str")


def load_yaml(text: str, file: str) -> Any:
    """What `parse_yaml` returns and raises."""
    try:
        document = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ResourceError(f"{file}{where}: not YAML: {error.problem}; fix the line") from None
    except yaml.reader.ReaderError as error:
        raise ResourceError(
            f"{file}: not YAML: character {chr(_code(error.character))!a} at position {error.position}; "
            "write it as UTF-8 text without control characters"
        ) from None
    except yaml.YAMLError as error:
        raise ResourceError(f"{file}: not YAML: {error}; write it as UTF-8 YAML") from None
    check_data(document, file, ResourceError, MOST_ITEMS)
    return document


def _code(character: Any) -> int:
    return character if isinstance(character, int) else ord(character)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the limits and refusals of this module."""

    yaml_constructors: ClassVar[dict[Any, Any]] = {}  # filled below
    yaml_implicit_resolvers: dict[Any, Any] = {  # noqa: RUF012 - declared so by PyYAML
        first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.depth = 0
        self.merged = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise self._refused(event, f"lists and mappings are nested more than {MOST_DEPTH} deep")
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        keys = set[str]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.rpartition(":")[2] not in ("str", "merge"):
                raise self._refused(key, "a key is a text; put it into quotes")
            if key.value in keys:
                raise self._refused(key, f"key {key.value[:60]!a} is given twice")
            keys.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        before = len(node.value)
        super().flatten_mapping(node)  # which calls this method for what is merged, before it copies that
        self.merged += max(0, len(node.value) - before)
        if self.merged > MOST_ITEMS:
            raise self._refused(node, f"merge keys copy more than {MOST_ITEMS} entries")

    def read_scalar(self, node: yaml.Node, read: Callable[[Any, Any], Any]) -> Any:
        """A scalar with a tag that PyYAML reads, whose exceptions for a wrong text are of many kinds."""
        try:
            value = read(self, node)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            if isinstance(error, yaml.YAMLError):
                raise
            kind = node.tag.rpartition(":")[2]
            raise self._refused(node, f"{str(node.value)[:60]!a} is no {kind}") from None
        if isinstance(value, int) and abs(value) >= MOST_NUMBER:
            raise self._refused(node, f"a number of more than {len(str(MOST_NUMBER)) - 1} digits")
        return value

    def refuse_tag(self, node: yaml.Node) -> None:
        """Raise: a tag of another kind."""
        raise self._refused(node, f"tag {node.tag[:60]!a} means nothing in a resource file")

    def _refused(self, event: Any, problem: str) -> yaml.MarkedYAMLError:
        return yaml.constructor.ConstructorError(None, None, problem, event.start_mark)


def _constructor(tag: str) -> Callable[[_Loader, yaml.Node], Any]:
    read = yaml.SafeLoader.yaml_constructors[tag]
    if tag.rpartition(":")[2] in ("seq", "map"):
        constructor: Callable[[_Loader, yaml.Node], Any] = read
        return constructor
    return lambda loader, node: loader.read_scalar(node, read)


for _tag in (f"tag:yaml.org,2002:{name}" for name in _TAGS):
    _Loader.add_constructor(_tag, _constructor(_tag))
_Loader.add_constructor(None, _Loader.refuse_tag)
