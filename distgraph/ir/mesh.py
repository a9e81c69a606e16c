"""ProcessMesh: a Cartesian array of logical ranks with named axes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from distgraph.errors import ShardingError
from distgraph.errors.arguments import Count, Size, check_argument, checked_arguments, is_integer

_WORD = re.compile(r"\w+")  # an identifier may also have marks, which no text form reads back
_MOST_RANKS = 2**31
_AXES, _WEIGHTS = str | Iterable[str], Mapping[str, Sequence[int]]


class ProcessMesh:
    """A Cartesian array of **logical ranks** (never of devices), every axis named.

    Different values may live on different meshes; a pipeline stage is a mesh. Immutable and hashable.

    Devices of unequal speed share a dim unevenly where the axis between them has weights: an axis of weights
    (w_0, w_1, ...) cuts a dim of size n as sum(w) ranks would, in units of ceil(n / sum(w)), and position i
    holds w_i consecutive units. A size that sum(w) divides nests and merges as over sum(w) equal ranks.

    Args:
        ranks: nested sequence or array of distinct non-negative ranks, any number of dimensions >= 1.
        axes: one distinct name an array dimension.
        weights: axis -> one whole number from 1 up for each position along it; axes left out, or with equal
            weights, cut evenly. Common factors are removed.
        device_type: type of the devices on which the ranks run, as resource files name it ("gpu"): one for
            all, or one for each rank in row-major order, such as ("cpu", "gpu"); None for any. It does not
            tell meshes apart: a rank needs what any of its meshes needs.
        memory: that each of these devices is to have, in bytes or as "16 GiB"; None for any.

    Raises:
        ShardingError: names and dimensions disagree, a name or a rank repeats, a rank is negative, there is
            none; weights of an unknown axis, of another number than its positions, or below 1; a device type
            that is no word, or another number of them than of ranks, or for other ranks.

    Example:
        >>> mesh = ProcessMesh(np.arange(6).reshape(3, 2), ["x", "y"])
        >>> mesh["x", 0].ranks.tolist(), mesh[1:3].shape, mesh.group(3, ("x",))
        ([0, 1], (2, 2), (1, 3, 5))
        >>> ProcessMesh.grid(dp=2).weighted(dp=(3, 1)).blocks(8, ("dp",))
        ((0, 6), (6, 8))
    """

    __slots__ = ("__dict__", "_hash", "axes", "device_type", "memory", "ranks", "shape", "weights")

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    weights: Mapping[str, tuple[int, ...]]

    device_type: str | Mapping[int, str] | None
    """One type, or rank -> type where the ranks have different ones."""
    memory: float | str | None

    def __init__(
        self,
        ranks: Any,
        axes: Sequence[str],
        weights: Mapping[str, Sequence[int]] | None = None,
        *,
        device_type: str | Sequence[str] | Mapping[int, str] | None = None,
        memory: float | str | None = None,
    ) -> None:
        check_argument("ProcessMesh", "axes", axes, _AXES, ShardingError)
        if weights is not None:
            check_argument("ProcessMesh", "weights", weights, _WEIGHTS, ShardingError)
        if memory is not None:
            check_argument("ProcessMesh", "memory", memory, float | str, ShardingError)
        array = _rank_array(ranks)
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        if array.ndim != len(names):
            raise ShardingError(
                f"mesh with ranks of shape {array.shape} has {array.ndim} dims but {len(names)} axis names "
                f"{list(names)}; give one name a dim"
            )
        if len(set(names)) != len(names) or not all(map(is_axis_name, names)):
            raise ShardingError(
                f"mesh axis names {list(names)} must be distinct identifiers of letters and digits, "
                "other than _"
            )
        if array.size == 0 or array.min() < 0 or len(set(array.flat)) != array.size:
            raise ShardingError(
                f"mesh ranks {array.ravel().tolist()} must be distinct, non-negative and at least one"
            )
        array.setflags(write=False)
        self.ranks, self.device_type, self.memory = array, _device_types(device_type, array), memory
        self.axes = names
        self.shape = tuple(int(n) for n in array.shape)
        self.weights = _uneven(dict(zip(names, self.shape, strict=True)), weights) if weights else {}
        self._rank_bytes = array.tobytes()  # compared and hashed much faster than numbers
        self._hash = hash((names, self.shape, self._rank_bytes, tuple(self.weights.items())))

    @classmethod
    @checked_arguments(ShardingError)
    def grid(cls, start: Size = 0, /, **sizes: int) -> ProcessMesh:
        """Consecutive ranks from `start`, axes in keyword order: `ProcessMesh.grid(dp=2, tp=4)`."""
        shape = tuple(sizes.values())
        if not shape or not all(is_integer(n) and n > 0 for n in shape):
            raise ShardingError(f"mesh sizes {sizes} must be numbers from 1 up, such as dp=2, tp=4")
        if start + math.prod(shape) > _MOST_RANKS:
            raise ShardingError(f"mesh sizes {sizes} give ranks beyond {_MOST_RANKS}; make them smaller")
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
        return {int(r): tuple(int(c) for c in position) for position, r in np.ndenumerate(self.ranks)}

    @cached_property
    def _groups(self) -> dict[tuple[int, tuple[str, ...]], tuple[int, ...]]:
        return {}

    def axis_size(self, axis: str) -> int:
        """Ranks along one axis. Raises ShardingError for an unknown axis."""
        try:
            return self.sizes[axis]
        except (KeyError, TypeError):
            raise ShardingError(f"axis {axis!r} is not in {self}; it has {', '.join(self.axes)}") from None

    def count(self, axes: Iterable[str]) -> int:
        """Product of the sizes of several axes (1 for none): the number of parts they split a dim into.

        Raises:
            ShardingError: the mesh has no such axis, or `axes` is no collection of names.
        """
        sizes, product = self.sizes, 1
        try:
            for axis in axes:
                product *= sizes.get(axis) or self.axis_size(axis)
        except TypeError:  # a check of every call would slow compilation down
            check_argument("count", "axes", axes, Sequence[str], ShardingError)
            raise
        return product

    @cached_property
    def _borders(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        return {}

    @checked_arguments(ShardingError)
    def borders(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Starts, in units, of the parts of a dim that several axes split; the last entry is `units`."""
        key = tuple(axes)
        if key not in self._borders:
            widths = [1]
            for axis in key:
                weights = self.weights.get(axis) or (1,) * self.axis_size(axis)
                widths = [width * weight for width in widths for weight in weights]
            self._borders[key] = (0, *accumulate(widths))
        return self._borders[key]

    @checked_arguments(ShardingError)
    def units(self, axes: Sequence[str]) -> int:
        """Number of equal units of a dim that is split over several axes; `count` where none has weights.

        A dim whose size it divides is shared exactly in proportion to the weights.
        """
        return self.borders(axes)[-1]

    @checked_arguments(ShardingError)
    def block(self, size: Size, axes: Sequence[str], position: Size) -> tuple[int, int]:
        """(start, stop) of one part of a dim of some size that is split over several axes, major first.

        Units are ceil(size / units) long: the last ones are shorter or empty.

        Raises:
            ShardingError: the position is not below the number of parts.
        """
        borders = self.borders(axes)
        if position >= len(borders) - 1:
            parts = f"{len(borders) - 1} part{'s' * (len(borders) > 2)}"
            raise ShardingError(
                f"position of block is {position} but {', '.join(axes) or 'no axis'} of {self} makes {parts}"
            )
        unit = -(-size // borders[-1])
        return min(size, unit * borders[position]), min(size, unit * borders[position + 1])

    @checked_arguments(ShardingError)
    def blocks(self, size: Size, axes: Sequence[str]) -> tuple[tuple[int, int], ...]:
        """(start, stop) of all parts of a dim that is split over several axes, major first."""
        return tuple(self.block(size, axes, position) for position in range(len(self.borders(axes)) - 1))

    @checked_arguments(ShardingError)
    def longest(self, size: Size, axes: Sequence[str]) -> int:
        """Length of the longest part of a dim that is split over several axes."""
        if not any(axis in self.weights for axis in axes):
            return -(-size // self.units(axes))
        return max(stop - start for start, stop in self.blocks(size, axes))

    @checked_arguments(ShardingError)
    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of a rank, one number an axis. Raises ShardingError when it is not in the mesh."""
        try:
            return self._coordinates[rank]
        except (KeyError, TypeError):
            raise ShardingError(
                f"rank {rank} is not in {self}, whose ranks are {list(self.members)}"
            ) from None

    @checked_arguments(ShardingError)
    def index(self, rank: int, axes: Iterable[str]) -> int:
        """Row-major position of a rank along several axes, major first: the number of its part of a dim."""
        coordinates, position = self.coordinates(rank), 0
        for axis in axes:
            position = position * self.axis_size(axis) + coordinates[self.axes.index(axis)]
        return position

    @checked_arguments(ShardingError)
    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Ranks that differ from `rank` along `axes` only, in row-major order of `axes` (major first)."""
        key = (rank, tuple(axes))
        if key not in self._groups:
            for axis in key[1]:
                self.axis_size(axis)
            selection: list[Any] = list(self.coordinates(rank))
            positions = [self.axes.index(axis) for axis in key[1]]
            for dim in positions:
                selection[dim] = slice(None)
            members = self.ranks[tuple(selection)]  # its dims are in mesh order; `axes` may have another
            members = members.transpose([sorted(positions).index(dim) for dim in positions])
            self._groups[key] = tuple(int(r) for r in members.ravel())
        return self._groups[key]

    @checked_arguments(ShardingError)
    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All distinct groups along `axes`; together they cover the mesh once."""
        for axis in axes:
            self.axis_size(axis)
        along = [self.axes.index(axis) for axis in axes]
        others = [dim for dim in range(len(self.axes)) if dim not in along]
        table = self.ranks.transpose([*others, *along]).reshape(-1, self.count(axes))
        return tuple(map(tuple, table.tolist()))

    def reshape(self, **sizes: int) -> ProcessMesh:
        """Same ranks, other axes, no weights: `mesh.reshape(dp=2, tp=2)`.

        Raises:
            ShardingError: the sizes do not fit.
        """
        for axis, size in sizes.items():
            check_argument("reshape", axis, size, Count, ShardingError)
        if math.prod(sizes.values()) != self.size:
            raise ShardingError(f"{self} has {self.size} ranks but {sizes} needs {math.prod(sizes.values())}")
        return self._derived(self.ranks.reshape(tuple(sizes.values())), tuple(sizes))

    @checked_arguments(ShardingError)
    def repeated(self, count: Count) -> ProcessMesh:
        """This mesh `count` times, one behind the other along a new first axis.

        The axis is called dp, or repeat where there is one of that name.

        Raises:
            ShardingError: the ranks of the mesh are not 0 to its size - 1, or an axis has weights.

        Example:
            >>> print(ProcessMesh.grid(tp=2).repeated(2))
            mesh(dp=2, tp=2)
        """
        if sorted(self.members) != list(range(self.size)) or self.weights:
            raise ShardingError(f"{self} cannot be repeated: it needs ranks 0 to {self.size - 1}, no weights")
        axis = next(name for name in ("dp", "repeat", "repeat2") if name not in self.axes)
        stacked = np.stack([self.ranks + n * self.size for n in range(count)])
        return self._derived(stacked, (axis, *self.axes))._with_types_of(self)

    @checked_arguments(ShardingError)
    def is_repeated_in(self, other: ProcessMesh) -> bool:
        """Whether another mesh is this one several times along one more axis, this one first."""
        repeats = other.axes[1:] == self.axes and not other.weights and not self.weights
        return repeats and np.array_equal(other.ranks[0], self.ranks)

    def weighted(self, **weights: Sequence[int]) -> ProcessMesh:
        """Same ranks and axes, other weights: `mesh.weighted(dp=(3, 1))`; see `ProcessMesh`."""
        for axis, parts in weights.items():
            check_argument("weighted", axis, parts, Sequence[Count], ShardingError)
        return self._derived(self.ranks, self.axes, weights)

    @checked_arguments(ShardingError)
    def requiring(
        self,
        device_type: str | Sequence[str] | Mapping[int, str] | None = None,
        memory: float | str | None = None,
    ) -> ProcessMesh:
        """The same mesh, whose ranks need devices of a type (see `ProcessMesh`), or with so much memory.

        Example:
            >>> ProcessMesh.grid(dp=2).requiring("gpu", memory="16 GiB").device_type
            'gpu'
            >>> ProcessMesh.grid(dp=2).weighted(dp=(1, 3)).requiring(("cpu", "gpu")).device_type_of(1)
            'gpu'
        """
        return ProcessMesh(self.ranks, self.axes, self.weights, device_type=device_type, memory=memory)

    @checked_arguments(ShardingError)
    def device_type_of(self, rank: int) -> str | None:
        """The type of device that a rank of the mesh needs; None for any."""
        types = self.device_type
        return types.get(rank) if isinstance(types, Mapping) else types

    def _derived(
        self, ranks: Any, axes: Sequence[str], weights: Mapping[str, Sequence[int]] | None = None
    ) -> ProcessMesh:
        """Another mesh of this one's ranks, on the same devices."""
        types = self.device_type
        if isinstance(types, Mapping):
            types = {rank: types[rank] for rank in np.asarray(ranks).ravel().tolist() if rank in types}
        return ProcessMesh(ranks, axes, weights, device_type=types, memory=self.memory)

    def _with_types_of(self, other: ProcessMesh) -> ProcessMesh:
        """This mesh, each of whose ranks needs the device of the rank at the same place of another mesh.

        A mesh of several times as many ranks repeats the places of the other.
        """
        if not isinstance(other.device_type, Mapping):
            return self
        types = [other.device_type.get(rank) for rank in other.members] * (self.size // other.size)
        named = {rank: name for rank, name in zip(self.members, types, strict=True) if name is not None}
        return self.requiring(named, self.memory)

    def __getitem__(self, key: Any) -> ProcessMesh:
        """`mesh[0:2]` cuts the first axis, `mesh["x", 0:2]` axis x; `mesh["x", 0]` drops x at position 0."""
        axis, selection = key if isinstance(key, tuple) else (self.axes[0], key)
        self.axis_size(axis)
        position = self.axes.index(axis)
        ranks = self.ranks[(slice(None),) * position + (selection,)]
        names = (
            self.axes if isinstance(selection, slice) else self.axes[:position] + self.axes[position + 1 :]
        )
        if not names:
            return self._derived(ranks.reshape(1), (axis,))
        weights = {
            name: axis_weights[selection] if name == axis and isinstance(selection, slice) else axis_weights
            for name, axis_weights in self.weights.items()
            if name in names
        }
        return self._derived(ranks, names, weights)

    @checked_arguments(ShardingError)
    def renumbered(self, ranks: Any) -> ProcessMesh:
        """The same axes and weights over other ranks, an array of the same shape."""
        mesh = self._derived(ranks, self.axes, self.weights)
        return mesh if mesh.rank_set == self.rank_set else mesh._with_types_of(self)

    @cached_property
    def rank_set(self) -> frozenset[int]:
        """The ranks without their order."""
        return frozenset(self.members)

    @checked_arguments(ShardingError)
    def contains(self, other: ProcessMesh) -> bool:
        """True when every rank of `other` is in this mesh."""
        return other.rank_set <= self.rank_set

    @checked_arguments(ShardingError)
    def reordered(self, axes: Sequence[str], order: Sequence[int]) -> ProcessMesh:
        """The same ranks and axes: position p along `axes` (major first) gets the ranks of `order[p]`.

        Weights stay at their positions.

        Example:
            >>> ProcessMesh.grid(x=2, y=3).reordered(("y",), (2, 1, 0)).ranks.tolist()
            [[2, 1, 0], [5, 4, 3]]
        """
        if sorted(order) != list(range(self.count(axes))):
            raise ShardingError(f"order {list(order)} of {self} along {', '.join(axes)} is no permutation")
        positions, front = [self.axes.index(axis) for axis in axes], list(range(len(axes)))
        moved = np.moveaxis(self.ranks, positions, front)
        picked = moved.reshape(len(order), -1)[list(order)].reshape(moved.shape)
        return self.renumbered(np.moveaxis(picked, front, positions))

    def __contains__(self, rank: object) -> bool:
        return rank in self._coordinates

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ProcessMesh):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.axes == other.axes
            and self.shape == other.shape
            and self.weights == other.weights
            and self._rank_bytes == other._rank_bytes
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def described(self) -> str:
        """Axes with their sizes, or with their weights where they have some: `dp=3:1, tp=4`."""
        shown = {axis: ":".join(map(str, self.weights.get(axis, (n,)))) for axis, n in self.sizes.items()}
        return ", ".join(f"{axis}={text}" for axis, text in shown.items())

    def __repr__(self) -> str:
        body, ranks = self.described, self.members
        if ranks == tuple(range(self.size)):
            return f"mesh({body})"
        if ranks == tuple(range(ranks[0], ranks[0] + self.size)):
            return f"mesh({body}; {ranks[0]}..{ranks[-1]})"
        return f"mesh({body}; {','.join(map(str, ranks))})"


def is_axis_name(name: object) -> bool:
    """Whether an axis may have this name: an identifier of letters and digits; _ is a dim kept whole."""
    return isinstance(name, str) and name.isidentifier() and name != "_" and bool(_WORD.fullmatch(name))


def _rank_array(ranks: Any) -> np.ndarray:
    try:
        array = np.array(ranks)
    except ValueError:
        raise ShardingError(f"mesh ranks {ranks} must be a full grid; rows differ in length") from None
    if array.size and array.dtype.kind not in "iu":
        raise ShardingError(f"mesh ranks {array.ravel().tolist()} are {array.dtype} but must be integers")
    return array.astype(np.int64)


def _device_types(given: Any, ranks: np.ndarray) -> str | dict[int, str] | None:
    """The device type that all ranks need, or rank -> type; see `ProcessMesh`."""
    if given is None:
        return None
    members: list[int] = ranks.ravel().tolist()
    if isinstance(given, Mapping):
        types = dict(given)
        if unknown := [rank for rank in types if rank not in members]:
            raise ShardingError(
                f"device types of a mesh are for ranks {unknown} too but it has ranks {members}; leave these "
                "out"
            )
    elif not isinstance(given, Sequence):
        raise ShardingError(f'device types of a mesh are {given!r} but must be words such as "gpu"')
    else:
        words = [given] * len(members) if isinstance(given, str) else list(given)
        if len(words) != len(members):
            raise ShardingError(
                f"device types {words} of a mesh are {len(words)} but it has {len(members)} ranks; give one "
                "for all, or one for each rank"
            )
        types = dict(zip(members, words, strict=True))
    for word in types.values():
        if not is_axis_name(word):
            raise ShardingError(f'device type {word!r} of a mesh must be a word such as "gpu"')
    if len(types) == len(members) and len(set(types.values())) == 1:
        return str(next(iter(types.values())))
    return types or None


def _uneven(sizes: Mapping[str, int], weights: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Weights in lowest terms, in the order of the axes; none where all are equal."""
    for axis, axis_weights in weights.items():
        if axis not in sizes:
            raise ShardingError(f"weights of axis {axis!r}, but the mesh has {', '.join(sizes)}")
        if len(axis_weights) != sizes[axis] or not all(is_integer(n) and n > 0 for n in axis_weights):
            raise ShardingError(
                f"weights {list(axis_weights)} of axis {axis} must be {sizes[axis]} whole numbers from 1 up, "
                f"one for each of its positions"
            )
    lowest = {axis: math.gcd(*weights[axis]) for axis in sizes if axis in weights}
    return {
        axis: tuple(int(n) // common for n in weights[axis])
        for axis, common in lowest.items()
        if len(set(weights[axis])) > 1
    }


def check_mesh(subject: str, mesh: object) -> None:
    """Raises ShardingError when an argument is not a ProcessMesh."""
    if not isinstance(mesh, ProcessMesh):
        raise ShardingError(
            f"{subject}: mesh is a {type(mesh).__name__} but must be a ProcessMesh, such as "
            f"ProcessMesh.grid(dp=2)"
        )
