"""Small Python objects between some of the ranks, over any transport for host arrays."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from distgraph.runtime.transport.transport import Group, Transport, stretches


def gather_in_group(transport: Transport, obj: Any, group: Group) -> dict[int, Any]:
    """Rank -> the object of each member of a group, on every member. Collective over the group."""
    data, ones = _packed(obj), [1] * len(group)
    counts = np.empty(len(group), np.int64)
    transport.all_gather(np.array([data.size], np.int64), counts, ones, group).wait()
    received = np.empty(int(counts.sum()), np.uint8)
    transport.all_gather(data, received, counts.tolist(), group).wait()
    places = stretches(counts.tolist())
    return {rank: _unpacked(received[place]) for rank, place in zip(group, places, strict=True)}


def broadcast_in_group(transport: Transport, obj: Any, root: int, group: Group) -> Any:
    """The `obj` of the rank `root` on every member of a group. Collective over the group."""
    data = _packed(obj)
    size = np.array([data.size], np.int64)
    transport.broadcast(size, root, group).wait()
    received = data if transport.rank == root else np.empty(int(size[0]), np.uint8)
    transport.broadcast(received, root, group).wait()
    return _unpacked(received)


def _packed(obj: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(pickle.dumps(obj)), np.uint8)


def _unpacked(data: np.ndarray[Any, Any]) -> Any:
    return pickle.loads(data.tobytes())
