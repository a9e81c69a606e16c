"""The gradient of a `scan`: a scan in the opposite order.

In:   a `scan` with a body B: (carry, x, fixed) -> (carry', y).
Out:  the scan that also stacks what its gradient reads of each turn (*residuals*), and a scan that hands the
      gradient of the carry back, stacks the gradients of the items and sums those of the fixed operands.
Invariant: the body of the gradient is the differentiated body without its forward ops: a value of the
      forward body is read as a carry, an item or a fixed operand, is recomputed if it depends on fixed
      operands and constants alone or is a reshape, or else is a residual.

    %h, %y = scan(%h0, %xs, %w)         %h, %y, %r = scan(%h0, %xs, %w)
                                  ->    %dh0, %dw, %dxs = scan(%dh, %dy, %r, %xs, %w) {reverse=true}

Ops of the body that are to be recomputed (`dg.recompute`, `scan(recompute=True)`) are part of the body of the
gradient, and only what they begin with is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from distgraph.ir.dtypes import is_float
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.loops import CARRY, FIXED, ITEM, STACKED, SUMMED, TURN, Loop, source_values
from distgraph.ir.op_registry import lookup
from distgraph.tracing.tensor import Tensor, emit_one
from distgraph.tracing.tracer import Trace

PullBack = Callable[[Trace, Sequence[Op], Mapping[str, Tensor], Sequence[Value]], list[Tensor | None]]
"""(trace, forward ops, gradients of some results, values) -> gradients of these values; see `backward`."""

Part = tuple[str, str]
"""("result", number), ("source", name) or ("value", name): what the gradient of a loop reads."""


@dataclass(frozen=True)
class LoopGradient:
    """The gradient of one scan.

    Attributes:
        loop: the scan, with the residuals among its results.
        needs: for every operand whether its gradient is needed.
        pull_back: differentiates the body.
    """

    loop: Loop
    needs: tuple[bool, ...]
    pull_back: PullBack

    @staticmethod
    def of(op: Op, active: set[str], pull_back: PullBack, fresh: Callable[[], str]) -> LoopGradient:
        """The gradient of a scan, whose op gets residuals; `active` values of its graph need gradients."""
        needs = tuple(value.name in active and is_float(value.dtype) for value in op.operands)
        loop = Loop(op)
        differentiated = _Body(loop, needs, (True,) * len(op.results), pull_back)
        stacked = {value.name for value in loop.stacked}
        values = [differentiated.forward.values[name] for name in differentiated.residuals]
        values = [value for value in values if value.name not in stacked]
        count = len(loop.stacked)
        outputs = tuple((f"{STACKED}{count + n}", value) for n, value in enumerate(values))
        before = [(label, value) for label, value in loop.body.outputs if not label.startswith(SUMMED)]
        sums = [(label, value) for label, value in loop.body.outputs if label.startswith(SUMMED)]
        body = replace(differentiated.forward, outputs=(*before, *outputs, *sums))
        results = (Value(fresh(), (loop.turns, *value.shape), value.dtype) for value in values)
        changed = replace(op, attrs={**op.attrs, "body": body}, results=(*op.results, *results))
        return LoopGradient(Loop(changed), needs, pull_back)

    def gradients(
        self,
        trace: Trace,
        operands: Sequence[Tensor],
        results: Sequence[Tensor],
        received: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Emit the scan of the gradient, and return the gradients of the operands.

        Args:
            trace: the graph's.
            operands, results: of the scan.
            received: gradients of the results.
        """
        loop = self.loop
        body = _Body(loop, self.needs, tuple(grad is not None for grad in received), self.pull_back)
        stacked = results[loop.carried + loop.sums :]
        part = {("value", value.name): x for value, x in zip(loop.stacked, stacked, strict=True)}
        part |= {("source", name): x for name, x in zip(loop.operand_names, operands, strict=True)}
        part |= {("result", str(n)): grad for n, grad in enumerate(received) if grad is not None}
        carries = [
            _or_zeros(received[n], begin)
            for n, (begin, _) in enumerate(loop.carries)
            if is_float(begin.dtype)
        ]
        items, fixed = [part[name] for name in body.items], [part[name] for name in body.fixed]
        attrs = {
            "body": body.graph(),
            "length": loop.turns,
            "carried": len(carries),
            "sequences": len(items),
            "sums": len(body.sums),
            "reverse": not loop.reverse,
        }
        returned = iter(trace.emit("scan", (*carries, *items, *fixed), attrs))
        by_source: dict[str, Tensor] = {}
        floats = [n for n, (begin, _) in enumerate(loop.carries) if is_float(begin.dtype)]
        for name in (*(f"{CARRY}{n}" for n in floats), *body.sums, *body.stacked):
            by_source[name] = next(returned)
        return [
            by_source.get(source) if need else None
            for source, need in zip(loop.operand_names, self.needs, strict=True)
        ]


@dataclass
class _Body:
    """The body of the gradient of a scan.

    Attributes:
        loop, needs, pull_back: as those of `LoopGradient`.
        received: for every result whether it has a gradient.
        residuals: names of values of the forward body that are read and have to be stacked.
        items: what the gradient reads item by item: the gradient of a result, by its number, a source of the
            forward body by its name, or a residual by the name of its value.
        fixed: what it reads as a whole: the gradient of a sum, or a source of the forward body.
        sums, stacked: sources of the forward body with a gradient that is summed, and that is stacked.
    """

    loop: Loop
    needs: tuple[bool, ...]
    received: tuple[bool, ...]
    pull_back: PullBack
    residuals: list[str] = field(default_factory=list)
    items: list[Part] = field(default_factory=list)
    fixed: list[Part] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)
    stacked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forward = self.loop.body
        self.names = {op.result.name: str(op.attrs["name"]) for op in self.forward.sources("state", "input")}
        self.trace = Trace.continuing(self.forward)
        self.trace.recomputed = dict(self.loop.op.attrs.get("recomputed", {}))
        self.trace.blocks = max(self.trace.recomputed.values(), default=0)
        self.sources: list[Op] = []
        self.again: list[Op] = []  # forward ops that are recomputed
        self.known: set[str] = set()
        self._differentiate()
        self._resolve()

    def _differentiate(self) -> None:
        loop, trace = self.loop, self.trace
        seeds: dict[str, Tensor] = {}
        self.carry_seeds: list[Value] = []
        with trace.activate(), trace.within(role="backward"), trace.on_behalf_of("", "", self.loop.op.source):
            for begin, end in loop.carries:
                if is_float(begin.dtype):
                    seed = self._seed(begin)
                    self.carry_seeds.append(seed.value)
                    _add(seeds, end, seed)
            for n, value in enumerate(loop.result_values):
                if n < loop.carried or not self.received[n]:
                    continue
                seed = self._seed(value)
                source = (ITEM, self.items) if n >= loop.carried + loop.sums else (FIXED, self.fixed)
                self._source("input", source[0], len(source[1]), seed.value)
                source[1].append(("result", str(n)))
                _add(seeds, value, seed)
            begins = [begin for begin, _ in loop.carries if is_float(begin.dtype)]
            inner, needed = source_values(self.forward), zip(loop.operand_names, self.needs, strict=True)
            others = [name for name, need in needed if need and not name.startswith(CARRY)]
            sources = [*begins, *(inner[name] for name in others)]
            gradients = self.pull_back(trace, self.forward.ops, seeds, sources)
            new = [
                _or_zeros(grad, value) for grad, value in zip(gradients[: len(begins)], begins, strict=True)
            ]
            self.new_carries = [
                emit_one("identity", grad) if grad.value in self.carry_seeds else grad for grad in new
            ]
        ops = trace.ops[: len(self.forward.ops)]  # scans among them leave residuals now
        self.forward = replace(self.forward, ops=tuple(ops))
        grads = zip(others, gradients[len(begins) :], strict=True)
        self.grads = {name: grad for name, grad in grads if grad is not None}
        self.sums = [name for name in self.grads if name.startswith(FIXED)]
        self.stacked = [name for name in self.grads if name.startswith(ITEM)]
        for n, value in enumerate(self.carry_seeds):
            self._source("state", CARRY, n, value)

    def _seed(self, like: Value) -> Tensor:
        value = Value(self.trace.fresh(f"d.{like.name}"), like.shape, like.dtype)
        return Tensor(value, self.trace)

    def _source(self, kind: str, part: str, number: int, value: Value) -> None:
        """Add a source that gives a value."""
        name = f"{part}{number}" if part != TURN else TURN
        role = "data" if kind == "input" else "backward"
        self.sources.append(Op(kind, (), (value,), {"name": name}, role, "", self.loop.op.source))
        self.known.add(value.name)

    def _resolve(self) -> None:
        """Find a source for each value of the forward body that the gradient reads."""
        needed = {grad.value.name for grad in (*self.new_carries, *self.grads.values())}
        self.made: list[Op] = []
        for op in reversed(self.trace.ops[len(self.forward.ops) :]):
            if any(value.name in needed for value in op.results):
                needed.update(value.name for value in op.operands)
                self.made.insert(0, op)
        produced = {value.name for op in self.made for value in op.results}
        read = [value.name for op in self.made for value in op.operands]
        for name in dict.fromkeys([*read, *sorted(needed)]):
            if name not in produced:
                self._provide(name)

    def _provide(self, name: str) -> None:
        if name in self.known:
            return
        op = self.forward.producers[name]
        source = self.names.get(name, "")
        value = self.forward.values[name]
        if op.kind not in SOURCES and self._is_computed_again(op):
            for operand in op.operands:
                self._provide(operand.name)
            self.again.append(replace(op, role="backward", link=""))
            self.known.update(each.name for each in op.results)
        elif op.kind == "constant":
            self.again.append(op)
            self.known.add(name)
        elif source == TURN:
            self._source("input", TURN, 0, value)
        elif source.startswith(FIXED):
            self._source("input", FIXED, len(self.fixed), value)
            self.fixed.append(("source", source))
        elif source.startswith(ITEM):
            self._source("input", ITEM, len(self.items), value)
            self.items.append(("source", source))
        else:
            self._source("input", ITEM, len(self.items), value)
            self.items.append(("value", name))
            self.residuals.append(name)

    def _is_computed_again(self, op: Op) -> bool:
        """Whether an op costs nothing, or depends on fixed operands, constants and the turn alone."""
        return lookup(op.kind).view in ("same", "contiguous") or self._is_invariant(op)

    def _is_invariant(self, op: Op) -> bool:
        if op.kind in SOURCES:
            source = self.names.get(op.result.name, FIXED)
            return not source.startswith((CARRY, ITEM))
        if lookup(op.kind).micro:
            return False
        return all(self._is_invariant(self.forward.producers[value.name]) for value in op.operands)

    def graph(self) -> Graph:
        """The graph of one turn."""
        ops = [*self.sources, *self.again, *(replace(op, link="") for op in self.made)]
        names = {value.name for op in ops for value in op.results}
        stacked = [(f"{STACKED}{n}", self.grads[name].value) for n, name in enumerate(self.stacked)]
        sums = [(f"{SUMMED}{n}", self.grads[name].value) for n, name in enumerate(self.sums)]
        updates = zip(self.carry_seeds, self.new_carries, strict=True)
        trace = self.trace
        return Graph(
            f"{self.forward.name}_gradient",
            tuple(ops),
            (*stacked, *sums),
            tuple((seed.name, grad.value) for seed, grad in updates),
            {name: attr for name, attr in trace.attrs.items() if name in names},
            axis_attrs={name: attr for name, attr in trace.axis_attrs.items() if name in names},
        )


def _or_zeros(grad: Tensor | None, like: Value) -> Tensor:
    return emit_one("full", shape=like.shape, value=0.0, dtype=like.dtype) if grad is None else grad


def _add(seeds: dict[str, Tensor], value: Value, seed: Tensor) -> None:
    seeds[value.name] = seeds[value.name] + seed if value.name in seeds else seed
