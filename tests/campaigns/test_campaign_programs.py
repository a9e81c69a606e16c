"""A short form of the campaign of random programs, the campaign's own parts, and programs that it found."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from campaigns.program_generator import Case, Instruction, Layout, Mesh, draw_case, draw_program
from campaigns.program_trial import (
    FAILURES,
    HUNG,
    INTERNAL,
    OK,
    REFUSED,
    SKIPPED,
    WRONG,
    References,
    _judged,
    run_trial,
    shrink,
)
from campaigns.programs import PARTS, RANKS, Tally, Trial, Worker
from support.files.clusters import cluster_of
from support.programs.searched import slow

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine import Engine
from distgraph.errors import GraphError, RuntimeFault
from distgraph.ir import verifier
from distgraph.runtime.transport import inprocess

SEED = 20
GRID = dg.ProcessMesh.grid


@pytest.mark.parametrize("block", range(6))
def test_random_programs_train_as_on_one_rank(block: int) -> None:
    references = References()
    for number in range(8 * block, 8 * block + 8):
        case = draw_case(SEED, number)
        case.layout.refine = "conflicts" if case.layout.refine == "always" else case.layout.refine
        verdict = run_trial(case, references)
        assert verdict.kind not in FAILURES, f"trial {number}: {verdict.why}\n{verdict.trace}\n{case}"


def test_a_worker_answers_as_the_trial_does() -> None:
    trial = Trial("process", SEED, 3)
    worker, tally = Worker("process"), Tally()
    try:
        verdict = worker.run(trial.case(), 100.0)
        assert worker.run(trial.case(), 0.0)["kind"] == "hung"  # no time at all
    finally:
        worker.close()
    assert verdict["kind"] == run_trial(trial.case(), References()).kind == OK
    tally.add(trial, verdict, None)
    assert tally.to_json()["trials"] == tally.to_json()["parts"]["process"][OK] == 1
    assert sum(PARTS.values()) == pytest.approx(1.0)


def test_a_case_is_the_same_from_its_seed_and_from_its_file() -> None:
    cases = [draw_case(1, n, searched=n % 3 == 0) for n in range(40)]
    assert cases == [draw_case(1, n, searched=n % 3 == 0) for n in range(40)]
    assert cases == [Case.from_json(json.loads(json.dumps(case.to_json()))) for case in cases]
    kinds = {each.kind for n in range(60) for each in draw_program(2, n).instructions}
    assert len(kinds) > 32


def test_every_form_of_a_program_is_drawn() -> None:
    cases = [draw_case(1, n) for n in range(400)]
    layouts = [case.layout for case in cases]
    nested = [each for each in layouts if len(each.meshes) > 2 and _nested(each.meshes)]
    assert {each.schedule for each in nested} == {"1f1b", "gpipe"}
    assert {each.executor for each in layouts if len(each.meshes) > 1} == {"static", "actors"}
    assert any(each.later is not None for each in layouts)
    assert all(case.layout.later is None or "plan" not in case.layout.extra for case in cases)
    assert {case.program.plain for case in cases} == {False, True}
    assert any(case.program.rest for case in cases)
    assert all(case.program.fitted and case.program.pure for case in cases if case.program.rest)


def _nested(meshes: list[Mesh]) -> bool:
    """Whether the first mesh has the ranks of all others, and no two of these share one."""
    rest = [rank for mesh in meshes[1:] for rank in mesh.ranks]
    return set(rest) < set(meshes[0].ranks) and len(set(rest)) == len(rest)


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_training_goes_on_from_a_checkpoint_in_another_layout(plain: bool, fitted: bool) -> None:
    """Also with a function as the model, and in the middle of an epoch with a short last batch."""
    case = _two_ranks()
    case.program.plain, case.program.fitted, case.program.optimizer = plain, fitted, "adam"
    case.program.rest = int(fitted)
    case.layout.later = Layout(meshes=[Mesh([2, 0, 1], {"tp": 3})], stages={"s0": 0}, parameters={"s0": 1})
    assert case.layout.ranks == 3
    assert run_trial(case, References()).kind == OK
    assert run_trial(replace(case, layout=case.layout.later), References()).kind == OK


def test_a_checkpoint_that_is_not_loaded_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _two_ranks()
    case.layout.later = Layout()
    monkeypatch.setattr(Engine, "load", lambda engine, path: None)
    assert run_trial(case, References()).kind == WRONG


def test_a_contribution_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _two_ranks()
    references = References()
    assert run_trial(case, references).kind == OK
    monkeypatch.setattr(inprocess, "reduce_in_order", lambda parts, op, out: out.__setitem__(..., parts[0]))
    verdict = run_trial(case, references)
    assert verdict.kind == WRONG
    assert "loss of step 0" in verdict.why


def test_rounding_errors_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial 7046 predicts a sum that is zero, with a bias that Adam has made of a zero gradient. It is
    wrong all the same where another number is, too."""
    case, references = draw_case(16000000, 7046, RANKS["process"], searched=False), References()
    verdict = run_trial(case, references)
    assert (verdict.kind, verdict.wrong) == (SKIPPED, ())
    assert verdict.why.startswith("rounding errors of the serial program: predicted output off by ")
    monkeypatch.setattr(inprocess, "reduce_in_order", lambda parts, op, out: out.__setitem__(..., parts[0]))
    verdict = run_trial(case, references)
    assert verdict.kind == WRONG
    assert len(verdict.wrong) > 1


def test_a_layout_that_the_verifier_refuses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of a wrong layout may be right by chance."""
    case, references = _two_ranks(), References()
    monkeypatch.setattr(verifier, "representable", lambda rule, layout: False)
    verdict = run_trial(case, references)
    assert verdict.kind == INTERNAL
    assert "does not pass the verifier" in verdict.why


def test_errors_are_told_apart() -> None:
    """A house error refuses a program; what a rank raises, and what is no house error, is a failure."""

    def caused(error: Exception, cause: Exception) -> Exception:
        error.__cause__ = cause
        return error

    assert _judged(GraphError("%1 does not fit")).kind == REFUSED
    assert _judged(KeyError("x")).kind == INTERNAL
    assert _judged(caused(GraphError("no plan"), KeyError("x"))).kind == INTERNAL
    assert _judged(caused(RuntimeFault("rank 1 failed: KeyError"), KeyError("x"))).kind == INTERNAL
    assert _judged(RuntimeFault("rank 0: recv made no progress in 20 s")).kind == HUNG
    assert _judged(AssertionError("copies of w differ")).kind == WRONG


def test_a_case_is_shrunk_to_what_fails() -> None:
    """Of a program with one instruction that matters, on one mesh that matters, these are left."""
    case = draw_case(SEED, 12)
    case.program.instructions.append(Instruction("sort", 5, "the one"))
    case.layout.meshes.append(Mesh([5, 6], {"dp": 2}))

    def fails(other: Case) -> bool:
        kinds = [each.kind for each in other.program.instructions]
        return "sort" in kinds and any(6 in mesh.ranks for mesh in other.layout.meshes)

    small = shrink(case, fails)
    assert [each.kind for each in small.program.instructions] == ["sort"]
    assert [mesh.ranks for mesh in small.layout.meshes] == [[5, 6]]
    assert not small.layout.pins
    assert small.program.steps == 1


def _two_ranks() -> Case:
    program = draw_program(SEED, 0)
    program.instructions, program.pure, program.other = [Instruction("linear", 4, "s0")], True, ""
    program.loss, program.shape, program.batch = "square", [4], 2
    return Case(program, Layout(meshes=[Mesh([0, 1], {"dp": 2})], stages={"s0": 0}, batch_axis=True))


# Programs that were found


@pytest.mark.parametrize(
    ("seed", "number", "searched"),
    [
        pytest.param(9700000, 8461, False, id="plan with a copied input"),
        pytest.param(9700000, 98, True, id="ranks of a stage without a forecast"),
        pytest.param(11000000, 7540, False, id="parts of a fused op that reads two meshes"),
        pytest.param(
            12000000, 4977, False, id="a loop on another mesh of the same ranks than its first value"
        ),
        pytest.param(9800000, 44, True, id="recursion that goes on in the inner dim of a reshape"),
        pytest.param(0, 9910291, False, id="two claims of one key on a dim, which differ in their place"),
    ],
)
def test_a_plan_is_made_of_any_program(seed: int, number: int, searched: bool) -> None:
    """Also where the copy of an input stands elsewhere in the plan than in the program, where the forecast
    has no rank of a stage, because blocks of its mesh have unequal sizes, and where a decomposed op reads a
    parameter of another mesh."""
    case = draw_case(seed, number, RANKS["searched" if searched else "process"], searched)
    verdict = run_trial(case, References())
    assert verdict.kind == OK, verdict.why


class Scaled(nn.Module):
    """Inputs times a parameter that lies on another mesh, split where there is one element only."""

    def __init__(self, mesh: dg.ProcessMesh | None) -> None:
        self.w = nn.Parameter((1,), "f64", ("ones",))
        dg.shard_tensor(self.w, mesh, ["dp"])

    def forward(self, x: Any) -> Any:
        return x * (self.w - 0.2)


def test_zeros_of_a_mask_are_not_summed_into() -> None:
    """A gradient that one rank of a mesh receives is summed there with zeros of the others, in every step."""

    def losses(first: dg.ProcessMesh | None, second: dg.ProcessMesh | None) -> list[float]:
        rng = np.random.default_rng(0)
        x, target = rng.normal(size=(2, 1)), rng.normal(size=(2, 1))
        strategy = dg.Strategy(mesh=first, batch_axis=first and "dp")
        engine = dg.Engine(Scaled(second), nn.MeanSquaredError(), optim.SGD(lr=0.1), strategy=strategy)
        return [engine.run((x, target))["loss"] for _ in range(4)]

    np.testing.assert_allclose(losses(GRID(dp=1), GRID(1, dp=2)), losses(None, None), rtol=1e-12)


def test_a_searched_plan_keeps_annotations_over_an_axis_of_one_rank() -> None:
    """Such an axis splits nothing, so a plan that leaves it out does not contradict the annotation."""
    mesh = dg.ProcessMesh.grid(dp=2, tp=1)
    model = nn.Linear(4, 6, dtype="f64")
    dg.shard_tensor(model.weight, mesh, ["tp", "dp"])
    strategy = dg.Strategy(mode="sharding_propagation", mesh=mesh)
    cluster = cluster_of(slow(2))
    engine = dg.Engine(model, nn.MeanSquaredError(), optim.SGD(lr=0.1), strategy=strategy, cluster=cluster)
    engine.prepare((np.zeros((4, 4)), np.zeros((4, 6))))
    assert engine.plan.portable.tensors["weight"].spec.axes in (("dp",), ("tp", "dp"))


class TwoMeshes(nn.Module):
    """A layer and what follows it, each on a mesh of its own."""

    def __init__(self, *meshes: dg.ProcessMesh) -> None:
        self.linear, self._meshes = nn.Linear(3, 3, dtype="f64"), meshes

    def forward(self, x: Any) -> Any:
        with dg.on(self._meshes[0] if self._meshes else None):
            hidden = ops.tanh(self.linear(x))
        with dg.on(self._meshes[1] if self._meshes else None):
            return ops.sin(hidden)


@pytest.mark.parametrize("micro", [1, 2])
def test_two_meshes_of_one_rank_exchange_without_a_transport(micro: int) -> None:
    """A rank that is alone has nobody to send to; what goes from one mesh to the other stays there."""

    def losses(*meshes: dg.ProcessMesh) -> list[float]:
        x, strategy = np.linspace(-1, 1, 12).reshape(4, 3), dg.Strategy(micro_batches=micro)
        engine = dg.Engine(TwoMeshes(*meshes), nn.MeanSquaredError(), optim.SGD(lr=0.1), strategy=strategy)
        return [engine.run((x, -x))["loss"] for _ in range(2)]

    np.testing.assert_allclose(losses(GRID(a=1), GRID(b=1)), losses(), rtol=1e-12)


class Doubled(nn.Module):
    """A value of one mesh, joined with itself on another mesh of the same ranks, along a split dim."""

    def __init__(self, *meshes: dg.ProcessMesh) -> None:
        self.w, self._meshes = nn.Parameter((6,), "f64", ("ones",)), meshes

    def forward(self, x: Any) -> Any:
        first, second = self._meshes or (None, None)
        dg.shard_tensor(x, first, ["tp", None])
        with dg.on(second):
            return dg.shard_tensor(ops.concat([x, x], axis=1), second, [None, "dp"]) * self.w


@pytest.mark.parametrize("second", [GRID(dp=4), GRID(dp=2, pp=2), GRID(tp=1, dp=4)], ids=str)
def test_windows_are_fetched_from_a_mesh_of_the_same_ranks_with_other_axes(second: dg.ProcessMesh) -> None:
    def losses(*meshes: dg.ProcessMesh) -> list[float]:
        x = np.linspace(-1, 1, 12).reshape(4, 3)
        engine = dg.Engine(Doubled(*meshes), nn.MeanSquaredError(), optim.SGD(lr=0.1))
        return [engine.run((x, np.ones((4, 6))))["loss"] for _ in range(2)]

    np.testing.assert_allclose(losses(GRID(tp=2, x=2), second), losses(), rtol=1e-12)
