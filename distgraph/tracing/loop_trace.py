"""Tracing of the body of a loop: tensors, parameters and states from outside become operands of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distgraph.errors import GraphError
from distgraph.ir.graph import Graph, Value
from distgraph.ir.loops import CARRY, FIXED, ITEM, TURN
from distgraph.ir.sharding_spec import AxisAttr, DistAttr
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace


class LoopTrace(Trace):
    """The body or the condition of a loop under construction.

    Args:
        name: of the graph.
        parent: the trace that holds the loop.
        captured: values of the parent that the loop reads -> their tensors there, in order; the body and the
            condition of one loop share it.
    """

    def __init__(self, name: str, parent: Trace, captured: dict[str, Tensor]) -> None:
        super().__init__(name)
        self.parent, self.captured = parent, captured
        self.training, self.role, self.scope = parent.training, parent.role, parent.scope
        self.update_role = self.role
        self.parameters, self._salts = parent.parameters, parent._salts
        self._inside: dict[str, Tensor] = {}  # captured value -> its tensor here
        self._outside: dict[str, Tensor] = {}  # value here -> the captured tensor

    def carry(self, position: int, like: Any) -> Tensor:
        """What a turn begins with."""
        return super().source("state", f"{CARRY}{position}", like.shape, like.dtype)

    def item(self, position: int, like: Any) -> Tensor:
        """An item of a sequence."""
        return super().source("input", f"{ITEM}{position}", like.shape[1:], like.dtype)

    def turn(self) -> Tensor:
        """The position of the turn."""
        return super().source("input", TURN, (), "i64")

    def is_inside(self, other: Trace) -> bool:
        """Whether this is the body of a loop in another trace, however deep."""
        return self.parent is other or self.parent.is_inside(other)

    def tensor(self, x: Any) -> Tensor:
        """One operand; a tensor from outside becomes an operand of the loop."""
        if isinstance(x, Tensor) and x.trace is not self:
            return self.capture(self.parent.tensor(x))
        return super().tensor(x)

    def source(self, kind: str, name: str, shape: Sequence[int], dtype: str, **attrs: Any) -> Tensor:
        """An input, parameter or state of the program: an operand of the loop."""
        return self.capture(self.parent.source(kind, name, shape, dtype, **attrs))

    def capture(self, outer: Tensor) -> Tensor:
        """A tensor of the parent inside of the body."""
        name = outer.value.name
        if name not in self._inside:
            self.captured.setdefault(name, outer)
            position = list(self.captured).index(name)
            inner = super().source("input", f"{FIXED}{position}", outer.shape, outer.dtype)
            self._inside[name], self._outside[inner.value.name] = inner, outer
        return self._inside[name]

    def complete_sources(self) -> None:
        """Add the sources of values that only the other graph of the loop has read so far."""
        for outer in list(self.captured.values()):
            self.capture(outer)

    def annotate(self, value: Value, attr: DistAttr) -> None:
        """Pin a layout; that of a value from outside is pinned there."""
        outer = self._outside.get(value.name)
        if outer is None:
            super().annotate(value, attr)
        else:
            self.parent.annotate(outer.value, attr)

    def annotate_axes(self, value: Value, attr: AxisAttr) -> None:
        """Pin a layout by names of axes; that of a value from outside is pinned there."""
        outer = self._outside.get(value.name)
        if outer is None:
            super().annotate_axes(value, attr)
        else:
            self.parent.annotate_axes(outer.value, attr)

    def finished(self, subject: str) -> Graph:
        """The graph. Raises GraphError where the body does what only a whole program can."""
        changed = [name for name, _ in self.updates if not name.startswith(CARRY)]
        if changed:
            state = self._outside.get(changed[0])
            shown = state.value.name if state is not None else changed[0]
            raise GraphError(
                f"{subject} updates state %{shown}, but a state has one new value in a step; return the new "
                "value, or carry it from turn to turn"
            )
        if self.boundaries or self.outputs or self.tasks:
            raise GraphError(
                f"{subject} marks a pipeline stage, a task or an output, but a loop is computed on one mesh "
                "and returns what its body returns; do so outside of the loop"
            )
        return self.finish()
