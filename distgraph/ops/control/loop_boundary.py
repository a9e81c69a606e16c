"""How values pass into the body of a loop and out of it, as ops of a graph that has the body in one piece.

Completion lays out a program whose loops are *flat*: in place of a loop stand these ops and, between them,
those of its body, once. Their index rules say that a carry begins and ends a turn in one layout, that items
are laid out as their sequence without its first dim, and that the sum over turns of partial sums is partial.
Flat programs are laid out and never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distgraph.errors import GraphError
from distgraph.ir.graph import Value
from distgraph.ir.index_rule import Rule, make_rule, term_of
from distgraph.ir.op_registry import Attrs, Shape, Shapes, define, elementwise

ENTER, FIXED, ITEM, TURN = "loop.enter", "loop.fixed", "loop.item", "loop.turn"
LEAVE, SUM, STACK, TEST = "loop.leave", "loop.sum", "loop.stack", "loop.test"
INTO, OUT_OF = (ENTER, FIXED, ITEM, TURN), (LEAVE, SUM, STACK)


def _no_kernel(xp: Any, *arrays: Any, out: Any = None, **attrs: Any) -> Any:
    raise AssertionError("a flat loop is laid out, not computed")


def _item_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    term, sizes = term_of(shapes[0])
    return make_rule("item", (term,), (term[1:],), sizes, whole={"i0"})


def _stack_rule(shapes: Shapes, attrs: Attrs) -> Rule:
    term, sizes = term_of((attrs["length"], *shapes[0]))
    return make_rule("stack", (term[1:],), (term,), sizes, whole={"i0"})


def _infer_item(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    return [(operands[0].shape[1:], operands[0].dtype)]


def _infer_stack(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    return [((attrs["length"], *operands[0].shape), operands[0].dtype)]


def _infer_first(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    if len({value.type for value in operands}) != 1:
        raise GraphError(f"a carry begins as {operands[0].type} but ends as {operands[-1].type}")
    return [(operands[0].shape, operands[0].dtype)]


def _infer_turn(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    return [((), "i64")]


for _kind in (ENTER, FIXED, LEAVE, TEST):
    define(_kind, elementwise, _no_kernel, infer=_infer_first, flops=0, view="same")
define(SUM, elementwise, _no_kernel, infer=_infer_first, flops=0, linear=((0,),), view="same")
define(ITEM, _item_rule, _no_kernel, infer=_infer_item, flops=0, view="strided")
define(STACK, _stack_rule, _no_kernel, infer=_infer_stack, flops=0, linear=((0,),))
define(TURN, "-> ...", _no_kernel, infer=_infer_turn, flops=0, cost="launch", anywhere=True)
