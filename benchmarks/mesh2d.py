"""Two-dimensional tensor parallelism on simulated TPU v4 tori: MeshSlice, its rivals and the tuner.

    python -m benchmarks.mesh2d [--json FILE] [--quick] [--measured FILE ...]

The four fully connected layers of a block of GPT-3 175B (d = 12288) and Megatron-Turing NLG 530B (d = 20480),
sequence 2048, forward and backward, on 16, 64 and 256 chips of `tpu_v4_16x16.yaml` (a torus of the shape of
the mesh): weak scaling with half as many sequences as chips, strong scaling with 32. Every algorithm runs on
the mesh, with the dataflows and slices, that the tuner finds best for it.

Two figures for each: `model`, the least seconds of the tuner's closed form (MeshSlice, section 3.2.2), and
`simulated`, the forecast of the compiled program under the simulated clock. Tensor parallelism and FSDP are
programs of all layers in their best layout (`mesh2d/one_axis_programs.py`). A program by MeshSlice has the
fewest slices within 2 % of the least seconds, as in mode mesh2d; `program_model` is the closed form of these.
With --quick weak scaling alone.

The steps of real ranks (`measured`) come from `benchmarks.support.mesh2d.mesh2d_networks`: from the files of
former runs that --measured names, or else from a run of all networks, for half an hour. There are none
without root, and with --quick only those of files.

Keys of the result: see `benchmarks/HISTORY.md` for what they were. Gains are in percent.

    meshslice_over_wang_256       by the model; `meshslice_over_wang_256_simulated` of the programs
    end_to_end_256                seconds of a training step of a whole block, and gains, see `end_to_end`
    mean16_over_collective/_wang  mean over the 16 sizes of products of both models on 256 chips, by the model
    efficiency_loss               points of utilisation, 16 to 256 chips; `_simulated` of the programs
    dataflow_gain                 against OS for all layers; `_simulated`; `_over`: OS, LS, RS (weights stay)
    over_collective_4x4           on 4 x 4 chips, by the model; `_simulated` of the programs
    one_axis_over_meshslice       by how much MeshSlice is faster than FSDP and tensor parallelism, programs
    mesh_shapes_256               seconds by the model on every shape of the mesh, over the least
    slices_32x8                   seconds by model and program for numbers of slices, GPT-3 on 32 x 8 chips
    order_holds                   MeshSlice < Wang < Collective in all cases; `order_holds_simulated`
    tuner_seconds                 of the processor, four layers on 256 chips
    assumptions                   the figures of the paper under others (`mesh2d_assumptions.py`)
    explained                     share (percent) of each difference above 5 points that one explains
    combinations                  the figures under all (`mesh2d_combinations.py`), not with --quick
    rows                          all cases, communication by cause: launch, sync and transfer
    measured                      of `benchmarks.support.mesh2d.mesh2d_networks`

Nothing is fitted to the paper's results.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.support.machines import missing
from benchmarks.support.mesh2d import mesh2d_assumptions as assumptions
from benchmarks.support.mesh2d import mesh2d_combinations, mesh2d_networks
from benchmarks.support.mesh2d.mesh2d_assumptions import BLOCK, WIDTHS, layers_of, mean_gain
from benchmarks.support.mesh2d.mesh2d_programs import block_seconds, simulated
from benchmarks.support.mesh2d.one_axis_programs import one_axis
from benchmarks.support.mesh2d.torus_prices import TPU_V4
from distgraph.errors import DistGraphError
from distgraph.passes.matmul_algorithms.layer_products import DATAFLOWS, Mesh, divisors, legal_slices
from distgraph.passes.matmul_algorithms.product_seconds import ALGORITHMS, ONE_AXIS, product_seconds
from distgraph.passes.matmul_algorithms.tuner import LayerTuning, ProductTuning, Tuning, tune

CHIPS = (16, 64, 256)
FLOPS = 266e12
TOLERANCE = 0.02  # as in mode mesh2d: the fewest slices within 2 % of the least seconds


@cache
def best(
    model: str, chips: int, sequences: int, algorithm: str = "meshslice", mesh: Mesh | None = None,
    forward: str | None = None, tolerance: float = 0.0,
) -> Tuning | None:  # fmt: skip
    """The tuner's answer; None where an algorithm fits no mesh."""
    layers, meshes = layers_of(WIDTHS[model], sequences), None if mesh is None else [mesh]
    try:
        return tune(
            layers, chips, TPU_V4, FLOPS, block=BLOCK, algorithm=algorithm, forward=forward, meshes=meshes,
            tolerance=tolerance,
        )  # fmt: skip
    except DistGraphError as error:
        print(f"  {algorithm}: {error}")
        return None


def seconds(*given: Any, **options: Any) -> float:
    """Of `best`, which there has to be."""
    tuning = best(*given, **options)
    assert tuning is not None
    return tuning.seconds


def total(parts: Iterable[float | None]) -> float | None:
    """The sum; None where a part is missing."""
    known = list(parts)
    return None if None in known else sum(part for part in known if part is not None)


def case(model: str, chips: int, sequences: int, scaling: str) -> list[dict[str, Any]]:
    """One row for every algorithm."""
    rows = []
    for algorithm in ALGORITHMS:
        tuning = best(model, chips, sequences, algorithm)
        if tuning is None:
            continue
        program = best(model, chips, sequences, algorithm, tuning.mesh, tolerance=TOLERANCE)
        assert program is not None
        timed, first = total(simulated(each, program.mesh, algorithm) for each in program.layers), None
        if algorithm in ONE_AXIS:
            fastest = one_axis(algorithm, tuple(layers_of(WIDTHS[model], sequences)), chips)
            timed, first = fastest.seconds, fastest.first
        parts = [each.seconds.communication for layer in tuning.layers for each in layer.products]
        compute = tuning.seconds * tuning.compute_share
        row = {
            "model_name": model, "chips": chips, "scaling": scaling, "algorithm": algorithm,
            "mesh": list(tuning.mesh), "model": tuning.seconds, "program_model": program.seconds,
            "simulated": timed, "compute": compute, "utilisation": tuning.compute_share,
            "simulated_utilisation": None if timed is None else compute / timed,
            "slices": [[product.slices for product in each.products] for each in tuning.layers],
            "first_layer": first,
            "communication": {cause: sum(getattr(part, cause) for part in parts)
                              for cause in ("launch", "sync", "transfer")},
        }  # fmt: skip
        rows.append(row)
        shown = "-" if timed is None else f"{timed * 1e3:9.2f}"
        causes = " ".join(f"{share / compute:7.3f}" for share in row["communication"].values())
        print(
            f"{model:9s} {scaling:6s} {chips:4d} {algorithm:16s} {tuning.mesh[0]:3d}x{tuning.mesh[1]:<3d} "
            f"{tuning.seconds * 1e3:9.2f} {shown:>9s} {100 * tuning.compute_share:6.1f} %   {causes}",
            flush=True,
        )
    return rows


def clock(
    model: str, chips: int, sequences: int, algorithm: str = "meshslice", mesh: Mesh | None = None,
    forward: str | None = None,
) -> float | None:  # fmt: skip
    """Seconds of the programs of the layers on the mesh of `best`; None where one has no program."""
    fastest = best(model, chips, sequences, algorithm, mesh, forward)
    assert fastest is not None
    tuning = best(model, chips, sequences, algorithm, fastest.mesh, forward, TOLERANCE)
    assert tuning is not None
    return total(simulated(each, tuning.mesh, algorithm) for each in tuning.layers)


def gain_in_percent(slow: float | None, fast: float | None) -> float | None:
    """By how much the second is faster; None where one is missing."""
    return None if slow is None or fast is None else 100 * (slow / fast - 1)


def mean_over(other: str) -> float:
    """Mean gain of MeshSlice over another algorithm, sizes of products of both models on 256 chips."""
    means = []
    for model in WIDTHS:
        ours, theirs = best(model, 256, 128), best(model, 256, 128, other)
        assert ours is not None
        assert theirs is not None
        pairs = [
            (a.product, b.seconds.total / a.seconds.total - 1)
            for mine, yours in zip(ours.layers, theirs.layers, strict=True)
            for a, b in zip(mine.products, yours.products, strict=True)
        ]
        means.append(mean_gain(pairs))
    return sum(means) / len(means)


def end_to_end() -> dict[str, Any]:
    """A whole block on 256 chips by MeshSlice and its rivals: seconds, and gains of MeshSlice.

    `simulated` is the compiled program. `model` adds what is not a fully connected layer, which is the block
    under the simulated clock without its layers, to the tuner's closed form of the layers.
    """
    found: dict[str, Any] = {}
    for model, width in WIDTHS.items():
        tunings = {
            name: best(model, 256, 128, name, tolerance=TOLERANCE)
            for name in ("meshslice", "wang", "collective")
        }
        blocks = {name: tuning and block_seconds(width, 128, tuning) for name, tuning in tunings.items()}
        ours = tunings["meshslice"]
        alone = [] if ours is None else [simulated(each, ours.mesh, "meshslice") for each in ours.layers]
        if ours is None or blocks["meshslice"] is None or None in alone:
            continue
        others = blocks["meshslice"] - sum(part for part in alone if part is not None)
        found[model] = {"simulated": blocks, "other_ops": others}
        for name, tuning in tunings.items():
            if name == "meshslice" or tuning is None:
                continue
            gain = (seconds(model, 256, 128, name) + others) / (seconds(model, 256, 128) + others) - 1
            found[model][f"over_{name}_model"] = 100 * gain
            if (block := blocks[name]) is not None:
                found[model][f"over_{name}_simulated"] = 100 * (block / blocks["meshslice"] - 1)
        print(f"{model}: whole block on 256 chips, {found[model]}", flush=True)
    return found


def slices_32x8() -> dict[str, Any]:
    """All products of GPT-3 on 32 x 8 chips in the same number of slices: seconds by model and program."""
    mesh = (32, 8)
    tuning = best("gpt3", 256, 128, mesh=mesh)
    assert tuning is not None
    legal = [legal_slices(each.product, mesh, BLOCK) for layer in tuning.layers for each in layer.products]
    counts = sorted(set(legal[0]).intersection(*legal[1:]))

    def cut(layer: LayerTuning, count: int) -> LayerTuning:
        first, second, third = (
            ProductTuning(
                each.product, count, product_seconds("meshslice", each.product, mesh, count, TPU_V4, FLOPS)
            )
            for each in layer.products
        )
        return replace(layer, products=(first, second, third))

    found: dict[str, Any] = {}
    for count in counts:
        layers = [cut(layer, count) for layer in tuning.layers]
        found[str(count)] = {
            "model": sum(layer.seconds for layer in layers),
            "simulated": total(simulated(layer, mesh, "meshslice") for layer in layers),
        }
    for key in ("model", "simulated"):
        found[f"best_by_{key}"] = min(map(str, counts), key=lambda count: found[count][key])
    print(f"slices on 32 x 8 chips: {found}", flush=True)
    return found


def run(quick: bool, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """All figures."""
    print(
        "model     scaling chips algorithm        mesh    model ms simulated ms  utilisation  launch, sync, "
        "transfer (of compute)"
    )
    rows = []
    for model in WIDTHS:
        for chips in CHIPS:
            rows += case(model, chips, chips // 2, "weak")
            if not quick:
                rows += case(model, chips, 32, "strong")

    def of(model: str, chips: int, algorithm: str, scaling: str = "weak") -> dict[str, Any]:
        return next(
            row for row in rows
            if (row["model_name"], row["chips"], row["algorithm"], row["scaling"])
            == (model, chips, algorithm, scaling)
        )  # fmt: skip

    def gain(model: str, key: str) -> float:
        return 100 * (of(model, 256, "wang")[key] / of(model, 256, "meshslice")[key] - 1)

    keys = sorted({(row["model_name"], row["chips"], row["scaling"]) for row in rows})

    def unordered(key: str) -> list[str]:
        """Cases in which MeshSlice < Wang < Collective does not hold."""
        return [
            f"{model} {chips} {scaling}" for model, chips, scaling in keys
            if not of(model, chips, "meshslice", scaling)[key] < of(model, chips, "wang", scaling)[key]
            < of(model, chips, "collective", scaling)[key]
        ]  # fmt: skip

    weak = {model: (model, 256, 128) for model in WIDTHS}
    flows = {
        model: {flow: 100 * (seconds(*given, forward=flow) / seconds(*given) - 1) for flow in DATAFLOWS}
        for model, given in weak.items()
    }
    under = assumptions.run()
    pairs = [(row["program_model"], row["simulated"]) for row in rows if row["simulated"] is not None]
    return {
        "meshslice_over_wang_256": {model: gain(model, "model") for model in WIDTHS},
        "meshslice_over_wang_256_simulated": {model: gain(model, "simulated") for model in WIDTHS},
        "end_to_end_256": end_to_end(),
        "mean16_over_collective": mean_over("collective"),
        "mean16_over_wang": mean_over("wang"),
        "efficiency_loss": {
            m: 100 * (of(m, 16, "meshslice")["utilisation"] - of(m, 256, "meshslice")["utilisation"])
            for m in WIDTHS
        },
        "efficiency_loss_simulated": {
            m: 100
            * (
                of(m, 16, "meshslice")["simulated_utilisation"]
                - of(m, 256, "meshslice")["simulated_utilisation"]
            )
            for m in WIDTHS
        },
        "dataflow_gain": {model: gains["OS"] for model, gains in flows.items()},
        "dataflow_gain_over": flows,
        "over_collective_4x4": {
            m: 100 * (seconds(m, 16, 8, "collective", (4, 4)) / seconds(m, 16, 8, mesh=(4, 4)) - 1)
            for m in WIDTHS
        },
        "dataflow_gain_simulated": {
            model: gain_in_percent(clock(*given, forward="OS"), clock(*given))
            for model, given in weak.items()
        },
        "over_collective_4x4_simulated": {
            m: gain_in_percent(clock(m, 16, 8, "collective", (4, 4)), clock(m, 16, 8, mesh=(4, 4)))
            for m in WIDTHS
        },
        "one_axis_over_meshslice": {
            f"{row['model_name']} {row['chips']} {row['scaling']} {row['algorithm']}": gain_in_percent(
                row["simulated"],
                of(row["model_name"], row["chips"], "meshslice", row["scaling"])["simulated"],
            )
            for row in rows
            if row["algorithm"] in ONE_AXIS
        },
        "mesh_shapes_256": {
            model: {
                f"{rows}x{256 // rows}": seconds(*given, mesh=(rows, 256 // rows)) / seconds(*given)
                for rows in divisors(256)[1:-1]
            }
            for model, given in weak.items()
        },
        "slices_32x8": None if quick else slices_32x8(),
        "order_holds": not unordered("model"),
        "order_holds_simulated": not unordered("simulated"),
        "unordered": {key: unordered(key) for key in ("model", "simulated")},
        "tuner_seconds": tuner_seconds(),
        "simulated_over_model": {
            "mean": sum(s / m for m, s in pairs) / max(1, len(pairs)),
            "least": min((s / m for m, s in pairs), default=None),
            "most": max((s / m for m, s in pairs), default=None),
        },
        "measured": measured,
        "assumptions": {"paper": assumptions.PAPER, **under},
        "explained": assumptions.explained(under),
        "combinations": None if quick else mesh2d_combinations.run(),
        "rows": rows,
    }


def tuner_seconds() -> float:
    """Seconds of the processor for the four layers of a model on 256 chips."""
    begun = time.process_time()
    for width in WIDTHS.values():
        tune(layers_of(width, 128), 256, TPU_V4, FLOPS, block=BLOCK)
    return (time.process_time() - begun) / len(WIDTHS)


def measured_steps(files: Sequence[Path], quick: bool) -> list[dict[str, Any]]:
    """Measured and forecast seconds of steps on networks; see the head of this file."""
    if files:
        return [row for file in files for row in json.loads(file.read_text())["measured"]]
    reason = "--quick" if quick else missing()
    if reason:
        print(
            f"no steps on networks: {reason}; name files of benchmarks.support.mesh2d.mesh2d_networks with "
            f"--measured"
        )
        return []
    rows: list[dict[str, Any]] = mesh2d_networks.run(mesh2d_networks.SETTINGS, quick=False)["measured"]
    return rows


def main() -> None:
    """Print the tables and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--measured", type=Path, nargs="+", default=[], metavar="FILE")
    options = parser.parse_args()
    result = run(options.quick, measured_steps(options.measured, options.quick))
    print(assumptions.table({name: row for name, row in result["assumptions"].items() if name != "paper"}))
    shown = {key: value for key, value in result.items() if key not in ("rows", "assumptions", "explained")}
    print(json.dumps(shown, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
