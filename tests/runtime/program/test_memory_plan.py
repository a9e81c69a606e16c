from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from support.files.clusters import cluster_of
from support.programs.forecasts import chain, document, machines
from support.programs.searched import PROGRAMS, two_by_two
from support.search.plan_training import trains_as_one_rank

from distgraph import nn, ops, optim
from distgraph.engine.compile.train_graph import train_graph
from distgraph.ir.dtypes import itemsize, to_numpy
from distgraph.ir.graph import SOURCES
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.complete import complete
from distgraph.plan.plan import Plan
from distgraph.runtime.execute.worker import Worker
from distgraph.runtime.forecast.forecast import forecast, out_of_memory
from distgraph.runtime.forecast.memory_forecast import RankMemory, rank_memory
from distgraph.runtime.forecast.memory_timeline import occupancy
from distgraph.runtime.program import parts_of_values
from distgraph.runtime.program.build import Build, build
from distgraph.runtime.program.kernel_workspace import task_workspace
from distgraph.runtime.program.memory_plan import plan_storage
from distgraph.tracing.tensor import emit

grid = ProcessMesh.grid


def memory_of(build: Build, rank: int) -> RankMemory:
    program = build.program(rank)
    return rank_memory(program, plan_storage(program, build.schedule))


def uneven() -> Build:
    """Two stages on meshes of different shape, no size a multiple of the number of its parts."""
    meshes = [grid(0, dp=2, tp=2)] * 2 + [grid(4, dp=3)] * 2
    weights = [[None, "tp"], ["tp", None], [None, None], [None, None]]
    return chain(7, [5, 9, 7, 11, 3], meshes, 4, weights=weights, optimizer=optim.Adam())


@pytest.mark.parametrize("rank", range(7))
def test_parameters_and_states_are_the_sum_of_local_blocks(rank: int):
    build = uneven()
    graph, found = build.lowered, memory_of(build, rank)
    for kind, size in (("param", found.parameters), ("state", found.states)):
        blocks = 0
        for op in graph.sources(kind):
            attr = graph.attrs[op.name]
            if rank in attr.mesh:
                shape = attr.spec.local_shape(op.result.shape, attr.mesh, rank)
                blocks += math.prod(shape) * itemsize(op.result.dtype)
        assert size == blocks > 0


@pytest.mark.parametrize("rank", range(7))
def test_categories_are_what_the_worker_allocates(rank: int):
    build = uneven()
    program, found = build.program(rank), memory_of(build, rank)
    sources = {
        op.name: np.zeros(program.types[op.name][0], np.float32)
        for op in program.graph.sources("param", "state")
        if op.name in program.types
    }
    worker = Worker(program, build.schedule, None, np, sources)
    bases = {}
    for array in (*worker.arena.fixed.values(), *(a for ring in worker.arena.rings.values() for a in ring)):
        whole = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        bases[id(whole)] = whole.nbytes
    held = found.total - found.inputs
    constants = sum(  # those that tasks read are bound to their code, not to the arena
        4 for op in program.graph.sources("constant") if op.name in program.types
    )
    assert held <= sum(bases.values()) <= held + constants


@pytest.mark.parametrize(("policy", "micro"), [("1f1b", 8), ("1f1b", 3), ("gpipe", 8)])
def test_activations_in_flight(policy: str, micro: int):
    """Between the two layers of a stage lies one block of activations for every micro-batch in flight."""
    stages = 4
    meshes = [grid(stage, x=1) for stage in range(stages) for _ in range(2)]
    build = chain(6, [4] * (2 * stages + 1), meshes, micro, policy)
    for stage in range(stages):
        program = build.program(stage)
        storage = plan_storage(program, build.schedule)
        messages = {
            name
            for task in program.tasks
            for local in task.ops
            if local.mode in ("send", "recv")
            for name in (*(v.name for v in local.op.operands), *(v.name for v in local.op.results))
        }
        depths = {depth for name, depth in storage.rings.items() if name not in messages}
        assert max(depths) == (min(micro, stages - stage) if policy == "1f1b" else micro)


def test_gradients_are_as_large_as_their_parameters():
    build = chain(6, [4, 5, 3], [grid(dp=3)] * 2, 4)
    found = memory_of(build, 1)
    loss = 4
    assert found.parameters == 4 * (4 * 5 + 5 * 3)
    assert found.gradients == pytest.approx(found.parameters + loss, abs=loss)


def test_inputs_of_all_micro_batches():
    build = chain(6, [4, 5], [grid(dp=3)], 4)
    scalars = sum(4 for op in build.lowered.sources("constant", "input") if op.result.shape == ())
    block = 4 * (2 * 4 + 2 * 5)
    found = memory_of(build, 0).inputs
    assert 4 * block <= found <= 4 * (block + scalars)


def test_a_device_that_is_too_small_is_named_with_the_missing_bytes():
    build = chain(64, [64, 256, 64], [grid(0, dp=2), grid(2, dp=2)], 2)
    found = forecast(build, machines(4))
    need = {rank: memory.total for rank, memory in found.memory.items()}
    room = (min(need.values()) + max(need.values())) // 2
    cluster = machines(4, memory=f"{room} B")
    (short,) = out_of_memory(forecast(build, cluster), cluster)
    assert short.needed == max(need.values())
    assert short.missing == short.needed - room
    assert f"device {short.device} (b0/gpu{short.device})" in str(short)
    assert "are missing" in str(short)
    assert out_of_memory(found, machines(4)) == ()


class Pictures(nn.Module):
    """Convolutions and a pooling: kernels that take memory while they run."""

    def __init__(self) -> None:
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.pool, self.last = nn.MaxPool2d(2), nn.Linear(16 * 4 * 4, 10)

    def forward(self, images):
        x = self.pool(ops.relu(self.first(images)))
        return self.last(nn.Flatten()(ops.relu(self.second(x))))


def test_memory_is_what_numpy_takes_in_a_step():
    """All categories together, against tracemalloc from the making of the worker to the end of two steps."""
    pytest.importorskip("numba")
    images, labels = ((1024, 1, 8, 8), "f32"), ((1024,), "i32")
    graph = train_graph(Pictures(), (images, labels), nn.CrossEntropy(), optim.Adam())
    compiled = build(complete(graph, grid(serial=1)), micro_batches=2)
    program = compiled.program(0)
    storage = plan_storage(program, compiled.schedule)
    workspaces = task_workspace(program, storage)
    assert max(workspaces.values()) > 2**20
    memory = rank_memory(program, storage, workspaces)
    feeds = {
        op.attrs["name"]: [np.zeros(op.result.shape, to_numpy(op.result.dtype))] * 2
        for op in program.graph.sources("input")
        if op.result.shape
    }
    feeds |= {op.attrs["name"]: 1 for op in program.graph.sources("input") if not op.result.shape}

    def steps() -> None:
        sources = {
            op.name: np.zeros(program.types[op.name][0], np.float32)
            for op in program.graph.sources("param", "state")
        }
        worker = Worker(program, compiled.schedule, None, np, sources)
        worker.step(feeds)
        worker.step(feeds)

    steps()  # compiles the kernels
    tracemalloc.start()
    try:
        steps()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak == pytest.approx(memory.total - memory.inputs, rel=0.05)
    described = document(1)
    described["machines"][0]["devices"]["type"] = "cpu"
    found = forecast(compiled, cluster_of(described))
    assert found.memory[0] == memory
    used = occupancy(program, storage, found.timeline, found.workspaces[0])
    assert used.peak <= memory.total
    assert max(used.bytes["temporary"]) == memory.temporary
    assert min(used.bytes["temporary"]) <= memory.temporary - max(workspaces.values())


def test_a_parameter_is_overwritten_by_the_cast_of_its_master_copy() -> None:
    model = nn.Linear(256, 128, bias=False, dtype="f16")
    batch = (((4, 256), "f16"), ((4, 128), "f16"))
    graph = train_graph(model, batch, lambda y, t: ops.mean((y - t) ** 2), optim.AdamW(master="f32"))
    mesh = ProcessMesh.grid(dp=1)
    program = build(complete(graph, mesh), micro_batches=2)
    storage = plan_storage(program.program(0), program.schedule)
    needed = rank_memory(program.program(0), storage)
    held = 256 * 128
    assert needed.parameters == 2 * held
    assert needed.states == (4 + 4 + 4) * held  # the master and two moments: no second copy in f16
    (old,) = (op.name for op in graph.sources("param"))
    assert old in storage.in_place


class Symmetric(optim.SGD):
    """Descends with the transposition of every matrix as its momentum."""

    def _apply(self, slot: Any, g: Any, lr: Any, step: Any) -> None:
        options = {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0}
        slot.store(slot.p, emit("momentum", slot.p, g, slot.p.transpose(1, 0), lr, **options)[0])


def test_a_parameter_is_not_overwritten_while_a_view_of_it_is_read() -> None:
    model = nn.Linear(4, 4, bias=False)
    batch = (((4, 4), "f32"), ((4, 4), "f32"))
    graph = train_graph(model, batch, lambda y, t: ops.mean((y - t) ** 2), Symmetric())
    program = build(complete(graph, ProcessMesh.grid(dp=1)))
    storage = plan_storage(program.program(0), program.schedule)
    (old,) = (op.name for op in graph.sources("param"))
    assert old not in storage.in_place


@pytest.mark.parametrize("policy", ["1f1b", "gpipe", "eager-1f1b"])
def test_a_sent_value_has_one_buffer_more_than_stages_to_the_receiver(policy: str):
    """Gradients of a stage's input, which nothing else there reads: the receiver is the stage before."""
    stages, micro = 4, 8
    build = chain(6, [4] * (stages + 1), [grid(stage, x=1) for stage in range(stages)], micro, policy)
    for stage in range(1, stages):
        program = build.program(stage)
        storage = plan_storage(program, build.schedule)
        sent = {
            storage.slots[local.op.operands[0].name].root
            for task in program.tasks
            for local in task.ops
            if local.mode == "send" and task.kind == "backward"
        }
        assert {storage.rings[name] for name in sent if name in storage.rings} == {2}


@pytest.mark.parametrize("worth", [1, 2**60])
def test_a_slice_that_outlives_what_it_is_cut_from_is_copied(worth: int, monkeypatch: pytest.MonkeyPatch):
    """Copied, it frees the whole; training is the same."""
    monkeypatch.setattr(parts_of_values, "_MIN_FREED_BYTES", worth)
    plan = PROGRAMS["experts"].search(two_by_two(), "recursive")
    kept = _kept_for_slices(plan)
    assert kept if worth > 1 else not kept
    trains_as_one_rank(PROGRAMS["experts"], plan)


def _kept_for_slices(plan: Plan) -> set[str]:
    """Values that outlive their task, of which nothing but slices is read behind it."""
    engine = PROGRAMS["experts"].engine(PROGRAMS["experts"].make(), plan=plan)
    build = engine.prepare(PROGRAMS["experts"].data(1)).build
    found = set()
    for rank in build.ranks:
        program = build.program(rank)
        storage = plan_storage(program, build.schedule)
        made = {v.name: task.name for task in program.tasks for local in task.ops for v in local.op.results}
        whole, part = set(), set()
        for task in program.tasks:
            for local in task.ops:
                for value in local.op.operands:
                    slot = storage.slots.get(value.name)
                    if slot is None or program.graph.producers[slot.root].kind in SOURCES:
                        continue
                    if made.get(slot.root) != task.name:
                        mode = program.graph.producers[value.name].kind
                        (part if mode == "comm.slice" and slot.kind == "view" else whole).add(slot.root)
        found |= part - whole
    return found
