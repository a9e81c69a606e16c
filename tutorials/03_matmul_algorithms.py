"""Two layers split over both axes of a mesh: tuned, then forecast and run with every algorithm.

    python tutorials/03_matmul_algorithms.py [picture.svg]
    distgraph run -n 4 tutorials/03_matmul_algorithms.py

The picture shows a training step on one rank: what it computes and, below, its messages. On the left the
simulated clock of 4 x 4 chips of a TPU v4 torus; on the right the median of three steps on 2 x 2 ranks of
this machine, where nothing limits the network.
"""

import sys
from pathlib import Path

import numpy as np

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine.compile.train_graph import train_graph
from distgraph.passes.complete import complete
from distgraph.passes.matmul_algorithms import MATMUL_ALGORITHMS
from distgraph.runtime.execute.process_group import is_chief
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.program.build import build
from distgraph.runtime.report.timeline_segments import inner_segments, measured_segments, task_segments

COLORS = {"forward": "#3b7dd8", "backward": "#2a9d6f", "optimize": "#8e5bb5", "wait": "#d64545",
          "collective": "#e0a030", "send": "#e0a030"}  # fmt: skip
NAMES = [name for name in ("collective", "wang", "meshslice") if name in MATMUL_ALGORITHMS]
cluster, shape = dg.load_cluster("tpu_v4_16x16"), (4, 4)


class MLP(nn.Module):
    """The largest matrix of a layer stays: the result of the first (OS), the input of the second (LS)."""

    def __init__(self, width, mesh, algorithm, slices, dtype="f32"):
        options = {"slices": slices, "block": 8} if algorithm == "meshslice" else {}
        self.up = nn.Linear(width, 4 * width, bias=False, dtype=dtype)
        self.down = nn.Linear(4 * width, width, bias=False, dtype=dtype)
        self.split_up = dg.shard_op(self.up, mesh, algorithm=algorithm, dataflow="OS", **options)
        self.split_down = dg.shard_op(self.down, mesh, algorithm=algorithm, dataflow="LS", **options)

    def forward(self, x):
        return self.split_down(ops.relu(self.split_up(x)))


def loss(y, target):
    return ops.mean(ops.square(y - target))


def simulated(algorithm, samples, width, slices):
    """Seconds of a step and its segments, from shapes alone."""
    model = MLP(width, dg.ProcessMesh.grid(rows=shape[0], cols=shape[1]), algorithm, slices, "bf16")
    batch = ((samples, width), "bf16")
    built = build(complete(train_graph(model, (batch, batch), loss, optim.SGD(0.1))))
    found = forecast(built, cluster, cluster.network.corner_block(shape), trace=True)
    return found.step_seconds, [*task_segments(found, 0), *inner_segments(found, 0, ops=False)]


def measured(algorithm, samples, width, slices):
    """Seconds of a step and its segments on rank 0 of four."""
    engine = dg.Engine(
        MLP(width, dg.ProcessMesh.grid(rows=2, cols=2), algorithm, slices), loss, optim.SGD(0.1)
    )
    batch = np.random.default_rng(0).normal(size=(2, samples, width)).astype("f4")
    engine.run(tuple(batch))
    engine.start_recording()
    for _ in range(3):
        engine.run(tuple(batch))
    timeline = engine.stop_recording()
    engine.close()
    step = timeline.median
    return step.seconds, list(measured_segments(step.ranks[0], 0, timeline.tasks, step.seconds))


def picture(rows):
    """An SVG: a row for each algorithm, simulated beside measured, each column on its own scale."""
    parts, longest = [], [max(row[1 + column][0] for row in rows) for column in (0, 1)]
    for number, (name, *columns) in enumerate(rows):
        y = 40 + 60 * number
        parts.append(f'<text x="8" y="{y + 22}">{name}</text>')
        for column, (seconds, segments) in enumerate(columns):
            x, scale = 110 + 400 * column, 340 / longest[column]
            for part in segments:
                if part.kind in COLORS:
                    top, height = (y, 22) if part.lane == "compute" else (y + 24, 10)
                    left, width = x + part.start * scale, max(part.seconds * scale, 0.3)
                    parts.append(f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height}" '
                                 f'fill="{COLORS[part.kind]}"/>')  # fmt: skip
            parts.append(f'<text x="{x + seconds * scale + 4:.0f}" y="{y + 16}">{1e3 * seconds:.1f}</text>')
    heads = [f"simulated, {shape[0]} x {shape[1]} TPU v4 (ms)", "measured, 2 x 2 threads (ms)"]
    parts += [f'<text x="{110 + 400 * n}" y="24">{head}</text>' for n, head in enumerate(heads)]
    bottom = 48 + 60 * len(rows)
    for n, name in enumerate(("forward", "backward", "optimize", "wait", "collective")):
        parts.append(f'<rect x="{110 + 120 * n}" y="{bottom}" width="12" height="12" fill="{COLORS[name]}"/>')
        parts.append(f'<text x="{128 + 120 * n}" y="{bottom + 11}">{name}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="910" height="{bottom + 24}"'
    return "\n".join([f'{head} font-family="sans-serif" font-size="13">',
                      '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])  # fmt: skip


samples, width = 65536, 4096
layers = {"up": (samples, width, 4 * width), "down": (samples, 4 * width, width)}
tuning = dg.tune_mesh2d(layers, cluster, devices=16, meshes=[shape])
most = min(product.slices for layer in tuning.best.layers for product in layer.products)
trials = {slices: simulated("meshslice", samples, width, slices) for slices in (most // 2, most, 2 * most)}
slices = min(trials, key=lambda count: trials[count][0])
rows = [(name, simulated(name, samples, width, slices), measured(name, 1024, 512, 2)) for name in NAMES]
if is_chief():
    print(
        f"{tuning}\n\nmeshslice in {slices} slices, because the clock counts what a slice reads and writes:"
    )
    for name, (forecast_seconds, _), (seconds, _) in rows:
        print(f"{name}: {1e3 * forecast_seconds:.2f} ms simulated, {1e3 * seconds:.1f} ms measured")
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(picture(rows))
