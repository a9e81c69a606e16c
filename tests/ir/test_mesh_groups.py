"""Groups of a mesh against their definition: the ranks that differ along some axes only."""

from itertools import permutations

import numpy as np
import pytest

from distgraph.errors import ShardingError
from distgraph.ir.mesh import ProcessMesh


@pytest.mark.parametrize("shape", [(2,), (3, 2), (2, 3, 4), (2, 1, 2, 3)])
def test_groups_are_those_of_every_rank(shape: tuple[int, ...]) -> None:
    names = ["a", "b", "c", "d"][: len(shape)]
    ranks = np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape) + 3
    mesh = ProcessMesh(ranks, names)
    for count in range(len(names) + 1):
        for axes in permutations(names, count):
            found = mesh.groups(axes)
            assert found == tuple(dict.fromkeys(mesh.group(rank, axes) for rank in mesh.members))
            assert sorted(rank for group in found for rank in group) == sorted(mesh.members)


def test_groups_of_an_unknown_axis() -> None:
    with pytest.raises(ShardingError, match="nowhere"):
        ProcessMesh.grid(x=2).groups(("nowhere",))
