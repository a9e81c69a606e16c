"""What every program that is timed has in common: sizes, initial numbers, data, the clock and the report.

Programs are started as `python -m benchmarks.support.peers.FILE NAME... --steps N --warmup K`, MPI ones as
`mpiexec -n 2 python -m mpi4py -m benchmarks.support.peers.FILE ...` (so that an error on one rank ends both);
several names run one after the other in the same processes. For each, rank 0 prints one line of JSON:
`{"seconds": [...], "losses": [...], "blas": [...]}`. `seconds` has one entry per timed step: the slowest
rank's, ranks being lined up by a barrier before each step. `losses` has one entry per step from the very
first, warm-up included, so that programs can be compared from the same start. `blas` names the kernels that
the BLAS libraries of the process chose.

The models, the same for everyone:
* MLP: `layers` x (linear with bias, then ReLU, but no ReLU after the last); loss = mean over batch and
  width of (output - target)^2; Adam without weight decay; the same batch at every step.
* narrow MLP: the same with many layers and small products, where calls cost more than products.
* conv net: convolutions with bias that keep the size, each with ReLU and max pooling by 2, then a linear
  layer; mean cross-entropy, Adam.
* GPT: pre-LN blocks, tanh GELU, learned positions, untied head without bias, mean cross-entropy, Adam.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_info

Array = NDArray[np.float32]

LEARNING_RATE = 1e-4
BETA1 = 0.9
BETA2 = 0.999
EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class MlpSizes:
    """Sizes of the MLP; `microbatches` is used by the pipelines only."""

    layers: int = 8
    width: int = 1024
    batch: int = 512
    microbatches: int = 4


NARROW = MlpSizes(layers=24, width=64, batch=32)


@dataclass(frozen=True, slots=True)
class ConvSizes:
    """Sizes of the conv net; images are square, and each layer halves them."""

    channels: tuple[int, ...] = (1, 16, 32)
    kernel: int = 5
    image: int = 28
    batch: int = 64
    classes: int = 10

    @property
    def features(self) -> int:
        """Inputs of the linear layer."""
        return int(self.channels[-1] * (self.image >> (len(self.channels) - 1)) ** 2)


@dataclass(frozen=True, slots=True)
class GptSizes:
    """Sizes of the GPT."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    sequence: int = 128
    batch: int = 16
    vocabulary: int = 4096


@dataclass(frozen=True, slots=True)
class Report:
    """Seconds of each timed step (slowest rank) and the global loss of every step, warm-up included."""

    seconds: list[float]
    losses: list[float]

    def print(self) -> None:
        """Print the report as one line of JSON."""
        report = {"seconds": self.seconds, "losses": self.losses, "blas": blas_kernels()}
        print(json.dumps(report), flush=True)


def blas_kernels() -> list[str]:
    """The BLAS libraries of this process and the kernels that each of them chose, such as
    "openblas 0.3.31 SkylakeX"; those that PyTorch is linked with are not seen."""
    kept = ("internal_api", "version", "architecture")
    libraries = [each for each in threadpool_info() if each["user_api"] == "blas"]
    return sorted({" ".join(str(each[name]) for name in kept if each.get(name)) for each in libraries})


def mlp_parameters(sizes: MlpSizes) -> list[tuple[Array, Array]]:
    """Initial (weight [in, out], bias [out]) of every layer: He-normal weights, small non-zero biases."""
    random = np.random.default_rng(7)
    scale = np.sqrt(2.0 / sizes.width)
    return [
        (
            (scale * random.standard_normal((sizes.width, sizes.width))).astype(np.float32),
            (0.1 * random.standard_normal(sizes.width)).astype(np.float32),
        )
        for _ in range(sizes.layers)
    ]


def mlp_batch(sizes: MlpSizes) -> tuple[Array, Array]:
    """Input and target, both [batch, width] and standard normal."""
    random = np.random.default_rng(11)
    shape = (sizes.batch, sizes.width)
    return random.standard_normal(shape).astype(np.float32), random.standard_normal(shape).astype(np.float32)


def conv_parameters(sizes: ConvSizes) -> dict[str, Array]:
    """Initial parameters of the conv net by name: `convs.i.{weight [out, in, kernel, kernel], bias}` and
    `head.{weight [features, classes], bias}`; He-normal weights, small biases."""
    random = np.random.default_rng(23)

    def normal(scale: float, *shape: int) -> Array:
        return (scale * random.standard_normal(shape)).astype(np.float32)

    parameters: dict[str, Array] = {}
    for layer, (inputs, outputs) in enumerate(zip(sizes.channels, sizes.channels[1:], strict=False)):
        scale = float(np.sqrt(2.0 / (inputs * sizes.kernel**2)))
        parameters[f"convs.{layer}.weight"] = normal(scale, outputs, inputs, sizes.kernel, sizes.kernel)
        parameters[f"convs.{layer}.bias"] = normal(0.1, outputs)
    parameters["head.weight"] = normal(sizes.features**-0.5, sizes.features, sizes.classes)
    return parameters | {"head.bias": normal(0.1, sizes.classes)}


def conv_batch(sizes: ConvSizes) -> tuple[Array, NDArray[np.int64]]:
    """Images [batch, channels, image, image], standard normal, and their classes [batch]."""
    random = np.random.default_rng(29)
    shape = (sizes.batch, sizes.channels[0], sizes.image, sizes.image)
    return random.standard_normal(shape).astype(np.float32), random.integers(sizes.classes, size=sizes.batch)


def gpt_parameters(sizes: GptSizes) -> dict[str, Array]:
    """Initial parameters of the GPT by name: linear weights are [in, out], normal with deviation 0.02.

    Names: `tokens` [vocabulary, hidden], `positions` [sequence, hidden], per block `i`:
    `i.norm1.{weight,bias}`, `i.qkv.{weight,bias}` (columns: all q, all k, all v), `i.out.{weight,bias}`,
    `i.norm2.{weight,bias}`, `i.fc1.{weight,bias}`, `i.fc2.{weight,bias}`, then `norm.{weight,bias}` and
    `head.weight` [hidden, vocabulary].
    """
    random = np.random.default_rng(13)
    hidden = sizes.hidden

    def normal(*shape: int) -> Array:
        return (0.02 * random.standard_normal(shape)).astype(np.float32)

    parameters = {"tokens": normal(sizes.vocabulary, hidden), "positions": normal(sizes.sequence, hidden)}
    linears = {
        "qkv": (hidden, 3 * hidden),
        "out": (hidden, hidden),
        "fc1": (hidden, 4 * hidden),
        "fc2": (4 * hidden, hidden),
    }
    norms = [f"{block}.{name}" for block in range(sizes.layers) for name in ("norm1", "norm2")] + ["norm"]
    for name in norms:
        parameters[f"{name}.weight"] = np.ones(hidden, np.float32)
        parameters[f"{name}.bias"] = np.zeros(hidden, np.float32)
    for block in range(sizes.layers):
        for name, shape in linears.items():
            parameters[f"{block}.{name}.weight"] = normal(*shape)
            parameters[f"{block}.{name}.bias"] = np.zeros(shape[1], np.float32)
    parameters["head.weight"] = normal(hidden, sizes.vocabulary)
    return parameters


def gpt_batch(sizes: GptSizes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens and targets, both int64 [batch, sequence], uniform over the vocabulary."""
    random = np.random.default_rng(17)
    shape = (sizes.batch, sizes.sequence)
    return random.integers(sizes.vocabulary, size=shape), random.integers(sizes.vocabulary, size=shape)


def timed_steps(
    step: Callable[[], float], barrier: Callable[[], object], steps: int, warmup: int
) -> tuple[list[float], list[float]]:
    """Run `warmup + steps` steps.

    Args:
        step: one training step; returns this rank's share of the loss before the update (shares sum to the
        loss). barrier: lines the ranks up; called before each step, outside the time taken. steps: steps
        timed, after `warmup` untimed ones.

    Returns:
        Seconds of each timed step and the loss shares of all steps, both of this rank.
    """
    seconds: list[float] = []
    losses: list[float] = []
    for _ in range(warmup + steps):
        barrier()
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    return seconds[warmup:], losses


def merge(ranks: Sequence[tuple[list[float], list[float]]]) -> Report:
    """Join the ranks' (seconds, loss shares): the slowest rank counts, loss shares add up."""
    seconds = [max(column) for column in zip(*(rank[0] for rank in ranks), strict=True)]
    losses = [sum(column) for column in zip(*(rank[1] for rank in ranks), strict=True)]
    return Report(seconds, losses)


def program_arguments(description: str | None, names: Sequence[str]) -> argparse.ArgumentParser:
    """The command line that all timed programs have: NAME..., --steps, --warmup and the MLP's sizes."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("names", nargs="+", choices=list(names), metavar="NAME", help=", ".join(names))
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    for field, value in (("layers", 8), ("width", 1024), ("batch", 512), ("microbatches", 4)):
        parser.add_argument(f"--{field}", type=int, default=value, help=f"{field} of the MLP")
    return parser


def mlp_sizes(arguments: argparse.Namespace) -> MlpSizes:
    """The MLP's sizes given on the command line."""
    return MlpSizes(arguments.layers, arguments.width, arguments.batch, arguments.microbatches)
