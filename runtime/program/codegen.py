"""Code generation: each task as straight-line Python over one array namespace, with its buffers bound.

    def backward_s0_last(m):                         # mesh(dp=2, tp=2) rank 3
        einsum_12(x_3, g_9, out=dw_14)               # %14 : f32[128, 256] partial(dp)       mlp.py:31
        work_14 = all_reduce_start(comm, dw_14, group_dp, 'sum', dw_14)
        ...
        work_14.wait()

`CompiledTask.source` holds the source, so that it can be read, dumped and debugged.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distgraph.ir.collective_registry import WIRE
from distgraph.ir.dtypes import to_numpy
from distgraph.ir.graph import Op
from distgraph.ir.op_registry import lookup
from distgraph.ir.printer import name_text
from distgraph.kernels._common import bound_kernel
from distgraph.kernels._elementwise import ufunc_of
from distgraph.passes.partition import LocalOp, LocalTask, RankProgram
from distgraph.runtime.program.compiled_task import Arena
from distgraph.runtime.program.fixed_calls import Call, call_of_several, direct_call, fixed
from distgraph.runtime.program.identifiers import Identifiers, commented, literal
from distgraph.runtime.program.storage import Storage, in_one_block, is_fused, is_started
from distgraph.runtime.transport import collectives
from distgraph.runtime.transport.transport import Transport


class Writer:
    """Writes the tasks of a rank as Python."""

    def __init__(
        self, program: RankProgram, storage: Storage, arena: Arena, transport: Transport | None, xp: Any
    ) -> None:
        self.program, self.storage, self.arena, self.xp = program, storage, arena, xp
        self.transport = transport
        self.makers = program.makers()
        self.bound: dict[str, Any] = {"comm": transport, "xp": xp, "copyto": xp.copyto}
        self.bound |= {"feeds": arena.feeds, "pending": arena.pending}
        self.bindings: dict[tuple[str, int], str] = {}  # (hint, id of the object) -> name
        self.identifiers = Identifiers([*self.bound, "m", "work"])
        self.ready: set[str] = set()
        self.foreign: dict[str, list[str]] = {}
        self.lines: list[str] = []
        self.called: list[str] = []  # texts of further functions of the task, which its lines call
        self.micro = program.graph.micro_batches
        self.task = ""
        self.together: list[Call] = []  # ops to be run by one call, which is not written yet

    def name(self, value: str) -> str:
        """Python name of a value."""
        return self.identifiers.of(("value", value), value)

    def work(self, value: str) -> str:
        """Python name of the started collective that produces a value."""
        return self.identifiers.of(("work", value), f"work_{value}")

    def bind(self, hint: str, thing: Any) -> str:
        """A global of the task for a Python object."""
        name_of_thing = self.bindings.get((hint, id(thing)))
        if name_of_thing is not None and self.bound.get(name_of_thing) is thing:
            return name_of_thing
        name = self.identifiers.once(hint)
        self.bound[name] = thing
        self.bindings[hint, id(thing)] = name
        return name

    def line(self, text: str, op: Op | None = None) -> None:
        self.write_together()
        if op is not None:
            described = ", ".join(f"%{name_text(v.name)}" for v in op.results)
            text = f"{text:<70}  # {described} {commented(op.kind)} {commented(op.source)}".rstrip()
        self.lines.append("    " + text)

    # ------------------------------------------------------------------ operands and results

    def read(self, value: str) -> str:
        """Python name of a value to read. Writes lines that fetch it or make its view if necessary."""
        name = self.name(value)
        if value in self.ready:
            return name
        self.ready.add(value)
        slot = self.storage.slots[value]
        if value in self.arena.fixed:
            self.bound[name] = self.arena.fixed[value]
        elif slot.kind == "source":
            self.fetch_source(value, name)
        elif slot.kind == "ring":
            rings = self.bind(f"ring_{name}", self.arena.rings[slot.root])
            self.line(f"{name} = {rings}[m % {len(self.arena.rings[slot.root])}]")
        elif slot.kind == "view":
            local = self.maker(value)
            self.view(local, self.read(self.view_source(local, value)), name, value)
        else:
            raise AssertionError(f"%{value} has no memory in this task")
        return name

    def fetch_source(self, value: str, name: str) -> None:
        op = self.program.graph.producers[value]
        if op.kind == "constant":
            payload = self.program.constant(value)
            dtype = to_numpy(op.result.dtype)
            self.bound[name] = (
                self.xp.asarray(payload, dtype) if isinstance(payload, np.ndarray) else dtype.type(payload)
            )
        elif op.result.shape == ():
            self.line(f"{name} = feeds[{literal(op.attrs['name'])}]")
        else:
            self.line(f"{name} = feeds[{literal(op.attrs['name'])}][m]")

    def maker(self, value: str) -> LocalOp:
        return self.makers[value]

    def view_source(self, local: LocalOp, result: str) -> str:
        """The operand whose memory a view or an in-place op uses for a result."""
        root = self.storage.slots[result].root
        for operand in local.op.operands:
            if operand.name in self.storage.slots and self.storage.slots[operand.name].root == root:
                return operand.name
        return root

    def view(self, local: LocalOp, source: str, name: str, value: str) -> None:
        """Bind or compute a view: the value, or the part of an operand that a collective reduces."""
        op, part = local.op, self.storage.parts.get(value)
        if part is not None or local.mode == "comm.slice":
            where = local.attrs["slices"] if part is None else part.where
            expression = f"{source}[{self.bind(f'slices_{name}', where)}]"
            apply: Callable[[Any], Any] = operator.itemgetter(where)
        elif local.mode == "compute" and lookup(op.kind).view:
            kernel = functools.partial(lookup(op.kind).kernel, self.xp, **local.attrs)
            expression, apply = f"{self.bind(op.kind, kernel)}({source})", kernel
        else:
            expression, apply = source, lambda x: x
        if source in self.bound:  # the memory stays the same in all steps, and so does its view
            self.bound[name] = apply(self.bound[source])
        else:
            self.line(f"{name} = {expression}", op)

    def target(self, value: str) -> str:
        """Python name of the buffer for a result; writes a line that waits for unfinished sends from it."""
        name = self.name(value)
        slot = self.storage.slots[value]
        self.ready.add(value)
        if slot.root in self.storage.sent:
            self.finish_sends(slot.root)
        if value in self.arena.fixed:
            self.bound[name] = self.arena.fixed[value]
        elif slot.kind == "ring":
            rings = self.bind(f"ring_{name}", self.arena.rings[slot.root])
            self.line(f"{name} = {rings}[m % {len(self.arena.rings[slot.root])}]")
        elif slot.root != value and slot.root in self.arena.fixed:
            self.bound[name] = self.arena.fixed[slot.root]  # computed in the memory of the old value
        else:
            raise AssertionError(f"%{value} has no buffer")
        return name

    def finish_sends(self, root: str) -> None:
        """Write the wait for unfinished sends from the present buffer of a root."""
        self.line(f"{self.bind('finish', collectives.finish)}({self.sends_of(root)})")

    # ------------------------------------------------------------------ ops

    def emit(self, local: LocalOp, *, last: bool) -> None:
        """Write the lines of one op."""
        op, mode = local.op, local.mode
        if mode == "accumulate":
            self.accumulate(op, last)
        elif mode == "compute":
            self.compute(local)
        elif mode == "loop":
            self.loop(local)
        elif mode == "send":
            self.send(local)
        elif mode == "recv":
            self.receive(local)
        elif local.collective is not None and local.collective.local:
            self.local_move(local)
        else:
            self.collective(local)

    def compute(self, local: LocalOp) -> None:
        op, declared = local.op, lookup(local.op.kind)
        first = op.results[0].name
        slot = self.storage.slots[first]
        if declared.view and slot.kind == "view" and slot.root != first:
            self.read(first)
            return
        operands = [self.read(v.name) for v in op.operands]
        total = self.storage.into.get(first)
        if total is not None and declared.adds is not None:
            self.add_to_total(local, operands, self.target(total))
            return
        targets = [self.target(v.name) for v in op.results]
        if declared.view in ("same", "strided"):  # an output, which needs memory of its own
            kernel = self.bind(op.kind, functools.partial(declared.kernel, self.xp, **local.attrs))
            source = operands[0]
            if op.operands[0].shape == () and self.storage.slots[op.operands[0].name].kind == "source":
                source = f"{self.bind('asarray', self.xp.asarray)}({source})"  # a number of the host
            self.line(f"copyto({targets[0]}, {kernel}({source}))", op)
            return
        call = Call(local, tuple(operands), tuple(targets))
        if total is not None:
            self.call(call, total)
        elif declared.together and self.xp is np and len(fixed(targets, self.bound)) == len(targets):
            if self.together and not call.goes_with(self.together[0], self.bound):
                self.write_together()
            self.together.append(call)
        else:
            self.call(call)

    def call(self, call: Call, total: str | None = None) -> None:
        """Write the call of a kernel."""
        op, operands, targets = call.local.op, call.operands, call.targets
        declared = lookup(op.kind)
        if total is None and (text := direct_call(call, self.bound, self.xp, self.bind)) is not None:
            self.line(text, op)
            return
        outs = targets[0] if len(targets) == 1 else f"({', '.join(targets)})"
        if total is not None:
            outs = f"{self.target(total)} if m == 0 else {outs}"
        if declared.view:  # the shapes may differ
            self.line(f"copyto(({outs}).reshape({operands[0]}.shape), {operands[0]})", op)
            return
        dtypes = [to_numpy(v.dtype) for v in op.operands]
        if declared.ufunc:
            function = self.bind(declared.ufunc, ufunc_of(self.xp, declared.ufunc, dtypes))
        else:
            bound = bound_kernel(declared.kernel, self.xp, dtypes, call.local.attrs)
            function = self.bind(op.kind.replace(".", "_"), bound)
        extra = ", micro=m" if declared.micro else ""
        self.line(f"{function}({', '.join(operands)}, out={outs}{extra})".replace("(, ", "("), op)

    def write_together(self) -> None:
        """Write the call of one function for the ops that were kept back; each op where there is none."""
        calls, self.together = self.together, []
        text = call_of_several(calls, self.bound, self.xp, self.bind) if calls else None
        if text is not None:
            self.line(text)
            return
        for call in calls:
            self.call(call)

    def loop(self, local: LocalOp) -> None:
        """Run a loop, whose body is a task of its own."""
        operands = [self.read(value.name) for value in local.op.operands]
        targets = [self.target(value.name) for value in local.op.results]
        run = self.bind(local.op.kind, self.arena.loops[local.op.name])
        self.line(f"{run}(m, ({', '.join(operands)},), ({', '.join(targets)},))", local.op)

    def add_to_total(self, local: LocalOp, operands: list[str], total: str) -> None:
        """Compute directly into the mean over the micro-batches."""
        op, adds = local.op, lookup(local.op.kind).adds
        assert adds is not None
        kernel = functools.partial(adds, self.xp, scale=1.0 / self.micro, **local.attrs)
        function = self.bind(f"{op.kind.replace('.', '_')}_add", kernel)
        self.line(f"{function}({', '.join(operands)}, out={total}, fresh=m == 0)", op)
        self.ready.add(op.result.name)

    def accumulate(self, op: Op, last: bool) -> None:
        if self.storage.slots[op.result.name].kind == "view":
            self.read(op.result.name)
            return
        value, target = op.operands[0].name, self.target(op.result.name)
        if value in self.storage.into and self.storage.slots[value].kind == "view":
            return  # the op that computes the value has added to it
        source, add = self.read(value), self.bind("add", self.xp.add)
        first = "None" if value in self.storage.into else f"copyto({target}, {source})"
        self.line(f"{first} if m == 0 else {add}({target}, {source}, out={target})", op)
        if last and self.micro > 1:
            multiply = self.bind("multiply", self.xp.multiply)
            share = self.bind(f"share_{op.result.dtype}", to_numpy(op.result.dtype).type(1.0 / self.micro))
            self.line(f"{multiply}({target}, {share}, out={target})")

    def local_move(self, local: LocalOp) -> None:
        name = local.op.result.name
        if self.storage.slots[name].kind == "view":
            self.read(name)
        elif local.attrs.get("keep", True):
            source, target = self.read(local.op.operands[0].name), self.target(name)
            slices = self.bind("slices", local.attrs.get("slices", ...))
            self.line(f"copyto({target}, {source}[{slices}])", local.op)
        else:
            self.read(name)  # a buffer of the neutral element, filled once when it was made

    def collective(self, local: LocalOp) -> None:
        if is_fused(local):
            (self.fused if in_one_block(local) else self.pieces)(local)
            return
        op, attrs = local.op, local.attrs
        source = self.read(op.operands[0].name)
        slots = self.storage.slots
        whole = local.collective is not None and local.collective.result_memory == "operand"
        in_place = whole and slots[op.result.name].root == slots[op.operands[0].name].root
        if in_place:
            target = self.name(op.result.name)
            self.ready.add(op.result.name)
        else:
            target = self.result_of(op, 0)
        if local.mode == "exchange":
            rank = self.program.rank
            sends = (*attrs["sends"], *((rank, s) for s, _ in attrs["copies"]))
            recvs = (*attrs["recvs"], *((rank, t) for _, t in attrs["copies"]))
            arguments = [self.bind("sends", sends), self.bind("recvs", recvs), target, self.tag(attrs)]
            function = "exchange"
        else:
            declared = local.collective
            assert declared is not None
            function = declared.name
            arguments = [self.argument(op, name, attrs[name]) for name in declared.parameters]
            arguments += [source if in_place else target, *self.wire(op)]
        start = self.bind(f"{function}_start", collectives.CALLS[function])
        call = ", ".join((self.comm(op.result.name), source, *arguments))
        self.line(f"{self.work(op.result.name)} = {start}({call})", op)
        if in_place:
            self.line(f"{target} = {source}")
            if source in self.bound:
                self.lines.pop()
                self.bound[target] = self.bound[source]

    def fused(self, local: LocalOp) -> None:
        """Start a collective of several tensors in the block of its results."""
        op, slots, declared = local.op, self.storage.slots, local.collective
        assert declared is not None
        for operand, result in zip(op.operands, op.results, strict=True):
            source = self.read(operand.name)
            if slots[operand.name].root == slots[result.name].root:
                self.bound[self.name(result.name)] = self.arena.fixed[result.name]
                self.ready.add(result.name)
            else:
                self.line(f"copyto({self.target(result.name)}, {source})", op)
        block = self.bind("fused", self.arena.fused[op.name])
        arguments = [self.argument(op, name, local.attrs[name]) for name in declared.parameters]
        start = self.bind(f"{declared.name}_start", collectives.CALLS[declared.name])
        call = ", ".join((self.comm(op.name), block, *arguments, block, *self.wire(op)))
        self.line(f"{self.work(op.name)} = {start}({call})", op)

    def pieces(self, local: LocalOp) -> None:
        """Start a collective of several tensors that the call packs for each member."""
        op, declared = local.op, local.collective
        assert declared is not None
        sources = ", ".join(self.read(value.name) for value in op.operands)
        targets = ", ".join(self.result_of(op, position) for position in range(len(op.results)))
        arguments = [self.argument(op, name, local.attrs[name]) for name in declared.parameters]
        function = f"{declared.name}_pieces"
        start = self.bind(f"{function}_start", collectives.CALLS[function])
        call = ", ".join((self.comm(op.name), f"({sources})", *arguments, f"({targets})", *self.wire(op)))
        self.line(f"{self.work(op.name)} = {start}({call})", op)

    def result_of(self, op: Op, position: int) -> str:
        """Name of the buffer for a result of a collective, which may be a part of the operand's."""
        result = op.results[position].name
        return self.read(result) if result in self.storage.parts else self.target(result)

    def wire(self, op: Op) -> list[str]:
        """The argument of a collective whose messages are narrower than its tensors."""
        return [f"wire={self.bind('wire', to_numpy(op.attrs[WIRE]))}"] if WIRE in op.attrs else []

    def argument(self, op: Op, name: str, value: Any) -> str:
        """An argument of a collective as text; a group, in which ranks differ, and an object by a name."""
        if name == "group":  # ranks share the compiled code
            return self.bind(f"group_{'_'.join(op.attrs.get('axes', ()))}", value)
        if isinstance(value, str):
            return literal(value)
        if isinstance(value, int) or (isinstance(value, tuple) and all(isinstance(n, int) for n in value)):
            return repr(value)
        return self.bind(name, value)

    def tag(self, attrs: Mapping[str, Any]) -> str:
        """Text of the tag of a message, which differs between micro-batches and transfers."""
        return f"{attrs['tag'] * self.micro} + m" if attrs["per_micro"] else str(attrs["tag"] * self.micro)

    def send(self, local: LocalOp) -> None:
        op, attrs = local.op, local.attrs
        if not attrs["sends"]:
            return
        source, sends = self.read(op.operands[0].name), self.bind("sends", attrs["sends"])
        start = self.bind("exchange_start", collectives.exchange_start)
        call = f"{start}({self.comm(op.result.name)}, {source}, {sends}, (), None, {self.tag(attrs)})"
        under_way = self.sends_of(self.storage.slots[op.operands[0].name].root)
        self.line(f"{under_way}.append({call})", op)

    def sends_of(self, root: str) -> str:
        """Text of the list of unfinished sends from the present buffer of a root."""
        depth = self.storage.rings.get(root, 1)
        under_way = self.arena.sends.setdefault(root, [[] for _ in range(depth)])
        return f"{self.bind('under_way', under_way)}[{'0' if depth == 1 else f'm % {depth}'}]"

    def receive(self, local: LocalOp) -> None:
        op, attrs = local.op, local.attrs
        target = self.read(op.result.name) if attrs["recvs"] else self.target(op.result.name)
        if attrs["copies"]:
            source = self.read(op.operands[0].name)
            for source_tile, target_tile in attrs["copies"]:
                target_name, source_name = self.bind("target", target_tile), self.bind("source", source_tile)
                self.line(f"{target}[{target_name}] = {source}[{source_name}]", op)
        if attrs["recvs"]:
            self.line(f"{self.work(op.result.name)} = pending.pop(({literal(op.result.name)}, m))", op)

    def wait(self, value: str) -> None:
        self.line(f"{self.work(value)}.wait()")
        for result in self.maker(value).op.results:
            self.arrived(result.name)

    def comm(self, value: str) -> str:
        """Text of the transport for the messages of a value."""
        return "comm"

    def arrived(self, value: str, condition: str = "") -> None:
        """Called when the result of a collective or a message can be read. Here it writes nothing.

        Args:
            value: the result.
            condition: text of a condition of the program under which it can be read; "" for always.
        """

    # ------------------------------------------------------------------ whole functions

    def function(self, task: LocalTask, *, last: bool) -> list[str]:
        """Lines of the body."""
        self.lines, self.ready, self.task = [], set(), task.name
        self.foreign = self.late_elsewhere(task)
        started: set[str] = set()
        ops = [(number, local) for number, local in enumerate(task.ops) if last or not local.tail]
        for number, local in ops:
            for value in self.storage.waits.get((task.name, number), ()):
                if value in started:
                    self.wait(value)
                    started.discard(value)
            for value in self.elsewhere(local, task):
                self.line(f"work = pending.pop(({literal(value)}, {self.at(value)}), None)")
                self.line("if work is not None: work.wait()")
                for result in self.maker(value).op.results:
                    self.arrived(result.name, "if work is not None: ")
            self.emit(local, last=last)
            if is_started(local) and (local.mode != "recv" or local.attrs["recvs"]):
                started.add(local.op.name)
        self.hand_over(task, started)
        return self.lines or ["    pass"]

    def hand_over(self, task: LocalTask, started: set[str]) -> None:
        """End a task: wait for collectives without readers, and pass the others on to the tasks that wait."""
        self.write_together()
        for value in self.storage.waits.get((task.name, len(task.ops)), ()):
            if value in started:
                self.wait(value)
        for value in self.storage.late[task.name]:
            if value in started:
                self.line(f"pending[{literal(value)}, {self.at(value)}] = {self.work(value)}")

    def at(self, value: str) -> str:
        """Text of the micro-batch of a value: the present one, or 0 for a value that exists once per step."""
        return "m" if self.program.parts.phase[value] == 1 else "0"

    def elsewhere(self, local: LocalOp, task: LocalTask) -> list[str]:
        """Results of other tasks' collectives that this op is the first to read, also through a view."""
        results = []
        roots = dict.fromkeys(
            self.storage.slots[v.name].root
            for v in local.op.operands
            if local.mode != "recv" and v.name in self.storage.slots
        )
        for root in roots:
            results += [n for n in self.foreign.get(root, ()) if n not in self.ready]
        for name in results:
            self.ready_elsewhere(name)
        return results

    def late_elsewhere(self, task: LocalTask) -> dict[str, list[str]]:
        """Root -> results in its memory of other tasks' collectives that those tasks do not wait for."""
        results: dict[str, list[str]] = {}
        for other, names in self.storage.late.items():
            for name in names if other != task.name else ():
                for value in self.maker(name).op.results:
                    results.setdefault(self.storage.slots[value.name].root, []).append(name)
        return results

    def ready_elsewhere(self, name: str) -> None:
        """Make the result of another task's collective readable, after the wait for it has been written."""
        self.read(name)

    def post(self, task: LocalTask) -> list[str]:
        """Lines that start the receives."""
        self.lines, self.ready, self.task = [], set(), task.name
        start = self.bind("exchange_start", collectives.exchange_start)
        for local in task.ops:
            if local.mode == "recv" and local.attrs["recvs"]:
                name, recvs = local.op.result.name, self.bind("recvs", local.attrs["recvs"])
                target = self.target(name)
                comm = self.comm(name)
                call = f"{start}({comm}, None, (), {recvs}, {target}, {self.tag(local.attrs)})"
                self.line(f"pending[{literal(name)}, m] = {call}")
        return self.lines or ["    pass"]
