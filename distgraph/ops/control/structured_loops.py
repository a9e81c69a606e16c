"""Loops: `scan` over the items of tensors, and `while_loop`, whose number of turns depends on data.

The body is traced once and held as a graph (see `distgraph.ir.loops`). Completion lays it out, and it is
partitioned and compiled like a program. What a body reads from outside is an operand of its loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.errors.arguments import Count, Size, checked_arguments, shown
from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.index_rule import Rule, make_rule
from distgraph.ir.loops import CARRY, STACKED, TURN, Loop, check_body
from distgraph.ir.op_registry import Attrs, Shape, Shapes, define, flops
from distgraph.ir.reference_interpreter import interpret
from distgraph.kernels._common import store_all
from distgraph.ops.contraction import as_tensors
from distgraph.tracing.loop_trace import LoopTrace
from distgraph.tracing.pytrees import leaves, map_leaves, same_leaves
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace, caller

MAX_TURNS = 1_000_000
"""Turns after which a loop with a condition counts as endless."""


def _infer(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    kind = "scan" if "condition" not in attrs else "while_loop"
    loop = Loop(Op(kind, tuple(operands), (), attrs))
    check_body(loop)
    if loop.turns < 1:
        raise GraphError(f"{kind} has {loop.turns} turns but needs at least one")
    carries = [(begin.shape, begin.dtype) for begin, _ in loop.carries]
    sums = [(value.shape, value.dtype) for value in loop.summed]
    return [*carries, *sums, *(((loop.turns, *value.shape), value.dtype) for value in loop.stacked)]


def _rule(shapes: Shapes, attrs: Attrs) -> Rule:
    """Index rule without a split: layouts of a loop follow from those of its body (`Loop.boundary`)."""
    operands = tuple(Value(f"{n}", shape, "f32") for n, shape in enumerate(shapes))
    loop = Loop(Op("loop", operands, (), attrs))
    values = loop.result_values
    dims = [len(value.shape) for value in values[: loop.carried + loop.sums]]
    dims += [1 + len(value.shape) for value in loop.stacked]
    return make_rule("loop", tuple(((),) * len(s) for s in shapes), tuple(((),) * n for n in dims), {})


def _flops(op: Op, rule: Rule) -> int:
    """Operations of all turns."""
    loop = Loop(op)
    graphs = [loop.body] if loop.condition is None else [loop.body, loop.condition]
    each_turn = (flops(inner) for graph in graphs for inner in graph.ops if inner.operands)
    return loop.turns * sum(each_turn)


def _workspace(*arrays: Any, **attrs: Any) -> int:
    """Bytes of all values that one turn computes, and of the state before it."""
    graphs = [attrs[name] for name in ("body", "condition") if name in attrs]
    computed: int = sum(v.nbytes for graph in graphs for op in graph.ops for v in op.results if op.operands)
    carried: int = sum(value.nbytes for _, value in attrs["body"].updates)
    return 2 * computed + carried


class _Interpreted:
    """One run of a loop by the interpreter."""

    def __init__(self, xp: Any, arrays: Sequence[Any], attrs: Attrs, micro: int) -> None:
        self.xp, self.micro = xp, micro
        self.loop = Loop(Op("loop", tuple(Value("", x.shape, "f32") for x in arrays), (), attrs))
        self.arrays = dict(zip(self.loop.operand_names, arrays, strict=True))
        self.state = {f"{CARRY}{n}": arrays[n] for n in range(self.loop.carried)}
        items = self.loop.carried, self.loop.carried + self.loop.sequences
        self.items = self.loop.operand_names[slice(*items)]

    def goes_on(self, turn: int) -> bool:
        """Whether the condition holds before a turn."""
        assert self.loop.condition is not None
        inputs = {**self.arrays, TURN: np.int64(turn)}
        (go,) = interpret(self.loop.condition, inputs, self.state, self.micro, self.xp)[0].values()
        return bool(go)

    def turn(self, turn: int) -> dict[str, Any]:
        """Outputs of a turn, after which `state` is the next one."""
        inputs = {**self.arrays, **{name: self.arrays[name][turn] for name in self.items}}
        inputs[TURN] = np.int64(turn)
        outputs, self.state = interpret(self.loop.body, inputs, self.state, self.micro, self.xp)
        return outputs


def _finished(xp: Any, results: Sequence[Any], arrays: Sequence[Any], out: Any) -> Any:
    if out is None:
        fresh = [x.copy() if any(x is a for a in arrays) else x for x in results]
        return tuple(fresh)
    return store_all(xp, results, out if isinstance(out, (tuple, list)) else (out,))


def _scan_kernel(xp: Any, *arrays: Any, out: Any = None, micro: int = 0, **attrs: Any) -> Any:
    run = _Interpreted(xp, arrays, attrs, micro)
    loop, turns = run.loop, {}
    for turn in loop.order:
        turns[turn] = run.turn(turn)
    rows = [turns[turn] for turn in sorted(turns)]
    sums, stacked = [], []
    for label, _ in loop.body.outputs:
        values = [row[label] for row in rows]
        if label.startswith(STACKED):
            stacked.append(xp.stack(values))
        else:
            sums.append(sum(values[1:], xp.asarray(values[0]).copy()))
    state = [run.state[f"{CARRY}{n}"] for n in range(loop.carried)]
    return _finished(xp, [*state, *sums, *stacked], arrays, out)


def _while_kernel(xp: Any, *arrays: Any, out: Any = None, micro: int = 0, **attrs: Any) -> Any:
    run = _Interpreted(xp, arrays, attrs, micro)
    for turn in range(MAX_TURNS):
        if not run.goes_on(turn):
            return _finished(xp, [run.state[f"{CARRY}{n}"] for n in range(run.loop.carried)], arrays, out)
        run.turn(turn)
    raise endless()


def endless() -> GraphError:
    """The error of a loop whose condition does not turn false."""
    return GraphError(f"while_loop ran {MAX_TURNS} turns without its condition turning false")


for _kind, _kernel, _bodies in (
    ("scan", _scan_kernel, ("body",)),
    ("while_loop", _while_kernel, ("condition", "body")),
):
    define(
        _kind,
        _rule,
        _kernel,
        infer=_infer,
        flops=_flops,
        cost="launch",
        workspace=_workspace,
        bodies=_bodies,
        boundary=lambda op: Loop(op).boundary(),
        micro=True,
    )


@checked_arguments()
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: Size | None = None,
    *,
    reverse: bool = False,
    recompute: bool = False,
) -> tuple[Any, Any]:
    """Apply a function to the items of tensors one after the other, and hand a carry from turn to turn.

    `f` is traced once, its graph is the body of the loop. It may call modules, read tensors from outside and
    contain loops. The loop is differentiable: what the gradient reads of a turn is kept for all turns.

    Args:
        f: (carry, items) -> (carry, y): a carry of the same structure, shapes and dtypes, and any pytree.
        init: the carry of the first turn: a pytree of tensors or numbers, or None.
        xs: a pytree of tensors with the same first dim, whose items `f` gets; or None.
        length: number of turns; needed if there are no xs.
        reverse: begin with the last item. The results of turns stay in the order of the items.
        recompute: recompute each turn in the backward part, so that only carries are kept.

    Returns:
        The last carry, and what `f` returns for each turn, stacked along a new first dim.

    Raises:
        GraphError: lengths differ, or there is none; the carry changes its structure, shape or dtype.

    Example:
        >>> import numpy as np
        >>> from distgraph import ops
        >>> from distgraph.array_api.trace import trace
        >>> graph = trace(lambda x: ops.scan(lambda s, v: (s + v, s + v), 0.0, x), np.ones(3, np.float32))
        >>> graph.ops[-1].kind, [value.type for value in graph.ops[-1].results]
        ('scan', ['f32[]', 'f32[3]'])
    """
    where = caller()
    carries, items = [x for _, x in leaves(init)], [x for _, x in leaves(xs)]
    tensors = as_tensors(*carries, *items) if carries or items else []
    trace = tensors[0].trace if tensors else Trace.current()
    count = _turns(tensors[len(carries) :], length, where)
    inner = LoopTrace("body", trace, {})
    with inner.activate(), inner.recomputing() if recompute else inner.within():
        begin = [inner.carry(n, t) for n, t in enumerate(tensors[: len(carries)])]
        item = [inner.item(n, t) for n, t in enumerate(tensors[len(carries) :])]
        returned: Any = f(_filled(init, begin), _filled(xs, item))
        if not isinstance(returned, tuple) or len(returned) != 2:
            shown = _shown(returned)
            raise GraphError(f"body of scan ({where}) must return (carry, y) but returns {shown}")
        carry = same_leaves(f"carry of scan ({where})", init, returned[0])
        end = [inner.tensor(x) for x in carry.values()]
        ys = [inner.tensor(x) for _, x in leaves(returned[1])]
    _check_carry(f"scan ({where})", begin, end)
    _hand_on(inner, begin, end)
    body = inner.finished(f"body of scan ({where})")
    body = body.with_ops(body.ops, outputs=tuple((f"{STACKED}{n}", y.value) for n, y in enumerate(ys)))
    if not begin and not ys:
        raise GraphError(f"scan ({where}) has no carry and its body returns nothing; leave it out")
    attrs = {"body": body, "length": count, "carried": len(begin), "sequences": len(item)}
    attrs |= {"reverse": True} if reverse else {}
    attrs |= {"recomputed": dict(inner.recomputed)} if inner.recomputed else {}
    results = trace.emit("scan", [*tensors, *inner.captured.values()], attrs)
    return _filled(init, results[: len(begin)]), _filled(returned[1], results[len(begin) :])


def _turns(sequences: Sequence[Tensor], length: int | None, where: str) -> int:
    """The number of turns of a scan."""
    scalar = next((t for t in sequences if not t.shape), None)
    if scalar is not None:
        raise GraphError(f"xs of scan ({where}) has %{scalar.value.name} {scalar.value.type}, without items")
    counts = {t.shape[0]: t for t in sequences}
    if length is not None:
        counts.setdefault(int(length), sequences[0] if sequences else None)  # type: ignore[arg-type]
    if len(counts) != 1:
        lengths = " and ".join(map(str, counts)) or "unknown"
        raise GraphError(
            f"number of turns of scan ({where}) is {lengths}: the tensors of xs must have one first dim, "
            "which is also length where that is given; without xs give length"
        )
    (count,) = counts
    if count < 1:
        raise GraphError(f"scan ({where}) has {count} turns but needs at least one")
    return count


def _filled(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """A pytree with other leaves, in order."""
    rest = iter(tensors)
    return map_leaves(lambda path, leaf: next(rest), tree)


def _shown(returned: Any) -> str:
    return f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"


def _check_carry(subject: str, begin: Sequence[Tensor], end: Sequence[Tensor]) -> None:
    """Raises GraphError where a carry changes its type."""
    if [t.value.type for t in begin] == [t.value.type for t in end]:
        return
    before, after = (", ".join(t.value.type for t in each) for each in (begin, end))
    raise GraphError(
        f"body of {subject} returns the carry ({after}) but gets ({before}); return the shapes and dtypes of "
        "the first carry, for example with ops.cast"
    )


def _hand_on(inner: LoopTrace, begin: Sequence[Tensor], end: Sequence[Tensor]) -> None:
    """State what a turn hands to the next one."""
    inner.updates += [(old.value.name, new.value) for old, new in zip(begin, end, strict=True)]


@checked_arguments()
def while_loop(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    state: Any,
    fixed: Sequence[Any] = (),
    *,
    turns: Count = 1,
) -> tuple[Tensor, ...]:
    """Repeat `state = body(*state, *fixed)` while `condition(*state, *fixed)` holds. Not differentiable.

    Args:
        condition: returns a bool scalar.
        body: returns the new state: a tensor or tuple of the same shapes and dtypes.
        state: a list or tuple of the tensors that change from turn to turn. Each is an argument of its own of
            condition and body, other than in JAX, where they get one carry.
        fixed: further tensors that are passed to condition and body, which may also read others.
        turns: number of turns that forecasts and counts of operations assume.

    Raises:
        GraphError: the body changes a shape or dtype, or the condition is no bool scalar; the state is no
            list or tuple, or a function does not take its tensors.

    Example:
        `(n, power) = while_loop(lambda n, p: p < 1000.0, lambda n, p: (n + 1, p * 2.0), (0, 1.0))`
    """
    if not isinstance(state, (list, tuple)):
        raise GraphError(
            f"state of while_loop is {shown(state)} but must be a list or tuple of tensors, which condition "
            f"and body get as arguments of their own; give {_as_tuple(state)}"
        )
    count = len(state)
    for name, function in (("condition", condition), ("body", body)):
        _check_takes_state(name, function, count, len(fixed))
    tensors = as_tensors(*state, *fixed)
    if not count:
        raise GraphError("while_loop has no state; give at least one tensor that changes from turn to turn")
    trace = tensors[0].trace
    attrs, captured = while_attrs(condition, body, trace, tensors[:count], tensors[count:], turns)
    return trace.emit("while_loop", [*tensors[:count], *captured.values()], attrs)


def _as_tuple(state: Any) -> str:
    """How a state that is no list or tuple is given as one."""
    return "tuple(state.values())" if isinstance(state, Mapping) else "(state,)"


def _check_takes_state(name: str, function: Callable[..., Any], state: int, fixed: int) -> None:
    """Raises GraphError where a function of while_loop does not take the tensors of the state."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have none; the call will tell
        return
    try:
        signature.bind(*range(state + fixed))
    except TypeError:
        raise GraphError(
            f"{name} of while_loop takes {signature} but is called with {state + fixed} arguments, the "
            f"tensors of state and fixed; take each as an argument of its own, such as "
            f"lambda n, x: (n + 1, x * 2), or give lambda *state: f(state)"
        ) from None


def while_attrs(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    trace: Trace,
    state: Sequence[Tensor],
    fixed: Sequence[Tensor],
    turns: Count = 1,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Attributes of a while_loop, and the tensors that its graphs read from outside."""
    where, captured = caller(), dict[str, Tensor]()
    graphs: dict[str, Graph] = {}
    traces = {name: LoopTrace(name, trace, captured) for name in ("condition", "body")}
    returned: dict[str, tuple[Tensor, ...]] = {}
    begins: list[Tensor] = []
    for name, function in (("condition", condition), ("body", body)):
        inner = traces[name]
        with inner.activate():
            begins = [inner.carry(n, t) for n, t in enumerate(state)]
            values = function(*begins, *(inner.tensor(t) for t in fixed))
            values = values if isinstance(values, (tuple, list)) else (values,)
            returned[name] = tuple(inner.tensor(x) for x in values)
    test = [t.value.type for t in returned["condition"]]
    if test != ["bool[]"]:
        raise GraphError(
            f"condition of while_loop ({where}) returns {', '.join(test)} but must return one bool scalar"
        )
    _check_carry(f"while_loop ({where})", begins, returned["body"])
    _hand_on(traces["body"], begins, returned["body"])
    for name, inner in traces.items():
        inner.complete_sources()
        graphs[name] = inner.finished(f"{name} of while_loop ({where})")
    test_graph = graphs["condition"]
    outputs = (("go", returned["condition"][0].value),)
    graphs["condition"] = test_graph.with_ops(test_graph.ops, outputs=outputs)
    return {**graphs, "carried": len(state), "turns": int(turns)}, captured
