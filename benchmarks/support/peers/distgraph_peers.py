"""distgraph's side of the step benchmark: the GPT (training, also in bf16, and generation), the Llama, the
conv net and the narrow MLP on one rank, the MLP data, tensor and pipeline parallel and ZeRO-2 on two.

Each program is a serial model written with `dg.nn`, a few annotations, and `Engine.prepare` and `Engine.run`;
nothing below the public front is touched but the initial values, which come from `benchmarks.support.peers`.

    python -m benchmarks.support.peers.distgraph_peers gpt_serial
    mpiexec -n 2 python -m mpi4py -m benchmarks.support.peers.distgraph_peers mlp_dp2
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import distgraph as dg
from benchmarks.support.peers import (
    BETA1,
    BETA2,
    EPSILON,
    LEARNING_RATE,
    NARROW,
    Array,
    ConvSizes,
    GptSizes,
    MlpSizes,
    Report,
    conv_batch,
    conv_parameters,
    gpt_batch,
    gpt_parameters,
    merge,
    mlp_batch,
    mlp_parameters,
    mlp_sizes,
    program_arguments,
    timed_steps,
)
from benchmarks.support.peers.generation import NEW, prompts
from benchmarks.support.peers.llama import WEIGHT_DECAY, LlamaSizes, llama_batch, llama_parameters
from distgraph import nn, ops
from distgraph.models import Llama, LlamaConfig
from distgraph.optim import Adam, AdamW, shard_states
from distgraph.runtime.launch.mpi_rank import current_transport

PROGRAMS = (
    "gpt_serial", "gpt_bf16", "gpt_generate", "llama_serial", "llama_bf16", "conv_serial", "narrow_serial",
    "mlp_serial", "mlp_dp2", "mlp_tp2", "mlp_pp2", "mlp_zero2",
)  # fmt: skip


class Mlp(nn.Module):
    """Linear layers with ReLU between them, cut in two pipeline stages where meshes are given."""

    def __init__(self, sizes: MlpSizes, stages: tuple[Any, Any] | None = None) -> None:
        self.layers = [nn.Linear(sizes.width, sizes.width) for _ in range(sizes.layers)]
        self.stages = stages

    def forward(self, x: Any) -> Any:
        """[batch, width] to the same."""
        half, last = (len(self.layers) + 1) // 2, len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            if self.stages and number in (0, half):
                x = dg.pipeline_boundary(x, self.stages[number // half])
            x = layer(x)
            if number < last:
                x = ops.relu(x)
        return x


class ConvNet(nn.Module):
    """The conv net of `benchmarks.support.peers`."""

    def __init__(self, sizes: ConvSizes) -> None:
        pairs = zip(sizes.channels, sizes.channels[1:], strict=False)
        self.convs = [nn.Conv2d(*pair, sizes.kernel, padding=sizes.kernel // 2) for pair in pairs]
        self.head = nn.Linear(sizes.features, sizes.classes)

    def forward(self, x: Any) -> Any:
        """[batch, channels, image, image] to [batch, classes]."""
        for conv in self.convs:
            x = ops.max_pool(ops.relu(conv(x)), 2)
        return self.head(x.reshape((x.shape[0], -1)))


class Gpt(nn.Module):
    """The GPT of `benchmarks.support.peers` from the blocks of `dg.nn`; its head has no bias."""

    def __init__(self, sizes: GptSizes) -> None:
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = nn.Parameter((sizes.sequence, sizes.hidden))
        self.blocks = [
            nn.TransformerBlock(sizes.hidden, sizes.heads, activation=gelu) for _ in range(sizes.layers)
        ]
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens: Any) -> Any:
        """[batch, sequence] tokens to [batch, sequence, vocabulary] logits."""
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gelu(x: Any) -> Any:
    """The tanh approximation."""
    return ops.gelu(x, approximate=True)


def adam(**options: Any) -> Adam:
    """The common Adam."""
    return Adam(lr=LEARNING_RATE, beta1=BETA1, beta2=BETA2, eps=EPSILON, **options)


def split_by_columns_and_rows(model: Mlp, mesh: dg.ProcessMesh) -> None:
    """Tensor parallel in pairs of layers (Megatron-LM, section 3)."""
    for number, layer in enumerate(model.layers):
        dg.shard_tensor(layer.weight, mesh, ["tp", None] if number % 2 else [None, "tp"])


def mlp_engine(name: str, sizes: MlpSizes) -> dg.Engine:
    """The engine of one of the MLP programs."""
    strategy, optimizer, model = dg.Strategy(), adam(), Mlp(sizes)
    if name == "mlp_dp2":
        strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp")
    elif name == "mlp_zero2":
        mesh = dg.ProcessMesh.grid(dp=2)
        strategy = dg.Strategy(mesh=mesh, batch_axis="dp", refine="never")  # the textbook algorithm
        optimizer = adam(state_spec=shard_states(mesh, "dp"))
        for _, parameter in model.named_parameters():  # stage 2 keeps them whole
            dg.shard_tensor(parameter, mesh, [None] * parameter.ndim)
    elif name == "mlp_tp2":
        mesh = dg.ProcessMesh.grid(tp=2)
        strategy = dg.Strategy(mesh=mesh)
        split_by_columns_and_rows(model, mesh)
    elif name == "mlp_pp2":
        strategy = dg.Strategy(micro_batches=sizes.microbatches)
        model = Mlp(sizes, (dg.ProcessMesh([0], ["dp"]), dg.ProcessMesh([1], ["dp"])))
    engine = dg.Engine(model, nn.MeanSquaredError(), optimizer, strategy=strategy)
    initial: dict[str, Array] = {}
    for number, (weight, bias) in enumerate(mlp_parameters(sizes)):
        initial |= {f"layers.{number}.weight": weight, f"layers.{number}.bias": bias}
    start_from(engine, initial)
    return engine


def conv_engine(sizes: ConvSizes) -> dg.Engine:
    """The engine of the conv net."""
    engine = dg.Engine(ConvNet(sizes), nn.CrossEntropy(), adam())
    start_from(engine, conv_parameters(sizes))
    return engine


def gpt_engine(sizes: GptSizes, precision: str | None = None) -> dg.Engine:
    """The engine of the GPT."""
    strategy = dg.Strategy(precision=precision)
    engine = dg.Engine(Gpt(sizes), nn.CrossEntropy(), adam(), strategy=strategy)
    initial: dict[str, Array] = {}
    for name, value in gpt_parameters(sizes).items():
        block, _, rest = name.partition(".")
        if not block.isdigit():
            initial[{"tokens": "tokens.weight"}.get(name, name)] = value
        elif rest.startswith("qkv."):
            for letter, part in zip("qkv", np.split(value, 3, axis=-1), strict=True):
                initial[f"blocks.{block}.attn.{letter}.{rest[4:]}"] = part
        else:
            kind, _, which = rest.partition(".")
            place = {"out": "attn.out", "fc1": "mlp.up", "fc2": "mlp.down"}.get(kind, kind)
            initial[f"blocks.{block}.{place}.{which}"] = value
    start_from(engine, initial)
    return engine


def llama_engine(sizes: LlamaSizes, precision: str | None = None) -> dg.Engine:
    """The engine of the Llama, with AdamW."""
    model = Llama(
        LlamaConfig(
            hidden=sizes.hidden,
            inner=sizes.inner,
            layers=sizes.layers,
            heads=sizes.heads,
            key_heads=sizes.key_heads,
            vocabulary=sizes.vocabulary,
            sequence=sizes.sequence,
            rotary=sizes.rotary,
        )
    )
    optimizer = AdamW(lr=LEARNING_RATE, beta1=BETA1, beta2=BETA2, eps=EPSILON, weight_decay=WEIGHT_DECAY)
    engine = dg.Engine(model, model.loss, optimizer, strategy=dg.Strategy(precision=precision))
    start_from(engine, llama_parameters(sizes))
    return engine


def start_from(engine: dg.Engine, initial: Mapping[str, Array]) -> None:
    """Let every parameter start from these values, and the optimiser from its own."""

    def read(name: str, shape: tuple[int, ...], dtype: str, where: tuple[slice, ...]) -> Any:
        if name not in initial:
            return None
        if initial[name].shape != shape:
            raise ValueError(f"{name} is {shape} in the model but {initial[name].shape} in the peers'")
        return np.array(initial[name][where], order="C")

    engine.memory.reader = read


def engine_of(name: str, sizes: MlpSizes) -> tuple[dg.Engine, Any]:
    """The engine of a program, and the batch that it trains on."""
    precision = "bf16" if name.endswith("bf16") else None
    if name.startswith("gpt"):
        return gpt_engine(GptSizes(), precision), gpt_batch(GptSizes())
    if name.startswith("llama"):
        return llama_engine(LlamaSizes(), precision), llama_batch(LlamaSizes())
    if name == "conv_serial":
        return conv_engine(ConvSizes()), conv_batch(ConvSizes())
    if name == "narrow_serial":
        sizes = NARROW
    return mlp_engine(name, sizes), mlp_batch(sizes)


def generation_step(engine: dg.Engine, sizes: GptSizes) -> Callable[[], float]:
    """One call of `Engine.generate`; see `benchmarks.support.peers.generation`."""
    ids = prompts(sizes)

    def step() -> float:
        rows = engine.generate(ids, NEW, length=sizes.sequence)
        return float(np.mean([row[ids.shape[1] :] for row in rows]))

    return step


def _loss(engine: dg.Engine, batch: Any) -> float:
    return engine.run(batch)["loss"]


def run(name: str, sizes: MlpSizes, steps: int, warmup: int) -> Report | None:
    """Run a program; its report on rank 0, None elsewhere. Raises ValueError on a wrong number of ranks."""
    transport = current_transport()
    ranks = 1 if transport is None else transport.size
    needed = 2 if name.endswith("2") else 1
    if ranks != needed:
        raise ValueError(f"{name} needs {needed} MPI ranks but has {ranks}; use mpiexec -n {needed}")
    if name == "gpt_generate":
        engine = gpt_engine(GptSizes())
        step = generation_step(engine, GptSizes())
    else:
        engine, batch = engine_of(name, sizes)
        engine.prepare(batch)
        step = functools.partial(_loss, engine, batch)
    barrier = (lambda: None) if transport is None else transport.barrier
    seconds, losses = timed_steps(step, barrier, steps, warmup)
    engine.close()
    shares = [loss / ranks for loss in losses]  # every rank has the whole loss
    timed = [(seconds, shares)] if transport is None else transport.gather_objects((seconds, shares))
    return None if timed is None else merge(timed)


def main() -> None:
    """Run the programs named on the command line; rank 0 prints their reports."""
    parser = program_arguments(__doc__, PROGRAMS)
    arguments = parser.parse_args()
    for name in arguments.names:
        try:
            report = run(name, mlp_sizes(arguments), arguments.steps, arguments.warmup)
        except ValueError as error:
            parser.error(str(error))
        if report is not None:
            report.print()


if __name__ == "__main__":
    main()
