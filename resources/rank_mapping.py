"""Rank mapping: which device runs which logical rank.

A quadratic assignment: minimise the sum over pairs of ranks of bytes exchanged x distance of their devices,
one rank per device, each rank on a device of its type with enough memory and FLOP/s. Start mappings
(identity, the greedy of Paddle's talk from several first ranks, a plain matching, scipy's FAQ relaxation) are
refined by local search; the best is returned. The identity is among the starts wherever it is legal, so the
answer is never worse than it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

import numpy as np

from distgraph.errors import InfeasibleError, ResourceError
from distgraph.errors.arguments import Count, NonNegative, check_fields, checked_arguments
from distgraph.resources.cluster import Cluster, Device
from distgraph.resources.mapping_local_search import Problem, descend, distances, kernighan_lin
from distgraph.resources.units import format_bytes, format_si

Objective = Literal["bytes", "seconds"]

GIVEN = "given"
"""`RankMapping.start` of a mapping that was given instead of searched."""

_GREEDY_STARTS = 16  # first ranks that the greedy is tried from; fewer where there are many ranks
_GREEDY_WORK = 4096
_RELAXATION_LIMIT = 128
_SMALL = 32  # devices up to which every start is refined in full
_PROMISING = 3


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a rank needs of its device: type (None: any), bytes of memory, FLOP/s sustained in a dtype.

    flops is FLOP per step divided by the target seconds per step; with 0 the device need not state a rate.
    """

    type: str | None = None
    memory: NonNegative = 0.0
    flops: NonNegative = 0.0
    dtype: str = "f32"

    def __post_init__(self) -> None:
        check_fields(self, ResourceError)

    def __str__(self) -> str:
        parts = [f"a {self.type} device" if self.type else "a device"]
        if self.memory:
            parts.append(f"{format_bytes(self.memory)} memory")
        if self.flops:
            parts.append(f"{format_si(self.flops, 'FLOP/s')} in {self.dtype}")
        return " with ".join([parts[0], " and ".join(parts[1:])]) if len(parts) > 1 else parts[0]


@dataclass(frozen=True, slots=True)
class RankMapping:
    """A mapping and how good it is.

    Attributes:
        devices: device number of each rank.
        objective: "bytes" that cross machines, or "seconds" of link time.
        cost: of this mapping. identity_cost: of rank i on device i, None where that is not allowed.
        greedy_cost: of the greedy alone (from rank 0), None where the greedy got stuck.
        start: which start the refinement began from, or `GIVEN`.
    """

    cluster: Cluster
    devices: tuple[int, ...]
    objective: Objective
    cost: float
    identity_cost: float | None
    greedy_cost: float | None
    start: str
    volume: Mapping[tuple[int, int], float]
    requirements: tuple[Requirement, ...]

    def table(self) -> str:
        """Every rank's device and why it is there: its heaviest partner, its bytes inside and across
        machines.
        """
        from rich import box  # noqa: PLC0415 (most programs print no table)
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415

        table = Table(title=self._title(), title_justify="left", box=box.ASCII)
        for heading in (
            "rank",
            "device",
            "model",
            "needs",
            "bytes inside",
            "bytes across",
            "heaviest partner",
        ):
            table.add_column(heading)
        machine = [self.cluster.devices[device].machine for device in self.devices]
        traffic: list[dict[int, float]] = [{} for _ in self.devices]
        for (a, b), size in self.volume.items():
            if a != b:
                traffic[a][b] = traffic[a].get(b, 0.0) + size
                traffic[b][a] = traffic[b].get(a, 0.0) + size
        for rank, device in enumerate(self.devices):
            hardware = self.cluster.devices[device]
            inside = sum(size for other, size in traffic[rank].items() if machine[other] == machine[rank])
            across = sum(size for other, size in traffic[rank].items() if machine[other] != machine[rank])
            why = "no traffic"
            if any(traffic[rank].values()):
                partner = max(traffic[rank], key=lambda other: (traffic[rank][other], -other))
                same = "same machine" if machine[partner] == machine[rank] else "another machine"
                why = f"rank {partner}, {format_bytes(traffic[rank][partner])}, {same}"
            table.add_row(
                str(rank), f"{device} ({hardware.node})", hardware.model, str(self.requirements[rank]),
                format_bytes(inside), format_bytes(across), why,
            )  # fmt: skip
        text = io.StringIO()
        Console(file=text, width=160, color_system=None).print(table)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def _title(self) -> str:
        show = format_bytes if self.objective == "bytes" else (lambda value: format_si(value, "s"))
        what = "across machines" if self.objective == "bytes" else "of link time"
        if self.start == GIVEN:
            return f"{show(self.cost)} {what} (given)"
        identity = "not allowed" if self.identity_cost is None else show(self.identity_cost)
        greedy = "stuck" if self.greedy_cost is None else show(self.greedy_cost)
        return f"{show(self.cost)} {what} (identity {identity}, greedy {greedy}; refined from {self.start})"


@checked_arguments(ResourceError)
def map_ranks(
    ranks: Count,
    volume: Mapping[tuple[int, int], float],
    cluster: Cluster,
    requirements: Sequence[Requirement] | Requirement = Requirement(),
    objective: Objective = "bytes",
) -> RankMapping:
    """The best mapping found of `ranks` logical ranks onto the cluster's devices.

    Args:
        ranks: how many. volume: bytes that rank a sends to rank b in a step, by (a, b).
        requirements: one for all ranks, or one per rank.
        objective: "bytes" counts the bytes that cross a machine border; "seconds" charges every pair its
            bytes over the narrowest link of its route (a sum, without overlap: a distance, not a forecast).
    Returns:
        Mapping; deterministic.
    Raises:
        ResourceError: more ranks than devices, ranks in `volume` that do not exist, negative bytes, a missing
            number.
        InfeasibleError: the ranks' requirements cannot all be met.
    Example:
        >>> from distgraph.resources.load import load_cluster
        >>> pairs = {(i, i + 8): 1e6 for i in range(8)}
        >>> map_ranks(16, pairs, load_cluster("p3_16xlarge_x8")).cost
        0.0
    """
    per_rank = (requirements,) * ranks if isinstance(requirements, Requirement) else tuple(requirements)
    _check(ranks, volume, cluster, per_rank)
    allowed = _allowed(per_rank, cluster)
    matching = _matching(per_rank, allowed, cluster)
    pairs = [(a, b, size) for (a, b), size in volume.items() if a != b and size]
    rows, columns = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    sparse = import_module("scipy.sparse")  # slow to load, and not every run places its ranks
    weights = sparse.coo_array(([pair[2] for pair in pairs], (rows, columns)), shape=(ranks, ranks)).tocsr()
    place_of, distance = distances(cluster, objective)
    problem = Problem((weights + weights.T).tocsr(), allowed, place_of, distance)
    identity = np.arange(ranks)
    identity_cost = problem.cost(identity) if allowed[identity, identity].all() else None
    starts = dict(_starts(problem, cluster, identity_cost is not None, matching))
    greedy_start = starts.get("greedy from rank 0")
    name, mapping = _refine(problem, starts)
    return RankMapping(
        cluster, tuple(mapping.tolist()), objective, problem.cost(mapping), identity_cost,
        None if greedy_start is None else problem.cost(greedy_start), name, dict(volume), per_rank,
    )  # fmt: skip


def _refine(problem: Problem, starts: Mapping[str, np.ndarray]) -> tuple[str, np.ndarray]:
    """The best mapping over all starts: descent from each, then Kernighan-Lin from the most promising."""
    ends = [(name, descend(problem, start)) for name, start in starts.items()]
    ends.sort(key=lambda end: problem.cost(end[1]))  # stable: the identity wins ties
    if problem.cost(ends[0][1]) == 0:
        return ends[0]
    promising = ends if len(problem.place_of) <= _SMALL else ends[:_PROMISING]
    improved = [(name, kernighan_lin(problem, mapping)) for name, mapping in promising]
    return min(improved, key=lambda end: problem.cost(end[1]))


def _check(
    ranks: int, volume: Mapping[tuple[int, int], float], cluster: Cluster, requirements: Sequence[Requirement]
) -> None:
    if ranks < 1:
        raise ResourceError(f"a mapping needs at least 1 rank, got {ranks}; give the mesh a rank")
    if ranks > len(cluster.devices):
        raise ResourceError(
            f"{ranks} ranks need {ranks} devices but cluster {cluster.name} has {len(cluster.devices)}; "
            "use a smaller mesh or another resource file"
        )
    if len(requirements) != ranks:
        raise ResourceError(
            f"{ranks} ranks but {len(requirements)} requirements; give one for all or one per rank"
        )
    for (a, b), size in volume.items():
        if not (0 <= a < ranks and 0 <= b < ranks):
            raise ResourceError(
                f"volume ({a}, {b}): ranks go from 0 to {ranks - 1}; leave the pair out or add ranks"
            )
        if not 0 <= size < float("inf"):
            raise ResourceError(
                f"volume ({a}, {b}): expected bytes, finite and not negative, got {size}; correct it"
            )


def check_devices(devices: Sequence[int], requirements: Mapping[int, Requirement], cluster: Cluster) -> None:
    """Check a mapping that was given instead of searched.

    Args:
        devices: device of every rank.
        requirements: of the ranks that have some.
        cluster: the devices.

    Raises:
        InfeasibleError: a device is not what its rank needs; names both.
    """
    for rank, requirement in requirements.items():
        device = cluster.devices[devices[rank]]
        unmet = _unmet_requirement(requirement, device, cluster)
        if unmet is not None:
            raise InfeasibleError(
                f"rank {rank} needs {requirement} but the plan puts it on device {device.index} "
                f"({device.node}), which {unmet}; make a plan for this program and cluster"
            )


def _unmet_requirement(requirement: Requirement, device: Device, cluster: Cluster) -> str | None:
    """Why the device does not meet the requirement, as the end of a sentence; None if it does."""
    if requirement.type is not None and device.type != requirement.type:
        return f"is of type {device.type}"
    if device.memory < requirement.memory:
        return f"has {format_bytes(device.memory)} memory"
    if requirement.flops and cluster.flops(device.index, requirement.dtype) < requirement.flops:
        rate = format_si(cluster.flops(device.index, requirement.dtype), "FLOP/s")
        return f"does {rate} in {requirement.dtype}"
    return None


def _allowed(requirements: Sequence[Requirement], cluster: Cluster) -> np.ndarray:
    """bool[ranks, devices]: whether the rank may run on the device."""
    rows = {
        requirement: np.array(
            [_unmet_requirement(requirement, device, cluster) is None for device in cluster.devices]
        )
        for requirement in dict.fromkeys(requirements)
    }
    for requirement, row in rows.items():
        if not row.any():
            closest = cluster.devices[0]
            for device in cluster.devices:
                if requirement.type in (None, device.type):
                    closest = max(
                        closest, device, key=lambda d: (requirement.type in (None, d.type), d.memory)
                    )
            rank = requirements.index(requirement)
            raise InfeasibleError(
                f"rank {rank} needs {requirement} but no device of cluster {cluster.name} is that: "
                f"device {closest.index} ({closest.node}) "
                f"{_unmet_requirement(requirement, closest, cluster)}; "
                "spread the rank's work over more ranks or use another resource file"
            )
    return np.stack([rows[requirement] for requirement in requirements])


def _matching(requirements: Sequence[Requirement], allowed: np.ndarray, cluster: Cluster) -> np.ndarray:
    """Some legal mapping, by maximum flow between kinds of ranks and kinds of devices.

    Raises:
        InfeasibleError: none exists; names the kinds of ranks that compete for too few devices.
    """
    kinds = list(dict.fromkeys(requirements))
    ranks_of = {kind: [rank for rank, need in enumerate(requirements) if need == kind] for kind in kinds}
    rows = {kind: allowed[ranks_of[kind][0]] for kind in kinds}
    pools: dict[tuple[bool, ...], list[int]] = {}
    for device in range(allowed.shape[1]):
        pools.setdefault(tuple(bool(rows[kind][device]) for kind in kinds), []).append(device)
    nx = import_module("networkx")
    flow = nx.DiGraph()
    for index, kind in enumerate(kinds):
        flow.add_edge("source", f"kind {index}", capacity=len(ranks_of[kind]))
        for number, (fits, devices) in enumerate(pools.items()):
            if fits[index]:
                flow.add_edge(f"kind {index}", f"pool {number}", capacity=len(ranks_of[kind]))
                flow.add_edge(f"pool {number}", "sink", capacity=len(devices))
    value, routed = nx.maximum_flow(flow, "source", "sink")
    if value < len(requirements):
        _, (source_side, _) = nx.minimum_cut(flow, "source", "sink")
        unmet = [index for index in range(len(kinds)) if f"kind {index}" in source_side]
        needed = sum(len(ranks_of[kinds[index]]) for index in unmet)
        available = sum(len(devices) for fits, devices in pools.items() if any(fits[i] for i in unmet))
        raise InfeasibleError(
            f"{needed} ranks (rank {ranks_of[kinds[unmet[0]]][0]} first) need "
            f"{' or '.join(str(kinds[index]) for index in unmet)} "
            f"but cluster {cluster.name} has {available} of them; "
            "use fewer such ranks or another resource file"
        )
    mapping = np.empty(len(requirements), dtype=np.int64)
    left = [list(devices) for devices in pools.values()]
    for index, kind in enumerate(kinds):
        waiting = iter(ranks_of[kind])
        for pool, count in routed[f"kind {index}"].items():
            number = int(pool.removeprefix("pool "))
            for _ in range(count):
                mapping[next(waiting)] = left[number].pop(0)
    return mapping


def _starts(
    problem: Problem, cluster: Cluster, identity_allowed: bool, matching: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    ranks = len(matching)
    if identity_allowed:
        yield "identity", np.arange(ranks)
    totals = np.asarray(problem.weights.sum(axis=1)).ravel()
    firsts = [0, *(int(rank) for rank in np.argsort(-totals, kind="stable") if rank != 0)]
    machine_of = np.array([device.machine for device in cluster.devices])
    for first in firsts[: max(1, min(_GREEDY_STARTS, _GREEDY_WORK // ranks))]:
        for name, best_fit in (("greedy", False), ("best-fit greedy", True)):
            mapping = greedy(problem, machine_of, first, best_fit=best_fit)
            if mapping is not None:
                yield f"{name} from rank {first}", mapping
    yield "matching", matching
    if problem.allowed.all() and ranks >= 3 and problem.allowed.shape[1] <= _RELAXATION_LIMIT:
        yield "relaxation", _relaxation_start(problem)


def greedy(
    problem: Problem, machine_of: np.ndarray, first: int, *, best_fit: bool = False
) -> np.ndarray | None:
    """The greedy of Paddle's talk: place a rank, then the rank that exchanges most with those on that
    machine.

    When the machine is full, or no rank is left that talks to it, the unplaced rank with the lowest number
    opens the next machine that has a free legal device. With best_fit it opens the fullest machine that still
    has room for all unplaced ranks that it exchanges with, directly or through others, else the emptiest one.

    Source: "Automatic parallelism in PaddlePaddle for heterogeneous scenarios", section 3, rank mapping.

    Returns:
        Device of each rank; None where a rank finds no free legal device.
    """
    ranks, devices = problem.allowed.shape
    mapping = np.full(ranks, -1, dtype=np.int64)
    free = np.ones(devices, dtype=bool)
    rank, machine = first, -1
    attraction = np.zeros(ranks)
    for placed in range(1, ranks + 1):
        fitting = np.flatnonzero(free & problem.allowed[rank])
        if len(fitting) == 0:
            return None
        here = fitting[machine_of[fitting] == machine]
        if len(here) == 0:
            machine = _best_machine(problem, machine_of, fitting, mapping, rank) if best_fit else -1
            here = fitting[machine_of[fitting] == machine] if best_fit else fitting
            machine = int(machine_of[here[0]])
            attraction = np.zeros(ranks)
        mapping[rank], free[here[0]] = here[0], False
        attraction += problem.row(rank)
        if placed == ranks:
            break
        waiting = mapping < 0
        seats = np.flatnonzero(free & (machine_of == machine))
        fits = waiting & problem.allowed[:, seats].any(axis=1)
        if fits.any() and attraction[fits].max() > 0:
            rank = int(np.argmax(np.where(fits, attraction, -1.0)))
        else:
            rank = int(np.flatnonzero(fits if fits.any() and not best_fit else waiting)[0])
            machine = -1 if best_fit else machine
    return mapping


def _best_machine(
    problem: Problem, machine_of: np.ndarray, fitting: np.ndarray, mapping: np.ndarray, rank: int
) -> int:
    waiting = np.flatnonzero(mapping < 0)
    within = problem.weights[waiting, :][:, waiting]
    _, label = import_module("scipy.sparse.csgraph").connected_components(within, directed=False)
    needed = int((label == label[np.searchsorted(waiting, rank)]).sum())
    seats = np.bincount(machine_of[fitting])
    enough = np.flatnonzero(seats >= needed)
    return int(enough[np.argmin(seats[enough])] if len(enough) else np.argmax(seats))


def _relaxation_start(problem: Problem) -> np.ndarray:
    """Start mapping of scipy's FAQ relaxation on the problem padded with ranks that send nothing."""
    ranks, devices = problem.allowed.shape
    weights = np.zeros((devices, devices))
    weights[:ranks, :ranks] = problem.weights.toarray()
    distance = problem.distance[np.ix_(problem.place_of, problem.place_of)]
    scale = max(weights.max(), 1.0)
    # FAQ from its default start draws nothing; the generator only keeps it off numpy's global one.
    optimize = import_module("scipy.optimize")
    relaxation = optimize.quadratic_assignment(
        weights / scale,
        distance / max(distance.max(), 1e-300),
        method="faq",
        options={"rng": np.random.default_rng(0)},
    )
    mapping: np.ndarray = np.asarray(relaxation.col_ind[:ranks], dtype=np.int64)
    return mapping
