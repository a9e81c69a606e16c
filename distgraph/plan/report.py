"""What people read of a plan: a page, one decision, the differences from another plan."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from distgraph.ir.range_notation import fold, spans, unfold
from distgraph.plan.constraints import SearchConstraints
from distgraph.plan.forecast_errors import EQUAL, Uncertain, in_seconds
from distgraph.plan.plan_components import Decision, LayerOps
from distgraph.serialization.text_table import indented_table

if TYPE_CHECKING:
    from distgraph.plan.plan import Plan

_TELLING = 2.0
"""A bound that a plan takes more than this many times says more about the bound than about the plan."""


CHANGED = "the plan was changed after it was forecast"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences of two plans; false where there are none. Print it.

    Attributes:
        rows: (what, in the first, in the second).
        verdict: which is faster by forecast, or that a forecast cannot tell.
    """

    rows: tuple[tuple[str, str, str], ...]
    verdict: str = ""

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "no difference"
        table = indented_table([("", "this", "other"), *self.rows])
        return f"{table}\n{self.verdict}" if self.verdict else table


def shown(plan: Plan) -> str:
    """A plan as a page: stages, tensors, forecast."""
    micro = f"{plan.micro_batches} micro-batch{'es' * (plan.micro_batches > 1)}"
    ranks = f"{len(plan.ranks)} rank{'s' * (len(plan.ranks) > 1)}"
    where = f" on {plan.cluster}" if plan.cluster else ""
    parts = [f"plan of {plan.program.name}{where}: {ranks}, batch {plan.batch} in {micro}, {plan.schedule}"]
    parts.append(
        "stages\n" + indented_table([(str(i), *stage_cells(plan, i)) for i in range(len(plan.stages))])
    )
    if plan.recompute:
        parts.append(f"layers recomputed in the backward part: {spans(plan.recompute)}")
    if plan.zero:
        parts.append(f"ZeRO: level {plan.zero}")
    parts.append("tensors\n" + indented_table(_layouts(plan)))
    if plan.forecast is not None:
        compared = ", and of plans that it is compared with" if plan.baselines else ""
        if plan.is_changed:
            parts.append(
                f"{CHANGED}: the forecast is of the plan before; distgraph forecast --plan tells it anew"
            )
        parts.append(f"forecast of a step{compared}\n" + indented_table(_times(plan)))
    if len(plan.search.front) > 1:
        parts.append("front of step time, peak memory and devices\n" + indented_table(_front(plan)))
    if plan.search.measured:
        parts.append("measured steps beside their forecasts\n" + indented_table(_measured(plan)))
    if plan.search.status:
        limit = _limit(plan)
        names = (field.name for field in fields(SearchConstraints))
        given = [f"{name}={plan.search.settings[name]}" for name in names if name in plan.search.settings]
        constraints = f"; given: {', '.join(given)}" if given else ""
        parts.append(f"search {plan.search.mode}: {plan.search.status}{limit}{constraints}")
    return "\n".join(parts)


def _limit(plan: Plan) -> str:
    """What no plan goes below, and what that says about this one."""
    bound = plan.search.bound
    if bound is None:
        return ""
    limit = f"; no plan can take less than {in_seconds(bound)}"
    if plan.forecast is None or plan.is_changed:
        return limit
    if plan.forecast.seconds > _TELLING * bound:
        return f"{limit}, which computation alone takes, without communication and idle devices"
    return f"{limit}, {1 - bound / plan.forecast.seconds:.1%} less than this one"


def _layouts(plan: Plan) -> list[tuple[str, str, str]]:
    """Inputs and parameters with their layouts and stages, those of equal layers in one row."""
    specs = {name: str(layout.spec) for name, layout in plan.tensors.items() if layout.kind != "state"}
    rows = []
    for pattern, spec in fold(specs).items():
        stages = sorted({plan.tensors[name].stage for name in unfold(pattern)})
        rows.append((pattern, spec, f"stage{'s' * (len(stages) > 1)} {spans(stages)}"))
    return rows


def decision_lines(plan: Plan, decision: Decision) -> list[str]:
    """A decision: what was chosen, its terms, the runner-up and what it would cost."""
    costs = ", ".join(f"{name} {in_seconds(cost)}" for name, cost in decision.terms.items())
    lines = [f"  chosen: {decision.chosen}" + (f" ({costs})" if costs else "")]
    if decision.runner_up:
        lines.append(f"  runner-up: {decision.runner_up}{_instead(plan, decision.runner_up_seconds)}")
    return [*lines, f"  {decision.note}"] if decision.note else lines


def _instead(plan: Plan, seconds: float | None) -> str:
    if seconds is None:
        return ""
    if plan.forecast is None:
        return f", a step of {in_seconds(seconds)}"
    mine, spread = plan.forecast.seconds, plan.forecast.uncertain
    # A runner-up differs in one decision, so its step goes to the same things.
    equal = f", {EQUAL}" if spread is not None and spread.equals(replace(spread, seconds=seconds)) else ""
    return (
        f", a step of {in_seconds(seconds)} in place of {in_seconds(mine)} ({seconds / mine - 1:+.2%}){equal}"
    )


def compared(left: Plan, right: Plan) -> Comparison:
    """What differs between two plans."""
    rows = ((what, str(mine), str(theirs)) for what, mine, theirs in _rows(left, right))
    return Comparison(tuple(row for row in rows if row[1] != row[2]), _verdict(left, right))


def _rows(left: Plan, right: Plan) -> Iterable[tuple[str, Any, Any]]:
    """(what, in the one, in the other), equal or not."""
    for name in ("name", "fingerprint", "parameters"):
        yield f"program {name}", getattr(left.program, name), getattr(right.program, name)
    for name in ("cluster", "batch"):
        yield name, getattr(left, name) or "none", getattr(right, name) or "none"
    others = right.texts()
    yield from ((name, text, others[name]) for name, text in left.texts().items())
    yield "layers", len(left.layers), len(right.layers)
    for i in range(max(len(left.stages), len(right.stages))):
        yield f"stage {i}", _stage_text(left, i), _stage_text(right, i)
    names = dict.fromkeys([*left.tensors, *right.tensors])
    pairs = {name: (_tensor_text(left, name), _tensor_text(right, name)) for name in names}
    for name, (mine, theirs) in fold({n: pair for n, pair in pairs.items() if pair[0] != pair[1]}).items():
        yield name, mine, theirs
    yield "matrix products", _products_text(left), _products_text(right)
    yield from _compared_ops(left.ops, right.ops)
    yield "forecast", _forecast_text(left), _forecast_text(right)
    for i in range(max(len(left.stages), len(right.stages))):
        yield f"memory of stage {i}", _memory_text(left, i), _memory_text(right, i)


def stage_cells(plan: Plan, number: int) -> tuple[str, ...]:
    """A stage in a row: its layers, mesh, devices and peak memory."""
    stage = plan.stages[number]
    memory = plan.forecast.memory[number:] if plan.forecast is not None else ()
    return (
        f"layers {spans(range(stage.first, stage.last))}" if stage.last > stage.first else "no whole layer",
        str(stage.mesh),
        f"devices {spans(stage.devices)}" if stage.devices else "",
        f"{_bytes(memory[0])}{_before(plan)}" if memory else "",
    )


def _before(plan: Plan) -> str:
    """Marks what a forecast says of a plan that was changed since."""
    return " before the change" if plan.is_changed else ""


def _stage_text(plan: Plan, number: int) -> str:
    if number >= len(plan.stages):
        return "none"
    stage = plan.stages[number]
    layers, ranks = spans(range(stage.first, stage.last)) or "none", spans(stage.mesh.members)
    return f"layers {layers} on ({stage.mesh.described}) ranks {ranks}"


def _tensor_text(plan: Plan, name: str) -> str:
    return str(plan.tensors.get(name, "none"))


def _products_text(plan: Plan) -> str:
    """How many products each distributed algorithm computes, along which ring; slices differ by product."""
    lines = (line for layer in plan.ops for line in layer.ops)
    algorithms = (line.algorithm for line in lines if line.algorithm is not None)
    counts = Counter(str(replace(each, slices=1, block=None)) for each in algorithms)
    return ", ".join(f"{count} by {name}" for name, count in sorted(counts.items())) or "by no algorithm"


def _compared_ops(left: Sequence[LayerOps], right: Sequence[LayerOps]) -> Iterable[tuple[str, str, str]]:
    """The first op that differs, of layers with the same difference; nothing where the layers are others."""
    if len(left) != len(right):
        return
    groups: dict[tuple[LayerOps, LayerOps], list[int]] = {}
    for number, pair in enumerate(zip(left, right, strict=True)):
        if pair[0] != pair[1]:
            groups.setdefault(pair, []).append(number)
    for (mine, theirs), layers in groups.items():
        pairs = itertools.zip_longest(mine.ops, theirs.ops, fillvalue="none")
        differ = [(str(a), str(b)) for a, b in pairs if a != b]
        if differ:
            yield f"ops of layers {spans(layers)}, first of {len(differ)}", differ[0][0], differ[0][1]


def _forecast_text(plan: Plan) -> str:
    if plan.forecast is None:
        return "none"
    uncertain = plan.forecast.uncertain
    interval = "" if uncertain is None else f" ({uncertain.interval})"
    return f"{in_seconds(plan.forecast.seconds)}{interval}{_before(plan)}"


def _verdict(left: Plan, right: Plan) -> str:
    """Which of two plans is faster by forecast; "" where the errors of a forecast are not known."""
    this, other = _uncertain(left), _uncertain(right)
    if this is None or other is None:
        return ""
    if this.equals(other):
        return f"the steps of both are {EQUAL}"
    return f"{'this' if this.seconds < other.seconds else 'other'} is faster by forecast"


def _uncertain(plan: Plan) -> Uncertain | None:
    """The forecast of a plan with its errors; None where there are none, or the plan was changed since."""
    return None if plan.forecast is None or plan.is_changed else plan.forecast.uncertain


def _memory_text(plan: Plan, stage: int) -> str:
    if plan.forecast is None or stage >= len(plan.forecast.memory):
        return "none"
    return f"{_bytes(plan.forecast.memory[stage])}{_before(plan)}"


def _times(plan: Plan) -> list[tuple[str, str]]:
    assert plan.forecast is not None
    spread = plan.forecast.uncertain
    interval = "" if spread is None else f" ({spread.interval})"
    rows = [(f"this plan{_before(plan)}", f"{in_seconds(plan.forecast.seconds)}{interval}")]
    for name, baseline in plan.baselines.items():
        rows.append((name, baseline if isinstance(baseline, str) else _baseline(plan, name, baseline)))
    return rows


def _baseline(plan: Plan, name: str, seconds: float) -> str:
    """Seconds of a baseline with their interval, and whether the plan is really faster."""
    assert plan.forecast is not None
    spread, other = plan.forecast.uncertain, plan.forecast.baseline(name, seconds)
    if spread is None or other is None:
        return in_seconds(seconds)
    equal = f", {EQUAL}" if spread.equals(other) and not plan.is_changed else ""
    return f"{in_seconds(seconds)} ({other.interval}){equal}"


def _front(plan: Plan) -> list[tuple[str, str, str, str]]:
    return [
        (in_seconds(each.seconds), _bytes(each.memory), _counted(each.devices, "device"), each.plan)
        for each in plan.search.front
    ]


def _measured(plan: Plan) -> list[tuple[str, str, str]]:
    return [
        (
            "did not run" if each.seconds is None else f"{in_seconds(each.seconds)} measured",
            f"{in_seconds(each.forecast)} forecast",
            each.plan,
        )
        for each in plan.search.measured
    ]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"


def _bytes(count: int) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.4g} {unit}"
    return f"{count} B"
