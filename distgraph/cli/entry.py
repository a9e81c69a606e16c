"""Entry of the command line: Ctrl-C is clean from the first moment, also while modules are still loaded."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Final

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""


def main() -> None:
    """Run a command; Ctrl-C is one line on standard error and exit code 130."""
    try:
        load_application().main()
    except KeyboardInterrupt:
        pass
    except SystemExit as ended:
        if ended.code != INTERRUPTED or not _interrupted(ended):
            raise
    else:
        return
    sys.stderr.write("error: interrupted\n")
    raise SystemExit(INTERRUPTED)


def load_application() -> ModuleType:
    """The module of the application. It loads all of distgraph, which takes a second."""
    from distgraph.cli import application  # noqa: PLC0415

    return application


def _interrupted(error: BaseException | None) -> bool:
    """Whether an exception was raised because of Ctrl-C, directly or as its cause or context."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
