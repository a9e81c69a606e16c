"""Changes of layout that differ only in the names of axes and the order of dims cost the same.

Of each class one stands for all, so that a price by bytes is looked for once: dims sorted, axes named a0, a1,
... in the order that makes the whole least, ranks counted from 0. On a mesh of three equal axes a class has
up to six members for each order of the dims.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache

from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.redistribution.tiles import without_unit_axes

Axes = tuple[str, ...]
Change = tuple[tuple[int, ...], ProcessMesh, ShardSpec, ShardSpec]
Named = tuple[tuple[tuple[int, Axes, Axes], ...], Axes, Axes]
_NAMINGS = 24  # most ways to name the axes that are compared; beyond, a change stands for itself


def representative(shape: tuple[int, ...], mesh: ProcessMesh, source: ShardSpec, target: ShardSpec) -> Change:
    """The change of layout that stands for all of the same class.

    Example:
        >>> mesh, spec = ProcessMesh.grid(2, x=2, y=2, z=3), ShardSpec.parse
        >>> representative((4, 8), mesh, spec("[y, z]"), spec("[_, z]"))
        ((4, 8), mesh(a0=2, a1=3), [a0, a1], [_, a1])
        >>> representative((8, 4), mesh, spec("[z, x]"), spec("[z, _]"))
        ((4, 8), mesh(a0=2, a1=3), [a0, a1], [_, a1])
    """
    source, target = without_unit_axes(source, mesh), without_unit_axes(target, mesh)
    used = frozenset(source.axes + target.axes)
    classes = _classes(mesh, used)
    many = math.prod(math.factorial(len(each)) for each in classes) > _NAMINGS
    if not used or many or len({kind for _, kind in source.partial + target.partial}) > 1:
        return shape, mesh, source, target  # unequal reductions are done in the order of the names
    least, names = min(
        ((_under(names, shape, source, target), names) for names in _namings(classes)),
        key=lambda pair: pair[0],
    )
    partials = [tuple((names[axis], kind) for axis, kind in spec.partial) for spec in (source, target)]
    before = ShardSpec(tuple(dim[1] for dim in least[0]), partials[0])
    after = ShardSpec(tuple(dim[2] for dim in least[0]), partials[1])
    return tuple(dim[0] for dim in least[0]), _renamed(mesh, tuple(names.items())), before, after


def _under(names: dict[str, str], shape: tuple[int, ...], source: ShardSpec, target: ShardSpec) -> Named:
    """Sizes and layouts of all dims under other names, the least first; axes pending before and after."""
    dims = (
        (size, tuple(names[axis] for axis in before), tuple(names[axis] for axis in after))
        for size, before, after in zip(shape, source.dims, target.dims, strict=True)
    )
    pending = (tuple(sorted(names[axis] for axis, _ in spec.partial)) for spec in (source, target))
    return tuple(sorted(dims)), *pending  # type: ignore[return-value]


@lru_cache(maxsize=4096)
def _classes(mesh: ProcessMesh, used: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    """The used axes, those of equal size and weights together."""
    classes: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for axis in mesh.axes:
        if axis in used:
            classes.setdefault((mesh.axis_size(axis), tuple(mesh.weights.get(axis, ()))), []).append(axis)
    return tuple(tuple(classes[key]) for key in sorted(classes))


def _namings(classes: tuple[tuple[str, ...], ...]) -> Iterator[dict[str, str]]:
    """All ways to name axes a0, a1, ...: those of the first class first, those of one class in any order."""
    for orders in itertools.product(*(itertools.permutations(each) for each in classes)):
        yield {axis: f"a{i}" for i, axis in enumerate(itertools.chain(*orders))}


@lru_cache(maxsize=4096)
def _renamed(mesh: ProcessMesh, names: tuple[tuple[str, str], ...]) -> ProcessMesh:
    """A mesh of ranks from 0 up with the named axes only."""
    by_name = {new: old for old, new in names}
    sizes = {new: mesh.axis_size(by_name[new]) for new in sorted(by_name, key=lambda name: (len(name), name))}
    weights = {new: mesh.weights[old] for new, old in by_name.items() if old in mesh.weights}
    grid = ProcessMesh.grid(**sizes)
    return grid.weighted(**weights) if weights else grid
