"""The one tree of errors. A message reads: subject, both sides of the disagreement, then the way out."""

from __future__ import annotations

TYPE_CHECKING = False  # see `distgraph/__init__.py`
if TYPE_CHECKING:
    from collections.abc import Iterable


class DistGraphError(Exception):
    """Root of everything that distgraph raises for a mistake that is not a bug of its own."""


class GraphError(DistGraphError):
    """A serial program that makes no sense: shapes, dtypes, unknown ops, malformed graph text."""


class ShardingError(DistGraphError):
    """A layout that makes no sense: unknown axis, axis used twice, wrong mesh, contradictory annotations."""


class ResourceError(DistGraphError):
    """A cluster description that is malformed, or too small for what is asked of it."""


class InfeasibleError(DistGraphError):
    """No plan satisfies the constraints; the message says which constraint, on what, by how much."""


class RuntimeFault(DistGraphError):
    """A rank failed, a wait ran out of time, or data or a checkpoint does not fit the program."""


class NonFiniteError(RuntimeFault):
    """The loss, a gradient, a parameter or a state is nan or infinite."""


class OperandFault(RuntimeFault):
    """The numbers of an operand do not fit the op that reads them; names the rank, the task and the op."""


def installing(extra: str) -> str:
    """How to install an extra, for the end of a message.

    Example:
        >>> print(installing("mpi"))
        pip install "distgraph[mpi]", or in a clone pip install -e ".[mpi]"
    """
    return f'pip install "distgraph[{extra}]", or in a clone pip install -e ".[{extra}]"'


def first_of(items: Iterable[object], most: int = 4) -> str:
    """The first items of a list that may be long, for a message.

    Example:
        >>> first_of("abc"), first_of(range(9)), first_of([])
        ('a, b, c', '0, 1, 2, 3, ...', 'none')
    """
    texts = [str(item) for item in items]
    rest = ["..."] if len(texts) > most else []
    return ", ".join(texts[:most] + rest) or "none"
