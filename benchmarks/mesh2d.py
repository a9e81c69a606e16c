"""Two-dimensional tensor parallelism on simulated TPU v4 tori: MeshSlice, its rivals and the tuner.

    python -m benchmarks.mesh2d [--json FILE] [--quick] [--measured FILE ...]

The four fully connected layers of a block of GPT-3 175B (d = 12288) and Megatron-Turing NLG 530B (d = 20480),
sequence 2048, forward and backward, on 16, 64 and 256 chips of `tpu_v4_16x16.yaml` (a torus of the shape of
the mesh): weak scaling with half as many sequences as chips, strong scaling with 32. Every algorithm runs on
the mesh, with the dataflows and slices, that the tuner finds best for it.

Two figures for each: `model`, the tuner's closed form (MeshSlice, section 3.2.2), and `simulated`, the
forecast of the compiled program under the simulated clock, for the algorithms that distgraph compiles. With
--quick weak scaling alone.

The steps of real ranks (`measured`) come from `benchmarks.mesh2d_networks`: from the files of former runs
that --measured names, or else from a run of all networks, for half an hour. There are none without root,
and with --quick only those of files.

Keys of the result: see `benchmarks/HISTORY.md` for what they were. `meshslice_over_wang_256` (percent),
`end_to_end_256` (seconds of a training step of a whole block, and percent, see `end_to_end`),
`mean16_over_collective`, `mean16_over_wang` (percent, mean over the forward and backward products of the four
layers of both models on 256 chips, by the model), `efficiency_loss` (points, 16 to 256 chips),
`dataflow_gain` (percent, against all weights stationary), `order_holds` (MeshSlice < Wang < Collective in all
cases), `tuner_seconds` (of the processor), `rows`, `measured` (of `benchmarks.mesh2d_networks`). Nothing is
fitted to the paper's results.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import mesh2d_networks
from benchmarks.support.machines import missing
from benchmarks.support.torus_prices import TPU_V4
from distgraph import nn, ops
from distgraph.engine.compile.train_graph import train_graph
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.models import GPT, GPTConfig
from distgraph.passes.complete import complete
from distgraph.passes.matmul_algorithms import MATMUL_ALGORITHMS
from distgraph.passes.matmul_algorithms.layer_products import Layer
from distgraph.passes.matmul_algorithms.product_seconds import ALGORITHMS
from distgraph.passes.matmul_algorithms.tuner import LayerTuning, Tuning, tune
from distgraph.passes.search.modes.mesh2d import annotate, layer_algorithms, linear_layers
from distgraph.passes.serial.backward import differentiate
from distgraph.passes.serial.dead_code_elimination import prune
from distgraph.resources import Cluster, load_cluster
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.program.build import build
from distgraph.tracing.tracer import Trace

MODELS = {"gpt3": 12288, "megatron": 20480}
CHIPS = (16, 64, 256)
SEQUENCE, BLOCK = 2048, 8
FLOPS = 266e12
TOLERANCE = 0.02  # as in mode mesh2d: the fewest slices within 2 % of the least seconds
HEAD = 128  # features of a head of attention
FILE = "resources/files/tpu_v4_16x16.yaml"


def layers_of(width: int, sequences: int) -> list[Layer]:
    """The fully connected layers of a transformer block."""
    samples = sequences * SEQUENCE
    wide = 4 * width
    sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, wide), "down": (wide, width)}
    return [Layer(name, samples, *size) for name, size in sizes.items()]


@cache
def torus(rows: int, cols: int) -> Cluster:
    """The shipped cluster with a torus of another shape."""
    text = Path(FILE).read_text().replace("shape: [16, 16]", f"shape: [{rows}, {cols}]")
    text = text.replace("count: 64", f"count: {rows * cols // 4}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "torus.yaml"
        path.write_text(text)
        return load_cluster(path)


def graph_of(layer: Layer) -> Graph:
    """A layer forward and backward, in shapes alone."""
    trace = Trace(layer.name)
    with trace.activate():
        x = trace.source("input", "x", (layer.samples, layer.inputs), "bf16")
        dy = trace.source("input", "dy", (layer.samples, layer.outputs), "bf16")
        w = trace.source("param", "w", (layer.inputs, layer.outputs), "bf16")
        y = x @ w
        dx, dw = differentiate(trace, ops.reduce("sum", y * dy), [x, w])
    return trace.finish({"y": y, "dx": dx, "dw": dw})


def form(tuned: LayerTuning) -> str | None:
    """The dataflow of a layer as a program has it; None for OS and LS in their transposed form."""
    if tuned.transposed:
        return "RS^T" if tuned.dataflow == "RS" else None
    return tuned.dataflow


def simulated(tuned: LayerTuning, mesh_shape: tuple[int, int], algorithm: str) -> float | None:
    """Seconds of a layer under the simulated clock; None for an algorithm or dataflow without a program."""
    if algorithm not in MATMUL_ALGORITHMS or form(tuned) is None:
        return None
    mesh = ProcessMesh.grid(rows=mesh_shape[0], cols=mesh_shape[1])
    graph = graph_of(tuned.layer)
    (linear,) = linear_layers(graph)
    annotated, names = annotate(graph, mesh, {linear.op: form(tuned) or ""})
    assert names == (linear.op,)
    algorithms = layer_algorithms(graph, linear, tuned, mesh, algorithm, BLOCK)
    completed = complete(replace(prune(annotated), algorithms=algorithms), mesh)
    cluster = torus(*mesh_shape)
    found = forecast(build(completed), cluster, cluster.network.corner_block(mesh_shape))
    return found.step_seconds


class TransformerBlock(nn.Module):
    """A block without the layers around it: its mean is the loss."""

    def __init__(self, width: int) -> None:
        model = GPT(GPTConfig(hidden=width, layers=1, heads=width // HEAD, packed=True, dtype="bf16"))
        self.block = model.blocks[0]

    def forward(self, x: Any) -> Any:
        """[sequences, tokens, width] to a number."""
        return ops.mean(self.block(x))


def block_seconds(width: int, sequences: int, tuning: Tuning) -> float | None:
    """Seconds of a training step of a whole block under the simulated clock, with attention, norms and AdamW;
    None where a layer has no program."""
    forms = [form(each) for each in tuning.layers]
    if None in forms:
        return None
    mesh = ProcessMesh.grid(rows=tuning.mesh[0], cols=tuning.mesh[1])
    graph = train_graph(TransformerBlock(width), (((sequences, SEQUENCE, width), "bf16"),))
    layers = linear_layers(graph)
    tuned = dict(zip((layer.op for layer in layers), tuning.layers, strict=True))
    annotated, names = annotate(graph, mesh, dict(zip(tuned, map(str, forms), strict=True)))
    assert len(names) == len(layers)
    algorithms = {}
    for layer in layers:
        algorithms |= layer_algorithms(graph, layer, tuned[layer.op], mesh, tuning.algorithm, BLOCK)
    completed = complete(replace(annotated, algorithms=algorithms), mesh)
    cluster = torus(*tuning.mesh)
    return forecast(build(completed), cluster, cluster.network.corner_block(tuning.mesh)).step_seconds


def best(layers: list[Layer], chips: int, algorithm: str) -> Tuning | None:
    """The tuner's answer; None where an algorithm fits no mesh."""
    try:
        return tune(layers, chips, TPU_V4, FLOPS, block=BLOCK, algorithm=algorithm, tolerance=TOLERANCE)
    except Exception as error:  # noqa: BLE001 - printed
        print(f"  {algorithm}: {error}")
        return None


def case(model: str, chips: int, sequences: int, scaling: str) -> list[dict[str, Any]]:
    """One row for every algorithm."""
    layers, rows = layers_of(MODELS[model], sequences), []
    ideal = sum(6 * layer.samples * layer.inputs * layer.outputs for layer in layers) / chips / FLOPS
    for algorithm in ALGORITHMS:
        tuning = best(layers, chips, algorithm)
        if tuning is None:
            continue
        clock = [simulated(each, tuning.mesh, algorithm) for each in tuning.layers]
        whole = None if any(seconds is None for seconds in clock) else sum(s for s in clock if s is not None)
        row = {
            "model_name": model, "chips": chips, "scaling": scaling, "algorithm": algorithm,
            "mesh": list(tuning.mesh), "model": tuning.seconds, "simulated": whole,
            "utilisation": ideal / tuning.seconds,
            "slices": [[product.slices for product in each.products] for each in tuning.layers],
        }  # fmt: skip
        rows.append(row)
        shown = "-" if whole is None else f"{whole * 1e3:9.2f}"
        print(
            f"{model:9s} {scaling:6s} {chips:4d} {algorithm:16s} {tuning.mesh[0]:3d}x{tuning.mesh[1]:<3d} "
            f"{tuning.seconds * 1e3:9.2f} {shown:>9s} {100 * ideal / tuning.seconds:6.1f} %",
            flush=True,
        )
    return rows


def mean_over(other: str) -> float:
    """Mean gain (percent) of MeshSlice over another algorithm, products of both models on 256 chips."""
    gains = []
    for width in MODELS.values():
        layers = layers_of(width, 128)
        ours, theirs = best(layers, 256, "meshslice"), best(layers, 256, other)
        assert ours is not None
        assert theirs is not None
        for mine, yours in zip(ours.layers, theirs.layers, strict=True):
            for a, b in zip(mine.products, yours.products, strict=True):
                gains.append(b.seconds.total / a.seconds.total - 1)
    return 100 * sum(gains) / len(gains)


def end_to_end() -> dict[str, Any]:
    """A whole block on 256 chips by MeshSlice and its rivals: seconds, and gains of MeshSlice in percent.

    `simulated` is the compiled program. `model` adds what is not a fully connected layer, which is the block
    under the simulated clock without its layers, to the tuner's closed form of the layers.
    """
    found: dict[str, Any] = {}
    for model, width in MODELS.items():
        tunings = {
            name: best(layers_of(width, 128), 256, name) for name in ("meshslice", "wang", "collective")
        }
        blocks = {name: tuning and block_seconds(width, 128, tuning) for name, tuning in tunings.items()}
        ours = tunings["meshslice"]
        alone = [] if ours is None else [simulated(each, ours.mesh, "meshslice") for each in ours.layers]
        if ours is None or blocks["meshslice"] is None or None in alone:
            continue
        others = blocks["meshslice"] - sum(seconds for seconds in alone if seconds is not None)
        found[model] = {"simulated": blocks, "other_ops": others}
        for name, tuning in tunings.items():
            if name == "meshslice" or tuning is None:
                continue
            gain = (tuning.seconds + others) / (ours.seconds + others) - 1
            found[model][f"over_{name}_model"] = 100 * gain
            if (seconds := blocks[name]) is not None:
                found[model][f"over_{name}_simulated"] = 100 * (seconds / blocks["meshslice"] - 1)
        print(f"{model}: whole block on 256 chips, {found[model]}", flush=True)
    return found


def run(quick: bool, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """All figures."""
    print("model     scaling chips algorithm        mesh    model ms simulated ms  utilisation (model)")
    rows = []
    for model in MODELS:
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

    def gain(model: str, key: str) -> float | None:
        ours, theirs = of(model, 256, "meshslice")[key], of(model, 256, "wang")[key]
        return None if ours is None or theirs is None else 100 * (theirs / ours - 1)

    keys = {(row["model_name"], row["chips"], row["scaling"]) for row in rows}
    order = all(
        of(m, c, "meshslice", s)["model"] < of(m, c, "wang", s)["model"] < of(m, c, "collective", s)["model"]
        for m, c, s in keys
    )
    begun = time.process_time()
    for width in MODELS.values():
        tune(layers_of(width, 128), 256, TPU_V4, FLOPS, block=BLOCK)
    seconds = (time.process_time() - begun) / len(MODELS)
    gains = {}
    for model, width in MODELS.items():
        stationary = tune(layers_of(width, 128), 256, TPU_V4, FLOPS, block=BLOCK, forward="RS").seconds
        gains[model] = 100 * (stationary / of(model, 256, "meshslice")["model"] - 1)
    pairs = [(row["model"], row["simulated"]) for row in rows if row["simulated"] is not None]
    return {
        "meshslice_over_wang_256": {model: gain(model, "model") for model in MODELS},
        "meshslice_over_wang_256_simulated": {model: gain(model, "simulated") for model in MODELS},
        "end_to_end_256": end_to_end(),
        "mean16_over_collective": mean_over("collective"),
        "mean16_over_wang": mean_over("wang"),
        "efficiency_loss": {
            m: 100 * (of(m, 16, "meshslice")["utilisation"] - of(m, 256, "meshslice")["utilisation"])
            for m in MODELS
        },
        "dataflow_gain": gains,
        "order_holds": order,
        "tuner_seconds": seconds,
        "simulated_over_model": {
            "mean": sum(s / m for m, s in pairs) / max(1, len(pairs)),
            "least": min((s / m for m, s in pairs), default=None),
            "most": max((s / m for m, s in pairs), default=None),
        },
        "measured": measured,
        "rows": rows,
    }


def measured_steps(files: Sequence[Path], quick: bool) -> list[dict[str, Any]]:
    """Measured and forecast seconds of steps on networks; see the head of this file."""
    if files:
        return [row for file in files for row in json.loads(file.read_text())["measured"]]
    reason = "--quick" if quick else missing()
    if reason:
        print(f"no steps on networks: {reason}; name files of benchmarks.mesh2d_networks with --measured")
        return []
    rows: list[dict[str, Any]] = mesh2d_networks.run(mesh2d_networks.SETTINGS, quick=False)["measured"]
    return rows


def main() -> None:
    """Print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--measured", type=Path, nargs="+", default=[], metavar="FILE")
    options = parser.parse_args()
    result = run(options.quick, measured_steps(options.measured, options.quick))
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
