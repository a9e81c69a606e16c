"""The MLP trained by hand-written mpi4py + NumPy programs, as an expert would write them for two ranks.

Common to all: preallocated buffers and `out=`; ReLU masks kept from forward; a layer's weight and bias in one
flat array, so one message and one Adam call a layer; Adam in blocks that stay in the cache, with the bias
corrections folded into the learning rate; messages posted as soon as their data exists and completed as late
as possible.

    mpiexec -n 2 python -m mpi4py -m benchmarks.support.peers.handwritten mlp_dp2
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from benchmarks.support.peers import (
    Array,
    GptSizes,
    MlpSizes,
    Report,
    merge,
    mlp_batch,
    mlp_parameters,
    mlp_sizes,
    program_arguments,
    timed_steps,
)
from benchmarks.support.peers.generation import numpy_generation
from benchmarks.support.peers.mlp_parts import (
    Activations,
    Adam,
    Backward,
    Layer,
    Moments,
    add_relu,
    empty_layer,
    loss_gradient,
    make_layer,
    make_moments,
    weight_gradient,
)

Step = Callable[[], float]


def mlp_serial(comm: MPI.Comm, sizes: MlpSizes) -> Step:
    """The serial program, on one rank: what the others must equal."""
    layers = [make_layer(*parameters) for parameters in mlp_parameters(sizes)]
    moments = [make_moments(layer.flat.size) for layer in layers]
    gradients = [empty_layer(sizes.width, sizes.width) for _ in layers]
    x, target = mlp_batch(sizes)
    activations = Activations(sizes.batch, [sizes.width] * sizes.layers, last=True)
    backward = Backward(layers, x.shape[0])
    adam = Adam()

    def step() -> float:
        adam.next_step()
        share = loss_gradient(activations.forward(layers, x), target, sizes, out=backward.dz)
        backward(activations, x, gradients)
        for index in reversed(range(sizes.layers)):
            adam(layers[index].flat, moments[index], gradients[index].flat)
        return share

    return step


def mlp_dp2(comm: MPI.Comm, sizes: MlpSizes) -> Step:
    """Data parallel: each rank half of the batch, gradients exchanged layer by layer during backward.

    The all_reduce of two ranks is an exchange, and its sum is taken inside Adam's blocks. Exchanges are
    completed after the whole backward, so that the ranks need not keep step. Ways tried, least and median
    milliseconds of 15 steps interleaved in one run (two idle Zen 5 cores, MPICH 5.0.2):

        no exchange at all (wrong, the bound)                                  121.4  125.6
        both ranks' gradients in one shared-memory window, read by Adam        121.6  125.8
        Isend and Irecv during backward, completed after it (this)             123.0  128.6
        Allreduce in place, layer by layer, after backward                     124.4  127.2
        Iallreduce during backward, completed one layer later                  123.8  129.9
            and tested between half products                                   127.5  132.1
        Isend and Irecv, completed one layer later, in one or in four parts    125.5  130.8
        a thread that does the Allreduce                                       126.1  130.4
        Allreduce inside the backward loop                                     127.2  130.7
        two buckets of 16 MB after backward                                    125.6  131.5
        one bucket of 32 MB after backward (out of the cache)                  135.0  139.8

    The window is left out because it works within one machine only, unlike everything it is compared with.
    """
    other = 1 - comm.rank
    rows = sizes.batch // 2
    layers = [make_layer(*parameters) for parameters in mlp_parameters(sizes)]
    moments = [make_moments(layer.flat.size) for layer in layers]
    mine = [empty_layer(sizes.width, sizes.width) for _ in layers]
    theirs = [np.empty_like(layer.flat) for layer in layers]
    x, target = (np.ascontiguousarray(part[comm.rank * rows :][:rows]) for part in mlp_batch(sizes))
    activations = Activations(rows, [sizes.width] * sizes.layers, last=True)
    backward = Backward(layers, x.shape[0])
    adam = Adam()
    requests: list[list[MPI.Request]] = [[] for _ in layers]

    def exchange(index: int) -> None:
        requests[index] = [
            comm.Irecv(theirs[index], other, index),
            comm.Isend(mine[index].flat, other, index),
        ]

    def step() -> float:
        adam.next_step()
        share = loss_gradient(activations.forward(layers, x), target, sizes, out=backward.dz)
        backward(activations, x, mine, ready=exchange)
        for index in reversed(range(sizes.layers)):
            MPI.Request.Waitall(requests[index])
            adam(layers[index].flat, moments[index], mine[index].flat, theirs[index])
        return share

    return step


def mlp_zero2(comm: MPI.Comm, sizes: MlpSizes) -> Step:
    """ZeRO stage 2: as data parallel, but each rank owns half of every layer's flat array and of its moments.

    Each rank sends the half of its gradient that it does not own, updates the half that it owns and sends
    that back.
    """
    other = 1 - comm.rank
    rows = sizes.batch // 2
    layers = [make_layer(*parameters) for parameters in mlp_parameters(sizes)]
    size = layers[0].flat.size
    halves = [slice(0, (size + 1) // 2), slice((size + 1) // 2, size)]
    own, away = halves[comm.rank], halves[other]
    moments = [make_moments(own.stop - own.start) for _ in layers]
    mine = [empty_layer(sizes.width, sizes.width) for _ in layers]
    theirs = [np.empty_like(layer.flat[own]) for layer in layers]
    x, target = (np.ascontiguousarray(part[comm.rank * rows :][:rows]) for part in mlp_batch(sizes))
    activations = Activations(rows, [sizes.width] * sizes.layers, last=True)
    backward = Backward(layers, x.shape[0])
    adam = Adam()
    scattered: list[list[MPI.Request]] = [[] for _ in layers]
    gathered: list[MPI.Request] = []

    def scatter(index: int) -> None:
        scattered[index] = [
            comm.Irecv(theirs[index], other, index),
            comm.Isend(mine[index].flat[away], other, index),
        ]

    def update(index: int) -> None:
        MPI.Request.Waitall(scattered[index])
        flat, tag = layers[index].flat, sizes.layers + index
        gathered.append(comm.Irecv(flat[away], other, tag))
        adam(flat[own], moments[index], mine[index].flat[own], theirs[index])
        gathered.append(comm.Isend(flat[own], other, tag))

    def step() -> float:
        adam.next_step()
        share = loss_gradient(activations.forward(layers, x), target, sizes, out=backward.dz)
        backward(activations, x, mine, ready=scatter)
        for index in reversed(range(sizes.layers)):
            update(index)
        MPI.Request.Waitall(gathered)
        gathered.clear()
        return share

    return step


@dataclass(frozen=True, slots=True)
class Pair:
    """A column-parallel layer and the row-parallel one after it (Megatron-LM, section 3), this rank's part.

    `hidden` [batch, width / 2] is the output between the two, `output` [batch, width] the all-reduced one.
    """

    column: Layer
    row: Layer
    moments: tuple[Moments, Moments]
    hidden: Array
    hidden_mask: NDArray[np.bool_]
    output: Array
    output_mask: NDArray[np.bool_]


def make_pairs(rank: int, sizes: MlpSizes) -> list[Pair]:
    """This rank's half of every pair, with the initial parameters."""
    parameters = mlp_parameters(sizes)
    middle = (sizes.width + 1) // 2
    part = slice(0, middle) if rank == 0 else slice(middle, sizes.width)
    pairs = []
    for (weight1, bias1), (weight2, bias2) in zip(parameters[::2], parameters[1::2], strict=True):
        column, row = make_layer(weight1[:, part], bias1[part]), make_layer(weight2[part], bias2)
        hidden: Array = np.empty((sizes.batch, part.stop - part.start), np.float32)
        output: Array = np.empty((sizes.batch, sizes.width), np.float32)
        moments = (make_moments(column.flat.size), make_moments(row.flat.size))
        masks = (np.empty(hidden.shape, np.bool_), np.empty(output.shape, np.bool_))
        pairs.append(Pair(column, row, moments, hidden, masks[0], output, masks[1]))
    return pairs


class Exchange:
    """The all_reduce of [batch, width] over two ranks, by halves of the rows: compute goes on between."""

    def __init__(self, comm: MPI.Comm, rows: int, width: int) -> None:
        self.comm = comm
        self.chunks = [slice(0, rows // 2), slice(rows // 2, rows)]
        self.mine: Array = np.empty((rows, width), np.float32)
        self.theirs: Array = np.empty((rows, width), np.float32)
        self.requests: list[list[MPI.Request]] = [[], []]

    def post(self, chunk: int) -> None:
        """Start to exchange a chunk of `mine`."""
        rows, other = self.chunks[chunk], 1 - self.comm.rank
        receive = self.comm.Irecv(self.theirs[rows], other, chunk)
        self.requests[chunk] = [receive, self.comm.Isend(self.mine[rows], other, chunk)]

    def finish(self, chunk: int, out: Array) -> None:
        """Complete a chunk and write its sum into the same rows of `out`."""
        rows = self.chunks[chunk]
        MPI.Request.Waitall(self.requests[chunk])
        np.add(self.mine[rows], self.theirs[rows], out=out[rows])


def forward_pairs(pairs: list[Pair], x: Array, exchange: Exchange) -> Array:
    """Forward through all pairs: while a chunk's sum travels, the other chunk is computed."""
    zeros = np.zeros(x.shape[1], np.float32)
    for number, pair in enumerate(pairs):
        for chunk, rows in enumerate(exchange.chunks):
            if number:
                finish_output(pairs[number - 1], exchange, chunk, zeros)
            np.matmul(x[rows], pair.column.weight, out=pair.hidden[rows])
            add_relu(
                pair.hidden[rows], pair.column.bias, zeros[: pair.column.bias.size], pair.hidden_mask[rows]
            )
            np.matmul(pair.hidden[rows], pair.row.weight, out=exchange.mine[rows])
            exchange.post(chunk)
        x = pair.output
    for chunk, rows in enumerate(exchange.chunks):
        exchange.finish(chunk, x)
        np.add(x[rows], pairs[-1].row.bias, out=x[rows])
    return x


def finish_output(pair: Pair, exchange: Exchange, chunk: int, zeros: Array) -> None:
    """Complete the sum of a pair's output chunk and apply bias and ReLU."""
    rows = exchange.chunks[chunk]
    exchange.finish(chunk, pair.output)
    add_relu(pair.output[rows], pair.row.bias, zeros, pair.output_mask[rows])


def mlp_tp2(comm: MPI.Comm, sizes: MlpSizes) -> Step:
    """Tensor parallel: every two layers split by columns, then by rows; one all_reduce a pair each way.

    Backward posts the all_reduce of a pair's input gradient before its weight gradients and Adam, which hide
    it.
    """
    x, target = mlp_batch(sizes)
    pairs = make_pairs(comm.rank, sizes)
    exchange = Exchange(comm, sizes.batch, sizes.width)
    dz, dhidden = np.empty_like(x), np.empty_like(pairs[0].hidden)
    column_gradient = empty_layer(*pairs[0].column.weight.shape)
    row_gradient = empty_layer(*pairs[0].row.weight.shape)
    ones = np.ones(sizes.batch, np.float32)
    adam = Adam()

    def backward(number: int) -> None:
        pair = pairs[number]
        np.matmul(dz, pair.row.weight.T, out=dhidden)
        np.multiply(dhidden, pair.hidden_mask, out=dhidden)
        if number:
            for chunk, rows in enumerate(exchange.chunks):
                np.matmul(dhidden[rows], pair.column.weight.T, out=exchange.mine[rows])
                exchange.post(chunk)
        weight_gradient(pair.hidden, dz, ones, row_gradient)
        adam(pair.row.flat, pair.moments[1], row_gradient.flat)
        weight_gradient(pairs[number - 1].output if number else x, dhidden, ones, column_gradient)
        adam(pair.column.flat, pair.moments[0], column_gradient.flat)
        if number:
            exchange.finish(0, dz)
            exchange.finish(1, dz)
            np.multiply(dz, pairs[number - 1].output_mask, out=dz)

    def step() -> float:
        adam.next_step()
        share = loss_gradient(forward_pairs(pairs, x, exchange), target, sizes, out=dz)
        for number in reversed(range(len(pairs))):
            backward(number)
        return share / 2  # both ranks have the whole loss

    return step


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """The 1F1B order of one stage, e.g. stage 0 of 2: F0 F1 B0 F2 B1 F3 B2 B3."""
    ahead = min(stages - stage, microbatches)
    order = [("F", microbatch) for microbatch in range(ahead)]
    for microbatch in range(microbatches):
        order.append(("B", microbatch))
        if microbatch + ahead < microbatches:
            order.append(("F", microbatch + ahead))
    return order


def mlp_pp2(comm: MPI.Comm, sizes: MlpSizes) -> Step:
    """Pipeline of two stages with half of the layers each, 1F1B; all receives are posted at the start."""
    rank, other, count = comm.rank, 1 - comm.rank, sizes.microbatches
    rows, half = sizes.batch // count, (sizes.layers + 1) // 2
    layers = [make_layer(*parameters) for parameters in mlp_parameters(sizes)]
    layers = layers[half:] if rank else layers[:half]
    moments = [make_moments(layer.flat.size) for layer in layers]
    gradients = [empty_layer(sizes.width, sizes.width) for _ in layers]
    data = [part.reshape(count, rows, sizes.width) for part in mlp_batch(sizes)]
    slots = [Activations(rows, [sizes.width] * len(layers), last=rank == 1) for _ in range(2 - rank)]
    received = np.empty_like(data[0])  # activations on stage 1, gradients on stage 0
    sent = np.empty_like(data[0])  # input gradients of stage 1
    backward = Backward(layers, rows)
    adam = Adam()
    order = one_forward_one_backward(rank, 2, count)

    def forward(microbatch: int, arrived: list[MPI.Request], sends: list[MPI.Request]) -> None:
        slot = slots[microbatch % len(slots)]
        if rank == 0:
            output = slot.forward(layers, data[0][microbatch])
            sends.append(comm.Isend(output, other, microbatch))
        else:
            arrived[microbatch].Wait()
            slot.forward(layers, received[microbatch])

    def go_back(microbatch: int, arrived: list[MPI.Request], sends: list[MPI.Request]) -> float:
        slot = slots[microbatch % len(slots)]
        again = microbatch > 0
        if rank == 0:
            arrived[microbatch].Wait()
            np.multiply(received[microbatch], slot.masks[-1], out=backward.dz)
            backward(slot, data[0][microbatch], gradients, accumulate=again)
            return 0.0
        x, into = received[microbatch], sent[microbatch]
        share = loss_gradient(slot.outputs[-1], data[1][microbatch], sizes, out=backward.dz)
        backward(slot, x, gradients, accumulate=again, input_gradient=into)
        sends.append(comm.Isend(into, other, microbatch))
        return share

    def step() -> float:
        adam.next_step()
        arrived = [comm.Irecv(received[microbatch], other, microbatch) for microbatch in range(count)]
        sends: list[MPI.Request] = []
        share = 0.0
        for kind, microbatch in order:
            if kind == "F":
                forward(microbatch, arrived, sends)
            else:
                share += go_back(microbatch, arrived, sends)
        for layer, moment, gradient in zip(layers, moments, gradients, strict=True):
            adam(layer.flat, moment, gradient.flat)
        MPI.Request.Waitall(sends)
        return share

    return step


PROGRAMS: dict[str, tuple[int, Callable[[MPI.Comm, MlpSizes], Step]]] = {
    "gpt_generate": (1, lambda comm, sizes: numpy_generation(GptSizes())),
    "mlp_serial": (1, mlp_serial),
    "mlp_dp2": (2, mlp_dp2),
    "mlp_tp2": (2, mlp_tp2),
    "mlp_pp2": (2, mlp_pp2),
    "mlp_zero2": (2, mlp_zero2),
}


def check_sizes(name: str, sizes: MlpSizes) -> str | None:
    """What keeps the program from running these sizes, or None."""
    if name in ("mlp_dp2", "mlp_zero2") and sizes.batch % 2:
        return f"{name} needs an even batch but got {sizes.batch}"
    if name == "mlp_tp2" and sizes.layers % 2:
        return f"{name} needs an even number of layers but got {sizes.layers}"
    if name == "mlp_pp2" and (sizes.batch % sizes.microbatches or sizes.layers < 2):
        return (
            f"{name} needs two layers and a batch divisible by the micro-batches but got "
            f"{sizes.layers} layers, batch {sizes.batch} and {sizes.microbatches} micro-batches"
        )
    return None


def run(comm: MPI.Comm, name: str, sizes: MlpSizes, steps: int, warmup: int) -> Report | None:
    """Run a program on the ranks of `comm`; returns the report on rank 0, None elsewhere.

    Raises:
        ValueError: the program needs another number of ranks, or cannot divide the sizes.
    """
    needed = PROGRAMS[name][0]
    if comm.size != needed:
        raise ValueError(f"{name} needs {needed} MPI ranks but has {comm.size}; use mpiexec -n {needed}")
    problem = check_sizes(name, sizes)
    if problem is not None:
        raise ValueError(problem)
    step = PROGRAMS[name][1](comm, sizes)
    ranks = comm.gather(timed_steps(step, comm.Barrier, steps, warmup))
    return merge(ranks) if ranks is not None else None


def main() -> None:
    """Run the programs named on the command line."""
    parser = program_arguments(__doc__, list(PROGRAMS))
    arguments = parser.parse_args()
    sizes = mlp_sizes(arguments)
    for name in arguments.names:
        try:
            report = run(MPI.COMM_WORLD, name, sizes, arguments.steps, arguments.warmup)
        except ValueError as error:
            parser.error(str(error))
        if report is not None:
            report.print()


if __name__ == "__main__":
    main()
