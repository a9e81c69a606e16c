"""The rows of Alpa's tables (OSDI 2022): models, plans, published TFLOPS. `alpa_tables` forecasts them.

*Recorded* plans are those of the paper and its artifact. Where none is recorded, a row has the plans of the
family that its system chooses from, and the forecast decides: inter_only puts one GPU in a stage, intra_only
and the ablations have one stage, DeepSpeed is data and expert parallel with ZeRO-2, PP-DP a pipeline of data
parallel stages. "heuristic" stands for tensor parallelism alone. The models of DeepSpeed with 16 and 32 GPUs
were smaller; those here have as many parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from distgraph.models import (
    GPT_PRESETS,
    MOE_PRESETS,
    WIDE_RESNET_PRESETS,
    GPTConfig,
    MoEConfig,
    WideResNetConfig,
    published,
)

FILE = Path(__file__).parent / "data" / "alpa" / "results.tsv"
GPUS = (1, 2, 4, 8, 16, 32, 64)
GPT_OF = dict(zip(GPUS, ("350M", "760M", "1.3B", "2.6B", "6.7B", "15B", "39B"), strict=True))
MOE_OF = dict(zip(GPUS, ("380M", "690M", "1.3B", "2.4B", "10B", "27B", "70B"), strict=True))
WIDE_OF = dict(zip(GPUS, ("250M", "500M", "1B", "2B", "4B", "6.8B", "13B"), strict=True))
MOE_TERA = dict(zip(GPUS, (1579.9, 1580.1, 3005.7, 4992.6, 10445.9, 17870.6, 35333.4), strict=True))
WIDE_GIGA = dict(zip(GPUS, (83.6, 163.5, 333.2, 652.5, 1330.6, 2203.5, 4518.2), strict=True))
Config = GPTConfig | MoEConfig | WideResNetConfig


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks of a stage, its mesh of dp x tp GPUs."""

    blocks: int
    dp: int
    tp: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model is trained.

    Attributes:
        config: of the model. batch: of a step. micro: number of micro-batches.
        stages: of the pipeline, on consecutive GPUs.
        zero: 0, or 2 for optimiser states split over dp, or 3 for parameters split too.
        experts: whether experts lie on dp.
        recompute: whether blocks are computed again in the backward part.
        master: whether the optimiser keeps a master copy and moments in f32.
    """

    config: Config
    batch: int
    micro: int
    stages: tuple[Stage, ...]
    zero: int = 0
    experts: bool = True
    recompute: bool = True
    master: bool = True

    @property
    def gpus(self) -> int:
        """GPUs of all stages."""
        return sum(stage.dp * stage.tp for stage in self.stages)

    def __str__(self) -> str:
        parts = [f"{s.blocks}:{s.dp}x{s.tp}" for s in self.stages]
        shown = parts[0] if len(parts) == 1 else f"{len(parts)} stages {parts[0]}..{parts[-1]}"
        return f"{shown} m{self.micro}" + (f" zero{self.zero}" if self.zero else "")


@dataclass(frozen=True, slots=True)
class Row:
    """One published number.

    Attributes:
        table, system, gpus: where it stands.
        published: TFLOPS per GPU, None for out of memory.
        projected: whether its authors did not run it.
        recorded: whether the plan is theirs.
        plans: the one plan, or those of the family; none where they cannot be expressed.
        flop: of a sequence or image.
    """

    table: str
    system: str
    gpus: int
    published: float | None
    projected: bool
    recorded: bool
    plans: tuple[Plan, ...]
    flop: float

    @property
    def kind(self) -> tuple[str, str]:
        """Table and system."""
        return self.table, self.system


def read_rows() -> tuple[Row, ...]:
    """All rows."""
    return tuple(_read())


def _read() -> Iterator[Row]:
    for line in FILE.read_text().splitlines():
        table, system, *cells = line.split("\t")
        gpus = (8, 16, 32) if table.startswith("inter_") else GPUS[: len(cells)]
        for count, cell in zip(gpus, cells, strict=True):
            recorded, plans = plans_of(table, system, count)
            number = None if cell == "OOM" else float(cell.rstrip("p"))
            flop = _flop(table, plans[0].config, count) if plans else 0.0
            yield Row(table, system, count, number, cell.endswith("p"), recorded, plans, flop)


def _flop(table: str, config: Config, gpus: int) -> float:
    """Of one sequence or image, as the paper counts it."""
    if isinstance(config, WideResNetConfig):
        return 3e9 * WIDE_GIGA[gpus]
    return published.flops(config, 1024) / 1024


def plans_of(table: str, system: str, gpus: int) -> tuple[bool, tuple[Plan, ...]]:
    """Whether the plan is recorded, and the plan or those of the family."""
    if table.startswith("intra_"):
        return gpus == 1, _ablation(table, system, gpus)
    if table.startswith("inter_"):
        return system == "dp", _cuts(table, system, gpus)
    family = {"gpt": _gpt, "moe": _moe, "wresnet": _wide}[table]
    recorded, plans = family(system, gpus)
    if system == "alpa":
        # Alpa makes all-reduces of gradients reduce-scatters: states are split over dp.
        plans = tuple(replace(p, zero=2) if any(s.dp > 1 for s in p.stages) else p for p in plans)
    return recorded, plans


def weights(config: Config) -> tuple[float, ...]:
    """FLOP of every block, what comes after the last block among its own; any unit."""
    if isinstance(config, WideResNetConfig):
        found, inputs = [], config.channels
        for level, count in enumerate(config.blocks):
            c = config.channels * 2**level
            for number in range(count):
                down = 2 if level and not number else 1
                project = inputs * 4 * c if not number else 0
                inner = 9 * c * c * config.width + 4 * c * c * config.width + project
                found.append((inner + inputs * c * down**2) / 4**level)
                inputs = 4 * c
        return tuple(found)
    h = config.hidden
    dense = 8 * h * h + 4 * config.mlp_factor * h * h + 4 * config.sequence * h
    moe = isinstance(config, MoEConfig)
    routed = dense + 4 * config.mlp_factor * h * h if moe else dense
    blocks = [4.0 * (routed if number % 2 else dense) for number in range(config.layers)]
    blocks[-1] += 6.0 * h * config.vocabulary
    return tuple(blocks)


@cache
def balanced(config: Config, shares: tuple[int, ...]) -> tuple[int, ...]:
    """Blocks of each stage such that the slowest is as fast as can be, stages being as fast as their GPUs."""
    sums, total = [0.0], 0.0
    for weight in weights(config):
        total += weight
        sums.append(total)
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for share in shares:
        step: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (worst, cut) in best.items():
            for end in range(start + 1, len(sums)):
                cost = max(worst, (sums[end] - sums[start]) / share)
                if end not in step or cost < step[end][0]:
                    step[end] = (cost, (*cut, end - start))
        best = step
    return best[len(sums) - 1][1]


def _pipeline(config: Config, meshes: Sequence[tuple[int, int]], even: bool = False) -> tuple[Stage, ...]:
    blocks = len(weights(config))
    sizes = balanced(config, tuple(dp * tp for dp, tp in meshes)) if not even else ()
    if even:
        count = len(meshes)
        sizes = tuple(blocks // count + (i < blocks % count) for i in range(count))
    return tuple(Stage(size, dp, tp) for size, (dp, tp) in zip(sizes, meshes, strict=True))


def _splits(gpus: int) -> list[tuple[int, int]]:
    """(dp, tp) of a number of GPUs."""
    return [(gpus // tp, tp) for tp in (1, 2, 4, 8, 16, 32, 64) if gpus % tp == 0]


def _gpt(system: str, gpus: int) -> tuple[bool, tuple[Plan, ...]]:
    config = GPT_PRESETS[GPT_OF[gpus]]

    def plan(meshes: Sequence[tuple[int, int]], micro: int, *, even: bool = False, zero: int = 0) -> Plan:
        stages = _pipeline(config, meshes, even)
        return Plan(config=config, batch=1024, micro=micro, stages=stages, zero=zero)

    if system == "alpa" or (gpus == 1 and system != "megatron"):
        meshes, micro = {
            1: ([(1, 1)], 512),
            2: ([(1, 1)] * 2, 128),
            4: ([(2, 1)] * 2, 128),
            8: ([(2, 1), (2, 1), (4, 1)], 128),
            16: ([(2, 4)] * 2, 64),
            32: ([(2, 4)] * 4, 128),
            64: ([(1, 4)] * 16, 1024),
        }[gpus]
        found = plan(meshes, micro)
        if gpus == 8:
            found = replace(found, stages=(Stage(8, 2), Stage(8, 2), Stage(16, 4)))
        return True, (found,)
    if system == "megatron":
        best = {
            1: (1, 1, 1, 64),
            4: (2, 1, 2, 128),
            8: (1, 1, 8, 128),
            16: (1, 2, 8, 256),
            32: (1, 4, 8, 256),
        }
        if gpus in best:
            dp, tp, pp, micro = best[gpus]
            found = plan([(dp, tp)] * pp, micro, even=True)
            return True, (found,)
        options = {2: [(1, 1, 2), (1, 2, 1), (2, 1, 1)], 64: [(1, 8, 8), (1, 4, 16), (2, 4, 8), (2, 8, 4)]}
        tried = [(o, micro) for o in options[gpus] for micro in (256,)]
        return False, tuple(plan([(dp, tp)] * pp, micro, even=True) for (dp, tp, pp), micro in tried)
    if system == "inter_only":
        return False, tuple(plan([(1, 1)] * min(gpus, config.layers), m) for m in (256, 1024))
    return False, tuple(
        plan([mesh], micro, zero=zero)
        for mesh in (_splits(gpus) if gpus <= 16 else [(gpus // 8, 8)])
        for micro in (64,)
        for zero in ((0, 2) if mesh[0] > 1 else (0,))
    )


def _moe(system: str, gpus: int) -> tuple[bool, tuple[Plan, ...]]:
    config = MOE_PRESETS[MOE_OF[gpus]]

    def plan(meshes: Sequence[tuple[int, int]], micro: int, zero: int = 0, even: bool = True) -> Plan:
        stages = _pipeline(config, meshes, even)
        master = system == "deepspeed"
        return Plan(config=config, batch=1024, micro=micro, stages=stages, zero=zero, master=master)

    if system == "alpa" or gpus == 1:
        meshes, micro = {
            1: ([(1, 1)], 512),
            2: ([(2, 1)], 32),
            4: ([(2, 1)] * 2, 32),
            8: ([(4, 1)] * 2, 32),
            16: ([(8, 1)] * 2, 16),
            32: ([(4, 1)] * 8, 128),
            64: ([(8, 1)] * 8, 64),
        }[gpus]
        return True, (plan(meshes, micro),)
    if system == "inter_only":
        # At most one block a stage: with 32 and 64 GPUs some have nothing to do.
        meshes = [(1, 1)] * min(gpus, config.layers)
        return False, tuple(plan(meshes, micro, even=False) for micro in (128, 512))
    if system == "deepspeed" and gpus in (16, 32):
        # Run with models of 4.5 and 10 billion parameters; these have as many.
        config = replace(MOE_PRESETS["10B"], hidden=1024 if gpus == 16 else 1536)
    zeros = (2,) if system == "deepspeed" else (0, 2)
    return False, tuple(plan([(gpus, 1)], micro, zero) for micro in (16, 32) for zero in zeros)


def _wide(system: str, gpus: int) -> tuple[bool, tuple[Plan, ...]]:
    config = WIDE_RESNET_PRESETS[WIDE_OF[gpus]]
    if gpus == 64:
        config = replace(config, blocks=(3, 4, 23, 3))

    def plan(
        meshes: Sequence[tuple[int, int]], micro: int, even: bool = False, batch: int = 1536
    ) -> list[Plan]:
        made = Plan(config=config, batch=batch, micro=micro, stages=_pipeline(config, meshes, even))
        return [replace(made, recompute=False), made]

    if system == "alpa" or gpus == 1:
        if gpus == 8:
            found = plan([(4, 1), (1, 4)], 24)
            return True, tuple(replace(p, stages=(Stage(8, 4), Stage(8, 1, 4))) for p in found)
        if gpus == 16:
            found = plan([(4, 1), (4, 1), (8, 1)], 32)
            return True, tuple(replace(p, stages=(Stage(5, 4), Stage(4, 4), Stage(7, 8))) for p in found)
        if gpus <= 4:
            return True, tuple(plan([(gpus, 1)], 24))
        # How stages split tensors is not recorded. 38 micro-batches of 40 images are 1520, not 1536.
        inner, outer = [(8, 1), (2, 4), (1, 8)], [(8, 1)] * (gpus // 16)
        micro, batch = (32, 1536) if gpus == 32 else (38, 1520)
        tails = [plan(outer + [mesh] * (gpus // 16), micro, batch=batch) for mesh in inner]
        whole = [plan([(4, 2)] * (gpus // 8), micro, batch=batch)]
        return True, tuple(p for each in tails + whole for p in each)
    if system == "inter_only":
        stages = min(gpus, len(weights(config)))
        return False, tuple(p for micro in (48,) for p in plan([(1, 1)] * stages, micro))
    if system == "pp_dp":
        depth = [pp for pp in (1, 2, 4, 8, 16, 32) if pp <= min(gpus, len(weights(config)))]
        return False, tuple(p for pp in depth for micro in (24,) for p in plan([(gpus // pp, 1)] * pp, micro))
    splits = _splits(gpus) if gpus <= 8 else [(gpus, 1), (gpus // 8, 8)]
    return False, tuple(p for mesh in splits for p in plan([mesh], 24))


def _ablation(table: str, system: str, gpus: int) -> tuple[Plan, ...]:
    at = (1, 2, 4, 8).index(gpus)
    config: Config
    if table == "intra_gpt":
        # Heads are not recorded; these can be split over the GPUs.
        hidden, heads = ((2048, 32), (3072, 48), (4096, 64), (5760, 96))[at]
        config = replace(GPT_PRESETS["1.3B"], layers=8, vocabulary=25600, hidden=hidden, heads=heads)
    elif table == "intra_moe":
        hidden, heads, experts = ((1024, 32, 8), (1280, 40, 16), (1536, 24, 16), (1536, 24, 32))[at]
        config = replace(
            MOE_PRESETS["1.3B"],
            hidden=hidden,
            heads=heads,
            experts=experts,
            layers=8,
            vocabulary=51200,
            group=1024,
        )
    else:
        config = WIDE_RESNET_PRESETS[WIDE_OF[gpus]]
    wide = table == "intra_wresnet"
    blocks = len(weights(config))

    def plan(mesh: tuple[int, int], zero: int = 0, experts: bool = False) -> Plan:
        return Plan(
            config=config,
            batch=32 if wide else 8,
            micro=1,
            stages=(Stage(blocks, *mesh),),
            zero=zero,
            experts=experts,
            recompute=not wide,
            master=table != "intra_moe",
        )

    options: dict[str, tuple[Plan, ...]] = {
        "data": (plan((gpus, 1)),),
        "zero2": (plan((gpus, 1), 2),),
        "zero3": (plan((gpus, 1), 3),),
        "heuristic": (plan((1, gpus)),),
    }
    both = [plan(mesh, zero, True) for mesh in _splits(gpus) for zero in ((0, 2) if mesh[0] > 1 else (0,))]
    return options.get(system, tuple(both)) if gpus > 1 else (plan((1, 1)),)


def _cuts(table: str, system: str, gpus: int) -> tuple[Plan, ...]:
    if system == "equal_operator":
        return ()  # cuts inside blocks: which operators is not recorded
    plans = plans_of(table.split("_")[1], "alpa", gpus)[1]
    if system == "dp":
        return plans
    return tuple(
        replace(p, stages=_pipeline(p.config, [(s.dp, s.tp) for s in p.stages], even=True)) for p in plans
    )
