"""Checked runs: each value is compared with what was written when it is read; dead buffers hold garbage.

*In:* `DISTGRAPH_CHECK=1` in the environment of all ranks.
*Out:* the numbers of a plain run, or a `RuntimeFault` that names rank, task, value and micro-batch.
*Invariant:* without the check, the generated code has nothing of it and no time is spent on it.

Three things are checked.

    values      The checksum of a value is taken when the value has been written, and compared whenever it is
                read. So a buffer that is reused too early, for another value or micro-batch, is detected.
    buffers     When the life of a buffer ends by the memory plan, all its bits are set, which is NaN in every
                floating type and -1 in integers. So a read after the end gives garbage in every run.
    messages    The checksum of a message is the same when its send is complete as at its start. It is sent
                along, and the receiver compares it with the received data. The buffer of a receive is filled
                with garbage at its start. So is the buffer of the result of a collective, which must hold the
                same garbage when the collective is complete; its operands are compared like a sent message.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distgraph.errors import RuntimeFault
from distgraph.errors.arguments import switch_of
from distgraph.passes.partition import LocalOp, RankProgram
from distgraph.runtime.program.codegen import Writer
from distgraph.runtime.program.compiled_task import Arena, CompiledTask
from distgraph.runtime.program.identifiers import literal
from distgraph.runtime.program.storage import Storage, is_started
from distgraph.runtime.transport.transport import Array, Group, Request, Transport, namespace_of
from distgraph.runtime.transport.watchdog import MESSAGE_TAGS

_Verify = Callable[[], None]
_DEAD = 0xFF
_VARIABLE = "DISTGRAPH_CHECK"


def check_enabled() -> bool:
    """Whether DISTGRAPH_CHECK enables checked runs.

    Raises:
        RuntimeFault: DISTGRAPH_CHECK is neither 0 nor 1.
    """
    return switch_of(_VARIABLE, RuntimeFault)


class BufferCheck:
    """Checks the values and buffers of one rank, which runs (task, micro-batch) pairs in any order."""

    def __init__(
        self, program: RankProgram, storage: Storage, arena: Arena, runs: Sequence[tuple[str, int]]
    ) -> None:
        self.rank, self._arena, self._storage = program.rank, arena, storage
        self._sums: dict[tuple[str, int], int] = {}
        self._late: list[tuple[str, int]] = []  # dead buffers from which a message is still being sent
        self._scratch = [
            arena.fixed[name]
            for name, slot in storage.slots.items()
            if slot.kind == "scratch" and slot.root == name
        ]
        self._ends = self._lives(program)
        self._runs = Counter(
            (tasks, in_ring, micro if in_ring else 0)
            for tasks, in_ring in self._ends
            for task, micro in runs
            if task in tasks
        )
        self._left = self._runs.copy()

    def _lives(self, program: RankProgram) -> dict[tuple[frozenset[str], bool], list[str]]:
        """(tasks that use a buffer, whether it is a ring) -> buffers that are dead when all have run."""
        filled = {local.op.result.name for local in program.ops if local.mode == "comm.mask"}
        outputs = {
            self._storage.slots[name].root for name in program.graph.live_out if name in self._storage.slots
        }
        buffers: dict[tuple[frozenset[str], bool], list[str]] = {}
        for root, tasks in self._storage.lives.items():
            if root not in filled and root not in outputs:
                buffers.setdefault((tasks, root in self._storage.rings), []).append(root)
        return buffers

    def begin(self) -> None:
        """Begin a step."""
        self._sums.clear()
        self._left = self._runs.copy()

    def wrote(self, value: str, micro: int, array: Any) -> None:
        """Take the checksum of a value that has been written."""
        self._sums[value, micro] = checksum(array)

    def reads(self, task: str, m: int, value: str, micro: int, array: Any) -> None:
        """Compare a value that is about to be read with its checksum.

        The first read takes the checksum of a value that was written before the step.
        """
        now = checksum(array)
        if self._sums.setdefault((value, micro), now) != now:
            raise RuntimeFault(
                f"rank {self.rank}: %{value} was overwritten before {task} of micro-batch {m} read it; this "
                "is a mistake in the memory plan of distgraph, please report it with the program"
            )

    def messages(self, comm: Transport, task: str, value: str, m: int) -> Transport:
        """A checked transport for the messages of a value."""
        where = f"rank {self.rank}: %{value} in {task} of micro-batch {m}"
        return CheckedTransport(comm, where)

    def filling_dead_buffers(self, task: CompiledTask) -> CompiledTask:
        """The task, which also fills the buffers with garbage whose life ends with it."""

        def with_ends(run: Callable[[int], None]) -> Callable[[int], None]:
            def run_and_end(m: int) -> None:
                run(m)
                self._after(task.name, m)

            return run_and_end

        return replace(task, body=with_ends(task.body), last=with_ends(task.last))

    def _after(self, task: str, m: int) -> None:
        for array in self._scratch:
            _fill_with_garbage(array)
        for root, slot in self._dead_after(task, m):
            if any(slot == number and some for number, some in enumerate(self._arena.sends.get(root, ()))):
                self._late.append((root, slot))
            else:
                self._end(root, slot)

    def _dead_after(self, task: str, m: int) -> Iterator[tuple[str, int]]:
        """Buffers whose life ends with this run, as (root, number in its ring)."""
        for (tasks, in_ring), roots in self._ends.items():
            if task not in tasks:
                continue
            life = tasks, in_ring, m if in_ring else 0
            self._left[life] -= 1
            if not self._left[life]:
                for root in roots:
                    yield root, m % self._storage.rings[root] if in_ring else 0

    def end(self) -> None:
        """End a step, in which all sends have completed."""
        for root, slot in self._late:
            self._end(root, slot)
        self._late.clear()

    def _end(self, root: str, slot: int) -> None:
        arena = self._arena
        _fill_with_garbage(arena.rings[root][slot] if root in arena.rings else arena.fixed[root])


class CheckedWriter(Writer):
    """Writes tasks that report their reads and writes to a `BufferCheck`."""

    def __init__(self, check: BufferCheck, *arguments: Any) -> None:
        super().__init__(*arguments)
        for word, method in (("wrote", check.wrote), ("reads", check.reads), ("messages", check.messages)):
            self.bound[word] = method
            self.identifiers.once(word)

    def comm(self, value: str) -> str:
        return f"messages(comm, {literal(self.task)}, {literal(value)}, m)"

    def emit(self, local: LocalOp, *, last: bool) -> None:
        """See `Writer`; it also reports operands before the op and results after it."""
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
        self.line(f"{condition}wrote({literal(value)}, {self.at(value)}, {self.read(value)})")


class CheckedTransport:
    """A transport that checks every message at the start and end of its send and at its receiver.

    Checksums are sent as messages of their own, with the tag of the checked message less `MESSAGE_TAGS`.
    Every error text begins with `where`.
    """

    def __init__(self, transport: Transport, where: str) -> None:
        self._transport, self._where = transport, where

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, buffer: Array, dest: int, tag: int) -> Request:
        sent_sum = np.array([checksum(buffer)], np.int64)
        sum_request = self._transport.send(_like(buffer, sent_sum), dest, tag - MESSAGE_TAGS)
        request = self._transport.send(buffer, dest, tag)
        return _Checked([request, sum_request], self._unchanged(buffer, f"is sent to rank {dest}"))

    def recv(self, buffer: Array, source: int, tag: int) -> Request:
        _fill_with_garbage(buffer)
        sent_sum = _like(buffer, np.zeros(1, np.int64))
        sum_request = self._transport.recv(sent_sum, source, tag - MESSAGE_TAGS)
        request = self._transport.recv(buffer, source, tag)

        def verify() -> None:
            if int(sent_sum[0]) != checksum(buffer):
                raise RuntimeFault(
                    f"{self._where}: what arrived from rank {source} is not what it sent: checksum "
                    f"{checksum(buffer):08x}, sent with {int(sent_sum[0]):08x}; look at the network, or "
                    "report it with the program"
                )

        return _Checked([request, sum_request], verify)

    def all_reduce(self, buffer: Array, op: str, group: Group) -> Request:
        result, copy_result = self._separate_result(buffer, f"is reduced in group {group}", buffer.copy())
        return _Checked([self._transport.all_reduce(result, op, group)], copy_result)

    def all_gather(self, send: Array, recv: Array, counts: Sequence[int], group: Group) -> Request:
        what = f"is gathered in group {group}"
        unchanged, (result, copy_result) = self._unchanged(send, what), self._separate_result(recv, what)
        return _Checked([self._transport.all_gather(send, result, counts, group)], unchanged, copy_result)

    def reduce_scatter(
        self, send: Array, recv: Array, counts: Sequence[int], op: str, group: Group
    ) -> Request:
        what, sent = f"is reduced in group {group}", send.copy()  # the result may be a part of it
        (result, copy_result), unchanged = self._separate_result(recv, what), self._unchanged(send, what)
        request = self._transport.reduce_scatter(sent, result, counts, op, group)
        return _Checked([request], unchanged, copy_result)

    def all_to_all(
        self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Request:
        what = f"is exchanged in group {group}"
        unchanged, (result, copy_result) = self._unchanged(send, what), self._separate_result(recv, what)
        request = self._transport.all_to_all(send, result, send_counts, recv_counts, group)
        return _Checked([request], unchanged, copy_result)

    def _separate_result(self, buffer: Array, what: str, start: Array | None = None) -> tuple[Array, _Verify]:
        """Memory for a result, and a function that copies it to its buffer if nothing else wrote there."""
        result = buffer.copy() if start is None else start
        _fill_with_garbage(buffer)
        unchanged = self._unchanged(buffer, what)

        def copy_result() -> None:
            unchanged()
            buffer[...] = result

        return result, copy_result

    def _unchanged(self, buffer: Array, what: str) -> _Verify:
        """A function that compares the buffer with its present contents."""
        before = checksum(buffer)

        def verify() -> None:
            if checksum(buffer) != before:
                raise RuntimeFault(
                    f"{self._where}: its buffer was written while it {what}; this is a mistake in the memory "
                    "plan of distgraph, please report it with the program"
                )

        return verify


class _Checked:
    """Requests with functions that verify the data when they are complete. See `Request`."""

    __slots__ = ("_requests", "_verify")

    def __init__(self, requests: Sequence[Request], *verify: _Verify) -> None:
        self._requests, self._verify = requests, verify

    def wait(self) -> None:
        for request in self._requests:
            request.wait()
        for verify in self._verify:
            verify()

    def done(self) -> bool:
        return all(request.done() for request in self._requests)


def checksum(array: Any) -> int:
    """CRC-32 of the bytes of an array (of the host or of a device) or of a number."""
    host = array if isinstance(array, np.ndarray) or not hasattr(array, "get") else array.get()
    return zlib.crc32(np.ascontiguousarray(host).reshape(-1).view(np.uint8).data)


def _fill_with_garbage(array: Any) -> None:
    if array.flags.c_contiguous and array.size:
        array.reshape(-1).view(np.uint8)[...] = _DEAD


def _like(array: Any, host: np.ndarray) -> Any:
    """A host array, or its copy in the memory of another array where that is on a device."""
    return host if isinstance(array, np.ndarray) else namespace_of(array).asarray(host)
