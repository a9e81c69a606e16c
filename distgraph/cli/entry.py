"""Entry of the command line: Ctrl-C is clean from the first moment, also while modules are still loaded.

Python itself prints a traceback for Ctrl-C until `main` is called, so little is imported here.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # see `distgraph/__init__.py`
if TYPE_CHECKING:
    from types import FrameType, ModuleType
    from typing import Final, NoReturn

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""
_MESSAGE: Final = "error: interrupted\n"


def main() -> None:
    """Run a command; Ctrl-C is one line on standard error and exit code 130.

    An exception inside an import may be swallowed or printed with a traceback, so Ctrl-C ends the process
    directly while modules are loaded. It raises KeyboardInterrupt while the command runs. Nothing changes
    where SIGINT is ignored, as in a background job of a shell.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    try:
        if not ignored:
            signal.signal(signal.SIGINT, _end)
        application = load_application()
        if not ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        application.main()
    except KeyboardInterrupt:
        pass
    except SystemExit as ended:
        if ended.code != INTERRUPTED or not _interrupted(ended):
            raise
    else:
        return
    finally:
        if not ignored:  # an exception at the end of the interpreter would be printed with a traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stderr.write(_MESSAGE)
    raise SystemExit(INTERRUPTED)


def load_application() -> ModuleType:
    """The module of the application, after that of the command that was called."""
    from distgraph.cli import application  # noqa: PLC0415

    application.load_command(sys.argv[1:])
    return application


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal by ending the process."""
    os.write(2, _MESSAGE.encode())
    os._exit(INTERRUPTED)


def _interrupted(error: BaseException | None) -> bool:
    """Whether an exception was raised because of Ctrl-C, directly or as its cause or context."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
