"""ShardSpec: how one tensor is sharded on a mesh; DistAttr: its mesh, its spec and who decided them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from distgraph.errors import ShardingError
from distgraph.errors.arguments import Size, check_argument, checked_arguments
from distgraph.ir.mesh import ProcessMesh, is_axis_name

REDUCTIONS = ("sum", "max", "min", "prod")
Dim = tuple[str, ...]
UserDim = str | Sequence[str] | None


class ShardSpec:
    """The sharding of a tensor: for each dim the mesh axes that split it, and the axes it is partial over.

    The axes of a dim are listed major to minor. A dim of size n that is split in k parts is cut in blocks of
    ceil(n / k); the last blocks are shorter or empty. Axes with weights cut unevenly, see `ProcessMesh`.
    A tensor is partial over an axis when its value is the reduction (sum, max, min, prod) of the blocks that
    the ranks along the axis hold.
    A spec is immutable and hashable, and `parse` is the inverse of `str`.

    Example:
        >>> spec = ShardSpec.of([("x", "y"), None], partial={"tp": "sum"})
        >>> str(spec), ShardSpec.parse(str(spec)) == spec
        ('[x*y, _] partial(tp)', True)
    """

    __slots__ = ("_hash", "dims", "partial")

    dims: tuple[Dim, ...]
    partial: tuple[tuple[str, str], ...]

    def __init__(self, dims: tuple[Dim, ...], partial: tuple[tuple[str, str], ...] = ()) -> None:
        self.dims = dims
        self.partial = tuple(sorted(partial)) if len(partial) > 1 else partial
        self._hash = hash((self.dims, self.partial))

    @classmethod
    def of(
        cls, dims: Sequence[UserDim], partial: Mapping[str, str] | None = None, where: str = ""
    ) -> ShardSpec:
        """The spec of a list with one entry a dim, as users write it: `[None, "x"]`, `[("x", "y"), None]`.

        Args:
            dims: one entry a dim.
            partial: axis -> reduction.
            where: what messages begin with, such as "shard_tensor (train.py:7)".

        Raises:
            ShardingError: an axis repeats, or what is given is no list of axes.
        """
        if partial is not None:
            check_argument("ShardSpec", "partial", partial, Mapping[str, str], ShardingError)
        check_argument("ShardSpec", "where", where, str, ShardingError)
        who = f"{where}: " if where else ""
        entries: object = dims
        if isinstance(entries, str) or not isinstance(entries, Sequence):
            raise ShardingError(
                f"{who}spec is {dims!r} but must be a list, one entry a dim, such as [None, 'tp']"
            )
        for d in entries:
            if d is not None and not isinstance(d, (str, tuple, list)):
                raise ShardingError(
                    f"{who}spec {list(entries)}: {d!r} is no axis; each entry is a name, a tuple of names or "
                    f"None"
                )
        tuples = tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in dims)
        spec = cls(tuples, tuple((partial or {}).items()))
        spec.check_axes(where)
        return spec

    @classmethod
    @checked_arguments(ShardingError)
    def replicated(cls, ndim: Size) -> ShardSpec:
        """No dim split, nothing partial."""
        return _replicated(ndim)

    @classmethod
    @checked_arguments(ShardingError)
    def parse(cls, text: str) -> ShardSpec:
        """Inverse of `str`. Raises ShardingError on malformed text."""
        match = re.fullmatch(r"\s*\[([^\]]*)\](?:\s+partial\(([^)]*)\))?\s*", text)
        if match is None:
            raise ShardingError(f"spec {text!r} does not read like '[x*y, _] partial(tp)'")
        dims = tuple(
            () if part.strip() == "_" else tuple(a.strip() for a in part.split("*"))
            for part in (match[1].split(",") if match[1].strip() else ())
        )
        partial = []
        for part in (match[2] or "").split(",") if match[2] is not None else ():
            axis, colon, kind = part.strip().partition(":")
            partial.append((axis, kind if colon else "sum"))
        spec = cls(dims, tuple(partial))
        spec.check_axes()
        return spec

    @checked_arguments(ShardingError)
    def check_axes(self, where: str = "") -> None:
        """Raises ShardingError when an axis is used twice, is no identifier, or a reduction is unknown."""
        who = f"{where}: " if where else ""
        used: list[Any] = [axis for dim in self.dims for axis in dim]  # users may pass anything
        used += [axis for axis, _ in self.partial]
        checked = set[str]()
        for axis in used:
            if not is_axis_name(axis):
                listed = [[*dim] if len(dim) > 1 else dim[0] if dim else None for dim in self.dims]
                raise ShardingError(
                    f"{who}spec {listed}: {axis!r} is no axis name; give names of axes as texts"
                )
            if axis in checked:
                raise ShardingError(
                    f"{who}spec {self}: axis {axis!r} is used twice; an axis splits one dim only, so leave "
                    f"one dim whole (None) or split it over another axis"
                )
            checked.add(axis)
        for axis, kind in self.partial:
            if kind not in REDUCTIONS:
                raise ShardingError(
                    f"spec {self}: reduction {kind!r} of axis {axis} is not one of {REDUCTIONS}"
                )

    @checked_arguments(ShardingError)
    def check(self, shape: Sequence[int], mesh: ProcessMesh, subject: str = "tensor") -> None:
        """Raises ShardingError when the spec does not fit a shape or names an axis that the mesh has not."""
        self.check_axes()
        self.check_dims(shape, subject)
        for axis in self.axes:
            if axis not in mesh.sizes:
                raise ShardingError(
                    f"{subject}: spec {self} names axis {axis!r} but {mesh} has {', '.join(mesh.axes)}"
                )

    @checked_arguments(ShardingError)
    def check_dims(self, shape: Sequence[int], subject: str) -> None:
        """Raises ShardingError when the spec has not as many dims as a shape."""
        if len(self.dims) != len(shape):
            raise ShardingError(
                f"{subject}: spec {self} has {len(self.dims)} dims but shape {tuple(shape)} has {len(shape)}"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that the spec mentions, split dims first, then partial ones."""
        return tuple(a for dim in self.dims for a in dim) + tuple(a for a, _ in self.partial)

    @checked_arguments(ShardingError)
    def reduction(self, axis: str) -> str | None:
        """The reduction of an axis that the tensor is partial over; None for all other axes."""
        return next((kind for a, kind in self.partial if a == axis), None)

    def without_partial(self) -> ShardSpec:
        """The same spec with no partial axes: the layout after an all_reduce over all of them."""
        return ShardSpec(self.dims) if self.partial else self

    @checked_arguments(ShardingError)
    def local_shape(self, shape: Sequence[int], mesh: ProcessMesh, rank: int) -> tuple[int, ...]:
        """Shape of the block that a rank holds. Raises ShardingError: as `bounds`."""
        return tuple(stop - start for start, stop in self.bounds(shape, mesh, rank))

    @checked_arguments(ShardingError)
    def bounds(self, shape: Sequence[int], mesh: ProcessMesh, rank: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) of a rank's block on every dim.

        Raises:
            ShardingError: the rank is not in the mesh, or the spec does not fit shape and mesh.
        """
        return _bounds(self, tuple(shape), mesh, rank)

    @checked_arguments(ShardingError)
    def slices(self, shape: Sequence[int], mesh: ProcessMesh, rank: int) -> tuple[slice, ...]:
        """Index of a rank's block in the global tensor. Raises ShardingError: as `bounds`."""
        return tuple(slice(start, stop) for start, stop in self.bounds(shape, mesh, rank))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ShardSpec):
            return NotImplemented
        return self._hash == other._hash and self.dims == other.dims and self.partial == other.partial

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        body = "[" + ", ".join("*".join(dim) if dim else "_" for dim in self.dims) + "]"
        if not self.partial:
            return body
        return f"{body} partial({', '.join(a if k == 'sum' else f'{a}:{k}' for a, k in self.partial)})"


@lru_cache(maxsize=65536)
def _bounds(
    spec: ShardSpec, shape: tuple[int, ...], mesh: ProcessMesh, rank: int
) -> tuple[tuple[int, int], ...]:
    spec.check_dims(shape, "block")
    mesh.coordinates(rank)
    return tuple(
        mesh.block(size, dim, mesh.index(rank, dim)) if dim else (0, size)
        for size, dim in zip(shape, spec.dims, strict=True)
    )


@lru_cache(maxsize=64)
def _replicated(ndim: int) -> ShardSpec:
    return ShardSpec(((),) * ndim)


@dataclass(frozen=True, slots=True)
class Origin:
    """Who decided a layout: `kind` is user, op, rule, search or default; `where` a file:line or an op."""

    kind: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".strip()


DEFAULT_ORIGIN = Origin("default")


@dataclass(frozen=True, slots=True)
class DistAttr:
    """The layout of a value: its mesh, its spec, and who decided them. Equality ignores the origin."""

    mesh: ProcessMesh
    spec: ShardSpec
    origin: Origin = field(default=DEFAULT_ORIGIN, compare=False)

    def __str__(self) -> str:
        return f"{self.spec} on {self.mesh}"

    @property
    def pinned(self) -> bool:
        """True for what a user wrote: no pass may change it."""
        return self.origin.kind == "user"


@dataclass(frozen=True, slots=True)
class AxisAttr:
    """The layout of a value by names of axes, on whichever mesh it is stored, and who decided it."""

    spec: ShardSpec
    origin: Origin = field(default=DEFAULT_ORIGIN, compare=False)

    def __str__(self) -> str:
        return f"{self.spec} on any mesh"

    def on(self, mesh: ProcessMesh, value: str) -> DistAttr:
        """The layout of a value on a mesh; a mesh of one rank splits nothing, whatever its axes are.

        Raises:
            ShardingError: the mesh does not have an axis.
        """
        if mesh.size == 1:
            return DistAttr(mesh, ShardSpec.replicated(len(self.spec.dims)), self.origin)
        check_has_axes(mesh, self.spec.axes, f"%{value} ({self.origin.where})")
        return DistAttr(mesh, self.spec, self.origin)


@dataclass(frozen=True, slots=True)
class OpAxes:
    """The axes that split the indices of one op, on whichever mesh it is computed, and who decided them."""

    axes: tuple[tuple[str, Dim], ...]
    origin: Origin = field(default=DEFAULT_ORIGIN, compare=False)

    def on(self, mesh: ProcessMesh, op: str) -> tuple[tuple[str, Dim], ...]:
        """Index -> axes of more than one rank on a mesh. Raises ShardingError as `AxisAttr.on`."""
        if mesh.size == 1:
            return ()
        check_has_axes(
            mesh, [axis for _, split in self.axes for axis in split], f"{op} ({self.origin.where})"
        )
        parts = ((index, tuple(a for a in split if mesh.axis_size(a) > 1)) for index, split in self.axes)
        return tuple(sorted((index, split) for index, split in parts if split))

    def __str__(self) -> str:
        return ", ".join(f"{index}:{'*'.join(split)}" for index, split in self.axes)


def check_has_axes(mesh: ProcessMesh, axes: Sequence[str], subject: str) -> None:
    """Raises ShardingError if a mesh has no axis that an annotation without a mesh names."""
    missing = next((axis for axis in axes if axis not in mesh.sizes), None)
    if missing is not None:
        raise ShardingError(
            f"{subject}: the annotation splits over axis {missing!r} but {mesh} has {', '.join(mesh.axes)}; "
            f"give the mesh that axis, or take the annotation out"
        )
