"""The rows of Alpa's tables (OSDI 2022): published TFLOPS and the FLOP that they count; see `recorded_plans`.

`data/alpa/results.tsv` has the tables; `data/alpa/seconds.tsv` the seconds of a step and the peak memory
of the rows for which the artifact states them (table, system, GPUs, TFLOPS, seconds, GiB). Where it does,
a row counts TFLOPS x seconds x GPUs: the intra-operator rows of MoE and all of Wide-ResNet count the
contractions of their compiled programs, embeddings by one-hot matrices among them, up to 12 % more or less
than the formula. Elsewhere the formulas of the paper count (`published_formulas`), recomputation
included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.alpa import published_formulas as published
from benchmarks.support.alpa.recorded_plans import GPUS, Config, Plan, plans_of
from distgraph.models import WideResNetConfig

DATA = Path(__file__).resolve().parents[1] / "data" / "alpa"
MOE_TERA = dict(zip(GPUS, (1579.9, 1580.1, 3005.7, 4992.6, 10445.9, 17870.6, 35333.4), strict=True))
WIDE_GIGA = dict(zip(GPUS, (83.6, 163.5, 333.2, 652.5, 1330.6, 2203.5, 4518.2), strict=True))


@dataclass(frozen=True, slots=True)
class Row:
    """One published number.

    Attributes:
        table, system, gpus: where it stands.
        published: TFLOPS per GPU, None for out of memory.
        projected: whether its authors did not run it.
        recorded: whether the plan is theirs, see `recorded_plans`.
        plans: one or several; none where they cannot be expressed.
        sample: FLOP of one sequence or image, as the row counts them.
        peak: GiB of the GPU that needed most, None where it is not stated.
    """

    table: str
    system: str
    gpus: int
    published: float | None
    projected: bool
    recorded: bool
    plans: tuple[Plan, ...]
    sample: float
    peak: float | None

    @property
    def name(self) -> str:
        """Table, system and GPUs."""
        return f"{self.table} {self.system} {self.gpus}"

    @property
    def counted(self) -> bool:
        """Whether it is of a run on two GPUs or more that ended."""
        return self.published is not None and not self.projected and self.gpus > 1

    def flop(self, plan: Plan) -> float:
        """Of a step."""
        return self.sample * plan.batch

    def tera(self, plan: Plan, seconds: float) -> float:
        """TFLOPS per GPU of a step that takes so long."""
        return self.flop(plan) / seconds / self.gpus / 1e12


def read_rows() -> tuple[Row, ...]:
    """All rows."""
    return tuple(_read(_measured()))


def _measured() -> dict[tuple[str, str, int], tuple[float, float, float | None]]:
    """(table, system, GPUs) -> TFLOPS, seconds, GiB."""
    found = {}
    for line in (DATA / "seconds.tsv").read_text().splitlines():
        table, system, gpus, tera, seconds, peak = line.split("\t")
        found[table, system, int(gpus)] = (
            float(tera),
            float(seconds),
            None if peak == "-" else float(peak),
        )
    return found


def _read(measured: dict[tuple[str, str, int], tuple[float, float, float | None]]) -> Iterator[Row]:
    for line in (DATA / "results.tsv").read_text().splitlines():
        table, system, *cells = line.split("\t")
        gpus = (8, 16, 32) if table.startswith("inter_") else GPUS[: len(cells)]
        for count, cell in zip(gpus, cells, strict=True):
            number = None if cell == "OOM" else float(cell.rstrip("p"))
            found, known = plans_of(table, system, count), measured.get((table, system, count))
            projected, sample = cell.endswith("p"), 0.0
            if found.plans:
                plan = found.plans[0]
                counts = known is not None and not projected
                sample = (
                    known[0] * known[1] * count * 1e12 / plan.batch
                    if counts and known is not None
                    else _sample(plan, count)
                )
            peak = known[2] if known is not None else None
            yield Row(table, system, count, number, projected, found.recorded, found.plans, sample, peak)


def _sample(plan: Plan, gpus: int) -> float:
    """FLOP of one sequence or image by the paper's formulas."""
    config: Config = plan.config
    if isinstance(config, WideResNetConfig):
        return (4e9 if plan.recompute else 3e9) * WIDE_GIGA[gpus]
    return published.flops(config, 1024) / 1024
