"""ProcessMesh: a Cartesian array of logical ranks with named axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from distgraph.dtypes import is_integer
from distgraph.errors import ShardingError


class ProcessMesh:
    """A Cartesian array of **logical ranks** (never of devices), every axis named.

    Different values may live on different meshes; a pipeline stage is a mesh. Immutable and hashable.

    Args:
        ranks: nested sequence or array of distinct non-negative ranks, any number of dimensions >= 1.
        axes: one distinct name an array dimension.

    Raises:
        ShardingError: names and dimensions disagree, a name or a rank repeats, a rank is negative, there is
            none.

    Example:
        >>> mesh = ProcessMesh(np.arange(6).reshape(3, 2), ["x", "y"])
        >>> mesh["x", 0].ranks.tolist(), mesh[1:3].shape, mesh.group(3, ("x",))
        ([0, 1], (2, 2), (1, 3, 5))
    """

    __slots__ = ("__dict__", "_hash", "axes", "ranks", "shape")

    axes: tuple[str, ...]
    shape: tuple[int, ...]

    def __init__(self, ranks: Any, axes: Sequence[str]) -> None:
        array = _rank_array(ranks)
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        if array.ndim != len(names):
            raise ShardingError(
                f"mesh with ranks of shape {array.shape} has {array.ndim} dims but {len(names)} axis names "
                f"{list(names)}; give one name a dim"
            )
        if len(set(names)) != len(names) or not all(name.isidentifier() for name in names):
            raise ShardingError(f"mesh axis names {list(names)} must be distinct identifiers")
        if array.size == 0 or array.min() < 0 or np.unique(array).size != array.size:
            raise ShardingError(
                f"mesh ranks {array.ravel().tolist()} must be distinct, non-negative and at least one"
            )
        array.setflags(write=False)
        self.ranks = array
        self.axes = names
        self.shape = tuple(int(n) for n in array.shape)
        self._hash = hash((names, self.shape, array.tobytes()))

    @classmethod
    def grid(cls, start: int = 0, /, **sizes: int) -> ProcessMesh:
        """Consecutive ranks from `start`, axes in keyword order: `ProcessMesh.grid(dp=2, tp=4)`."""
        shape = tuple(sizes.values())
        if not shape or not all(is_integer(n) and n > 0 for n in shape):
            raise ShardingError(f"mesh sizes {sizes} must be numbers from 1 up, such as dp=2, tp=4")
        return cls(np.arange(start, start + math.prod(shape)).reshape(shape), tuple(sizes))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self.ranks.size)

    @cached_property
    def members(self) -> tuple[int, ...]:
        """All ranks in row-major order."""
        return tuple(int(r) for r in self.ranks.ravel())

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Axis name -> number of ranks along it."""
        return dict(zip(self.axes, self.shape, strict=True))

    @cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...]]:
        return {int(r): tuple(int(c) for c in at) for at, r in np.ndenumerate(self.ranks)}

    @cached_property
    def _groups(self) -> dict[tuple[int, tuple[str, ...]], tuple[int, ...]]:
        return {}

    def axis_size(self, axis: str) -> int:
        """Ranks along one axis. Raises ShardingError for an unknown axis."""
        try:
            return self.sizes[axis]
        except KeyError:
            raise ShardingError(f"axis {axis!r} is not in {self}; it has {', '.join(self.axes)}") from None

    def count(self, axes: Iterable[str]) -> int:
        """Product of the sizes of several axes (1 for none): the number of parts they split a dim into."""
        return math.prod(self.axis_size(axis) for axis in axes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of a rank, one number an axis. Raises ShardingError when it is not in the mesh."""
        try:
            return self._coordinates[rank]
        except KeyError:
            raise ShardingError(
                f"rank {rank} is not in {self}, whose ranks are {list(self.members)}"
            ) from None

    def index(self, rank: int, axes: Iterable[str]) -> int:
        """Row-major position of a rank along several axes, major first: the part of a split dim it holds."""
        at, position = self.coordinates(rank), 0
        for axis in axes:
            position = position * self.axis_size(axis) + at[self.axes.index(axis)]
        return position

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Ranks that differ from `rank` along `axes` only, in row-major order of `axes` (major first)."""
        key = (rank, tuple(axes))
        if key not in self._groups:
            for axis in key[1]:
                self.axis_size(axis)
            at: list[Any] = list(self.coordinates(rank))
            where = [self.axes.index(axis) for axis in key[1]]
            for dim in where:
                at[dim] = slice(None)
            part = self.ranks[tuple(at)]  # its dims come in mesh order: put them in the order asked for
            part = part.transpose([sorted(where).index(dim) for dim in where])
            self._groups[key] = tuple(int(r) for r in part.ravel())
        return self._groups[key]

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All distinct groups along `axes`; together they cover the mesh once."""
        return tuple(dict.fromkeys(self.group(rank, axes) for rank in self.members))

    def reshape(self, **sizes: int) -> ProcessMesh:
        """Same ranks, other axes: `mesh.reshape(dp=2, tp=2)`. Raises ShardingError when sizes do not fit."""
        if math.prod(sizes.values()) != self.size:
            raise ShardingError(f"{self} has {self.size} ranks but {sizes} needs {math.prod(sizes.values())}")
        return ProcessMesh(self.ranks.reshape(tuple(sizes.values())), tuple(sizes))

    def __getitem__(self, key: Any) -> ProcessMesh:
        """`mesh[0:2]` cuts the first axis, `mesh["x", 0:2]` axis x; `mesh["x", 0]` drops x at position 0."""
        axis, at = key if isinstance(key, tuple) else (self.axes[0], key)
        self.axis_size(axis)
        where = self.axes.index(axis)
        part = self.ranks[(slice(None),) * where + (at,)]
        names = self.axes if isinstance(at, slice) else self.axes[:where] + self.axes[where + 1 :]
        if not names:
            return ProcessMesh(part.reshape(1), (axis,))
        return ProcessMesh(part, names)

    @cached_property
    def rank_set(self) -> frozenset[int]:
        """The ranks without their order."""
        return frozenset(self.members)

    def contains(self, other: ProcessMesh) -> bool:
        """True when every rank of `other` is in this mesh."""
        return other.rank_set <= self.rank_set

    def reordered(self, axes: Sequence[str], order: Sequence[int]) -> ProcessMesh:
        """The same ranks and axes; position p along `axes` (major first) gets what was at `order[p]`.

        Example:
            >>> ProcessMesh.grid(x=2, y=3).reordered(("y",), (2, 1, 0)).ranks.tolist()
            [[2, 1, 0], [5, 4, 3]]
        """
        if sorted(order) != list(range(self.count(axes))):
            raise ShardingError(f"order {list(order)} of {self} along {', '.join(axes)} is no permutation")
        where, front = [self.axes.index(axis) for axis in axes], list(range(len(axes)))
        moved = np.moveaxis(self.ranks, where, front)
        picked = moved.reshape(len(order), -1)[list(order)].reshape(moved.shape)
        return ProcessMesh(np.moveaxis(picked, front, where), self.axes)

    def __contains__(self, rank: object) -> bool:
        return rank in self._coordinates

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ProcessMesh):
            return NotImplemented
        return (
            self.axes == other.axes and self.shape == other.shape and bool((self.ranks == other.ranks).all())
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        body = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        ranks = self.members
        if ranks == tuple(range(self.size)):
            return f"mesh({body})"
        if ranks == tuple(range(ranks[0], ranks[0] + self.size)):
            return f"mesh({body}; {ranks[0]}..{ranks[-1]})"
        return f"mesh({body}; {','.join(map(str, ranks))})"


def _rank_array(ranks: Any) -> np.ndarray:
    try:
        array = np.array(ranks)
    except ValueError:
        raise ShardingError(f"mesh ranks {ranks} must be a full grid; rows differ in length") from None
    if array.size and array.dtype.kind not in "iu":
        raise ShardingError(f"mesh ranks {array.ravel().tolist()} are {array.dtype} but must be integers")
    return array.astype(np.int64)


def check_mesh(subject: str, mesh: object) -> None:
    """Raises ShardingError where something else is given for a mesh."""
    if not isinstance(mesh, ProcessMesh):
        raise ShardingError(
            f"{subject}: mesh is a {type(mesh).__name__} but must be a ProcessMesh, such as "
            f"ProcessMesh.grid(dp=2)"
        )
