"""What a framework executes of a plan, as data: a runtime model says it, and a search keeps to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from distgraph.serialization.fields import documented


@documented(complete=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a framework executes of a plan; by default everything that distgraph does.

    Attributes:
        stages: "any"; "equal" if all stages of a pipeline need meshes of the same shape, each with ranks of
            its own; "one" if there is no pipeline.
        schedules: names of the pipeline schedules, or "all".
        axes: "any"; "one_use" if an axis of a mesh either splits the batch, into equal parts, or other dims,
            and one axis splits those.
        matmul_algorithms: whether distributed algorithms of matrix products are executed
            (docs/parallelism/matmul_algorithms.md).
    """

    stages: Literal["any", "equal", "one"] = "any"
    schedules: tuple[str, ...] | Literal["all"] = "all"
    axes: Literal["any", "one_use"] = "any"
    matmul_algorithms: bool = True

    def among(self, schedules: Sequence[str]) -> tuple[str, ...]:
        """Those of some schedules that are executed.

        Example:
            >>> Capabilities(schedules=("1f1b", "gpipe")).among(["zb-h1", "1f1b"])
            ('1f1b',)
        """
        return tuple(name for name in schedules if self.schedules == "all" or name in self.schedules)


ANY = Capabilities()
"""Every plan is executed."""
