"""Cache of compiled code: generated modules with equal text are compiled once for all ranks of a process.

The modules of the ranks of one mesh often have equal texts, whose names are bound to different arrays, slices
and groups.
"""

from __future__ import annotations

from types import CodeType

from distgraph.passes.split_tasks import Parts


def shared_code(parts: Parts, source: str, filename: str) -> CodeType:
    """The code of a module, shared with modules that differ only in their first line, which is a comment."""
    body = source[source.index("\n") :]  # begins with the newline, so that line numbers stay the same
    with parts.compiling:
        if body not in parts.codes:
            parts.codes[body] = compile(body, filename, "exec")
    return _under_name(parts.codes[body], filename)


def _under_name(code: CodeType, filename: str) -> CodeType:
    """A copy of a code object and of the functions in it, with another file name."""
    inner = (_under_name(c, filename) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=filename, co_consts=tuple(inner))
