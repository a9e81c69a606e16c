"""Runtime models from files: those that come with distgraph, by name, and others by path."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from distgraph.errors import ResourceError
from distgraph.resources.runtimes.runtime_model import RuntimeModel
from distgraph.serialization.documents import read_text, refuse, shown_path
from distgraph.serialization.yaml_reader import MOST_BYTES, parse_yaml

_DESCRIPTIVE = ("name", "about", "sources")
_DOCUMENTATION = "docs/planning/runtimes.md"


@cache
def shipped_runtimes() -> tuple[str, ...]:
    """Names of the runtime models that come with distgraph."""
    entries = (files("distgraph.resources") / "runtimes").iterdir()
    names = (entry.name for entry in entries)
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def load_runtime(name_or_path: str | os.PathLike[str]) -> RuntimeModel:
    """A runtime model by its name or from a YAML file.

    Raises:
        ResourceError: no such file, not YAML, or not a runtime model; names the path in the document.
    Example:
        >>> load_runtime("torch").overlap.hides("gradients", "all_reduce")
        True
    """
    text = os.fspath(name_or_path)
    if text in shipped_runtimes():
        return _shipped(text)
    path = Path(text)
    if not path.is_file():
        names = ", ".join(shipped_runtimes())
        raise ResourceError(f"{shown_path(text)}: neither a file nor a runtime; shipped are {names}")
    return parse_runtime(read_text(path, ResourceError, MOST_BYTES), text)


def runtime_document(name_or_path: str) -> dict[str, Any]:
    """The YAML document of a runtime model, as it is written. Raises ResourceError: as `load_runtime`."""
    load_runtime(name_or_path)
    shipped = name_or_path in shipped_runtimes()
    path = _shipped_path(name_or_path) if shipped else Path(name_or_path)
    document: dict[str, Any] = parse_yaml(read_text(path, ResourceError, MOST_BYTES), str(path))
    return document


def parse_runtime(text: str, file: str) -> RuntimeModel:
    """A runtime model from the text of its file.

    Args:
        text: of the file.
        file: its name in messages.

    Raises:
        ResourceError: one line per mistake: file, path in the document, what was expected, what was found.
    """
    from distgraph.serialization.models import validate  # noqa: PLC0415 (loads pydantic)

    document = parse_yaml(text, file)
    model = validate(RuntimeModel, document, file, ResourceError, _DOCUMENTATION)
    _check_sources(model, document, file)
    return model


def default_runtime(device_type: str) -> RuntimeModel:
    """The model of distgraph's own runtime on a type of device."""
    return load_runtime("distgraph_cpu" if device_type == "cpu" else "distgraph_gpu")


def _shipped_path(name: str) -> Path:
    return Path(str(files("distgraph.resources") / "runtimes" / f"{name}.yaml"))


@lru_cache
def _shipped(name: str) -> RuntimeModel:
    return parse_runtime(
        read_text(_shipped_path(name), ResourceError, MOST_BYTES), f"resources/runtimes/{name}.yaml"
    )


def _check_sources(model: RuntimeModel, document: dict[str, Any], file: str) -> None:
    """Every value has a source and every source a value; a fitted value names what was held out."""
    described = {name: value for name, value in document.items() if name not in _DESCRIPTIVE}
    values = dict(_values(described, ""))
    for path in values:
        if path not in model.sources:
            refuse(ResourceError, file, ["sources"], f"an entry {path} that says where this value comes from")
    for path, source in model.sources.items():
        if path not in values:
            refuse(ResourceError, file, ["sources", path], "the path of a field that is given in the file")
        if (source.kind == "fitted") != (source.held_out is not None):
            expected = "held_out with a fitted value, and with no other"
            refuse(ResourceError, file, ["sources", path], expected, source.kind)


def _values(entries: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Path -> value of every leaf of nested mappings."""
    for name, value in entries.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _values(value, f"{path}.")
        else:
            yield path, value
