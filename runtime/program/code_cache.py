"""Code of generated modules, compiled once for all ranks of a process whose programs read the same.

Ranks of one mesh differ in the arrays, slices and groups that their names are bound to, seldom in the text.
"""

from __future__ import annotations

from types import CodeType

from distgraph.passes.split_tasks import Parts


def shared_code(parts: Parts, source: str, filename: str) -> CodeType:
    """The code of a module; that of another rank where only the first line, a comment, differs."""
    body = source[source.index("\n") :]  # which keeps the numbers of the lines
    with parts.compiling:
        if body not in parts.codes:
            parts.codes[body] = compile(body, filename, "exec")
    return _under_name(parts.codes[body], filename)


def _under_name(code: CodeType, filename: str) -> CodeType:
    """The same code, and that of its functions, under another file name."""
    inner = (_under_name(c, filename) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=filename, co_consts=tuple(inner))
