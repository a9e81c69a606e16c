"""Plans applied to a function of JAX on eight CPU devices train it to the serial losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

jax: Any = pytest.importorskip("jax")

from support.plans.applied_functions import apply, plan_of, start  # noqa: E402

import distgraph as dg  # noqa: E402
from distgraph.errors import GraphError, ResourceError, ShardingError  # noqa: E402
from distgraph.plan.apply.jax_application import DistributedFunction  # noqa: E402

pytestmark = [pytest.mark.jax, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    settings = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/plans/applied_functions.py")],
        env={**os.environ, **settings, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("case", "up"), [("dp", [8, 16]), ("dp_tp", [8, 8]), ("zero3", [1, 16])])
def test_losses_are_the_serial_ones(case: str, up: list[int], results: dict[str, Any]) -> None:
    found = results[case]
    assert found["losses"] == pytest.approx(results["serial"], rel=1e-5)
    assert found["up"] == up
    assert found["constraints"] >= 5  # up, down and block0 of both blocks, but for the last residual
    assert found["notes"] == []


def test_arguments_on_other_devices_by_keyword_and_of_other_kinds(results: dict[str, Any]) -> None:
    assert max(results["calls"].values()) < 1e-5
    assert results["leaves"] == 0


def test_too_few_devices() -> None:
    if jax.device_count() > 1:
        pytest.skip("JAX has several devices")
    with pytest.raises(
        ResourceError, match=r"uses mesh\(dp=8\) but JAX has 1 devices; search a plan with dev"
    ):
        plan_of("dp").apply_to_jax(apply)


def test_what_cannot_be_applied_is_said_before_anything_runs() -> None:
    plan = plan_of("dp")
    with pytest.raises(GraphError, match=r"function is a int but must be callable"):
        plan.apply_to_jax(3)  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match=r"mesh is dict but the plan has the axes \{'dp': 8\}"):
        plan.apply_to_jax(apply, {})
    with pytest.raises(
        ShardingError, match=r"has 2 stages but JAX has no pipeline; search a plan with stages=1"
    ):
        replace(plan, stages=(plan.stages[0],) * 2).apply_to_jax(apply)


def test_other_parameters_are_refused() -> None:
    plan, mesh = plan_of("dp"), jax.sharding.Mesh(jax.devices()[:1], ("dp",))
    function = DistributedFunction(plan, apply, mesh, ())
    other = dg.tree_map(lambda x: x, start())
    other["head"] = other["head"][:, :2]
    with pytest.raises(ShardingError, match=r"parameter head is \[8, 2\] but \[8, 3\] in the plan"):
        function(other, 0)
    with pytest.raises(
        ShardingError, match=r"parameter tail is not in the plan of apply|parameter tail is not"
    ):
        function({"tail": other["head"]}, 0)


def test_wrong_calls_and_unknown_states_are_named() -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("dp",))
    function = DistributedFunction(plan_of("dp"), apply, mesh, ())
    with pytest.raises(
        GraphError, match=r"apply is called with other arguments .* missing .* 'x'; its argum"
    ):
        function(start(), y=0)
    with pytest.raises(
        ShardingError, match=r"has no state 'adam_m' of parameters; its optimiser has momentum"
    ):
        function.state_shardings(start(), "adam_m")
    assert function.state_shardings(start(), "momentum")["head"].is_fully_replicated
