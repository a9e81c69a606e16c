"""The MLP in PyTorch on two CPU ranks (gloo, one thread each) and the GPT, the Llama, the conv net and the
narrow MLP on one, in PyTorch's own documented ways.

DDP, tensor parallel by `parallelize_module`, 1F1B by `torch.distributed.pipelining`, FSDP2 by
`fully_shard`; all eager, Adam with its fastest CPU implementation (`fused=True`) where that takes the
parameters, sizes as in `benchmarks.support.peers`.

    python -m benchmarks.support.peers.torch_peers mlp_dp2

starts the second rank itself; the ranks meet at a free port of this machine. Losses may be read off only
between steps.
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.peers import (
    BETA1,
    BETA2,
    EPSILON,
    LEARNING_RATE,
    NARROW,
    ConvSizes,
    GptSizes,
    MlpSizes,
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
from benchmarks.support.peers.generation import torch_generation
from benchmarks.support.peers.llama import LlamaSizes
from benchmarks.support.peers.llama import torch_step as llama_step

Step = Callable[[], float]
END_LIMIT = 30.0  # seconds that rank 1 may take to end after rank 0


def adam(parameters: Iterable[nn.Parameter], fused: bool = True) -> torch.optim.Adam:
    """The common Adam."""
    return torch.optim.Adam(parameters, lr=LEARNING_RATE, betas=(BETA1, BETA2), eps=EPSILON, fused=fused)


def make_mlp(sizes: MlpSizes) -> nn.Sequential:
    """The MLP with the common initial parameters."""
    modules: list[nn.Module] = []
    for weight, bias in mlp_parameters(sizes):
        linear = nn.Linear(sizes.width, sizes.width)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(weight).T)
            linear.bias.copy_(torch.from_numpy(bias))
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def rank_rows(sizes: MlpSizes) -> tuple[Tensor, Tensor]:
    """This rank's half of input and target."""
    rows = sizes.batch // 2
    x, target = (torch.from_numpy(part[dist.get_rank() * rows :][:rows]) for part in mlp_batch(sizes))
    return x, target


def simple_step(
    model: nn.Module, x: Tensor, target: Tensor, optimizer: torch.optim.Optimizer, share: float
) -> Step:
    """Zero, forward, backward, update; the loss reported is `share` of this rank's mean."""

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(model(x), target)
        torch.autograd.backward(loss)
        optimizer.step()
        return share * loss.item()

    return step


def mlp_serial(sizes: MlpSizes) -> Step:
    """One rank."""
    model = make_mlp(sizes)
    x, target = (torch.from_numpy(part) for part in mlp_batch(sizes))
    return simple_step(model, x, target, adam(model.parameters()), 1.0)


def mlp_dp2(sizes: MlpSizes) -> Step:
    """DistributedDataParallel with its default 25 MiB buckets, gradients as views of them."""
    model = DistributedDataParallel(make_mlp(sizes), gradient_as_bucket_view=True)
    return simple_step(model, *rank_rows(sizes), adam(model.parameters()), 0.5)


def mlp_tp2(sizes: MlpSizes) -> Step:
    """DTensor tensor parallel: linears alternately split by columns and by rows."""
    mesh = init_device_mesh("cpu", (2,))
    model = make_mlp(sizes)
    linears = [name for name, module in model.named_children() if isinstance(module, nn.Linear)]
    plan: dict[str, ParallelStyle] = {
        name: RowwiseParallel() if index % 2 else ColwiseParallel() for index, name in enumerate(linears)
    }
    parallelize_module(model, mesh, plan)
    x, target = (torch.from_numpy(part) for part in mlp_batch(sizes))
    return simple_step(model, x, target, adam(model.parameters()), 0.5)


def mlp_zero2(sizes: MlpSizes) -> Step:
    """FSDP2: every linear and the whole fully sharded."""
    mesh = init_device_mesh("cpu", (2,))
    model = make_mlp(sizes)
    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return simple_step(model, *rank_rows(sizes), adam(model.parameters()), 0.5)


def mlp_pp2(sizes: MlpSizes) -> Step:
    """Two stages of half of the layers, Schedule1F1B."""
    rank = dist.get_rank()
    middle = 2 * ((sizes.layers + 1) // 2)  # each layer is a linear and a ReLU
    model = make_mlp(sizes)
    part = model[middle:] if rank else model[:middle]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, sizes.microbatches, loss_fn=F.mse_loss)
    optimizer = adam(part.parameters())
    x, target = (torch.from_numpy(part) for part in mlp_batch(sizes))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        if rank:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step(x)
        optimizer.step()
        return sum(loss.item() for loss in losses) / sizes.microbatches

    return step


class Block(nn.Module):
    """A pre-LN transformer block."""

    def __init__(self, sizes: GptSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.norm1 = nn.LayerNorm(sizes.hidden)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.out = nn.Linear(sizes.hidden, sizes.hidden)
        self.norm2 = nn.LayerNorm(sizes.hidden)
        self.fc1 = nn.Linear(sizes.hidden, 4 * sizes.hidden)
        self.fc2 = nn.Linear(4 * sizes.hidden, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, hidden))
        projected: Tensor = self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))
        return x + projected


class Gpt(nn.Module):
    """The GPT of `benchmarks.support.peers` with its initial parameters."""

    def __init__(self, sizes: GptSizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = nn.Parameter(torch.empty(sizes.sequence, sizes.hidden))
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        initial = gpt_parameters(sizes)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                key = name.removeprefix("blocks.").replace("tokens.weight", "tokens")
                value = torch.from_numpy(initial.pop(key))
                is_linear = value.ndim == 2 and key not in ("tokens", "positions")
                parameter.copy_(value.T if is_linear else value)
        if initial:
            raise ValueError(f"parameters {sorted(initial)} have no place in the model")

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, sequence] tokens to [batch, sequence, vocabulary] logits."""
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def gpt_serial(sizes: GptSizes, *, bf16: bool = False) -> Step:
    """The GPT, eager, one thread; in bf16 under `torch.autocast`."""
    tokens, targets = (torch.from_numpy(part) for part in gpt_batch(sizes))
    return classifier_step(Gpt(sizes), tokens, targets, bf16=bf16)


class ConvNet(nn.Module):
    """The conv net of `benchmarks.support.peers` with its initial parameters."""

    def __init__(self, sizes: ConvSizes) -> None:
        super().__init__()
        pairs = zip(sizes.channels, sizes.channels[1:], strict=False)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, sizes.kernel, padding=sizes.kernel // 2) for a, b in pairs)
        self.head = nn.Linear(sizes.features, sizes.classes)
        initial = conv_parameters(sizes)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                value = torch.from_numpy(initial[name])
                parameter.copy_(value.T if name == "head.weight" else value)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, image, image] to [batch, classes]."""
        for conv in self.convs:
            x = F.max_pool2d(F.relu(conv(x)), 2)
        logits: Tensor = self.head(x.flatten(1))
        return logits


def classifier_step(model: nn.Module, x: Tensor, classes: Tensor, *, bf16: bool = False) -> Step:
    """Zero, forward, mean cross-entropy over the last dim, backward, update."""
    optimizer = adam(model.parameters())

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(model(x).flatten(0, -2), classes.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.item()

    return step


def conv_serial(sizes: ConvSizes) -> Step:
    """The conv net, eager, one thread."""
    x, classes = (torch.from_numpy(part) for part in conv_batch(sizes))
    return classifier_step(ConvNet(sizes), x, classes)


MLP_PROGRAMS: dict[str, Callable[[MlpSizes], Step]] = {
    "mlp_dp2": mlp_dp2,
    "mlp_tp2": mlp_tp2,
    "mlp_pp2": mlp_pp2,
    "mlp_zero2": mlp_zero2,
}


SERIAL_PROGRAMS: dict[str, Callable[[MlpSizes], Step]] = {
    "gpt_serial": lambda sizes: gpt_serial(GptSizes()),
    "gpt_bf16": lambda sizes: gpt_serial(GptSizes(), bf16=True),
    "gpt_generate": lambda sizes: torch_generation(GptSizes()),
    "llama_serial": lambda sizes: llama_step(LlamaSizes()),
    "llama_bf16": lambda sizes: llama_step(LlamaSizes(), bf16=True),
    "conv_serial": lambda sizes: conv_serial(ConvSizes()),
    "narrow_serial": lambda sizes: mlp_serial(NARROW),
    "mlp_serial": mlp_serial,
}


def run_serial(name: str, arguments: argparse.Namespace) -> None:
    """Run a program of one rank."""
    step = SERIAL_PROGRAMS[name](mlp_sizes(arguments))
    merge([timed_steps(step, lambda: None, arguments.steps, arguments.warmup)]).print()


def run_rank(arguments: argparse.Namespace, store: TCPStore, rank: int) -> None:
    """Run one rank of programs of two; rank 0 prints the reports."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for name in arguments.names:
        step = MLP_PROGRAMS[name](mlp_sizes(arguments))
        timed = timed_steps(step, dist.barrier, arguments.steps, arguments.warmup)
        ranks: list[tuple[list[float], list[float]] | None] = [None, None]
        dist.all_gather_object(ranks, timed)
        if rank == 0:
            merge([one for one in ranks if one is not None]).print()
    dist.barrier()


def end(code: int) -> NoReturn:
    """End this process at once: PyTorch's own end (process group, store, threads) hangs once in 20 runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def make_store(port: int, master: bool) -> TCPStore:
    """The ranks' meeting point; the master listens on a free port if `port` is 0."""
    return TCPStore("127.0.0.1", port, 2, is_master=master, wait_for_workers=False)


def run_child(arguments: argparse.Namespace, port: Connection) -> None:
    """Rank 1: join the store of rank 0 when its port is known."""
    run_rank(arguments, make_store(port.recv(), master=False), 1)
    end(0)


def run_pair(arguments: argparse.Namespace) -> int:
    """Run rank 0 here and rank 1 in a child, which never outlives this call; says why where it fails."""
    # forked before any thread exists: saves the seconds of a second import of torch
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=run_child, args=(arguments, receiver), daemon=True)
    child.start()
    try:
        store = make_store(0, master=True)
        sender.send(store.port)
        run_rank(arguments, store, 0)
        child.join(timeout=END_LIMIT)
        if child.exitcode:
            print(f"rank 1 ended with exit code {child.exitcode}; rank 0 is done", file=sys.stderr)
        elif child.exitcode is None:
            print(f"rank 1 did not end within {END_LIMIT:.0f} s of rank 0", file=sys.stderr)
        return 0 if child.exitcode == 0 else 1
    finally:
        child.kill()
        child.join()


def main() -> int:
    """Run the programs named on the command line."""
    torch.set_num_threads(1)
    parser = program_arguments(__doc__, [*SERIAL_PROGRAMS, *MLP_PROGRAMS])
    arguments = parser.parse_args()
    alone = [name for name in arguments.names if name not in MLP_PROGRAMS]
    if alone and len(alone) < len(arguments.names):
        parser.error(f"{', '.join(alone)} run on one rank, the others on two; start them apart")
    for name in alone:
        run_serial(name, arguments)
    return 0 if alone else run_pair(arguments)


if __name__ == "__main__":
    end(main())
