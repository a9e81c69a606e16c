"""One trial: a random program trained in a layout must give what one rank gives, to 1e-9 in fp64."""

from __future__ import annotations

import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from campaigns.program_generator import Case, Layout, Program
from campaigns.program_model import batch_of, make_engine
from support.programs.equivalence import gathered

from distgraph.engine import Engine
from distgraph.engine.callbacks import Callback
from distgraph.errors import DistGraphError, GraphError, RuntimeFault
from distgraph.ir.verifier import verify

TOLERANCE = 1e-9
"""Largest error, relative to the largest element of a tensor."""
FLOOR = 1e-3
"""What counts as the largest element where all are smaller: an exact zero leaves rounding errors only."""
ROUNDING = 4 * float(np.finfo("f8").eps)
"""Relative change of the data. A number that it changes by more than the tolerance, on one rank, consists of
rounding errors: such as what Adam makes of a gradient that is zero."""

OK, WRONG, HUNG, INTERNAL, REFUSED, SKIPPED = "ok", "wrong", "hung", "internal error", "refused", "skipped"
FAILURES = (WRONG, HUNG, INTERNAL)


@dataclass
class Verdict:
    """What came of a trial.

    Attributes:
        kind: one of the words above.
        why: what differs, or the error.
        error: largest relative error that was seen.
        ranks: of the layout.
        wrong: names of the numbers that are wrong.
    """

    kind: str
    why: str = ""
    error: float = 0.0
    ranks: int = 1
    trace: str = ""
    wrong: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Outcome:
    """Numbers that training left, by name."""

    numbers: dict[str, np.ndarray] = field(default_factory=dict)


def outcome(case: Case) -> Outcome:
    """Train a case, and what follows training."""
    later, extras, program = case.layout.later, case.layout.extra, case.program
    with ExitStack() as opened:
        engine = opened.enter_context(closing(make_engine(case)))
        found = _trained(case, engine, range(program.steps if later is None else 1))
        if later is not None:
            before, case = engine, Case(program, later)
            engine = opened.enter_context(closing(make_engine(case, seed=program.seed + 1)))
            opened.enter_context(_loaded(before, engine))  # an engine reads tensors when it needs them
            before.close()
            found.numbers |= _trained(case, engine, range(1, program.steps)).numbers
        for extra in ("evaluate", "predict"):
            if extra in extras:
                found.numbers |= _after(extra, program, engine)
        if "plan" in extras:
            _replay(case, engine, found)
        _verify_programs(engine)
        return found


def _verify_programs(engine: Engine) -> None:
    """Whether every program that an engine has compiled passes the verifier, which does not run by itself."""
    for compiled in engine._session.programs.values():
        try:
            verify(compiled.build.completed, "completed")
            verify(compiled.build.lowered, "lowered")
        except DistGraphError as error:
            raise AssertionError(f"a compiled program does not pass the verifier: {error}") from error


class StopAfter(Callback):
    """Ends `fit` after so many steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_batch_end(self, engine: Engine, step: int, logs: Mapping[str, float]) -> None:
        engine.should_stop = step == self._steps


def _trained(case: Case, engine: Engine, steps: range) -> Outcome:
    """Losses and metrics of some steps; after the last one of the program parameters and states, too."""
    program, found = case.program, Outcome()
    count = program.batch * program.micro
    ends = steps.stop == program.steps
    if program.fitted:
        rows = batch_of(program, count * program.steps + program.rest, 1)
        stop = [] if ends else [StopAfter(steps.stop)]
        engine.fit(
            rows,
            epochs=1,
            batch_size=count,
            callbacks=stop,
            resume=steps.start > 0,
            shuffle=True,
            progress=False,
        )
    for step in steps if not program.fitted else ():
        logs = engine.run(batch_of(program, count, 1 + step))
        found.numbers |= {f"{name} of step {step}": np.array(value) for name, value in logs.items()}
        if "checkpoint" in case.layout.extra and step == 0:
            with _loaded(engine, engine):
                pass
    if ends:
        losses = enumerate(engine.history.losses)
        found.numbers |= {f"loss {i} of the history": np.array(n) for i, n in losses}
        found.numbers |= gathered(engine)
    return found


def _after(what: str, program: Program, engine: Engine) -> dict[str, np.ndarray]:
    """Numbers of an evaluation or a prediction after training."""
    count = program.batch * program.micro
    rows = count + 1 if program.pure else count  # a program that mixes samples is one of its batch size
    if what == "evaluate":
        logs = engine.evaluate(batch_of(program, rows, 91), batch_size=count)
        return {f"evaluated {name}": np.array(value) for name, value in logs.items()}
    if program.loss == "inside":
        return {}  # the model needs the targets, and returns no output alone
    data = batch_of(program, rows, 92)
    given = {k: v for k, v in data.items() if k != "target"} if program.keyed else data[:-1]
    try:
        outputs = engine.predict(given, batch_size=count)
    except GraphError as error:  # the serial program, in as many micro-batches, has to refuse, too
        if "not rows for each" not in str(error):
            raise
        return {"prediction refused": np.ones(())}
    outputs = outputs if isinstance(outputs, Mapping) else {"output": outputs}
    return {f"predicted {name}": np.asarray(value) for name, value in outputs.items()}


@contextmanager
def _loaded(engine: Engine, other: Engine) -> Iterator[None]:
    """While the checkpoint is there that an engine saved, and another one (or the same) has loaded."""
    with tempfile.TemporaryDirectory() as folder:
        path = engine._session.ranks().share(folder, 0)
        engine.save(f"{path}/checkpoint")
        other.load(f"{path}/checkpoint")
        yield
        world = other._session.ranks()
        world.gather(dict.fromkeys(world.local))  # nobody takes the folder away while others read


def _replay(case: Case, engine: Engine, found: Outcome) -> None:
    """The same training by the plan of the compiled program, on the serial program."""
    plan, steps = engine.plan.portable, range(case.program.steps)
    layout = case.layout
    bare = serial(case)
    bare.layout.recomputed = layout.recomputed  # recomputed blocks and reshards of the model are its own
    bare = case if layout.reshards or layout.operators else bare
    replayed = make_engine(bare, plan=plan)
    try:
        again = _trained(replace(bare, layout=replace(bare.layout, extra=[])), replayed, steps)
    finally:
        replayed.close()
    for name, array in again.numbers.items():
        if name in found.numbers:
            found.numbers[f"by plan: {name}"] = array


def serial(case: Case) -> Case:
    """The program on one rank, followed by all that may follow."""
    return Case(case.program, Layout())


class References:
    """What one rank makes of programs, for those seen last."""

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._known: dict[str, tuple[Engine, dict[str, dict[str, np.ndarray]]]] = {}

    def of(self, case: Case) -> Outcome:
        """All numbers of the serial program that the layout of the case has."""
        program, key = case.program, repr(case.program)
        if key not in self._known:
            if len(self._known) >= self._size:
                engine, _ = self._known.pop(next(iter(self._known)))
                engine.close()
            engine = make_engine(serial(case))
            self._known[key] = engine, {"train": _trained(serial(case), engine, range(program.steps)).numbers}
        engine, found = self._known[key]
        wanted = ["train", *(each for each in ("evaluate", "predict") if each in case.layout.extra)]
        for each in wanted:
            if each not in found:
                found[each] = _after(each, program, engine)
        return Outcome({name: array for each in wanted for name, array in found[each].items()})


def run_trial(case: Case, references: References) -> Verdict:
    """Train a case and compare it with one rank."""
    ranks = case.layout.ranks
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        # The program on one rank is divided in the same micro-batches.
        warnings.filterwarnings("ignore", "loss is not recognised as a mean|loss depends on")
        try:
            expected = references.of(case)
        except Exception as error:  # noqa: BLE001 - whatever a serial program raises is a finding
            return replace(_judged(error), ranks=1, why=f"serial: {_line(error)}")
        if not all(
            np.isfinite(a).all() and np.abs(a).max(initial=0) < 1e6 for a in expected.numbers.values()
        ):
            return Verdict(SKIPPED, "numbers of the serial program are not of the order of 1", ranks=ranks)
        try:
            found = outcome(case)
        except Exception as error:  # noqa: BLE001 - whatever the product raises is a finding
            return replace(_judged(error), ranks=ranks)
    verdict = replace(_compared(found.numbers, expected.numbers), ranks=ranks)
    if verdict.kind == WRONG and verdict.wrong:
        shifted = replace(case, program=replace(case.program, shift=ROUNDING))
        unsure = _compared(references.of(shifted).numbers, expected.numbers).wrong
        if {name.removeprefix("by plan: ") for name in verdict.wrong} <= set(unsure):
            return Verdict(SKIPPED, f"rounding errors of the serial program: {verdict.why}", ranks=ranks)
    return verdict


def _compared(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> Verdict:
    worst, wrong = 0.0, dict[str, str]()
    plain = {name.removeprefix("by plan: ") for name in found}
    if plain != set(expected):
        return Verdict(WRONG, f"other numbers: {sorted(plain ^ set(expected))}", np.inf)
    for name, array in found.items():
        other = expected[name.removeprefix("by plan: ")]
        if array.shape != other.shape:
            return Verdict(WRONG, f"{name} has shape {array.shape} but {other.shape} serially", np.inf)
        scale = max(FLOOR, float(np.abs(other).max(initial=0)))
        difference = np.abs(np.asarray(array, "f8") - np.asarray(other, "f8")).max(initial=0)
        error = float("inf") if np.isnan(difference) else float(difference) / scale
        worst = max(worst, error)
        if not error <= TOLERANCE:
            wrong[name] = f"{name} off by {error:.2g}"
    if not wrong:
        return Verdict(OK, error=worst)
    return Verdict(WRONG, "; ".join(list(wrong.values())[:6]), worst, wrong=tuple(wrong))


def _judged(error: BaseException) -> Verdict:
    """Whether an error refuses a program, or is one of ours."""
    trace = "".join(traceback.format_exception(error)[-12:])[-4000:]
    if "no progress" in str(error):
        return Verdict(HUNG, _line(error), trace=trace)
    if isinstance(error, AssertionError) and "copies of" in str(error):
        return Verdict(WRONG, _line(error), np.inf, trace=trace)
    causes = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    house = all(isinstance(each, DistGraphError) for each in causes) and not isinstance(error, RuntimeFault)
    return Verdict(REFUSED if house else INTERNAL, _line(error), trace="" if house else trace)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


def signature(verdict: Verdict) -> str:
    """A verdict without what differs from case to case: equal for what is most likely one bug."""
    if verdict.kind in (WRONG, HUNG):
        return verdict.kind
    why = re.sub(r"%[\w.]+|'[^']*'|\([\w.]+py:\d+\)|\w+\.py:\d+|-?\d+(\.\d+)?|\[[^\]]*\]", "*", verdict.why)
    return f"{verdict.kind}: {why[:110]}"


# Smaller cases that fail in the same way


def shrink(case: Case, fails: Callable[[Case], bool], attempts: int = 300) -> Case:
    """The smallest case found that still fails: parts are taken out as long as any can be."""
    start = 0  # candidates before it were tried on a case that was little larger
    while True:
        for number, smaller in enumerate(_smaller(case)):
            if number < start:
                continue
            attempts -= 1
            if attempts < 0:
                return case
            if fails(smaller):
                case, start = smaller, number
                break
        else:
            if not start:
                return case
            start = 0


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one part less, what takes most first."""
    program, layout = case.program, case.layout
    size = len(program.instructions)
    for step in sorted({size // 2, size // 4, 1} - {0}, reverse=True):
        for at in range(0, size, step):
            rest = program.instructions[:at] + program.instructions[at + step :]
            yield Case(replace(program, instructions=rest), layout)
    for name, value in (
        ("steps", 1), ("micro", max(1, program.micro - 1)), ("optimizer", "sgd"), ("clip_norm", None),
        ("weight_decay", 0.0), ("warmup", False), ("keyed", False), ("other", ""), ("rest", 0),
        ("fitted", False), ("plain", False),
        ("batch", min(2, program.batch)), ("batch", 1),
        ("shape", program.shape[:-1] or [1]), ("loss", "square" if program.pure else "whole"),
    ):  # fmt: skip
        if getattr(program, name) != value:
            yield Case(replace(program, **{name: value}), layout)
    for name, empty in (
        ("pins", {}), ("reshards", {}), ("operators", {}), ("parameters", {}), ("recomputed", []),
        ("states", False), ("batch_axis", False), ("loss", -1), ("schedule", "1f1b"), ("refine", "never"),
        ("executor", "static"),
        ("mode", "semi"), ("extra", []), ("style", "on"), ("later", None),
    ):  # fmt: skip
        if getattr(layout, name) != empty:
            yield Case(program, replace(layout, **{name: empty}))
    if layout.later is not None:
        yield Case(program, layout.later)
        yield Case(program, replace(layout, later=Layout()))
        rest = (smaller for smaller in _smaller(Case(program, layout.later)) if smaller.program is program)
        yield from (Case(program, replace(layout, later=smaller.layout)) for smaller in rest)
    for name in ("pins", "reshards", "operators", "parameters"):
        table = getattr(layout, name)
        for key in table:
            yield Case(program, replace(layout, **{name: {k: v for k, v in table.items() if k != key}}))
    for extra in layout.extra:
        yield Case(program, replace(layout, extra=[e for e in layout.extra if e != extra]))
    yield from (Case(program, smaller) for smaller in _smaller_meshes(layout))


def _smaller_meshes(layout: Layout) -> Iterator[Layout]:
    for i, mesh in enumerate(layout.meshes):
        if len(layout.meshes) > 1:
            stages = {k: v - (v > i) if v != i else max(0, i - 1) for k, v in layout.stages.items()}
            rest = layout.meshes[:i] + layout.meshes[i + 1 :]
            yield replace(layout, meshes=rest, stages=stages, loss=min(layout.loss, len(rest) - 1))
        changed = [replace(mesh, weights={})] if mesh.weights else []
        if mesh.ranks != sorted(mesh.ranks):
            changed.append(replace(mesh, ranks=sorted(mesh.ranks)))
        for axis, count in mesh.axes.items():
            rest_axes = {k: v for k, v in mesh.axes.items() if k != axis}
            if rest_axes:
                changed.append(
                    replace(mesh, ranks=mesh.ranks[: len(mesh.ranks) // count], axes=rest_axes, weights={})
                )
            if count > 1:
                fewer = len(mesh.ranks) // count * (count - 1)
                changed.append(
                    replace(mesh, ranks=mesh.ranks[:fewer], axes={**mesh.axes, axis: count - 1}, weights={})
                )
        for other in changed:
            yield replace(layout, meshes=[*layout.meshes[:i], other, *layout.meshes[i + 1 :]])


def limited() -> None:
    """Waits without progress end after some seconds: a program that hangs is a failure, not a long wait."""
    os.environ.setdefault("DISTGRAPH_TIMEOUT", "60")
