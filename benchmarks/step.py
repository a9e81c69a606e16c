"""Seconds of one training step: distgraph against hand-written mpi4py + NumPy programs and against PyTorch.

    python benchmarks/step.py [--quick] [--only mlp_dp2] [--peers] [--json FILE]

Compared, each on its own processes with one BLAS thread a rank: the GPT and a Llama, each in fp32 and in bf16
(`Strategy(precision="bf16")` and `torch.autocast`), a conv net and an MLP of many narrow layers on one rank
against PyTorch eager, the GPT's generation with a cache against a NumPy loop and PyTorch;
the MLP data, tensor and pipeline parallel on two MPI ranks against the hand-written program of the same
algorithm and against DDP, DTensor tensor parallel and 1F1B over gloo; ZeRO-2 against FSDP2. Models, data
and initial numbers are those of `benchmarks/support/peers/__init__.py` and `llama.py` there, and losses must
agree to 1e-4, in bf16 to 2^-8 (the rounding of one number), or nothing is reported: a faster program that
computes something else is no comparison. `loss_difference` of the figures is the largest difference found.

Programs run in turns (hand-written, ours, PyTorch, hand-written, ...), one at a time. A ratio is the median
over the rounds of (our median step) / (the other's median step) of the same round; below 1 is faster than
the other. `--peers` leaves ours out and compares the hand-written programs with PyTorch. Other load on the
machine is printed: with more than a little of it, ratios mean nothing. Variables of the environment that
hold a library to older instructions than the processor has (`FORCED_KERNELS`) do not reach the programs, and
`blas` of the figures names the kernels that each side's BLAS chose by itself.

The programs of each side are `python -m MODULE NAME... --steps N --warmup K` (`MODULES` below; ours and the
hand-written ones of two ranks under `mpiexec -n 2 python -m mpi4py`); rank 0 prints the reports that
`benchmarks/support/peers/__init__.py` describes. With `--quick` all programs of one side and number of ranks
share one start, so that pairs lie further apart in time; otherwise every program has its own.

Changes tried on the hand-written side, since the comparison is only as good as its best (milliseconds a
step, two Zen 5 cores): ways to exchange gradients, predicted 1.5 times from overlap, found 3 % (121 to 135,
listed at `handwritten.mlp_dp2`), because both cores compute and a transfer is a copy by one of them; Adam in
cached blocks, found 6.8 less; stage 1 sending its input gradient before its last weight gradient, found 0,
taken out.

Changes tried on our side (on a busy machine: single kernels as the least of many calls, whole steps as pairs
of ours and hand-written steps alternating in one pair of processes):
* compiled kernels copy their scratch block by a loop instead of a slice assignment: predicted 5 %, found
gelu 1349 to
  993 us, gelu_grad 1530 to 1150, cross_entropy_grad 1186 to 739, relu_grad in place 1126 to 288 (8 MiB each);
* relu against a row of zeros instead of a scalar: 86 to 27 us for 1 MiB;
* messages leave right behind what they carry, updates follow the order of gradients: predicted 1 % of dp2,
not told
  apart from the load;
* gradients of micro-batches added up by BLAS (beta = 1) in the accumulator: no copy, sum, scaling or extra
buffer;
  kernel 2.37 ms against 2.49 for product and sum, pp2 from 17 MiB of scratch to 1;
* input gradients reduced at once instead of behind the activation's gradient, so that the weight gradient
hides it:
  predicted 1 % of tp2, medians of pairs 1.02 before, 1.05, 0.99 and 1.00 after, so not told apart from the
  load;
* shards of a new parameter gathered where the old one lies: predicted 3 % of zero2, not told apart from the
load;
* all_reduce of two ranks in one exchange of everything instead of two of halves, tp2: found 0, taken out.
* --quick in 5 starts of processes instead of 14 and 4 steps instead of 5: 151 s to 56 s, both with one of the
two cores busy with other work.
* the machine to itself (load 0.8), 3 rounds of --quick: gpt_serial 0.78 of torch; dp2 1.009, tp2 1.008, pp2
1.003, zero2
  1.016 of hand-written; dp2 0.76, tp2 0.65, pp2 0.75, zero2 0.43 of torch. What read 1.17 for dp2 before was
  load.
* scratch memory packed by offset instead of in blocks, 2 rounds, the machine to itself: gpt_serial 0.75 of
  torch (0.89 in the version before, 2 rounds); dp2 1.03, tp2 1.04, pp2 1.06 (0.96 in 5 rounds), zero2 1.14 of
  hand-written; dp2 0.87, tp2 0.70, pp2 0.85 (0.82), zero2 0.50 of torch.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
FORCED_KERNELS = (
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "ATEN_CPU_CAPABILITY",
)
TIME_LIMIT = 300.0  # seconds for one program
LOSS_TOLERANCE = 1e-4  # relative; fp32 sums in another order stay below 1e-5 over the first steps
BF16_LOSS_TOLERANCE = 2.0**-8  # relative; each side rounds other values, both a number by this at most
MODULES = {
    "ours": "benchmarks.support.peers.distgraph_peers",
    "handwritten": "benchmarks.support.peers.handwritten",
    "torch": "benchmarks.support.peers.torch_peers",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One program that several sides run, and the key of each ratio ours / side."""

    name: str
    ranks: int
    keys: dict[str, str]  # side -> key
    tolerance: float = LOSS_TOLERANCE


CASES = (
    Case("gpt_serial", 1, {"torch": "gpt_serial_over_torch"}),
    Case("gpt_bf16", 1, {"torch": "gpt_bf16_over_torch"}, BF16_LOSS_TOLERANCE),
    Case("llama_serial", 1, {"torch": "llama_serial_over_torch"}),
    Case("llama_bf16", 1, {"torch": "llama_bf16_over_torch"}, BF16_LOSS_TOLERANCE),
    Case("gpt_generate", 1, {"handwritten": "generate_over_handwritten", "torch": "generate_over_torch"}),
    Case("conv_serial", 1, {"torch": "conv_serial_over_torch"}),
    Case("narrow_serial", 1, {"torch": "narrow_serial_over_torch"}),
    Case("mlp_dp2", 2, {"handwritten": "mlp_dp2_over_handwritten", "torch": "mlp_dp2_over_torch"}),
    Case("mlp_tp2", 2, {"handwritten": "mlp_tp2_over_handwritten", "torch": "mlp_tp2_over_torch"}),
    Case("mlp_pp2", 2, {"handwritten": "mlp_pp2_over_handwritten", "torch": "mlp_pp2_over_torch"}),
    Case("mlp_zero2", 2, {"handwritten": "mlp_zero2_over_handwritten", "torch": "mlp_zero2_over_torch_fsdp"}),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Median seconds of a step, the losses and the BLAS kernels of one run of one program."""

    seconds: float
    losses: list[float]
    blas: tuple[str, ...] = ()


def command(side: str, cases: Sequence[Case], steps: int, warmup: int) -> list[str]:
    """The command line that runs one side of cases with the same number of ranks."""
    names, ranks = [case.name for case in cases], cases[0].ranks
    program = [MODULES[side], *names, "--steps", str(steps), "--warmup", str(warmup)]
    if side == "torch" or ranks == 1:
        return [sys.executable, "-m", *program]
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise SystemExit("mpiexec is not on the path; install distgraph[mpi] or an MPI")
    # the runner of mpi4py ends all ranks when one raises
    return [mpiexec, "-n", str(ranks), sys.executable, "-m", "mpi4py", "-m", *program]


def measure(side: str, cases: Sequence[Case], steps: int, warmup: int) -> dict[str, Measured]:
    """Run one side of cases in processes of their own, all ended when this returns.

    Returns:
        case name -> what was measured.

    Raises:
        SystemExit: a program failed, took longer than the limit, or printed no report.
    """
    words, limit = command(side, cases, steps, warmup), TIME_LIMIT * len(cases)
    environment = {name: value for name, value in os.environ.items() if name not in FORCED_KERNELS}
    environment |= dict.fromkeys(THREADS, "1")
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        said = said_by(output, errors)
        raise SystemExit(f"{' '.join(words)} took longer than {limit:.0f} s and said\n{said}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in output.splitlines() if line.startswith('{"seconds"')]
    if process.returncode or len(lines) != len(cases):
        ended = f"ended with exit code {process.returncode} and {len(lines)} of {len(cases)} reports"
        raise SystemExit(f"{' '.join(words)} {ended} and said\n{said_by(output, errors)}")
    reports = [json.loads(line) for line in lines]
    return {
        case.name: Measured(statistics.median(report["seconds"]), report["losses"], tuple(report["blas"]))
        for case, report in zip(cases, reports, strict=True)
    }


def said_by(output: str, errors: str) -> str:
    """The end of what a program wrote to both streams, for people."""
    parts = {"stderr": errors, "stdout": output}
    return "\n".join(f"{name}: {text.strip()[-3000:] or '(nothing)'}" for name, text in parts.items())


def check_losses(case: Case, results: dict[str, Measured]) -> float:
    """The largest relative difference of losses. Raises SystemExit unless all sides computed the same run."""
    (first, reference), *others = results.items()
    largest = 0.0
    for side, measured in others:
        for step, (a, b) in enumerate(zip(reference.losses, measured.losses, strict=True)):
            if not abs(a - b) <= case.tolerance * abs(a):
                both = f"{a:.7g} by {first} but {b:.7g} by {side}"
                raise SystemExit(f"{case.name} step {step}: loss is {both}")
            largest = max(largest, abs(a - b) / abs(a) if a else 0.0)
    return largest


def run_rounds(
    cases: Sequence[Case],
    peers: bool,
    rounds: int,
    steps: int,
    warmup: int,
    console: Console,
    differences: dict[str, float] | None = None,
    blas: dict[str, tuple[str, ...]] | None = None,
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each side of cases that start together, one entry a round; the sides take turns.

    ``differences`` receives the largest relative difference of the losses of each case, ``blas`` the kernels
    of each side.
    """
    differences = {} if differences is None else differences
    blas = {} if blas is None else blas
    sides = {case.name: sides_of(case, peers) for case in cases}
    seconds = {name: {side: list[float]() for side in found} for name, found in sides.items()}
    names = ", ".join(sides)
    for number in range(rounds):
        results: dict[str, dict[str, Measured]] = {name: {} for name in sides}
        for side in dict.fromkeys(side for found in sides.values() for side in found):
            console.print(f"[dim]{names} {side}, round {number + 1} of {rounds}", highlight=False)
            run = [case for case in cases if side in sides[case.name]]
            for name, measured in measure(side, run, steps, warmup).items():
                results[name][side] = measured
                seconds[name][side].append(measured.seconds)
                blas[side] = measured.blas
        for case in cases:
            difference = check_losses(case, results[case.name])
            differences[case.name] = max(differences.get(case.name, 0.0), difference)
    return seconds


def sides_of(case: Case, peers: bool) -> list[str]:
    """The sides that run a case, in the order of their turns."""
    wanted = ("handwritten", "ours", "torch")
    return [side for side in wanted if side in case.keys or (side == "ours" and not peers)]


def starts(cases: Sequence[Case], together: bool) -> list[list[Case]]:
    """Cases that share a start: those of one number of ranks, or each its own."""
    if not together:
        return [[case] for case in cases]
    return [[c for c in cases if c.ranks == ranks] for ranks in dict.fromkeys(c.ranks for c in cases)]


def ratio(seconds: dict[str, list[float]], side: str, other: str) -> float:
    """Median over the rounds of side / other."""
    return statistics.median(a / b for a, b in zip(seconds[side], seconds[other], strict=True))


def ratios(case: Case, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Ours over each other side of a case, or hand-written over PyTorch where ours did not run."""
    if "ours" in seconds:
        return {key: ratio(seconds, "ours", side) for side, key in case.keys.items() if side in seconds}
    if "handwritten" in seconds:
        return {f"handwritten_{case.name}_over_torch": ratio(seconds, "handwritten", "torch")}
    return {}


def table_of(seconds: dict[str, dict[str, list[float]]], figures: dict[str, float]) -> Table:
    """Median and least milliseconds of each program, and then the ratios."""
    table = Table("program", "side", "median ms", "least ms", title="one training step")
    for name, sides in seconds.items():
        for side, values in sides.items():
            table.add_row(name, side, f"{1e3 * statistics.median(values):.1f}", f"{1e3 * min(values):.1f}")
    table.add_section()
    for key, value in figures.items():
        table.add_row(key, "", f"{value:.3f}", "")
    return table


def arguments_of(words: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="one round of few steps, under a minute")
    parser.add_argument("--only", choices=[case.name for case in CASES], help="one case")
    parser.add_argument(
        "--peers", action="store_true", help="without distgraph: hand-written against PyTorch"
    )
    parser.add_argument("--rounds", type=int, help="rounds instead of 5 (1 with --quick)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    """Measure, print the table and write the figures."""
    arguments = arguments_of(words)
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    steps, warmup = (3, 1) if arguments.quick else (12, 3)
    console = Console(stderr=True)
    load = os.getloadavg()[0]
    if load > 0.3:
        console.print(
            f"load average is {load:.2f} before starting: other work is running, ratios are doubtful"
        )
    cases = [case for case in CASES if arguments.only in (None, case.name)]
    seconds: dict[str, dict[str, list[float]]] = {}
    differences: dict[str, float] = {}
    blas: dict[str, tuple[str, ...]] = {}
    for group in starts(cases, arguments.quick):
        seconds |= run_rounds(group, arguments.peers, rounds, steps, warmup, console, differences, blas)
    figures: dict[str, float] = {}
    for case in cases:
        figures |= ratios(case, seconds[case.name])
    Console().print(table_of(seconds, figures))
    if arguments.json is not None:
        extra = {"seconds": seconds, "loss_difference": differences, "rounds": rounds, "load_before": load}
        extra["blas"] = blas
        arguments.json.write_text(json.dumps({**figures, **extra}, indent=1) + "\n")


if __name__ == "__main__":
    main()
