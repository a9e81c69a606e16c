"""Reduce gradients into parts as they are made, in every micro-batch, and accumulate the parts.

In:   a lowered graph in which the gradient of a step is scattered over ranks (ZeRO-2, Rajbhandari et al.,
      2020).
Out:  the same program, in which no rank keeps a whole gradient: each is reduced and scattered as soon as its
      bucket is full, and its buffer is free when the message has been sent. The messages of a bucket stand
      together; `bucket_gradients` makes one of them.
Invariant: same numbers up to rounding: with several micro-batches, sums over ranks come before those over
    micro-batches. A bucket (see `message_buckets`) is no larger than the largest gradient or all gradients of
    a layer. A rank waits for a message before the gradients that are under way or wait for their bucket would
    together be larger than two such buckets.

    %s = accumulate(%g)                %t = comm.reduce_scatter(%g)
    %r = comm.reduce_scatter(%s)  ->   ...                            # of the next layer
                                       %r = accumulate(%t)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from distgraph.ir.graph import Graph, Op
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import rule_of
from distgraph.ir.sharding_spec import DistAttr, Origin
from distgraph.passes.communication.fuse_reductions import fusion_key
from distgraph.passes.communication.gather_parameters import layer_of
from distgraph.passes.communication.message_buckets import bucket_bytes, mesh_levels, single_bytes
from distgraph.passes.pass_registry import PassContext, register_pass
from distgraph.passes.redistribution.planner import Price, latency_price

IN_FLIGHT = 2
"""Buckets of the largest size whose gradients may be in memory at the same time."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """A reduce_scatter of the gradient of one micro-batch, and the `accumulate` of its result."""

    scatter: Op
    accumulate: Op
    attr: DistAttr  # of the result of the scatter
    nbytes: int  # of a rank's block of the whole gradient


@dataclass(slots=True)
class _Bucket:
    """Gradients whose messages start together."""

    key: Hashable
    pairs: list[_Pair] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(pair.nbytes for pair in self.pairs)


@dataclass(slots=True)
class _Queue:
    """Gradients of one mesh that wait for their bucket, and those whose messages are under way."""

    room: float  # bytes of the largest bucket
    waiting: dict[Hashable, _Bucket] = field(default_factory=dict)
    started: deque[_Bucket] = field(default_factory=deque)

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in (*self.waiting.values(), *self.started))

    def add(self, pair: _Pair, key: Hashable, limit: float, single: float) -> Iterator[Op]:
        """Ops after a gradient: waits for earlier ones, and the messages of the buckets that it fills.

        Args:
            pair, key: the gradient, and what it has in common with others of its bucket.
            limit: bytes at which a bucket is closed.
            single: bytes from which on a gradient has a bucket of its own.
        """
        if key in self.waiting and self.waiting[key].nbytes + pair.nbytes > self.room:
            yield from self.start(self.waiting.pop(key))
        while self.nbytes and self.nbytes + pair.nbytes > IN_FLIGHT * self.room:
            yield from self.free()
        alone = pair.nbytes >= single
        bucket = _Bucket(key) if alone else self.waiting.pop(key, _Bucket(key))
        bucket.pairs.append(pair)
        if alone or bucket.nbytes >= limit:
            yield from self.start(bucket)
        else:
            self.waiting[key] = bucket

    def start(self, bucket: _Bucket) -> Iterator[Op]:
        """The messages of a bucket."""
        self.started.append(bucket)
        for pair in bucket.pairs:
            yield pair.scatter

    def free(self) -> Iterator[Op]:
        """Wait for the oldest messages under way; without any, start those of the oldest bucket."""
        if not self.started:
            yield from self.start(self.waiting.pop(next(iter(self.waiting))))
        for pair in self.started.popleft().pairs:
            yield pair.accumulate

    def complete(self, pair: _Pair) -> Iterator[Op]:
        """Start and end what is left until a gradient has been added up."""
        for key, bucket in list(self.waiting.items()):
            if pair in bucket.pairs:
                yield from self.start(self.waiting.pop(key))
        while any(pair in bucket.pairs for bucket in self.started):
            yield from self.free()


@register_pass("shard_gradients", stage="lowered", after=("lower",))
def _run(graph: Graph, context: PassContext) -> Graph:
    """Scatter gradients as they are made."""
    return shard_gradients(graph, context.price)


def shard_gradients(graph: Graph, price: Price = latency_price) -> Graph:
    """Scatter gradients as they are made, bucket by bucket; `price` is the cost of one collective."""
    pairs = {pair.scatter.operands[0].name: pair for pair in _pairs(graph)}
    if not pairs:
        return graph
    sums = {graph.producers[pair.accumulate.name].operands[0].name: pair for pair in pairs.values()}
    replaced = {*sums, *(pair.accumulate.name for pair in pairs.values())}
    keys, limits = _buckets(graph, pairs, price)
    queues = _queues(graph, pairs, max(limit for limit, _ in limits.values()))
    ops: list[Op] = []
    for op in graph.ops:
        if op.name in sums:  # where the whole gradient was added up
            ops += queues[sums[op.name].attr.mesh].complete(sums[op.name])
        if op.name in replaced:
            continue
        ops.append(op)
        for name in (value.name for value in op.results if value.name in pairs):
            queue = queues[pairs[name].attr.mesh]
            ops += queue.add(pairs[name], keys[name], *limits[keys[name]])
    attrs = {name: attr for name, attr in graph.attrs.items() if name not in sums}
    attrs.update((pair.scatter.name, pair.attr) for pair in pairs.values())
    return graph.with_ops(ops, attrs=attrs)


def _buckets(
    graph: Graph, pairs: Mapping[str, _Pair], price: Price
) -> tuple[dict[str, Hashable], dict[Hashable, tuple[float, float]]]:
    """Gradient -> what those have in common that one message may carry -> `bucket_bytes`, `single_bytes`."""
    levels = mesh_levels(graph)
    keys: dict[str, Hashable] = {
        name: (fusion_key(graph, pair.scatter), levels.get(name, 0)) for name, pair in pairs.items()
    }
    groups: dict[Hashable, list[Op]] = {}
    for name, pair in pairs.items():
        groups.setdefault(keys[name], []).append(pair.scatter)
    limits = {key: bucket_bytes(graph, group, price) for key, group in groups.items()}
    return keys, {
        key: (limits[key], single_bytes(graph, group, limits[key])) for key, group in groups.items()
    }


def _queues(graph: Graph, pairs: Mapping[str, _Pair], limit: float) -> dict[ProcessMesh, _Queue]:
    """A queue for each mesh, with room for its largest gradient, and for a layer up to a bucket's bytes."""
    largest: dict[ProcessMesh, float] = {}
    layers: dict[tuple[ProcessMesh, str], int] = {}
    for name, pair in pairs.items():
        mesh, layer = pair.attr.mesh, layer_of(graph.producers[name], name)
        layers[mesh, layer] = layers.get((mesh, layer), 0) + pair.nbytes
        largest[mesh] = max(largest.get(mesh, 0), pair.nbytes)
    for (mesh, _), nbytes in layers.items():
        largest[mesh] = max(largest[mesh], min(nbytes, limit))
    return {mesh: _Queue(room) for mesh, room in largest.items()}


def _pairs(graph: Graph) -> Iterator[_Pair]:
    """The gradients that are scattered where they are summed, each once."""
    scattered: set[str] = set()
    for op in graph.ops:
        users = graph.users[op.name] if op.kind == "accumulate" and op.name not in graph.live_out else ()
        if len(users) != 1 or users[0].kind != "comm.reduce_scatter" or op.operands[0].name in scattered:
            continue
        (scatter,), (operand,) = users, op.operands
        scattered.add(operand.name)
        attr, whole = graph.attrs[scatter.name], graph.attrs[operand.name]
        part = replace(operand, name=f"{op.name}.part")
        early = replace(scatter, operands=(operand,), results=(part,), role="backward")
        late = replace(op, operands=(part,), results=scatter.results, layout=_layout(op, attr))
        parts = whole.mesh.count(axis for dim in whole.spec.dims for axis in dim)
        origin = Origin("op", f"%{scatter.name}")
        yield _Pair(early, late, replace(attr, origin=origin), operand.nbytes // parts)


def _layout(op: Op, attr: DistAttr) -> OpLayout:
    """The layout of an `accumulate` of blocks that are stored as `attr` says."""
    dims = zip(rule_of(op).results[0], attr.spec.dims, strict=True)
    axes = tuple(sorted((term[0], split) for term, split in dims if term and split))
    return OpLayout(attr.mesh, axes, tuple((axis, 0) for axis, _ in attr.spec.partial))
