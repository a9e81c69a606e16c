from __future__ import annotations

import itertools
from dataclasses import replace

import networkx as nx
import pytest
from support.files.clusters import cluster_of
from support.programs.forecasts import BANDWIDTH, LAUNCH, RATE, WAITING, chain, document, machines

from distgraph.errors import GraphError, ResourceError
from distgraph.ir.graph import Op, Value
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import flops, lookup
from distgraph.passes.partition import LocalOp
from distgraph.resources import CollectiveCost, ComputeCost
from distgraph.resources.cluster import Cluster, MeasuredTable
from distgraph.resources.mesh_communication import MeshCommunication
from distgraph.runtime.forecast.communication_cost import Message, TrafficCost
from distgraph.runtime.forecast.forecast import Forecast, forecast, out_of_memory
from distgraph.runtime.forecast.in_flight import NOTHING_IN_FLIGHT
from distgraph.runtime.forecast.op_cost import OpCost
from distgraph.runtime.forecast.stream_model import Streams, _Run
from distgraph.runtime.program.build import Build
from distgraph.runtime.program.memory_plan import plan_storage
from distgraph.runtime.schedule.simulate import simulate
from distgraph.runtime.schedule.task import pipeline

grid = ProcessMesh.grid
FREE = {"launch": "0 s", "latency": "0 s", "bandwidth": "1000000 TB/s", "cable": "1000000 TB/s"}


def serial_chain(micro_batches: int = 1) -> Build:
    return chain(64, [128, 256], [grid(x=1)], micro_batches)


def of_kind(build: Build, task: str, kind: str, rank: int = 0) -> list[LocalOp]:
    found = next(t for t in build.program(rank).tasks if t.name == task)
    return [local for local in found.ops if local.op.kind == kind]


def costs(build: Build, cluster: Cluster, rank: int = 0) -> OpCost:
    program = build.program(rank)
    return OpCost(program, plan_storage(program, build.schedule), ComputeCost(cluster), rank)


def test_a_matmul_by_hand():
    build = serial_chain()
    (local,) = of_kind(build, "forward.s0", "matmul")
    work, seconds = costs(build, machines(1)).of(local)
    moved = 4 * (64 * 128 + 128 * 256 + 64 * 256)
    assert (work.kind, work.flops, work.nbytes, work.dims) == (
        "matmul", 2 * 64 * 128 * 256, moved, (1, 64, 256, 128),
    )  # fmt: skip
    assert seconds == pytest.approx(LAUNCH + max(2 * 64 * 128 * 256 / RATE, moved / BANDWIDTH))


def test_the_tasks_of_a_serial_program_are_the_sums_of_their_ops():
    build, cluster = serial_chain(), machines(1)
    found = forecast(build, cluster)
    price = costs(build, cluster)
    for task in build.program(0).tasks:
        assert found.tasks[task.name].last.seconds == pytest.approx(sum(price.of(op)[1] for op in task.ops))
        assert found.tasks[task.name].last.exposed == 0
    assert found.step_seconds == pytest.approx(sum(t.last.seconds for t in found.tasks.values()))
    assert found.bubble == pytest.approx(0)
    assert found.exact
    assert not found.traffic


def test_flops_and_bytes_are_those_of_the_local_block():
    build = chain(6, [4, 5, 7], [grid(dp=2, tp=3)] * 2, weights=[[None, "tp"], ["tp", None]])
    cluster = machines(6)
    for rank, inner in ((0, 2), (2, 1), (4, 2)):  # 5 columns over 3 ranks: 2, 2, 1
        first, second = of_kind(build, "forward.s0", "matmul", rank)
        price = costs(build, cluster, rank)
        assert price.of(first)[0].flops == 2 * 3 * 4 * inner
        assert price.of(second)[0].nbytes == 4 * (3 * inner + inner * 7 + 3 * 7)
        assert price.of(second)[0].dims == (1, 3, 7, inner)


def test_views_cost_nothing_and_sums_over_micro_batches_no_pass_of_their_own():
    build, cluster = serial_chain(micro_batches=3), machines(1)
    price = costs(build, cluster)
    task = next(t for t in build.program(0).tasks if t.kind == "backward")
    gradient = next(local for local in task.ops if local.op.kind == "einsum")
    adding = next(local for local in task.ops if local.mode == "accumulate")
    assert price.of(adding)[1] == 0
    assert price.scaling(adding)[1] == 0
    # the product reads the sum that it adds to
    assert price.of(gradient)[0].nbytes == 4 * (64 * 128 + 64 * 256 + 2 * 128 * 256)
    once = serial_chain()
    assert costs(once, cluster).of(of_kind(once, "backward.s0", "einsum")[0])[0].nbytes == 4 * (
        64 * 128 + 64 * 256 + 128 * 256
    )
    broadcast = next(op for p in build.parts.tasks for op in p.body if op.kind == "broadcast_to")
    (home,) = [p.name for p in build.parts.tasks if broadcast in p.body]
    assert price.of(of_kind(build, home, "broadcast_to")[0])[1] == 0


def test_a_lookup_reads_the_rows_that_are_asked_for():
    table, ids, rows = Value("t", (1000, 8), "f32"), Value("i", (5,), "i32"), Value("y", (5, 8), "f32")
    local = LocalOp(Op("embedding", (table, ids), (rows,), {}), "compute", {})
    price = costs(serial_chain(), machines(1))
    price.program.types.update({v.name: (v.shape, v.dtype) for v in (table, ids, rows)})
    slot = next(iter(price.storage.slots.values()))
    price.storage.slots.update({v.name: type(slot)("source", v.name) for v in (table, ids, rows)})
    work = price.of(local)[0]
    assert (work.kind, work.nbytes) == ("lookup", 160 + 20 + 160)


def test_a_reduction_that_is_read_at_once_is_exposed():
    mesh = grid(tp=3)
    build = chain(64, [12, 30, 9], [mesh] * 2, weights=[[None, "tp"], ["tp", None]])
    cluster = machines(3)
    found = forecast(build, cluster).tasks["forward.s0"].last
    alone = CollectiveCost(cluster).time("all_reduce", (0, 1, 2), 4 * 64 * 9)
    assert found.exposed == pytest.approx(alone)
    assert found.seconds == pytest.approx(found.compute + found.exposed)


def test_reductions_hide_behind_computation():
    """The last gradient's reduction runs beside the updates of the other layers."""
    build = chain(64, [64] * 6, [grid(dp=2)] * 5, passes=["-bucket_gradients"])
    slow, free = forecast(build, machines(2)), forecast(build, machines(2, **FREE))
    backward, update = free.tasks["backward.s0"].last, free.tasks["optimize.s0"].last
    assert backward.exposed == 0
    assert update.exposed == pytest.approx(0, abs=1e-12)
    assert backward.communication > 0
    assert slow.tasks["backward.s0"].last.communication == pytest.approx(
        5 * CollectiveCost(machines(2)).time("all_reduce", (0, 1), 4 * 64 * 64)
    )
    exposed = slow.exposed_seconds[0]
    total = sum(task.last.communication for task in slow.tasks.values())
    assert 0 < exposed < total


def test_without_overlap_everything_is_exposed():
    build = chain(64, [64] * 6, [grid(dp=2)] * 5, micro_batches=3)
    found = forecast(build, machines(2), runtime=WAITING)
    total = sum(task.last.communication for task in found.tasks.values())
    assert found.exposed_seconds[0] == pytest.approx(total)
    assert found.step_seconds >= forecast(build, machines(2)).step_seconds


def test_groups_that_share_a_cable_slow_each_other():
    mesh = grid(dp=2, tp=2)
    build = chain(64, [64, 64], [mesh], weights=[[None, "tp"]])
    together = forecast(build, machines(2, 2)).tasks["backward.s0"].last.communication
    (local,) = of_kind(build, "backward.s0", "comm.all_reduce")
    size, cost = 4 * 64 * 32, CollectiveCost(machines(2, 2))
    assert local.attrs["group"] == (0, 2)
    assert together == pytest.approx(cost.time("all_reduce", (0, 2), size, [(1, 3)]))
    assert together > cost.time("all_reduce", (0, 2), size)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (3, 3, 3, 3), (12,), (5, 4, 3), (2,) * 6])
@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b")])
def test_patterns_of_groups_give_the_slowest_group(sizes: tuple[int, ...], axes: tuple[str, ...]):
    """Beside a computation for every group, with the groups that share a machine with it, however far."""
    mesh, cluster = grid(a=3, b=4), machines(*sizes)
    communication = MeshCommunication(cluster)
    cost = CollectiveCost(cluster)
    best = max(
        cost.time("all_gather", groups[0], 2**20, groups[1:]) for groups in communication.patterns(mesh, axes)
    )
    slowest, meet = 0.0, nx.Graph()
    groups = mesh.groups(axes)
    meet.add_nodes_from(groups)
    for one, other in itertools.combinations(groups, 2):
        if {cluster.devices[d].machine for d in one} & {cluster.devices[d].machine for d in other}:
            meet.add_edge(one, other)
    for group in groups:
        others = nx.node_connected_component(meet, group) - {group}
        slowest = max(slowest, cost.time("all_gather", group, 2**20, sorted(others)))
    assert best == pytest.approx(slowest, rel=1e-12)


def walked(build: Build, found: Forecast) -> float:
    """The longest path through the tasks, made anew from order, edges and durations."""
    micro, tasks = build.lowered.micro_batches, {p.name: p for p in build.parts.tasks}
    graph: nx.DiGraph = nx.DiGraph()

    def seconds(name: str, m: int) -> float:
        time = found.tasks[name]
        return (time.last if m == micro - 1 or not tasks[name].per_micro else time.body).seconds

    def runs(name: str) -> range:
        return range(micro if tasks[name].per_micro else 1)

    for name in tasks:
        for m in runs(name):
            graph.add_edge((name, m, "start"), (name, m, "end"), w=seconds(name, m))
    for source, target in build.parts.edges:
        for m, n in itertools.product(runs(source), runs(target)):
            if m == n or not (tasks[source].per_micro and tasks[target].per_micro):
                delay = found.transfers.get((source, target), 0.0)
                graph.add_edge((source, m, "end"), (target, n, "start"), w=delay)
    for rank in build.ranks:
        for (a, m), (b, n) in itertools.pairwise(build.schedule.order(rank)):
            graph.add_edge((a, m, "end"), (b, n, "start"), w=0.0)
    return float(nx.dag_longest_path_length(graph, weight="w"))


@pytest.mark.parametrize("policy", ["1f1b", "gpipe", "eager-1f1b"])
@pytest.mark.parametrize("micro", [1, 2, 7])
def test_the_step_is_the_longest_path(policy: str, micro: int):
    meshes = [grid(0, dp=2), grid(2, dp=3), grid(5, dp=1), grid(6, dp=2)]
    build = chain(12, [30, 60, 20, 40, 10], meshes, micro, policy)
    found = forecast(build, machines(4, 4))
    assert found.step_seconds == pytest.approx(walked(build, found), rel=1e-9)


@pytest.mark.parametrize("policy", ["1f1b", "gpipe", "eager-1f1b"])
@pytest.mark.parametrize(("stages", "micro"), [(1, 3), (3, 3), (4, 8), (5, 2)])
def test_equal_stages_take_m_plus_p_minus_1_turns(policy: str, stages: int, micro: int):
    graph = pipeline([(s,) for s in range(stages)], micro, optimize=False)
    times = {"forward": 2.0, "backward": 3.0}
    last = {f"backward.s{s}": 3.0 for s in range(stages)}
    edges = {(e.source, e.target): 0.0 for e in graph.edges}
    assert simulate(graph, times, policy=policy, transfer=edges, last=last).makespan == pytest.approx(
        (micro + stages - 1) * 5.0
    )


def test_last_micro_batch_and_transfers_of_edges_by_hand():
    graph = pipeline([(0,), (1,)], 2, optimize=False)
    transfer = {("forward.s0", "forward.s1"): 0.5, ("backward.s1", "backward.s0"): 0.25}
    found = simulate(graph, {"forward": 1.0, "backward": 2.0}, transfer=transfer, last={"backward.s1": 4.0})
    ran = {(run.task, run.micro): (run.start, run.end) for run in found.intervals}
    assert ran["forward.s1", 0] == (1.5, 2.5)
    assert ran["backward.s1", 0] == (2.5, 4.5)
    assert ran["backward.s0", 0] == (4.75, 6.75)
    assert ran["backward.s1", 1] == (5.5, 9.5)  # after its forward, four seconds long
    assert ran["backward.s0", 1] == (9.75, 11.75)
    with pytest.raises(GraphError, match=r"transfer time is -1 s"):
        simulate(graph, transfer={("forward.s0", "forward.s1"): -1})
    with pytest.raises(GraphError, match=r"duration of task 'backward.s1' is -4.0"):
        simulate(graph, last={"backward.s1": -4.0})


@pytest.mark.parametrize(
    ("rows", "widths", "exact"), [(6, [4, 6, 8], True), (6, [4, 7, 8], False), (7, [4, 6, 8], False)]
)
def test_representatives_stand_for_all_ranks(rows: int, widths: list[int], exact: bool):
    build = chain(rows, widths, [grid(dp=2, tp=3)] * 2, 2, weights=[[None, "tp"], ["tp", None]])
    cluster = machines(6)
    found = forecast(build, cluster)
    assert found.exact is exact
    traffic = TrafficCost(build.lowered, cluster, tuple(range(6)))
    for task in build.parts.tasks:
        times = []
        for rank in build.ranks:
            program = build.program(rank)
            storage = plan_storage(program, build.schedule)
            streams = Streams(program, storage, OpCost(program, storage, ComputeCost(cluster), rank), traffic)
            local = next(t for t in program.tasks if t.name == task.name)
            times.append(streams.run(local, last=False).seconds)
        if task.per_micro:
            assert found.tasks[task.name].body.seconds == pytest.approx(max(times))
        if exact:
            assert max(times) == pytest.approx(min(times))


def test_flops_of_all_ranks_are_those_of_the_program():
    build = chain(12, [4, 6, 9], [grid(dp=2, tp=3)] * 2, 5, weights=[[None, "tp"], ["tp", None]])
    whole = 5 * sum(flops(op) for op in build.completed.ops if lookup(op.kind).cost == "matmul")
    assert forecast(build, machines(6)).total_flops == whole


def test_mapping_decides_the_links():
    build = chain(64, [64, 64], [grid(dp=2)])
    near, far = (forecast(build, machines(2, 2), mapping) for mapping in ([0, 1], [0, 2]))
    assert near.step_seconds < far.step_seconds
    assert (list(near.traffic), list(far.traffic)) == (["nvlink"], ["ethernet"])
    assert near.traffic["nvlink"] == far.traffic["ethernet"]


def test_bytes_on_links_are_those_of_the_rank_programs():
    meshes = [grid(0, dp=2), grid(2, dp=2), grid(4, dp=2)]
    build = chain(12, [8, 6, 4, 10], meshes, 3)
    sent = sum(build.program(rank).bytes_sent() for rank in build.ranks)
    assert sum(forecast(build, machines(6)).traffic.values()) == pytest.approx(sent)


def test_more_links_or_devices_never_take_longer():
    build = chain(64, [64, 64, 64], [grid(0, dp=3), grid(3, dp=3)], 4)
    assert forecast(build, machines(6, **FREE)).step_seconds <= forecast(build, machines(6)).step_seconds
    times = [forecast(chain(64, [64, 64], [grid(dp=2)], m), machines(2)).step_seconds for m in (1, 2, 5)]
    assert times == sorted(times)


def test_what_the_report_says():
    build = chain(12, [8, 6, 4], [grid(0, dp=2), grid(2, dp=2)], 3)
    found = forecast(build, machines(4))
    text = str(found)
    assert "forward.s0 -> forward.s1" in text
    assert "all ranks equal" not in text
    assert "on rank 0, least " in text.splitlines()[0]
    assert text.splitlines()[0].endswith(" on rank 2 (ranks with the same tasks and device equal)")
    assert found.memory[0].total > found.memory[2].total
    assert "rank 2: " in text
    assert "(all ranks equal)" in str(forecast(chain(12, [8, 6, 4], [grid(0, dp=2)] * 2, 3), machines(2)))
    assert 0 < found.bubble < 1
    assert sum(found.compute_seconds.values()) > 0
    assert out_of_memory(found, machines(4)) == ()


def test_mistakes():
    build = chain(12, [8, 6], [grid(dp=4)])
    with pytest.raises(ResourceError, match=r"the program has 4 ranks but cluster boxes has 2 devices"):
        forecast(build, machines(2))
    with pytest.raises(ResourceError, match=r"names 1 different ones"):
        forecast(build, machines(4), [0, 0, 0, 0])


def test_a_device_that_moves_its_messages_stands_still_at_both_ends():
    """One micro-batch goes through two stages and back: two messages, four ends, all on the critical path."""
    build = chain(64, [64, 128, 64, 32], [grid(0, x=1), grid(0, x=1), grid(1, x=1)], 1)
    described = document(2)
    alone = forecast(build, cluster_of(described))
    ends = 1e-3  # of a message: longer than it is under way
    described["machines"][0]["devices"]["compute"]["host"] = {"message": "1 ms"}
    attended = forecast(build, cluster_of(described))
    under_way = [seconds for seconds in alone.transfers.values() if seconds]
    assert len(under_way) == 2
    assert max(under_way) < ends
    assert attended.step_seconds == pytest.approx(alone.step_seconds + 4 * ends - sum(under_way))
    assert attended.exposed_seconds == pytest.approx({0: 2 * ends, 1: 2 * ends})


def at_work(*sizes: int) -> Cluster:
    """Devices that move their messages themselves."""
    described = document(*sizes)
    for entry in described["machines"]:
        entry["devices"]["compute"]["host"] = {"message": "0 s"}
    return cluster_of(described)


def test_what_devices_send_themselves_hides_behind_nothing():
    build = chain(64, [64] * 6, [grid(dp=2)] * 5, micro_batches=3)
    hidden, found = forecast(build, machines(2)), forecast(build, at_work(2))
    total = sum(task.last.communication for task in found.tasks.values())
    assert hidden.exposed_seconds[0] < found.exposed_seconds[0]
    assert found.exposed_seconds[0] == pytest.approx(total)
    alone = forecast(build, at_work(2), runtime=WAITING)
    assert found.step_seconds == pytest.approx(alone.step_seconds)


def test_of_a_measured_collective_hides_what_its_devices_do_not_do():
    """The last one is awaited at once and takes its time; the others meanwhile, but for the work in them."""
    build = chain(64, [64] * 6, [grid(dp=2)] * 5, passes=["-bucket_gradients"])
    table = MeasuredTable("all_reduce", 1, 2, (4 * 64 * 64,), (1e-6,), None, ((0, 1),), (4e-7,))
    found = forecast(build, replace(at_work(2), measured=(table,)))
    exposed = sum(task.last.exposed for task in found.tasks.values())
    assert exposed == pytest.approx((len(communications(build)) - 1) * 4e-7 + 1e-6)


def test_collectives_under_way_at_once_are_worked_for_once():
    """Groups along two axes, all at work: as long as one after the other, whichever is awaited first."""
    build, cluster = serial_chain(), at_work(1)
    price = costs(build, cluster)
    streams = Streams(price.program, price.storage, price, TrafficCost(build.lowered, cluster, (0,)))
    task = price.program.tasks[0]
    run = _Run(streams, task, True, {}, NOTHING_IN_FLIGHT, False)
    first, second = (
        local_of("comm.all_reduce", name, group) for name, group in (("a", (0, 1)), ("b", (0, 2)))
    )
    for local in (first, second):
        run._communicate(local, Message("all_reduce", 10.0, 0.0, "nvlink", 10.0))
    run._wait_for(("a", "b"))
    assert run.clock == run.exposed == pytest.approx(20.0)
    # Half of the first is work; the other half of its time the second is worked for.
    run = _Run(streams, task, True, {}, NOTHING_IN_FLIGHT, False)
    run._communicate(first, Message("all_reduce", 10.0, 0.0, "nvlink", 5.0))
    run._communicate(second, Message("all_reduce", 4.0, 0.0, "ethernet", 4.0))
    run._wait_for(("a", "b"))
    assert run.clock == pytest.approx(10.0)


def local_of(mode: str, name: str, group: tuple[int, ...]) -> LocalOp:
    op = Op(mode, (Value("x", (8,), "f32"),), (Value(name, (8,), "f32"),), {})
    return LocalOp(op, mode, {"group": group})


CASES = [
    ("comm.all_gather", (4, 6), (8, 6), {"dim": 0}, 0),
    ("comm.all_gather", (4, 6), (4, 12), {"dim": 1}, 4 * 12),
    ("comm.all_gather", (1, 6), (1, 12), {"dim": 1}, 0),
    ("comm.reduce_scatter", (8, 6), (4, 6), {"dim": 0}, 0),
    ("comm.reduce_scatter", (8, 6), (8, 3), {"dim": 1}, 8 * 6),
    ("comm.all_to_all", (8, 6), (4, 12), {"split_dim": 0, "concat_dim": 1}, 4 * 12),
    ("comm.all_to_all", (4, 12), (8, 6), {"split_dim": 1, "concat_dim": 0}, 4 * 12),
    ("comm.all_to_all", (2, 4, 6), (2, 2, 12), {"split_dim": 1, "concat_dim": 2}, 2 * 48),
]


@pytest.mark.parametrize(("mode", "before", "after", "attrs", "copied"), CASES)
def test_a_device_that_sends_itself_copies_what_does_not_lie_in_one_piece(
    mode: str, before: tuple[int, ...], after: tuple[int, ...], attrs: dict[str, int], copied: int
):
    """Blocks along columns go one after the other, blocks along rows as they lie."""
    x, y = Value("x", before, "f32"), Value("y", after, "f32")
    local = LocalOp(Op(mode, (x,), (y,), {}), mode, attrs)
    for cluster, expected in ((at_work(2), 2 * 4 * copied), (machines(2), 0)):
        price = costs(serial_chain(), cluster)
        price.program.types.update({"x": (before, "f32"), "y": (after, "f32")})
        slot = next(iter(price.storage.slots.values()))
        price.storage.slots.update({name: type(slot)("source", name) for name in "xy"})
        work, seconds = price.of(local)
        assert work.nbytes == expected
        assert (seconds > 0) == (expected > 0)


def communications(build: Build) -> list[LocalOp]:
    return [op for task in build.program(0).tasks for op in task.ops if op.mode.startswith("comm.")]


def test_what_the_host_does_beside_the_ops_is_added_once_a_step_and_for_every_task():
    build, described = serial_chain(3), document(1)
    alone = forecast(build, cluster_of(described))
    described["machines"][0]["devices"]["compute"]["host"] = {"step": "90 us", "task": "7 us"}
    found = forecast(build, cluster_of(described))
    runs = len(build.schedule.order(0))
    assert runs == 3 * 2 + sum(not task.per_micro for task in build.program(0).tasks)
    assert found.step_seconds == pytest.approx(alone.step_seconds + 90e-6 + runs * 7e-6)
    assert found.compute_seconds == alone.compute_seconds
    assert all(time.last.exposed == alone.tasks[name].last.exposed for name, time in found.tasks.items())
