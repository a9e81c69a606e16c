"""What a program declares from outside the package is used like what is built in: ops, collectives,
transports, devices and clusters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.ir.collective_registry import (
    Collective,
    RankCall,
    Space,
    Step,
    StepAttrs,
    register_collective,
    smaller,
    unregister_collective,
)
from distgraph.ir.op_registry import REGISTRY, GradientContext, define
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.plan.device_types import DEVICE_TYPES
from distgraph.plan.strategy import DEVICES
from distgraph.resources import (
    CollectiveCost,
    collective_algorithms,
    load,
    load_cluster,
    register_cluster,
    wire_bytes,
)
from distgraph.resources.collective_algorithms import Stage, register_algorithms
from distgraph.runtime.execute import device, process_group
from distgraph.runtime.execute.device import Host, register_device
from distgraph.runtime.execute.process_group import InProcessWorld, register_transport
from distgraph.runtime.transport import collectives
from distgraph.runtime.transport.collectives import Handle, register_call
from distgraph.runtime.transport.inprocess import connect
from distgraph.runtime.transport.transport import MESSAGES, Group, Transport
from distgraph.tracing.tensor import Tensor, emit_one

MESH = dg.ProcessMesh.grid(x=2, y=2)


class Net(nn.Module):
    """A layer whose weight is stored in a grid of blocks and read whole, and one without annotations."""

    def __init__(self, mesh: dg.ProcessMesh | None) -> None:
        self.mesh = mesh
        self.up, self.down = nn.Linear(6, 8, dtype="f64"), nn.Linear(8, 3, dtype="f64")
        if mesh is not None:
            dg.shard_tensor(self.up.weight, mesh, ["x", "y"])

    def forward(self, x: Any) -> Any:
        weight = dg.reshard(self.up.weight, self.mesh, [None, None])
        return self.down(ops.tanh(x @ weight))


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    return rng.normal(size=(24, 6)), rng.integers(0, 3, 24).astype("i4")


def trained(mesh: dg.ProcessMesh | None, **given: Any) -> tuple[dg.Engine, list[float]]:
    """An engine after three epochs, and its losses."""
    engine = dg.Engine(Net(mesh), nn.CrossEntropy(), optim.Adam(lr=0.01), seed=5, **given)
    history = engine.fit(data(), epochs=3, batch_size=8, progress=False)
    return engine, list(history["loss"])


# ---------------------------------------------------------------------- a collective


def all_dims_gathered(spec: ShardSpec, attrs: StepAttrs) -> ShardSpec | None:
    axes = tuple(axis for dim in spec.dims for axis in dim)
    return ShardSpec(((),) * len(spec.dims), spec.partial) if axes == attrs.axes else None


def grid_gathers(space: Space, spec: ShardSpec) -> Iterator[Step]:
    """Of blocks that are all of one size, along all dims at once."""
    axes = tuple(axis for dim in spec.dims for axis in dim)
    even = all(size % space.mesh.count(dim) == 0 for size, dim in zip(space.shape, spec.dims, strict=True))
    if even and sum(map(bool, spec.dims)) > 1:
        after = all_dims_gathered(spec, StepAttrs(axes))
        assert after is not None
        yield Step("grid_gather", axes, None, None, None, spec, after)


def grid_arguments(call: RankCall) -> dict[str, Any]:
    source, shape = call.source, call.op.result.shape
    return {"places": tuple(source.spec.slices(shape, source.mesh, member) for member in call.group)}


def grid_gather_start(
    transport: Transport, x: Any, places: Sequence[tuple[slice, ...]], group: Group, out: Any
) -> Handle:
    """Blocks of all members, each to its place in `out`."""
    sent, blocks = np.ascontiguousarray(x), np.empty((len(group), *x.shape), x.dtype)
    request = transport.all_gather(sent, blocks.reshape(-1), [x.size] * len(group), group)

    def place_blocks() -> None:
        for place, block in zip(places, blocks, strict=True):
            out[place] = block

    return Handle([request], out, place_blocks, [sent])


def all_to_each(router: Any, group: Group) -> dict[str, tuple[Stage, ...]]:
    pairs = [(a, b, 1 / len(group)) for a in group for b in group if a != b]
    return {"pairs": (Stage(tuple(pairs), 1),)}


@pytest.fixture
def grid_gather(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A collective that gathers all dims of a tensor at once, declared as a program would."""
    monkeypatch.setattr(collectives, "CALLS", dict(collectives.CALLS))
    monkeypatch.setattr(collective_algorithms, "_ALGORITHMS", dict(collective_algorithms._ALGORITHMS))
    register_collective(
        Collective(
            "grid_gather",
            sent=lambda sizes: smaller(sizes.after, (sizes.members - 1) * sizes.before),
            traffic="pairs",
            layout_after=all_dims_gathered,
            steps=grid_gathers,
            growth=1,
            parameters=("places", "group"),
            arguments=grid_arguments,
        )
    )
    register_algorithms("grid_gather", all_to_each)
    register_call("grid_gather", grid_gather_start)
    yield
    unregister_collective("grid_gather")


def kinds_of(engine: dg.Engine) -> set[str]:
    return {op.kind for op in engine.prepare(tuple(part[:8] for part in data())).build.lowered.ops}


@pytest.mark.parametrize("cluster", [None, "dgx_a100_pod"])
@pytest.mark.usefixtures("grid_gather")
def test_a_program_trains_with_a_collective_of_its_own(cluster: str | None) -> None:
    engine, losses = trained(MESH, cluster=cluster)
    assert "comm.grid_gather" in kinds_of(engine)
    assert losses == pytest.approx(trained(None)[1], rel=1e-9)
    (summary,) = [c for c in engine.plan.collectives if c.kind == "grid_gather"]
    assert summary.nbytes == pytest.approx(3 / 4 * 6 * 8 * 8 * summary.count)


@pytest.mark.usefixtures("grid_gather")
def test_a_collective_of_a_program_is_priced_by_its_own_algorithms() -> None:
    cost = CollectiveCost(load_cluster("dgx_a100_pod"))
    assert cost.estimate("grid_gather", range(4), 2**20).algorithm == "pairs"
    assert 0 < cost.time("grid_gather", range(4), 2**20) < cost.time("grid_gather", range(4), 2**24)
    assert wire_bytes("grid_gather", 4, 1000) == 750


def test_without_it_other_collectives_take_its_place() -> None:
    engine, losses = trained(MESH)
    assert "comm.grid_gather" not in kinds_of(engine)
    assert losses == pytest.approx(trained(None)[1], rel=1e-9)


def test_a_collective_is_declared_once() -> None:
    with pytest.raises(dg.DistGraphError, match="all_gather is declared twice"):
        register_collective(Collective("all_gather", lambda sizes: 0, "ring"))
    with pytest.raises(dg.DistGraphError, match="all_gather has two calls"):
        register_call("all_gather", grid_gather_start)
    with pytest.raises(dg.DistGraphError, match="declared twice"):
        register_algorithms("all_gather", all_to_each)
    with pytest.raises(dg.DistGraphError, match="collective shout: not declared"):
        register_algorithms("shout", all_to_each)


# ---------------------------------------------------------------------- an op


def product_of_squares(xp: Any, x: Any, w: Any, out: Any = None) -> Any:
    return xp.matmul(x * x, w * w, out=out)


def squares_gradient(ctx: GradientContext) -> tuple[Tensor, Tensor]:
    (x, w), grad = ctx.operands, ctx.grad
    return 2 * x * (grad @ ops.square(w).T), 2 * w * (ops.square(x).T @ grad)


@pytest.fixture
def squares_matmul() -> Iterator[None]:
    """An op that sums over an index, declared by its rule, kernel and gradient alone."""
    before = dict(REGISTRY)
    define(
        "squares_matmul",
        "m k, k n -> m n",
        product_of_squares,
        gradient=squares_gradient,
        flops=lambda op, rule: 2 * op.results[0].size * rule.sizes["k"],
        workspace=lambda x, w: 8 * (x.size + w.size),
    )
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


class Squares(nn.Module):
    """A layer of its own op, whose inner index may be split, between two that are not annotated."""

    def __init__(self, mesh: dg.ProcessMesh | None) -> None:
        self.up, self.down = nn.Linear(6, 8, dtype="f64"), nn.Linear(5, 3, dtype="f64")
        self.weight = nn.Linear(8, 5, bias=False, dtype="f64").weight
        if mesh is not None:
            dg.shard_tensor(self.weight, mesh, ["y", None])

    def forward(self, x: Any) -> Any:
        return self.down(ops.tanh(emit_one("squares_matmul", self.up(x), self.weight)))


@pytest.mark.usefixtures("squares_matmul")
def test_a_program_trains_with_an_op_of_its_own() -> None:
    def run(mesh: dg.ProcessMesh | None) -> tuple[dg.Engine, list[float]]:
        strategy = None if mesh is None else dg.Strategy(mesh=mesh, batch_axis="x", micro_batches=2)
        engine = dg.Engine(Squares(mesh), nn.CrossEntropy(), optim.Adam(lr=0.01), seed=5, strategy=strategy)
        return engine, list(engine.fit(data(), epochs=3, batch_size=8, progress=False).losses)

    engine, losses = run(MESH)
    assert losses == pytest.approx(run(None)[1], rel=1e-9)
    lowered = engine.plan.build.lowered
    (op,) = [op for op in lowered.ops if op.kind == "squares_matmul"]
    assert op.layout.of("k") == ("y",)  # the rule says that a split k leaves partial sums
    assert dict(lowered.attrs[op.result.name].spec.partial) == {"y": "sum"}
    with pytest.raises(dg.DistGraphError, match="op squares_matmul is declared twice"):
        define("squares_matmul", "m k, k n -> m n", product_of_squares)


# ---------------------------------------------------------------------- a transport


class Counted:
    """A transport that counts its messages by name; everything else is that of another one."""

    def __init__(self, transport: Transport, counts: Counter[str]) -> None:
        self.transport, self.counts = transport, counts

    def __getattr__(self, name: str) -> Any:
        if name in MESSAGES:
            self.counts[name] += 1
        return getattr(self.transport, name)


def test_a_program_trains_over_a_transport_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_TRANSPORTS", dict(process_group._TRANSPORTS))
    counts: Counter[str] = Counter()
    in_use = True

    def connected(ranks: int) -> list[Any]:
        return [Counted(transport, counts) for transport in connect(ranks)]

    register_transport("counted", lambda ranks, meshes: InProcessWorld(ranks, connected), lambda: in_use)
    _, losses = trained(MESH)
    assert losses == pytest.approx(trained(None)[1], rel=1e-9)
    assert counts["all_gather"] >= 3 * 3 * MESH.size  # the weight, in every step, on every rank
    in_use, before = False, counts.copy()
    trained(MESH)
    assert counts == before
    with pytest.raises(dg.DistGraphError, match="transport counted is declared twice"):
        register_transport("counted", lambda ranks, meshes: InProcessWorld(ranks))


# ---------------------------------------------------------------------- a device, and a cluster of it


@pytest.fixture
def abacus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Host]]:
    """A type of device, and a cluster of four of them under a name; yields the devices that are in use."""
    monkeypatch.setattr(device, "_DEVICE_TYPES", dict(device._DEVICE_TYPES))
    monkeypatch.setattr(load, "_REGISTERED", {})
    names, types, in_use = list(DEVICES), list(DEVICE_TYPES), []

    def take(transport: Transport | None, ranks: Group) -> Host:
        in_use.append(Host(transport))
        return in_use[-1]

    register_device("abacus", take, lambda: np)
    register_cluster("shop", lambda: load.parse_cluster(SHOP, "shop"))
    yield in_use
    DEVICES[:], DEVICE_TYPES[:] = names, types


SHOP = """
name: shop
launch: 10 us
machines:
- devices: {count: 4, type: abacus, model: wooden, memory: 1 GiB}
  inside: {topology: full, bandwidth: 1 GB/s, latency: 5 us}
"""


def test_a_program_trains_on_devices_and_a_cluster_of_its_own(abacus: list[Host]) -> None:
    strategy = dg.Strategy(device="abacus")
    engine, losses = trained(MESH, strategy=strategy, cluster="shop")
    assert len(abacus) == MESH.size
    assert {each.type for each in engine.cluster.devices} == {"abacus"}
    assert losses == pytest.approx(trained(None)[1], rel=1e-9)
    with pytest.raises(dg.DistGraphError, match="device abacus is declared twice"):
        register_device("abacus", lambda transport, ranks: Host(transport), lambda: np)
    with pytest.raises(dg.DistGraphError, match="cluster shop: there is one of this name"):
        register_cluster("shop", lambda: load_cluster("local"))


def test_without_them_their_names_are_unknown() -> None:
    with pytest.raises(dg.DistGraphError, match="device 'abacus' of Strategy does not exist"):
        dg.Strategy(device="abacus")
    with pytest.raises(dg.DistGraphError, match=r'type: expected one of .*, got "abacus"'):
        load.parse_cluster(SHOP, "shop")
    with pytest.raises(dg.DistGraphError, match="shop: neither a file nor a"):
        load_cluster("shop")
