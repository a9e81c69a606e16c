"""How the systems in Alpa's tables (OSDI 2022) trained which model: recorded plans, and grids where none is.

Sources: the paper, and the experiment scripts of its public artifact (github.com/alpa-projects/alpa,
Apache-2.0, numbers only): `osdi22_artifact/suite_artifact_e2e_*.py`, `benchmark/alpa/suite_auto_*.py`,
`exp_inter_only.py`, `exp_intra_only.py`, `exp_intra_ablation.py`, `paper_manual_gpt_suite.py`, `megatron/`
and `deepspeed/`. A plan of theirs is *recorded*; what a script leaves open (numbers of micro-batches
tried, or how the solver of Alpa split tensors in a mesh) is a family of plans, of which the forecast takes
the fastest that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from distgraph.models import (
    GPT_PRESETS,
    MOE_PRESETS,
    WIDE_RESNET_PRESETS,
    GPTConfig,
    MoEConfig,
    WideResNetConfig,
)

GPUS = (1, 2, 4, 8, 16, 32, 64)
GPT_OF = dict(zip(GPUS, ("350M", "760M", "1.3B", "2.6B", "6.7B", "15B", "39B"), strict=True))
MOE_OF = dict(zip(GPUS, ("380M", "690M", "1.3B", "2.4B", "10B", "27B", "70B"), strict=True))
WIDE_OF = dict(zip(GPUS, ("250M", "500M", "1B", "2B", "4B", "6.8B", "13B"), strict=True))
Config = GPTConfig | MoEConfig | WideResNetConfig


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks of a stage, its mesh of dp x ep x tp GPUs; dp and ep split the batch, ep the experts."""

    blocks: int
    dp: int
    tp: int = 1
    ep: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of the mesh."""
        return self.dp * self.ep * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model is trained.

    Attributes:
        config: of the model. batch: of a step. micro: number of micro-batches.
        stages: of the pipeline, on consecutive GPUs; several on the `same` GPUs are one stage in which the
            tensors of some blocks are split otherwise than those of others.
        zero: 0, or 2 for optimiser states split over dp, or 3 for parameters split too.
        recompute: whether blocks are computed again in the backward part.
        software: the runtime: "xla" (Alpa), "megatron" or "deepspeed".
        largest: every parameter is split by its longest dim, and the rest follows ("shard-largest").
    """

    config: Config
    batch: int
    micro: int
    stages: tuple[Stage, ...]
    same: bool = False
    zero: int = 0
    recompute: bool = True
    software: str = "xla"
    largest: bool = False

    @property
    def gpus(self) -> int:
        """GPUs of all stages."""
        return self.stages[0].gpus if self.same else sum(stage.gpus for stage in self.stages)

    def __str__(self) -> str:
        parts = [f"{s.blocks}:{s.dp}x{s.tp}" + (f" ep{s.ep}" if s.ep > 1 else "") for s in self.stages]
        shown = parts[0] if len(parts) == 1 else f"{len(parts)} stages {parts[0]}..{parts[-1]}"
        extra = (f" zero{self.zero}" if self.zero else "") + (" largest" if self.largest else "")
        return f"{shown} m{self.micro}{extra}" + (" same GPUs" if self.same else "")


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans of a row; recorded: whether it is one plan, and theirs."""

    plans: tuple[Plan, ...]
    recorded: bool


def plans_of(table: str, system: str, gpus: int) -> Plans:
    """Plans of a row; none where they cannot be expressed."""
    if table.startswith("intra_"):
        return _ablation(table.removeprefix("intra_"), system, gpus)
    if table.startswith("inter_"):
        return _cuts(table.split("_")[1], system, gpus)
    family: Callable[[str, int], Plans] = {"gpt": _gpt, "moe": _moe, "wresnet": _wide}[table]
    return family(system, gpus)


def blocks_of(config: Config) -> int:
    """Number of blocks."""
    return sum(config.blocks) if isinstance(config, WideResNetConfig) else config.layers


def even(config: Config, count: int, dp: int = 1, tp: int = 1) -> tuple[Stage, ...]:
    """Equal numbers of blocks on equal meshes; at most one stage a block.

    Longer stages come after the first, which computes the embedding too: Alpa balances FLOP (section 5.2).
    """
    blocks = blocks_of(config)
    count = min(count, blocks)
    return tuple(Stage(blocks // count + (0 < i <= blocks % count), dp, tp) for i in range(count))


def _made(plans: Iterable[Plan]) -> Plans:
    found = tuple(dict.fromkeys(plans))
    return Plans(found, len(found) == 1)


def _gpt(system: str, gpus: int) -> Plans:
    config = GPT_PRESETS[GPT_OF[gpus]]

    def plan(stages: tuple[Stage, ...], micro: int, batch: int = 1024, software: str = "xla") -> Plan:
        split = software == "xla" and any(s.dp > 1 for s in stages)
        return Plan(
            config=config,
            batch=batch,
            micro=micro,
            stages=stages,
            zero=2 if split else 0,
            software=software,
        )

    if system == "alpa":
        stages, micro = {
            1: (even(config, 1), 512),
            2: (even(config, 2), 128),
            4: (even(config, 2, 2), 128),
            8: ((Stage(8, 2), Stage(8, 2), Stage(16, 4)), 128),
            16: (even(config, 2, 2, 4), 64),
            32: (even(config, 4, 2, 4), 128),
            64: (even(config, 16, 1, 4), 1024),
        }[gpus]
        return _made([plan(stages, micro)])
    if system == "inter_only":
        tried = {1: (64, 128, 256), 2: (64, 128, 256), 4: (64, 128, 256, 512)}
        tried |= {8: (64, 128, 256, 512, 1024), 64: (1024,)}
        return _made(plan(even(config, gpus), m) for m in tried.get(gpus, (128, 256, 512, 1024)))
    if system == "intra_only":
        # Those on 32 and 64 GPUs were run with smaller batches, and their authors projected the rest.
        dp, tp, micro, batch = {
            1: (1, 1, 64, 1024),
            2: (2, 1, 64, 1024),
            4: (4, 1, 64, 1024),
            8: (4, 2, 32, 1024),
            16: (2, 8, 64, 1024),
            32: (4, 8, 32, 256),
            64: (2, 32, 32, 64),
        }[gpus]
        return _made([plan(even(config, 1, dp, tp), micro, batch)])
    tried_dp_tp_pp = {
        1: [(1, 1, 1, 8, 128)],
        # Their grid for 760M: data parallelism ran out of memory, the halves of a model held 8 samples or 16.
        2: [(1, 2, 1, 64, 1024), (1, 1, 2, 64, 1024), (1, 1, 2, 128, 1024)],
        4: [(2, 1, 2, 128, 1024)],
        8: [(1, 1, 8, 128, 1024)],
        16: [(1, 2, 8, 256, 1024)],
        32: [(1, 4, 8, 256, 1024)],
        64: [(1, 4, 16, 1024, 1024), (1, 8, 8, 512, 1024)],
    }[gpus]
    return _made(
        plan(even(config, pp, dp, tp), micro, batch, "megatron")
        for dp, tp, pp, micro, batch in tried_dp_tp_pp
    )


def _moe(system: str, gpus: int) -> Plans:
    config = MOE_PRESETS[MOE_OF[gpus]]
    if system == "deepspeed":
        return _deepspeed(config, gpus)

    def plan(stages: tuple[Stage, ...], micro: int, batch: int = 1024) -> Plan:
        zero = 2 if any(s.dp * s.ep > 1 for s in stages) else 0
        group = min(config.group, batch // micro * config.sequence)  # as the script does
        return Plan(config=replace(config, group=group), batch=batch, micro=micro, stages=stages, zero=zero)

    def expert(count: int, gpus: int) -> tuple[Stage, ...]:
        return tuple(replace(s, ep=gpus) for s in even(config, count))

    if system == "alpa":
        pp, ep, micro = {
            1: (1, 1, 512),
            2: (1, 2, 32),
            4: (2, 2, 32),
            8: (2, 4, 32),
            16: (2, 8, 16),
            32: (8, 4, 128),
            64: (8, 8, 64),
        }[gpus]
        return _made([plan(expert(pp, ep), micro)])
    if system == "inter_only":
        # Their scripts cut inside blocks where there are more stages than blocks; here some GPUs stay idle.
        tried = {1: (64, 128), 2: (64, 128, 256), 4: (64, 128, 256, 512)}
        tried |= {8: (64, 128, 256, 512, 1024), 16: (64, 128, 256, 512, 1024)}
        return _made(plan(even(config, gpus), m) for m in tried.get(gpus, (1024,)))
    # Logical meshes of their script: 1, 2, 4, 8 GPUs in a row, 2 x 8, 1 x 32, 1 x 64 (two are projected).
    micro, batch = {
        1: (32, 1024),
        2: (32, 1024),
        4: (16, 1024),
        8: (16, 1024),
        16: (32, 1024),
        32: (8, 256),
        64: (32, 128),
    }[gpus]
    found = [plan(expert(1, gpus), micro, batch)]
    if gpus == 16:
        found.append(plan((Stage(config.layers, 2, 1, 8),), micro, batch))
    return _made(found)


def _deepspeed(config: MoEConfig, gpus: int) -> Plans:
    """The best of their grids; at 16 and 32 GPUs with models of 4.5 and 10 billion parameters."""
    if gpus == 16:
        config = replace(MOE_PRESETS["2.4B"], experts=32)
    elif gpus == 32:
        config = MOE_PRESETS["10B"]
    micro, sizes = {
        1: (128, (1,)),
        2: (64, (1, 2)),
        4: (32, (4,)),
        8: (16, (2,)),
        16: (8, (8,)),
        32: (8, (8,)),
        64: (8, (8,)),
    }[gpus]
    # DeepSpeed has no groups: the capacity of experts is shared by all tokens of a GPU.
    config = replace(config, group=1024 // micro // gpus * config.sequence)
    return _made(
        Plan(
            config=config,
            batch=1024,
            micro=micro,
            stages=(Stage(config.layers, gpus // ep, 1, ep),),
            zero=2 if gpus > 1 else 0,
            software="deepspeed",
        )
        for ep in sizes
    )


def _wide(system: str, gpus: int) -> Plans:
    config = WIDE_RESNET_PRESETS[WIDE_OF[gpus]]
    if gpus == 64:
        config = replace(config, blocks=(3, 4, 23, 3))

    def plan(
        stages: Iterable[tuple[int, int, int]], micro: int, batch: int = 1536, again: bool = True
    ) -> Plan:
        found = tuple(Stage(*stage) for stage in stages)
        zero = 2 if any(s.dp > 1 for s in found) else 0
        return Plan(config=config, batch=batch, micro=micro, stages=found, zero=zero, recompute=again)

    if system == "intra_only":
        dp, tp, micro, batch = {
            1: (1, 1, 48, 1536),
            2: (2, 1, 32, 1536),
            4: (4, 1, 32, 1536),
            8: (8, 1, 48, 1536),
            16: (2, 8, 64, 1536),
            32: (4, 8, 8, 256),
            64: (4, 16, 8, 64),
        }[gpus]
        whole = plan([(blocks_of(config), dp, tp)], micro, batch, again=False)
        flat = plan([(blocks_of(config), gpus, 1)], micro, batch, again=False)
        return _made([*_mixed(whole), *_mixed(flat)] if gpus <= 16 else _mixed(whole))
    if gpus == 1 or (system == "alpa" and gpus <= 4):
        found = _mixed(plan([(16, gpus, 1)], 24))
        # On 4 GPUs the paper says which: "the first dozens of layers" by samples, the last by channels (8.6).
        return _made(found[1:2] if gpus == 4 else found)
    if system == "alpa":
        # In some meshes of (n, 1) their solver chose how tensors are split; `forced` of the first were not.
        stages, micro, batch, forced = {
            8: ([(8, 4, 1), (8, 1, 4)], 24, 1536, 2),
            16: ([(5, 4, 1), (4, 4, 1), (7, 8, 1)], 32, 1536, 2),
            32: ([(5, 8, 1), (4, 8, 1), (4, 8, 1), (3, 8, 1)], 32, 1536, 1),
            64: ([(4, 8, 1), (4, 1, 8)] * 2 + [(4, 8, 1)] * 2 + [(5, 1, 8), (4, 8, 1)], 38, 1520, 4),
        }[gpus]
        return _made(plan(chosen, micro, batch) for chosen in _by_channels(stages, forced))
    if system == "inter_only":
        cuts = {2: (8, 8), 4: (6, 5, 3, 2), 8: (3, 3, 2, 3, 2, 1, 1, 1)}.get(gpus, (1,) * blocks_of(config))
        tried, batch = {2: 24, 4: 64, 8: 96, 16: 384}.get(gpus, 2), 1536 if gpus <= 16 else 2
        return _made([plan([(blocks, 1, 1) for blocks in cuts], tried, batch)])
    stages, micro, batch = {
        2: ([(16, 2, 1)], 24, 1536),
        4: ([(8, 2, 1), (5, 1, 1), (3, 1, 1)], 32, 1536),
        8: ([(9, 4, 1), (2, 1, 1), (3, 2, 1), (2, 1, 1)], 32, 1536),
        16: ([(1, 1, 1)] * 16, 384, 1536),
        32: ([(1, 2, 1)] * 16, 2, 4),  # one image a GPU: their smallest attempt
        64: ([(1, 1, 1)] * 33, 2, 2),
    }[gpus]
    return _made([plan(stages, micro, batch)])


def _by_channels(stages: Sequence[tuple[int, int, int]], forced: int) -> list[list[tuple[int, int, int]]]:
    """The stages as they are, and with the last one, two, ... split by channels instead of samples.

    The first `forced` stages stay as they are.
    """
    found = [list(stages)]
    for number in range(forced, len(stages)):
        changed = [(b, 1, dp * tp) for b, dp, tp in stages[number:]]
        found.append([*stages[:number], *changed])
    return found


def _mixed(plan: Plan) -> list[Plan]:
    """A plan of one stage, and those whose last blocks split channels over the same GPUs."""
    (stage,) = plan.stages
    if stage.gpus == 1:
        return [plan]
    firsts = (13, 7, 3)  # blocks before the last resolution, the last two, the last three
    tails = [(Stage(n, stage.dp, stage.tp), Stage(stage.blocks - n, 1, stage.gpus)) for n in firsts]
    return [plan, *(replace(plan, stages=stages, same=True) for stages in tails)]


def _ablation(family: str, system: str, gpus: int) -> Plans:
    """One machine, one micro-batch."""
    config = _ablation_config(family, gpus)
    wide = family == "wresnet"

    def plan(dp: int, tp: int, *, zero: int = 0, ep: int = 1, largest: bool = False) -> Plan:
        return Plan(
            config=config,
            batch=32 if wide else 8,
            micro=1,
            stages=(Stage(blocks_of(config), dp, tp, ep),),
            zero=zero if dp * ep > 1 else 0,
            recompute=not wide,
            largest=largest,
        )

    if gpus == 1:
        return _made([plan(1, 1)])
    if system in ("data", "zero2", "zero3"):
        return _made([plan(gpus, 1, zero={"data": 0, "zero2": 2, "zero3": 3}[system])])
    if system == "heuristic":
        return _made([plan(1, gpus, largest=True)])
    # Of their logical meshes the fastest, by TFLOPS; for GPT the batch was tied to the first axis.
    if family == "gpt":
        dp, tp = {2: (2, 1), 4: (4, 1), 8: (1, 8)}[gpus]
        return _made([plan(dp, tp, zero=2)])
    if family == "moe":
        return _made([plan(1, 1, zero=2, ep=gpus), plan(1, gpus)])
    return _made(_mixed(plan(gpus, 1, zero=2)))


@cache
def _ablation_config(family: str, gpus: int) -> Config:
    at = (1, 2, 4, 8).index(gpus)
    if family == "gpt":
        hidden, size = ((2048, 128), (3072, 128), (4096, 128), (5760, 144))[at]
        heads = hidden // size
        return replace(GPT_PRESETS["1.3B"], layers=8, vocabulary=25600, hidden=hidden, heads=heads)
    if family == "wresnet":
        return WIDE_RESNET_PRESETS[WIDE_OF[gpus]]
    hidden, heads, experts = ((1024, 32, 8), (1280, 40, 16), (1536, 24, 16), (1536, 24, 32))[at]
    shape = {"hidden": hidden, "heads": heads, "experts": experts}
    return replace(MOE_PRESETS["1.3B"], layers=8, vocabulary=51200, group=1024, **shape)


def _cuts(family: str, system: str, gpus: int) -> Plans:
    """Alpa's plan, and equal numbers of blocks in every stage.

    "Equal operator" cuts after equal numbers of operators, inside blocks: where is not recorded.
    """
    if system == "equal_operator":
        return Plans((), False)
    if system == "dp" or (family == "gpt" and gpus > 8):  # Alpa's stages have equal numbers of blocks there
        return plans_of(family, "alpa", gpus)
    if family == "gpt":
        return _made(p for pp in (1, 2, 4, 8) for p in _equal(gpus, pp))
    stages = {
        8: (Stage(8, 4), Stage(8, 1, 4)),
        16: (Stage(8, 2, 4), Stage(8, 1, 8)),
        32: (Stage(4, 8), *[Stage(4, 1, 8)] * 3),
    }[gpus]
    config = WIDE_RESNET_PRESETS[WIDE_OF[gpus]]
    return _made([Plan(config=config, batch=1536, micro=32, stages=stages, zero=2)])


def _equal(gpus: int, pp: int) -> list[Plan]:
    """GPT, as many blocks and as many GPUs in every stage."""
    config, each = GPT_PRESETS[GPT_OF[gpus]], gpus // pp
    inside = [tp for tp in (1, 2, 4, 8) if tp <= each]
    meshes = [even(config, pp, each // tp, tp) for tp in inside]
    zero = [2 if stages[0].dp > 1 else 0 for stages in meshes]
    return [
        Plan(config=config, batch=1024, micro=128, stages=s, zero=z)
        for s, z in zip(meshes, zero, strict=True)
    ]
