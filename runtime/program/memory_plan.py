"""Memory planning for a rank program: liveness, aliases, and the reuse of buffers.

*In:* a rank program and the schedule. *Out:* a `Storage` (see `storage.py`).
*Invariant:* two values share memory only if one is a view of the other, or reuses its buffer at the op that
reads it last, or they are scratch values that are never alive at the same time. The operands and the result
of a collective are alive until it has been waited for. Memory that a message is sent from, under any name, is
written again only when that message has been received (`Storage.sent`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from distgraph.errors import RuntimeFault
from distgraph.ir.op_registry import lookup
from distgraph.passes.partition import LocalOp, LocalTask, RankProgram
from distgraph.runtime.program.collective_waits import place_waits
from distgraph.runtime.program.memory_packing import Block, pack_once
from distgraph.runtime.program.parts_of_values import outliving_slices, reduced_parts
from distgraph.runtime.program.ring_buffer_sizes import RankClocks, outstanding, rank_clocks, window
from distgraph.runtime.program.storage import (
    Part,
    Place,
    Slot,
    Storage,
    in_one_block,
    nbytes,
)
from distgraph.runtime.schedule.actor_group import AliveLimits
from distgraph.runtime.schedule.task_order import Schedule

_ALIGN = 64
_NO_LIMIT = 1 << 30


def plan_storage(program: RankProgram, schedule: Schedule, limits: AliveLimits | None = None) -> Storage:
    """Decide the storage of every value.

    Args:
        program: the program of the rank.
        schedule: recorded order of all tasks.
        limits: of actors, which run the tasks in any order within these limits; None for the recorded order.

    Raises:
        RuntimeFault: under this order the rank might wait forever to write a buffer that is being sent.
    """
    plan, clocks = planned(program), rank_clocks(schedule, program.parts, program.rank)
    storage = plan.under(clocks, limits)
    plan.verify(storage, clocks)
    return storage


def planned(program: RankProgram, *, in_parts: bool = True) -> StoragePlan:
    """The storage of every value, except the numbers of buffers in rings.

    Args:
        program: the program of the rank.
        in_parts: whether what is reduced and scattered may stay where it is in the operand.
    """
    plan = StoragePlan(program)
    plan.visit()
    copied, parts = outliving_slices(plan), reduced_parts(plan) if in_parts else {}
    if copied or parts:
        plan = StoragePlan(program, copied, parts)
        plan.visit()
    plan.join_accumulates()
    place_waits(plan)
    plan.classify()
    plan.place_updates()
    plan.assign_scratch()
    plan.storage.lives = {
        name: frozenset(task for task, _ in plan.uses[name])
        for name, slot in plan.slots.items()
        if slot.root == name and slot.kind in ("persistent", "ring")
    }
    plan.storage.sent = frozenset(root for root in plan.aliases if plan.messages(root))
    return plan


class StoragePlan:
    """The part of the storage plan that does not depend on the order of the tasks; see `planned`."""

    def __init__(
        self,
        program: RankProgram,
        copied: frozenset[str] = frozenset(),
        parts: Mapping[str, Part] | None = None,
    ) -> None:
        self.program = program
        self.tasks = {task.name: task for task in program.tasks}
        self.copied = copied  # slices with memory of their own
        self.viewed: dict[str, LocalOp] = {}  # view -> op that makes it
        self.slots: dict[str, Slot] = {}
        self.aliases: dict[str, list[str]] = {}  # root -> values in its memory
        self.storage = Storage(self.slots, parts=dict(parts or {}))
        self.made: dict[str, Place] = {}  # value -> place of its op
        self.uses: dict[str, list[Place]] = {}  # root -> places that read or write its memory
        self.readers: dict[str, list[Place]] = {}  # value -> places that read it
        self.copies: dict[str, list[Place]] = {}  # value -> places that copy a part of it to another mesh
        self.reader_count: dict[str, int] = {}
        self.sending: set[Place] = set()
        for task in program.tasks:
            for number, local in enumerate(task.ops):
                if local.mode in ("send", "exchange"):
                    self.sending.add((task.name, number))
                if local.mode != "recv" or local.attrs["copies"]:
                    for name in {v.name for v in local.op.operands}:
                        self.reader_count[name] = self.reader_count.get(name, 0) + 1
        for name in program.parts.sources_of(program.rank):
            self.put(name, Slot("source", name))

    def put(self, name: str, slot: Slot) -> None:
        """Give a value its slot."""
        if name in self.slots:
            self.aliases[self.slots[name].root].remove(name)
        self.slots[name] = slot
        self.aliases.setdefault(slot.root, []).append(name)

    def visit(self) -> None:
        """Find aliases and uses."""
        for task in self.program.tasks:
            self._visit(task)

    def _visit(self, task: LocalTask) -> None:
        for number, local in enumerate(task.ops):
            place = (task.name, number)
            for value in local.op.operands:
                if value.name in self.slots and local.mode != "recv":
                    self.uses.setdefault(self.slots[value.name].root, []).append(place)
                    self.readers.setdefault(value.name, []).append(place)
            if local.mode == "send":
                continue
            if local.mode == "recv" and local.attrs["copies"]:
                name = local.op.operands[0].name
                self.uses.setdefault(self.slots[name].root, []).append(place)
                self.copies.setdefault(name, []).append(place)
            for position, value in enumerate(local.op.results):
                self.made[value.name] = place
                alias = self.alias(local, position)
                if alias is None:
                    self.put(value.name, Slot("scratch", value.name))
                else:
                    root, contiguous = alias
                    self.put(value.name, Slot("view", root, contiguous))
                    self.viewed[value.name] = local
                self.uses.setdefault(self.slots[value.name].root, []).append(place)
            if in_one_block(local):
                self.storage.fused[local.op.name] = tuple(value.name for value in local.op.results)

    def alias(self, local: LocalOp, position: int) -> tuple[str, bool] | None:
        """(root, contiguous) of a result where it shares an operand's memory; None where it does not."""
        op = local.op
        if (
            op.results[position].name in self.program.graph.live_out
            or op.results[position].name in self.copied
        ):
            return None  # outputs have memory of their own
        declared = local.collective
        if declared is not None and declared.result_memory == "operand":
            operand = op.operands[position].name
            joined = in_one_block(local) and self._is_part_of_fused(operand)
            fits = self.is_only_reader(operand) and not joined
            return (self.slots[operand].root, True) if fits else None
        if op.results[position].name in self.storage.parts:
            return self.slots[op.operands[position].name].root, True
        if position > 0:
            return None
        view = lookup(op.kind).view if declared is None else declared.view
        if not view or (local.mode == "accumulate" and self.program.graph.micro_batches > 1):
            return None
        if declared is not None and not local.attrs.get("keep", True):
            return None  # a mask that holds the identity of the reduction
        source = self.slots[op.operands[0].name]
        if view == "contiguous":
            return (source.root, True) if source.contiguous else None
        if view == "strided" and source.kind == "source" and self.program.types[source.root][0] == ():
            return None  # a scalar is a number, not memory
        return source.root, view == "same" and source.contiguous

    def _is_part_of_fused(self, operand: str) -> bool:
        """Whether the memory of a value is in the block of a fused collective, or is not that value alone."""
        root = self.slots[operand].root
        return root in self._fused_roots() or nbytes(self.program, root) != nbytes(self.program, operand)

    def _fused_roots(self) -> set[str]:
        return {self.slots[name].root for names in self.storage.fused.values() for name in names}

    def is_only_reader(self, operand: str) -> bool:
        """Whether nothing else reads the memory of an operand, so that a collective may work in place."""
        root = self.slots[operand].root
        if self.slots[root].kind == "source" or not self.slots[operand].contiguous:
            return False
        maker = self.made[root]
        if self.tasks[maker[0]].ops[maker[1]].mode == "comm.mask":
            return False  # filled once, for all steps
        outputs = self.program.graph.live_out
        return all(self.reader_count.get(name, 0) == 1 and name not in outputs for name in self.aliases[root])

    def join_accumulates(self) -> None:
        """Let values that only an `accumulate` reads be computed directly into its buffer."""
        if self.program.graph.micro_batches == 1:
            return
        for task in self.program.tasks:
            for local in task.ops:
                if local.mode != "accumulate":
                    continue
                value, total = local.op.operands[0].name, local.op.result.name
                place = self.made.get(value, ("", 0))
                fits = (
                    place[0] == task.name
                    and self.slots[value].root == value
                    and self._same_type(value, total)
                )
                if not fits or self.slots[value].kind != "scratch" or not self.is_only_reader(value):
                    continue
                maker = task.ops[place[1]]
                if maker.mode == "compute" and len(maker.op.results) == 1 and not lookup(maker.op.kind).view:
                    self.storage.into[value] = total
                    if lookup(maker.op.kind).adds is not None:  # then it needs no buffer of its own
                        self.put(value, Slot("view", total))
                        self.uses[total] += self.uses.pop(value)

    def classify(self) -> None:
        """Make roots that another task uses persistent, or rings where there is one per micro-batch."""
        graph = self.program.graph
        per_micro = {task.name: task.per_micro for task in self.program.tasks}
        output_roots = {slot.root for name, slot in self.slots.items() if name in graph.live_out}
        fused_roots = self._fused_roots()
        for name, slot in self.slots.items():
            if slot.root != name or slot.kind != "scratch":
                continue
            task, number = self.made[name]
            local = self.tasks[task].ops[number]
            crosses = any(place[0] != task for place in self.uses.get(name, ())) or name in output_roots
            sent = any(send.mode == "send" for _, send in self._sends(name))  # an exchange ends in its task
            accumulated = local.mode == "accumulate"
            zeros = local.mode == "comm.mask"
            received = local.mode == "recv"  # may arrive while the task before is still running
            if not (crosses or sent or accumulated or zeros or received or name in fused_roots):
                continue
            once = not per_micro[task] or local.tail or accumulated or zeros
            if name in fused_roots and not once and graph.micro_batches > 1:
                raise RuntimeFault(
                    f"%{name} is reduced together with other tensors in every micro-batch, but only "
                    "reductions that run once a step can be fused; leave out the pass that fused them"
                )
            slot.kind = "persistent" if once or graph.micro_batches == 1 else "ring"

    def _sends(self, root: str) -> list[tuple[str, LocalOp]]:
        """(task, send) of all sends from the memory of a root."""
        places = self.uses.get(root, ())
        if self.sending.isdisjoint(places):  # most roots, of which there are many
            return []
        sends = [place for place in places if place in self.sending]
        return [(task, self.tasks[task].ops[number]) for task, number in sends]

    def messages(self, root: str) -> list[LocalOp]:
        """The sends from the memory of a root that are started in one task and may end in a later one."""
        return [local for _, local in self._sends(root) if local.mode == "send" and local.attrs["sends"]]

    def place_updates(self) -> None:
        """Compute updates in the memory of the old values, where nothing reads these afterwards."""
        updates = self.program.parts.updates
        updated = sorted((*updates[old], old) for old in self.slots if old in updates)
        targets = {new: old for _, new, old in updated}
        for name, old in targets.items():
            if name not in self.made or self.slots[name].root != name:
                continue
            task, number = self.made[name]
            if not self._may_be_written(old, self.tasks[task]):
                continue
            local = self.tasks[task].ops[number]
            declared = lookup(local.op.kind)
            readable = [local.op.operands[i].name for i in declared.inplace if i < len(local.op.operands)]
            later = [p for p in self.uses.get(old, ()) if not self._precedes(p, (task, number))]
            views = (v.name for v in local.op.operands if v.name != old and v.name in self.slots)
            viewed = any(self.slots[name].root == old for name in views)  # such as its transposition
            computed = local.mode == "compute" and old in readable and not viewed
            gathered = (  # the shards of a new value come together where the old one was
                local.collective is not None
                and local.collective.result_memory == "replaced"
                and all(self.slots[v.name].root != old for v in local.op.operands)
                and not self._sends(old)
            )
            written = (  # such as a narrow parameter, cast from its master copy
                local.mode == "compute"
                and not declared.view
                and old not in {self.slots[v.name].root for v in local.op.operands if v.name in self.slots}
                and not self._sends(old)
            )
            # the update waits for sends of the old value, which must not in turn wait for the update
            received = all(self._received_before(local, task) for local in self.messages(old))
            fits = not later and received and self._same_type(name, old)
            if (computed or gathered or written) and fits:
                self.storage.in_place[old] = name
                self.slots[name].kind, self.slots[name].root = "view", old

    def _may_be_written(self, old: str, task: LocalTask) -> bool:
        """Whether a task may write a parameter or state: a step that fails its check leaves them unchanged.

        Transient states, which every use fills anew, are written by any task that runs once a step.
        """
        if task.kind == "optimize":
            return True
        transient = "transient" in self.program.graph.producers[old].attrs
        return transient and (not task.per_micro or self.program.graph.micro_batches == 1)

    def _precedes(self, place: Place, other: Place) -> bool:
        """Whether an op has run for all micro-batches before another one runs, under every schedule."""
        if place[0] == other[0]:
            return place[1] <= other[1]
        return place[0] in self.program.parts.before[other[0]]

    def _received_before(self, sent: LocalOp, task: str) -> bool:
        """Whether a message has been received before a task begins, under every schedule."""
        _, target = self.program.parts.transfers[sent.op.name]
        return target in self.program.parts.before[task]

    def _same_type(self, first: str, second: str) -> bool:
        return self.program.types[first] == self.program.types[second]

    def assign_scratch(self) -> None:
        """Pack the values that are dead at the end of their task, some into buffers of values that die."""
        blocks: list[Block] = []
        owner: dict[str, int] = {}  # scratch root -> number of its block
        begin = 0  # of the task: they run one after the other
        last_uses = self._last_uses()
        for task in self.program.tasks:
            last = last_uses[task.name]
            for number, local in enumerate(task.ops):
                for value in local.op.results if local.mode != "send" else ():
                    if value.name not in last or self.made[value.name] != (task.name, number):
                        continue
                    donor = self._donor(local, value.name, number, last)
                    if donor is None:
                        owner[value.name] = len(blocks)
                        size = -(-max(nbytes(self.program, value.name), 1) // _ALIGN) * _ALIGN
                        blocks.append(Block(size, begin + number, begin + last[value.name]))
                    else:
                        owner[value.name] = owner[donor]
                        blocks[owner[donor]].stop = begin + last[value.name]
            begin += len(task.ops) + 1
        self.storage.scratch = pack_once(self.program.parts, blocks)
        for name, block in owner.items():
            self.slots[name].offset = blocks[block].offset

    def _last_uses(self) -> dict[str, dict[str, int]]:
        """Task -> scratch root that it uses -> number of the op that uses it last."""
        last_uses: dict[str, dict[str, int]] = {task.name: {} for task in self.program.tasks}
        for root, places in self.uses.items():
            if root in self.slots and self.slots[root].kind == "scratch":
                for task, number in places:
                    last_uses[task][root] = max(number, last_uses[task].get(root, 0))
        return last_uses

    def _donor(self, local: LocalOp, name: str, number: int, last: Mapping[str, int]) -> str | None:
        """Root of an operand whose buffer the first result may reuse, because this op reads it last."""
        if local.mode != "compute" or local.op.results[0].name != name:
            return None
        roots = [self.slots[v.name].root for v in local.op.operands]
        names = {v.name for v in local.op.operands}
        for position in lookup(local.op.kind).inplace:
            if position >= len(roots):
                continue
            operand, root = local.op.operands[position].name, roots[position]
            slot = self.slots[root]
            shared = len({n for n in names if self.slots[n].root == root}) > 1
            fits = self._same_type(operand, name) and nbytes(self.program, root) == nbytes(self.program, name)
            ends = slot.kind == "scratch" and last.get(root) == number
            if ends and fits and not shared and self.slots[operand].contiguous:
                return root
        return None

    def under(self, clocks: RankClocks, limits: AliveLimits | None = None) -> Storage:
        """The storage under a schedule, with the number of buffers of each ring.

        A ring has as many buffers as micro-batches are alive at the same time, or may be within the limits.
        """
        rings = dict[str, int]()
        micro = self.program.graph.micro_batches
        count = 1 + max((int(places.max()) for places in clocks.places.values()), default=0)
        received = self.program.received()
        depths: dict[
            tuple[frozenset[str], bool], int
        ] = {}  # many values are alive between the same few tasks
        for root, slot in self.slots.items():
            if slot.kind != "ring" or slot.root != root:
                continue
            tasks, posted_early = frozenset(task for task, _ in self.uses[root]), root in received
            if (tasks, posted_early) not in depths:
                touched = np.stack([clocks.places[task] for task in tasks if task in clocks.places])
                first = np.where(touched < 0, count, touched).min(axis=0)
                depths[tasks, posted_early] = window(first - posted_early, touched.max(axis=0))
            rings[root] = depths[tasks, posted_early]
            if self._sends(root):
                rings[root] = min(micro, max(rings[root], *self._send_depths(root, clocks, posted_early)))
            if limits is not None:
                rings[root] = min(micro, max(rings[root], self._depth_within(root, limits, posted_early)))
        return replace(self.storage, rings=rings)

    def _depth_within(self, root: str, limits: AliveLimits, posted_early: bool) -> int:
        """The number of buffers with which a ring suffices in every order within the limits."""
        writer = self.made[root][0]
        targets = {self.program.parts.transfers[local.op.name][1] for local in self.messages(root)}
        users = {task for task, _ in self.uses[root]} - {writer}
        pairs = [(writer, task) for task in (*users, *targets)]
        if posted_early:
            return max(limits.posts.get(pair, _NO_LIMIT) for pair in (*pairs, (writer, writer)))
        alive = {**limits.within, **limits.across}
        return max((alive.get(pair, _NO_LIMIT) for pair in pairs), default=1)

    def verify(self, storage: Storage, clocks: RankClocks) -> None:
        """Compare the rings with the posts of all receives; `ring_buffer_sizes.py` states what that proves.

        Raises:
            RuntimeFault: a buffer is written before the receive of the message sent from it is posted.
        """
        for task, transfer, depth, posting in self.sent_rings(storage):
            written = (clocks.posts if posting else clocks.starts)[task]
            late = np.flatnonzero(clocks.receiver_posts[transfer][:-depth] + posting > written[depth:])
            if late.size:
                micro, target = int(late[0]), self.program.parts.transfers[transfer][1]
                raise RuntimeFault(
                    f"rank {self.program.rank}: {task} of micro-batch {micro + depth} writes again what it "
                    f"sends before {target} is to receive %{transfer} of micro-batch {micro}; {depth} "
                    "buffers are too few, report it with the program and its schedule"
                )

    def sent_rings(self, storage: Storage) -> list[tuple[str, str, int, bool]]:
        """(task that writes the ring, transfer, buffers, whether by a receive) of each send from a ring."""
        rings = []
        for root in sorted(storage.sent & storage.rings.keys()):
            task, number = self.made[root]
            posting = self.tasks[task].ops[number].mode == "recv"
            rings += [
                (task, message.op.name, storage.rings[root], posting) for message in self.messages(root)
            ]
        return rings

    def _send_depths(self, root: str, clocks: RankClocks, posted_early: bool) -> tuple[int, int]:
        """Numbers of buffers that sends from a root need: to be ahead of the receiver, and to avoid deadlock.

        A stage may begin a micro-batch earlier than the receiver by as many places of the schedule as there
        are stages between them. A buffer that is itself received into is needed one place earlier.
        """
        parts, attrs = self.program.parts, self.program.graph.attrs
        reach = (
            abs(parts.stage_of[attrs[local.op.result.name].mesh.rank_set] - parts.stages[task])
            for task, local in self._sends(root)
        )
        task = self.made[root][0]
        written = (clocks.posts if posted_early else clocks.starts)[task]
        needed = (
            outstanding(written, clocks.receiver_posts[local.op.name], posting=posted_early)
            for local in self.messages(root)
        )
        return 1 + posted_early + max(1, *reach), max(needed, default=1)
