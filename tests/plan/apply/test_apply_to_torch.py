"""Plans applied to a model of torch on four gloo processes train it to the serial losses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from support.plans.applied_models import SEARCHED, VOCABULARY, WIDTH, Decoder, decoder, plan_of  # noqa: E402
from support.plans.exported import finish, run  # noqa: E402

import distgraph as dg  # noqa: E402
from distgraph.errors import GraphError, ResourceError, ShardingError  # noqa: E402
from distgraph.plan.apply.module_checks import check_module, checksum  # noqa: E402
from distgraph.plan.apply.stage_layouts import layouts_of  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
CASES = ["dp_tp", "zero1", "zero3", "pp_dp", "pp_tp", *SEARCHED]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("applied")
    for case in CASES:
        plan_of(case).save(folder / f"{case}.plan.json")
    ranks = [{"RANK": str(rank), "WORLD_SIZE": "4", "PYTHONPATH": _paths()} for rank in range(4)]
    finish([run("applied_models.py", [str(folder), *CASES], rank) for rank in ranks])
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in CASES}


def _paths() -> str:
    return str(Path(__file__).parents[3])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_and_parameters_are_the_serial_ones(case: str, results: dict[str, Any]) -> None:
    found = results[case]
    assert found["serial"][-1] < found["serial"][0] - 0.1
    assert found["losses"] == pytest.approx(found["serial"], abs=2e-6)
    assert found["apart"] < 2e-6


@pytest.mark.slow
def test_parameters_are_stored_as_planned(results: dict[str, Any]) -> None:
    tensors, whole, states = (results[case]["shapes"] for case in ("dp_tp", "zero3", "zero1"))
    assert tensors["blocks.0.up.weight"] == [4 * WIDTH // 2, WIDTH]
    assert tensors["blocks.0.down.weight"] == [WIDTH, 4 * WIDTH // 2]
    assert whole["tokens.weight"] == states["tokens.weight"] == [VOCABULARY // 4, WIDTH]
    assert any("ZeRO-1" in note for note in results["zero1"]["notes"])
    assert results["searched_dp_tp"]["shapes"]["blocks.0.up.weight"] == [4 * WIDTH // 2, WIDTH]
    assert results["searched_zero"]["shapes"]["blocks.0.up.weight"] == [4 * WIDTH // 4, WIDTH]


@pytest.mark.slow
def test_ranks_that_start_from_permuted_values_are_refused(results: dict[str, Any]) -> None:
    refusal = results["dp_tp"]["refusal"]
    assert re.match(r"parameter norm.weight has checksum \w{16} on one rank and \w{16} on another", refusal)


def test_checksums_depend_on_the_order_of_elements() -> None:
    values = torch.tensor([1.0, 2.0, 2.0, 1.0, 0.0])
    others = [values.flip(0), values[[1, 0, 3, 2, 4]], values.double(), torch.zeros(5)]
    sums = [int(checksum(x)) for x in (values, *others)]
    assert len(set(sums)) == len(sums)
    matrix = torch.randn(3, 5, dtype=torch.bfloat16)
    assert checksum(matrix.T) == checksum(matrix.T.contiguous()) != checksum(matrix)


def test_an_uneven_batch_is_refused() -> None:
    plan = replace(plan_of("dp_tp"), batch=7)
    with pytest.raises(ShardingError, match=r"stage 0: 7 samples .* over 2 ranks .* are uneven"):
        layouts_of(plan)


def test_stages_of_different_shapes_are_refused() -> None:
    plan, other = plan_of("pp_tp"), plan_of("pp_dp")
    mixed = replace(plan, stages=(other.stages[0], plan.stages[1]), batch=8)
    with pytest.raises(ShardingError, match=r"are 1 x 1 x 2, 1 x 1 x 2|PyTorch sends between stages"):
        layouts_of(replace(mixed, tensors=dict(other.tensors)))


def _without_a_layer(net: Any) -> None:
    net.blocks.pop(-1)


def _of_other_shape(net: Any) -> None:
    net.places = torch.nn.Embedding(3, WIDTH)


def _without_values(net: Any) -> None:
    net.to("meta")


def _with_dropout(net: Any) -> None:
    net.blocks[0].drop = torch.nn.Dropout(0.1)


def _with_batch_norm(net: Any) -> None:
    net.bn = torch.nn.BatchNorm1d(2, affine=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_a_layer, r"has the parameters blocks\.1.*but the model does not"),
        (_of_other_shape, r"places.weight is \[3, 16\] in the model but \[8, 16\] in the plan"),
        (_without_values, r"tokens.weight is on device meta .* give it values first"),
        (_with_dropout, r"blocks.0.drop \(Dropout, p=0.1\): ranks that share a tensor"),
        (_with_batch_norm, r"bn \(BatchNorm1d\): the batch is split over 2 ranks"),
    ],
)
def test_what_cannot_be_applied_is_said_before_anything_runs(change: Any, message: str) -> None:
    net, plan = decoder(), plan_of("dp_tp")
    change(net)
    with pytest.raises(ShardingError, match=message):
        check_module(plan, layouts_of(plan), net, "cpu")


def test_no_module_and_no_processes() -> None:
    plan = plan_of("dp_tp")
    with pytest.raises(GraphError, match=r"module is a function but must be a torch.nn.Module"):
        check_module(plan, layouts_of(plan), lambda x: x, "cpu")
    with pytest.raises(ResourceError, match=r"needs 4 processes but none were started; run .* torchrun"):
        plan.apply_to_torch(Decoder())


def test_a_boundary_before_a_module_that_does_not_exist() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model = dg.frontends.torch.import_module(net.eval(), torch.zeros(2, 2))
    with pytest.raises(GraphError, match=r"Sequential has no module '00'; near are 0"):
        model.pipeline_boundary("00")
