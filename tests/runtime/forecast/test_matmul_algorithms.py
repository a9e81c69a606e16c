"""Products by MeshSlice under the simulated clock: communication is hidden, in less memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.programs.matrix_products import FLOWS, Product
from support.programs.search_cases import cluster

from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.resources import ComputeCost
from distgraph.resources.host_times import HostTimes
from distgraph.runtime.forecast import program_structure
from distgraph.runtime.forecast.forecast import Forecast, forecast
from distgraph.runtime.forecast.op_cost import OpCost
from distgraph.runtime.program.build import build
from distgraph.runtime.program.memory_plan import plan_storage

SIZE = 4096


def forecast_of(flow: str, algorithm: MatmulAlgorithm, rows: int = 2, cols: int = 4) -> Forecast:
    case = Product(rows, cols, flow, algorithm, SIZE, SIZE, SIZE)
    return forecast(build(case.completed()), cluster((rows * cols,)), trace=True)


def exposed(found: Forecast) -> float:
    return sum(task.last.exposed for task in found.tasks.values())


@pytest.mark.parametrize("flow", FLOWS)
def test_slices_hide_communication_in_less_memory(flow: str) -> None:
    whole = forecast_of(flow, MatmulAlgorithm("collective"))
    sliced = forecast_of(flow, MatmulAlgorithm("meshslice", slices=8))
    assert sliced.step_seconds < whole.step_seconds
    assert exposed(sliced) < exposed(whole) / 3
    peaks = [max(memory.total for memory in found.memory.values()) for found in (sliced, whole)]
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("flow", FLOWS)
def test_meshslice_hides_more_than_its_rivals(flow: str) -> None:
    """Nothing hides the skews of Cannon's algorithm, but those of parameters, which a task of their own loads
    (OS): else it exposes no less than the collectives do."""
    whole = exposed(forecast_of(flow, MatmulAlgorithm("collective"), 2, 2))
    sliced = exposed(forecast_of(flow, MatmulAlgorithm("meshslice", slices=8), 2, 2))
    wang, summa, cannon = (
        exposed(forecast_of(flow, MatmulAlgorithm(name), 2, 2)) for name in ("wang", "summa", "cannon")
    )
    assert sliced < wang < cannon
    assert cannon < whole if flow == "OS" else whole <= cannon * (1 + 1e-9)
    assert wang < whole
    assert sliced < summa < whole


def test_gathered_slices_of_weights_are_made_where_they_are_used() -> None:
    """Not once for the whole step, before it begins, when all of them would be kept."""
    found = forecast_of("OS", MatmulAlgorithm("meshslice", slices=4))
    assert not any(span.kind.startswith("comm.") for span in found.tasks["load.s0"].last.spans)
    forward = found.tasks["forward.s0"].last.spans
    gathers = [span for span in forward if span.kind == "comm.all_gather"]
    products = [span for span in forward if span.kind in ("einsum", "einsum_add")]
    assert (len(gathers), len(products)) == (8, 4)
    both = [span for span in gathers if span.start < products[0].start + products[0].seconds]
    assert len(both) == 4  # those of the first two slices, in both directions


@pytest.mark.parametrize("block", [None, 1])
def test_a_slice_of_one_block_is_copied_only_to_be_sent(block: int | None) -> None:
    """A (a slice is some columns) where its all_gather starts; B (some rows) never."""
    case = Product(2, 2, "OS", MatmulAlgorithm("meshslice", 4, block), 48, 64, 80)
    built = build(case.completed())
    program = built.program(0)
    ordinary = cluster((4,))
    host = replace(ordinary.devices[0].compute, host=HostTimes(message=1e-6))
    moving = replace(ordinary, devices=tuple(replace(d, compute=host) for d in ordinary.devices))
    cost = OpCost(program, plan_storage(program, built.schedule), ComputeCost(moving), 0)
    forward = [local for local in program.ops if local.op.role == "forward"]
    sliced = [local for local in forward if local.op.kind == "block_slice"]
    assert {local.mode for local in sliced} == {"compute" if block else "comm.slice"}
    item, bytes_of = 8, {"a": 24 * 8, "b": 8 * 40}  # a quarter of a shard of A, [24, 32], and of B, [32, 40]
    copies = {local.op.name.split(".")[1]: cost.work(local).nbytes for local in sliced}
    assert copies == {f"{n}{i}": 2 * item * bytes_of[n] if block else 0 for n in "ab" for i in range(4)}
    gathered = {local.op.name.split(".")[1]: local for local in forward if local.mode == "comm.all_gather"}
    unpacked = 2 * item * 2 * bytes_of["a"]
    for name, local in gathered.items():
        scattered = 0 if block else 2 * item * bytes_of["a"]
        work = cost.work(local)
        assert work.nbytes == (unpacked + scattered if name[0] == "a" else 0), name
        assert work.op == ("block_slice" if name[0] == "a" else ""), name  # whose copies a profile measures


@pytest.mark.parametrize(("ring", "corners"), [("rows", 4), ("cols", 8)])
def test_one_rank_is_timed_for_a_ring(ring: str, corners: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank has another block in each step of the ring, and the same work."""
    built = build(Product(2, 4, "OS", MatmulAlgorithm("wang", ring=ring), SIZE, SIZE, SIZE).completed())
    one = forecast(built, cluster((8,)))
    assert one.exact
    meshes = frozenset(built.parts.graph.meshes)
    monkeypatch.setattr(program_structure, "uneven_meshes", lambda _: meshes)
    several = forecast(built, cluster((8,)))
    assert (len(one.ranks), len(several.ranks)) == (1, corners)
    assert several.step_seconds == one.step_seconds
