"""The least cost of laying a small forward graph out within a limit on memory, by trying everything.

Beside the layouts of all ops, every value that is stored apart takes every layout in which its maker could
make it or a reader could read it, and readers that want the same other layout share one copy, which is then
held as long as the value, or move for themselves. Nothing here comes from the formulation or the solver.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from support.search.search_brute import Brute, every_spec

from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.index_rule import operand_spec, result_spec
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import linear_groups, lookup, rule_of
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.search.intra_op.cost_model import CostModel

Array = Any
Way = tuple[float, float]  # seconds and bytes


@dataclass(frozen=True)
class Everything:
    """What every choice costs.

    Attributes:
        costs, peaks: seconds of a step, and bytes at the peak, of every choice; [choices].
        least: time -> the fewest bytes that any choice uses then.
    """

    costs: Array
    peaks: Array
    least: dict[int, float]

    def within(self, limit: float) -> float:
        """The least cost; inf where nothing keeps the limit."""
        return float(self.costs[self.peaks <= limit].min(initial=math.inf))

    def front(self) -> list[float]:
        """Every limit from which on another cost is the least, rising."""
        order = np.lexsort((self.costs, self.peaks))
        best = np.minimum.accumulate(self.costs[order])
        falls = np.concatenate([[True], best[1:] < best[:-1] * (1 - 1e-12)])
        return [float(peak) for peak in self.peaks[order][falls]]


class Limited(Brute):
    """All choices of one forward graph, with their memory over time."""

    def __init__(self, graph: Graph, mesh: ProcessMesh, cost_model: CostModel) -> None:
        super().__init__(graph, mesh, cost_model)
        self.position = {op.name: i for i, op in enumerate(graph.ops)}
        self.outputs = {value.name for _, value in graph.outputs}
        self.values = [
            (op, i, value)
            for op in graph.ops
            for i, value in enumerate(op.results)
            if value.shape or op.kind not in SOURCES
        ]

    @cached_property
    def ways(self) -> dict[str, tuple[Array, Array]]:
        """Value -> (seconds, bytes) of its ways to be stored, [ways, *layouts of maker and readers]."""
        return {value.name: self._ways(op, i, value) for op, i, value in self.values}

    @property
    def choices(self) -> int:
        """How many there are, dominated ways to store a value left out."""
        return self.size * math.prod(len(costs) for costs, _ in self.ways.values())

    def everything(self) -> Everything:
        """Try all of it."""
        computing = sum(
            (self._spread(np.array([self.op_cost(op, o) for o in self.layouts[i]]), [i])
             for i, op in enumerate(self.ops)),
            np.zeros([len(layouts) for layouts in self.layouts]),
        )  # fmt: skip
        spread = {
            name: tuple([self._spread(way, self._axes(name)) for way in table] for table in tables)
            for name, tables in self.ways.items()
        }
        times = sorted({0, *(start for start, _ in self.lives.values())})
        costs, peaks, least = [], [], dict.fromkeys(times, math.inf)
        for taken in itertools.product(*(range(len(table[0])) for table in spread.values())):
            chosen = {name: (t[0][k], t[1][k]) for (name, t), k in zip(spread.items(), taken, strict=True)}
            total = computing + sum(seconds for seconds, _ in chosen.values())
            possible = np.isfinite(total)
            if not possible.any():
                continue
            peak = np.zeros(total.shape)
            for time in times:
                alive = (n for n, (start, stop) in self.lives.items() if start <= time < stop)
                used = np.zeros(total.shape) + sum(chosen[name][1] for name in alive)
                least[time] = min(least[time], float(used[possible].min()))
                peak = np.maximum(peak, used)
            costs.append(total[possible])
            peaks.append(peak[possible])
        return Everything(np.concatenate(costs), np.concatenate(peaks), least)

    # memory

    @cached_property
    def lives(self) -> dict[str, tuple[int, int]]:
        """Value -> the times start <= t < stop at which it holds memory of its own."""
        end, found, taken = len(self.graph.ops) + 1, {}, set()
        for op, _, value in self.values:
            root = self._root(value)
            if not self._is_kept(op, value) or root.name in taken:
                continue
            taken.add(root.name)
            home = root if root.nbytes < value.nbytes else value  # of a broadcast, what it is of
            if home.shape:
                found[home.name] = (0, end)
        for op, _, value in self.values:
            if value.shape and value.name not in taken and self._root(value).name == value.name:
                found[value.name] = (self.position[op.name], self._stop(op, value))
        return found

    def _is_kept(self, op: Op, value: Value) -> bool:
        """What comes from outside or leaves, and what is made once but read in every micro-batch."""
        if op.kind in SOURCES or value.name in self.outputs:
            return True
        readers = self.graph.users[value.name]
        return not self._in_micro(op) and any(self._in_micro(reader) for reader in readers)

    def _in_micro(self, op: Op) -> bool:
        if (op.kind == "input" and op.result.shape) or lookup(op.kind).micro:
            return True
        return any(self._in_micro(self.graph.producers[v.name]) for v in op.operands)

    def _root(self, value: Value) -> Value:
        op = self.graph.producers[value.name]
        viewed = op.kind not in SOURCES and self.is_view(op)
        return self._root(op.operands[0]) if viewed else value

    def _stop(self, op: Op, value: Value) -> int:
        """Behind the last op that reads it or a view of it; before, if that op's result takes its place."""
        last, waiting = op, [value]
        while waiting:
            for user in self.graph.users[waiting.pop().name]:
                last = max(last, user, key=lambda o: self.position[o.name])
                if self.is_view(user):
                    waiting += user.results
        if last is op:
            return self.position[op.name] + 1
        result = last.results[0]
        alike = (result.shape, result.dtype) == (value.shape, value.dtype)
        direct = any(
            i < len(last.operands) and last.operands[i].name == value.name for i in lookup(last.kind).inplace
        )
        return max(self.position[op.name] + 1, self.position[last.name] + (0 if alike and direct else 1))

    def _bytes(self, value: Value, spec: ShardSpec) -> float:
        if value.name not in self.lives:
            return 0.0
        op = self.graph.producers[value.name]
        blocks = (-(-n // self.mesh.count(dim)) for n, dim in zip(value.shape, spec.dims, strict=True))
        rounds = self.graph.micro_batches if op.kind == "input" else 1
        return float(rounds * itemsize(value.dtype) * math.prod(blocks))

    # ways to store a value

    def _axes(self, name: str) -> list[int]:
        op = self.graph.producers[name]
        made = [] if op.kind in SOURCES else [self.axis[op.name]]
        return made + [self.axis[user.name] for user in self._users(name)]

    def _users(self, name: str) -> list[Op]:
        return list({user.name: user for user in self.graph.users[name]}.values())

    def _ways(self, op: Op, position: int, value: Value) -> tuple[Array, Array]:
        made = self._made(op, position)
        needed = [self._needed(user, value) for user in self._users(value.name)]
        candidates = self._candidates(value, made, needed)
        shape = ([len(made)] if op.kind not in SOURCES else []) + [len(each) for each in needed]
        known: dict[object, list[Way]] = {}
        found: dict[tuple[int, ...], list[Way]] = {}
        for at in np.ndindex(*shape):
            first, rest = (None, at) if op.kind in SOURCES else (made[at[0]], at[1:])
            wanted = Counter(spec for each, i in zip(needed, rest, strict=True) for spec in each[i])
            key = first, frozenset(wanted.items())
            if key not in known:
                known[key] = _front(list(self._stored(value, first, wanted, candidates)))
            found[at] = known[key]
        most = max(map(len, found.values()))
        costs, nbytes = np.full((most, *shape), np.inf), np.zeros((most, *shape))
        for at, pairs in found.items():
            for i, (seconds, held) in enumerate(pairs):
                costs[(i, *at)], nbytes[(i, *at)] = self.times[value.name] * seconds, held
        return costs, nbytes

    def _made(self, op: Op, position: int) -> list[ShardSpec | None]:
        if op.kind in SOURCES:
            return [None]
        reduction = lookup(op.kind).reduction
        return [result_spec(rule_of(op), position, o, reduction) for o in self.layouts[self.axis[op.name]]]

    def _needed(self, user: Op, value: Value) -> list[frozenset[ShardSpec]]:
        places = [i for i, v in enumerate(user.operands) if v.name == value.name]
        return [
            frozenset(operand_spec(rule_of(user), i, o, linear_groups(user)) for i in places)
            for o in self.layouts[self.axis[user.name]]
        ]

    def _candidates(
        self, value: Value, made: Sequence[ShardSpec | None], needed: Sequence[Sequence[frozenset[ShardSpec]]]
    ) -> list[ShardSpec] | None:
        """Layouts in which it may be stored; None where it lies as it is made."""
        pinned = self.graph.attrs.get(value.name)
        if pinned is not None:
            return [pinned.spec]
        if made == [None]:
            return every_spec(value.shape, self.mesh)
        leaves, lives = value.name in self.outputs, self.lives.get(value.name)
        kept = lives is not None and lives == (0, len(self.graph.ops) + 1)
        if not (leaves or kept) and len(needed) < 2:
            return None
        wanted = {spec for each in needed for specs in each for spec in specs}
        every = {spec for spec in made if spec is not None}
        every |= {spec.without_partial() for spec in every} | wanted
        return [s for s in every if not s.partial or (s in wanted and not leaves)]

    def _stored(
        self,
        value: Value,
        made: ShardSpec | None,
        wanted: Counter[ShardSpec],
        candidates: list[ShardSpec] | None,
    ) -> Iterator[Way]:
        if candidates is None:
            assert made is not None
            yield sum(self.move(value, made, spec) for spec in wanted), self._bytes(value, made)
            return
        for kept in candidates:
            there = 0.0 if made is None else self.move(value, made, kept)
            others = {spec: count for spec, count in wanted.items() if spec != kept}
            several = [spec for spec, count in others.items() if count > 1 and not spec.partial]
            for count in range(len(several) + 1):
                for shared in itertools.combinations(several, count):
                    moves = sum(
                        self.move(value, kept, spec) * (1 if spec in shared else readers)
                        for spec, readers in others.items()
                    )
                    held = sum(self._bytes(value, spec) for spec in (kept, *shared))
                    yield there + moves, held


def _front(ways: list[Way]) -> list[Way]:
    """Those that no other one beats in both."""
    found: list[Way] = []
    for seconds, nbytes in sorted(ways):
        if not found or nbytes < found[-1][1]:
            found.append((seconds, nbytes))
    return found
