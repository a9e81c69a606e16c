"""YAML of resource files to plain data, within limits; only texts, numbers, truth values, lists and mappings.

PyYAML is loaded by the first file that is read: most programs read none.
"""

from __future__ import annotations

from typing import Any, Final

MOST_BYTES: Final = 512 << 10
"""Of a resource file: shipped ones have up to 4 KiB, and PyYAML takes about 10 seconds for 512 KiB."""


def parse_yaml(text: str, file: str) -> Any:
    """The plain data in a YAML text. Raises ResourceError: the text is no YAML, or has too many entries."""
    from distgraph.serialization.yaml_loader import load_yaml  # noqa: PLC0415 (loads PyYAML)

    return load_yaml(text, file)
