"""A checked run: every value is what was computed or sent when it is read, and a dead buffer holds garbage.

*In:* `DISTGRAPH_CHECK=1` in the environment of all ranks, or `Worker(checked=True)`.
*Out:* the numbers of a plain run, or a `RuntimeFault` that names rank, task, value and micro-batch.
*Invariant:* nothing of it is in the generated code, and nothing is done, where the check is off.

Three things are checked.

    values      A checksum of each value is taken when it has been written, and compared whenever it is read:
                a buffer that was given to another value, or to a later micro-batch, too early is seen.
    buffers     When the life of a buffer ends by the memory plan, all its bits are set, which is NaN in every
                floating type and -1 in integers: what is read after its end is garbage in every run.
    messages    What is sent has the same checksum when the send is complete as it had at its start. The
                checksum travels with it, and the receiver compares it with what arrived. The buffer of a
                receive is garbage from its start. So is that of the result of a collective, and must still be
                the same garbage when it is complete; its operands are compared like what is sent.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distgraph.errors import RuntimeFault
from distgraph.passes.partition import LocalOp, RankProgram
from distgraph.runtime.program.codegen import Arena, CompiledTask, Writer
from distgraph.runtime.program.identifiers import literal
from distgraph.runtime.program.memory_plan import Storage, is_started
from distgraph.runtime.transport.transport import Array, Group, Request, Transport
from distgraph.runtime.transport.watchdog import MESSAGE_TAGS

_Verify = Callable[[], None]
_DEAD = 0xFF
_VARIABLE = "DISTGRAPH_CHECK"


def check_wanted() -> bool:
    """Whether the environment asks for checked runs.

    Raises:
        RuntimeFault: DISTGRAPH_CHECK is something else than 0 or 1.
    """
    text = os.environ.get(_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise RuntimeFault(f"{_VARIABLE} is {text!r}, expected 1 to check buffers and messages, or 0")
    return text == "1"


class BufferCheck:
    """The check of one rank.

    Args:
        program, storage, arena: of the rank.
        order: (task, micro-batch) pairs that it runs.
    """

    def __init__(
        self, program: RankProgram, storage: Storage, arena: Arena, order: Sequence[tuple[str, int]]
    ) -> None:
        self.rank, self._arena, self._storage = program.rank, arena, storage
        self._sums: dict[tuple[str, int], int] = {}
        self._late: list[tuple[str, int]] = []  # dead buffers from which something is still sent
        self._scratch = [
            arena.fixed[name]
            for name, slot in storage.slots.items()
            if slot.kind == "scratch" and slot.root == name
        ]
        self._dead = self._ends(program, order)

    def _ends(
        self, program: RankProgram, order: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], list[tuple[str, int]]]:
        """(task, micro-batch) -> buffers whose life ends with it, as (root, number in its ring)."""
        filled = {
            local.op.result.name for task in program.tasks for local in task.ops if local.mode == "comm.mask"
        }
        left = {self._storage.slots[name].root for name in program.graph.kept if name in self._storage.slots}
        last: dict[frozenset[str], dict[int, tuple[str, int]]] = {}  # micro-batch -> last task to touch it
        for tasks in set(self._storage.lives.values()):
            last[tasks] = {run[1]: run for run in order if run[0] in tasks}
        ends = {tasks: [run for run in order if run[0] in tasks][-1:] for tasks in last}
        found: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for root, tasks in self._storage.lives.items():
            if root in filled or root in left:
                continue
            depth = self._storage.rings.get(root, 0)
            for run in last[tasks].values() if depth else ends[tasks]:
                found.setdefault(run, []).append((root, run[1] % depth if depth else 0))
        return found

    def begin(self) -> None:
        """A step begins."""
        self._sums.clear()

    def wrote(self, value: str, micro: int, array: Any) -> None:
        """A value has been written."""
        self._sums[value, micro] = checksum(array)

    def reads(self, task: str, m: int, value: str, micro: int, array: Any) -> None:
        """A value is about to be read; of one that is there before the step, the first read takes the sum."""
        found = checksum(array)
        if self._sums.setdefault((value, micro), found) != found:
            raise RuntimeFault(
                f"rank {self.rank}: %{value} was overwritten before {task} of micro-batch {m} read it; this "
                "is a mistake in the memory plan of distgraph, please report it with the program"
            )

    def messages(self, comm: Transport, task: str, value: str, m: int) -> Transport:
        """The transport for the messages of a value."""
        where = f"rank {self.rank}: %{value} in {task} of micro-batch {m}"
        return CheckedTransport(comm, where)

    def watched(self, task: CompiledTask) -> CompiledTask:
        """The task, with what is dead behind it made garbage."""

        def watch(run: Callable[[int], None]) -> Callable[[int], None]:
            def watched(m: int) -> None:
                run(m)
                self._after(task.name, m)

            return watched

        return replace(task, body=watch(task.body), last=watch(task.last))

    def _after(self, task: str, m: int) -> None:
        for array in self._scratch:
            _kill(array)
        for root, slot in self._dead.get((task, m), ()):
            if any(slot == number and some for number, some in enumerate(self._arena.sends.get(root, ()))):
                self._late.append((root, slot))
            else:
                self._end(root, slot)

    def end(self) -> None:
        """The step is over: all that was sent has left."""
        for root, slot in self._late:
            self._end(root, slot)
        self._late.clear()

    def _end(self, root: str, slot: int) -> None:
        arena = self._arena
        _kill(arena.rings[root][slot] if root in arena.rings else arena.fixed[root])


class CheckedWriter(Writer):
    """Writes tasks that tell a `BufferCheck` what they read and write.

    Args:
        check: that is told.
        arguments: of a `Writer`.
    """

    def __init__(self, check: BufferCheck, *arguments: Any) -> None:
        super().__init__(*arguments)
        for word, thing in (("wrote", check.wrote), ("reads", check.reads), ("messages", check.messages)):
            self.bound[word] = thing
            self.identifiers.once(word)

    def comm(self, value: str) -> str:
        """See `Writer`."""
        return f"messages(comm, {literal(self.task)}, {literal(value)}, m)"

    def emit(self, local: LocalOp, *, last: bool) -> None:
        """See `Writer`; with what is read before, and what was written behind."""
        op, into = local.op, self.storage.into
        for value in op.operands if local.mode != "recv" or local.attrs["copies"] else ():
            if value.name not in into:
                self._reads(value.name)
        total = into.get(op.result.name) if len(op.results) == 1 else None
        super().emit(local, last=last)
        if local.mode == "send" or is_started(local) or total is not None:
            if local.mode == "recv" and not local.attrs["recvs"]:
                self.arrived(op.result.name)
            return
        for value in op.results:
            self.arrived(value.name)

    def _reads(self, value: str) -> None:
        name = self.read(value)
        self.line(f"reads({literal(self.task)}, m, {literal(value)}, {self.at(value)}, {name})")

    def arrived(self, value: str, condition: str = "") -> None:
        """See `Writer`."""
        self.line(f"{condition}wrote({literal(value)}, {self.at(value)}, {self.read(value)})")


class CheckedTransport:
    """A transport that compares what is sent, at its start, at its end and where it arrives.

    Checksums travel as messages of their own, whose tags are those of the messages themselves without
    `MESSAGE_TAGS`.

    Args:
        transport: that does the work.
        where: begins every error.
    """

    def __init__(self, transport: Transport, where: str) -> None:
        self._transport, self._where = transport, where

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, buffer: Array, dest: int, tag: int) -> Request:
        """See `Transport`."""
        own = np.array([checksum(buffer)], np.int64)
        label = self._transport.send(_like(buffer, own), dest, tag - MESSAGE_TAGS)
        request = self._transport.send(buffer, dest, tag)
        return _Checked([request, label], self._unchanged(buffer, f"is sent to rank {dest}"))

    def recv(self, buffer: Array, source: int, tag: int) -> Request:
        """See `Transport`."""
        _kill(buffer)
        told = _like(buffer, np.zeros(1, np.int64))
        label = self._transport.recv(told, source, tag - MESSAGE_TAGS)
        request = self._transport.recv(buffer, source, tag)

        def verify() -> None:
            if int(told[0]) != checksum(buffer):
                raise RuntimeFault(
                    f"{self._where}: what arrived from rank {source} is not what it sent: checksum "
                    f"{checksum(buffer):08x}, sent with {int(told[0]):08x}; look at the network, or report "
                    "it with the program"
                )

        return _Checked([request, label], verify)

    def all_reduce(self, buffer: Array, op: str, group: Group) -> Request:
        """See `Transport`."""
        result, landed = self._landing(buffer, f"is reduced in group {group}", buffer.copy())
        return _Checked([self._transport.all_reduce(result, op, group)], landed)

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int], group: Group) -> Request:
        """See `Transport`."""
        what = f"is gathered in group {group}"
        unchanged, (result, landed) = self._unchanged(send, what), self._landing(recv, what)
        return _Checked([self._transport.all_gather(send, result, counts, group)], unchanged, landed)

    def reduce_scatter(
        self, send: Array, recv: Array, counts: Sequence[int], op: str, group: Group
    ) -> Request:
        """See `Transport`."""
        what = f"is reduced in group {group}"
        unchanged, (result, landed) = self._unchanged(send, what), self._landing(recv, what)
        request = self._transport.reduce_scatter(send, result, counts, op, group)
        return _Checked([request], unchanged, landed)

    def all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Request:
        """See `Transport`."""
        what = f"is exchanged in group {group}"
        unchanged, (result, landed) = self._unchanged(send, what), self._landing(recv, what)
        request = self._transport.all_to_all(send, result, send_counts, recv_counts, group)
        return _Checked([request], unchanged, landed)

    def _landing(self, buffer: Array, what: str, start: Array | None = None) -> tuple[Array, _Verify]:
        """Memory for a result, and what brings it to its buffer if that is still as dead as it is now."""
        result = buffer.copy() if start is None else start
        _kill(buffer)
        unchanged = self._unchanged(buffer, what)

        def landed() -> None:
            unchanged()
            buffer[...] = result

        return result, landed

    def _unchanged(self, buffer: Array, what: str) -> _Verify:
        """A comparison with the contents of now."""
        before = checksum(buffer)

        def verify() -> None:
            if checksum(buffer) != before:
                raise RuntimeFault(
                    f"{self._where}: its buffer was written while it {what}; this is a mistake in the memory "
                    "plan of distgraph, please report it with the program"
                )

        return verify


class _Checked:
    """Requests with what is compared when they are complete. See `Request`."""

    __slots__ = ("_requests", "_verify")

    def __init__(self, requests: Sequence[Request], *verify: _Verify) -> None:
        self._requests, self._verify = requests, verify

    def wait(self) -> None:
        """See `Request`."""
        for request in self._requests:
            request.wait()
        for verify in self._verify:
            verify()

    def done(self) -> bool:
        """See `Request`."""
        return all(request.done() for request in self._requests)


def checksum(array: Any) -> int:
    """CRC-32 of the elements of an array of the host or of a GPU; of a number, of its bytes."""
    host = array if isinstance(array, np.ndarray) or not hasattr(array, "get") else array.get()
    return zlib.crc32(np.ascontiguousarray(host).reshape(-1).view(np.uint8).data)


def _kill(array: Any) -> None:
    if array.flags.c_contiguous and array.size:
        array.reshape(-1).view(np.uint8)[...] = _DEAD


def _like(array: Any, host: np.ndarray) -> Any:
    """A host array where another one lies."""
    if isinstance(array, np.ndarray):
        return host
    there = array.__class__(host.shape, host.dtype)
    there.set(host)
    return there
