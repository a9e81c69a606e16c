"""The interface of a transport, which every rank program uses, and the arithmetic that transports share.

A transport moves flat, C-contiguous arrays between ranks; it knows nothing of tensors, dims or meshes (those
live in `distgraph.runtime.transport.collectives`). There is one object per rank. Every operation but
`barrier` and the two for small Python objects returns at once with a `Request`. Until `wait` has returned,
the buffers belong to the transport: do not write to what is being sent or read what is being received.

Invariants:
* Operations on the same group are started in the same order by all its members. Operations of different
  groups are not ordered against each other. `send` and `recv` are matched by (source, tag), first come first
  served.
* While a rank waits for one operation, all others that it has started make progress, so starting early and
  waiting late is always safe.
* A reduction adds contributions by position in the group: ((x0 + x1) + x2) + ... . In-process and MPI ranks
  therefore produce the same bits, on every member, every time. 16-bit floats (f16, bf16) are accumulated in
  f32 and rounded once. (MPI ranks on several machines of which one has several members add up those of each
  machine first, in messages of every size. NCCL chooses its own order; it is deterministic for a given group
  and size but its bits differ.)
* Every wait has a limit: `time_limit` seconds without progress raise `RuntimeFault`, and so does the failure
  of another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from distgraph.errors import RuntimeFault
from distgraph.runtime.job.job_files import DEFAULT_TIME_LIMIT, TIMEOUT, setting_in_seconds
from distgraph.runtime.transport.watchdog import Activity

Array = Any
"""An array of NumPy, of CuPy, or of the namespace of a registered device."""
Group = tuple[int, ...]
"""Global ranks in order of position; contains the rank that uses it."""

REDUCTIONS: Final = ("sum", "max", "min", "prod")
_CHUNK: Final = 1 << 15
"""Elements accumulated at a time: f32 accumulators of 128 KiB stay in the second-level cache."""
_UFUNCS: Final[dict[str, np.ufunc]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}


_NAMESPACES: dict[type, Any] = {np.ndarray: np}


def register_arrays(xp: Any) -> None:
    """Declare an array namespace, whose arrays (`xp.ndarray`) are to be sent and received."""
    _NAMESPACES[xp.ndarray] = xp


def namespace_of(array: Array) -> Any:
    """The declared namespace of an array, or of a NumPy number."""
    return np if isinstance(array, np.generic) else _NAMESPACES[type(array)]


class Request(Protocol):
    """An operation that a transport has started."""

    def wait(self) -> None:
        """Return when the operation is complete on this rank.

        Raises:
            RuntimeFault: another rank failed, or nothing moved for the transport's time limit.
        """

    def done(self) -> bool:
        """Whether `wait` would return at once; drives the operation on, never blocks.

        Raises:
            RuntimeFault: as `wait`, except for the time limit.
        """


class Order(Protocol):
    """Orders work between the GPU streams of ranks: calls return before the GPU has done the work."""

    def mark(self) -> Any:
        """An event that happens when the work given to the calling thread's stream so far is done."""

    def after(self, mark: Any) -> None:
        """Make all later work of the calling thread's stream wait for the event `mark`."""


class Transport(Protocol):
    """Communication of one rank with the other ranks of its job; used by one thread at a time.

    `buffer`, `send` and `recv` are C-contiguous arrays whose dtype is the same on all members. `counts` are
    elements per member of the group, in group order, and may be 0.
    """

    @property
    def activity(self) -> Activity:
        """What this rank is doing; the code that runs tasks on it keeps the task up to date."""

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < size."""

    @property
    def size(self) -> int:
        """Number of ranks in the job."""

    def all_reduce(self, buffer: Array, op: str, group: Group) -> Request:
        """Replace `buffer` on every member by its reduction over the members: op is one of `REDUCTIONS`."""

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int], group: Group) -> Request:
        """Collect `counts[i]` elements of each member i in `recv` (sum(counts) elements), in group order."""

    def reduce_scatter(
        self, send: Array, recv: Array, counts: Sequence[int], op: str, group: Group
    ) -> Request:
        """Reduce `send` (sum(counts) elements) over the members; `recv` of member i gets the i-th stretch."""

    def all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Request:
        """Send stretch i of `send` to member i, and receive from member i into stretch i of `recv`."""

    def broadcast(self, buffer: Array, root: int, group: Group) -> Request:
        """Overwrite `buffer` with that of the global rank `root`, a member of the group."""

    def send(self, buffer: Array, dest: int, tag: int) -> Request:
        """Send to the global rank `dest` (may be this one); complete when the receiver has received it.

        Waiting for a send before the receiver has posted its `recv` may block: post receives first.
        """

    def recv(self, buffer: Array, source: int, tag: int) -> Request:
        """Receive exactly `buffer.size` elements from the global rank `source`; 0 <= tag < 2**28 - 2."""

    def barrier(self, group: Group | None = None) -> None:
        """Return when every member (default: every rank) has called it."""

    def gather_objects(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Collect one small picklable object per rank on `root`, in rank order; None elsewhere."""

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return the `obj` of `root` on every rank."""

    def progress(self) -> None:
        """Let the started operations make progress without blocking; call it between long computations.

        Raises:
            RuntimeFault: another rank failed.
        """

    def poll(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until `ready()` while all started operations make progress.

        Args:
            ready: whether the wait is over, such as by `Request.done` of several; called now and whenever
                something may have arrived.
            what: text of what is waited for.

        Raises:
            RuntimeFault: another rank failed, or nothing moved for the transport's time limit.
        """

    def abort(self, error: BaseException) -> None:
        """Make every other rank's waits raise `RuntimeFault` naming this rank and `error`.

        In-process it returns; between processes it ends this process with exit code 1.
        """

    def close(self) -> None:
        """Release the resources of the transport. No operation may be unfinished."""


MESSAGES: Final = frozenset(
    name
    for name, operation in vars(Transport).items()
    if getattr(operation, "__annotations__", {}).get("return") == "Request"
)
"""Names of the operations of a transport that move arrays."""


def time_limit(seconds: float | None) -> float:
    """Seconds without progress after which a wait fails: the argument, else DISTGRAPH_TIMEOUT, else 60.

    Raises:
        RuntimeFault: not a positive number.
    """
    if seconds is None:
        return setting_in_seconds(TIMEOUT, DEFAULT_TIME_LIMIT)
    if not seconds > 0:
        raise RuntimeFault(
            f"time limit of a transport: expected a positive number of seconds, got {seconds!r}"
        )
    return seconds


def stretches(counts: Sequence[int]) -> list[slice]:
    """Consecutive slices of the given lengths.

    >>> stretches([2, 0, 1])
    [slice(0, 2, None), slice(2, 2, None), slice(2, 3, None)]
    """
    ends = np.cumsum(np.asarray(counts, dtype=np.int64)).tolist()
    return [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]


def even_counts(total: int, parts: int) -> list[int]:
    """Lengths that split `total` into `parts` as evenly as can be.

    >>> even_counts(7, 3)
    [3, 2, 2]
    """
    quotient, rest = divmod(total, parts)
    return [quotient + (position < rest) for position in range(parts)]


def flat(array: Array, what: str) -> Array:
    """One-dimensional view of a C-contiguous array.

    Raises:
        RuntimeFault: the array is not C-contiguous, so a view does not exist.
    """
    if not array.flags.c_contiguous:
        raise RuntimeFault(
            f"{what}: array of shape {tuple(array.shape)} is not C-contiguous but a transport moves "
            "contiguous buffers; copy it first"
        )
    return array.reshape(-1)


def check_reduction(op: str, dtype: Any, what: str) -> None:
    """Check that a reduction is defined for a dtype.

    Raises:
        RuntimeFault: an unknown reduction, or the sum of booleans.
    """
    if op not in _UFUNCS:
        raise RuntimeFault(f"{what}: reduction {op!r} is unknown; use one of {', '.join(REDUCTIONS)}")
    if op == "sum" and np.dtype(dtype) == np.bool_:
        raise RuntimeFault(
            f"{what}: sum of bool has no bool result; use max (any), min (all) or an integer dtype"
        )


def check_counts(what: str, size: int, counts: Sequence[int], group: Group) -> None:
    """Check that the counts of the members add up to the size of the buffer.

    Raises:
        RuntimeFault: the number of counts differs from that of members, or their sum from `size`.
    """
    if len(counts) != len(group):
        raise RuntimeFault(f"{what}: {len(counts)} counts but the group {group} has {len(group)} members")
    if size != sum(counts):
        raise RuntimeFault(
            f"{what}: buffer has {size} elements but counts {list(counts)} sum to {sum(counts)}"
        )


def check_own(what: str, count: int, counts: Sequence[int], group: Group, rank: int) -> None:
    """Raise RuntimeFault unless a rank holds as many elements as its count says."""
    expected = counts[position_in(group, rank, what)]
    if count != expected:
        raise RuntimeFault(f"{what}: rank {rank} holds {count} elements but its count is {expected}")


def position_in(group: Group, rank: int, what: str) -> int:
    """Position of `rank` in `group`.

    Raises:
        RuntimeFault: it is not a member.
    """
    try:
        return group.index(rank)
    except ValueError:
        raise RuntimeFault(f"{what}: rank {rank} is not in the group {group}") from None


def accumulation_dtype(dtype: Any) -> Any:
    """In which sums of arrays of a dtype are accumulated: f32 for 16-bit floats, else the dtype itself."""
    return np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype


def reduce_in_order(pieces: Sequence[Array], op: str, out: Array) -> None:
    """Reduce equally long flat arrays by position into `out`, which may be one of them.

    The dtype of `out` is theirs, or, for a part of a sum, that in which they are accumulated, or the reverse.
    16-bit floats are accumulated in f32 and rounded once at the end. Overflow gives inf without a
    warning: whether a gradient that overflows is a mistake is for the program to decide.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        _reduce_in_order(pieces, op, out)


def _reduce_in_order(pieces: Sequence[Array], op: str, out: Array) -> None:
    ufunc, count = _UFUNCS[op], out.size
    if len(pieces) == 1:
        if out is not pieces[0]:
            out[...] = pieces[0]
        return
    dtype = accumulation_dtype(pieces[0].dtype)
    wide = out.dtype != dtype or pieces[0].dtype != dtype
    if len(pieces) == 2 and not wide:
        ufunc(pieces[0], pieces[1], out=out)
        return
    if not isinstance(out, np.ndarray):  # on a GPU: whole arrays at a time, there is no cache to stay in
        total = pieces[0].astype(dtype)
        for piece in pieces[1:]:
            ufunc(total, piece.astype(dtype) if wide else piece, out=total)
        out[...] = total
        return
    accumulator = np.empty(min(count, _CHUNK), dtype)
    for start in range(0, count, _CHUNK):
        part = slice(start, min(start + _CHUNK, count))
        total = accumulator[: part.stop - start]
        total[...] = pieces[0][part]
        for piece in pieces[1:]:
            ufunc(total, piece[part].astype(dtype) if wide else piece[part], out=total)
        out[part] = total
