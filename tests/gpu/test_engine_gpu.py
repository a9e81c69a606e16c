"""Training on hardware against training on the processor; one GPU is enough.

Ranks in-process share the GPU by copies from device to device; two MPI ranks share it through the host.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.devices.mixed_devices import on, trained
from support.paths import TESTS
from support.programs.equivalence import Case, Layout, grid, layouts, train

import distgraph as dg
from distgraph import nn, optim
from distgraph.errors import DistGraphError
from distgraph.ir.dtypes import to_numpy
from distgraph.runtime.launch.mpiexec import find_mpiexec

pytestmark = pytest.mark.gpu

STEPS = 8
TOLERANCE = {"f32": 1e-3, "f64": 1e-9}
"""Of a loss after 8 steps of Adam: sums of up to some hundred terms in another order, TF32 off (the default
of CuPy), and functions such as exp and erf that differ in the last digits from those of the processor."""

NAMED = {layout.name: layout for layout in layouts("gpt")}
SHARED = [
    Case("gpt", NAMED["dp2_tp2"], dtype="f64"),
    Case("gpt", NAMED["zero3"], micro=2),
    Case("gpt", NAMED["pp4"], micro=4),
    Case("gpt", NAMED["stages_1_3"], micro=4, dtype="f32"),
    Case("gpt", Layout("dp2", (grid(dp=2),), rows="dp"), dtype="f32"),
    Case("conv", Layout("pp2", (grid(0, one=1), grid(1, one=1))), micro=2, dtype="f32"),
    Case("conv", next(layout for layout in layouts("conv") if layout.name == "dp2_tp2")),
]


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("model", ["gpt", "conv"])
def test_one_rank(model: str, dtype: str) -> None:
    case = Case(model, Layout("serial"), dtype=dtype)
    wanted, found = train(case, STEPS), train(replace(case, device="gpu"), STEPS)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_ranks_of_one_process(case: Case) -> None:
    """Where there is a GPU for each rank this is NCCL between threads."""
    wanted, found = train(case, STEPS), train(replace(case, device="gpu"), STEPS)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", [Case("gpt", Layout("serial"), micro=2, dtype="f32"), *SHARED], ids=str)
def test_cuda_graphs_change_no_number(case: Case) -> None:
    """A warning that an op cannot be captured is an error here."""
    case = replace(case, device="gpu")
    wanted, found = train(case, STEPS), train(replace(case, cuda_graphs=True), STEPS)
    np.testing.assert_array_equal(found.losses, wanted.losses)


SCRIPT = """
import json, sys
from dataclasses import replace
from support.programs.equivalence import Case, Layout, grid, train
from distgraph.runtime.execute.process_group import is_chief
layout = {"dp2": Layout("dp2", (grid(dp=2),), rows="dp"),
          "pp2": Layout("pp2", (grid(0, one=1), grid(1, one=1)))}[sys.argv[1]]
losses = train(Case("gpt", layout, micro=2, device="gpu"), int(sys.argv[2])).losses
if is_chief():
    print(json.dumps(list(map(float, losses))))
"""


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_two_mpi_ranks(layout: str, tmp_path: Path) -> None:
    """On one GPU they exchange through the host, on two by NCCL."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    script = tmp_path / "train.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n{SCRIPT}")
    command = [find_mpiexec(), "-n", "2", sys.executable, str(script), layout, str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    wanted = train(Case("gpt", Layout("serial"), micro=2), STEPS).losses
    np.testing.assert_allclose(json.loads(done.stdout.splitlines()[-1]), wanted, rtol=TOLERANCE["f64"])


@pytest.mark.parametrize(
    "meshes",
    [on("cpu", "gpu", "cpu"), on(("cpu", "gpu"), weights=(1, 3)), on(("gpu", "gpu"), "cpu")],
    ids=["stages", "uneven", "two"],
)
def test_processors_beside_gpus(meshes: list[dg.ProcessMesh]) -> None:
    """Messages between them go through pinned host memory."""
    optimizer = optim.AdamW(lr=0.01, eps=1e-3, clip_norm=0.05)
    given: dict[str, Any] = {"optimizer": optimizer, "micro_batches": 4}
    wanted, found = trained([None] * len(meshes), **given), trained(meshes, **given)
    np.testing.assert_allclose(found[0], wanted[0], rtol=TOLERANCE["f64"])
    for name, array in wanted[1].items():
        np.testing.assert_allclose(found[1][name], array, rtol=1e-6, atol=1e-9, err_msg=name)


def test_predict_and_checkpoints(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(23, 6)).astype("f4"), rng.normal(size=(23, 5)).astype("f4")

    def engine(device: str, ranks: int) -> dg.Engine:
        strategy = dg.Strategy(mesh=grid(dp=ranks), batch_axis="dp", device=device)
        return dg.Engine(nn.Linear(6, 5), nn.MeanSquaredError(), optim.Adam(lr=0.01), strategy=strategy)

    first = engine("gpu", 3)
    first.fit((x, y), epochs=2, batch_size=9, progress=False)
    first.save(tmp_path / "ckpt")
    wanted = first.predict(x)
    assert type(wanted) is np.ndarray
    first.close()
    for device, ranks in (("gpu", 1), ("gpu", 2), ("cpu", 2)):
        other = engine(device, ranks)
        other.load(tmp_path / "ckpt")
        np.testing.assert_allclose(other.predict(x), wanted, rtol=1e-5, atol=1e-6)
        other.close()


def test_bfloat16_trains_or_is_refused() -> None:
    import cupy

    rng = np.random.default_rng(0)
    to = to_numpy("bf16")
    batch = (rng.normal(size=(16, 6)).astype(to), rng.normal(size=(16, 5)).astype(to))
    losses: dict[str, Any] = {}
    for device in ("cpu", "gpu"):
        engine = dg.Engine(
            nn.Linear(6, 5, dtype="bf16"), nn.MeanSquaredError(), optim.SGD(lr=0.01),
            strategy=dg.Strategy(device=device),
        )  # fmt: skip
        if device == "gpu" and int(cupy.__version__.split(".")[0]) < 14:
            with pytest.raises(DistGraphError, match="has no bfloat16"):
                engine.run(batch)
            return
        losses[device] = [engine.run(batch)["loss"] for _ in range(4)]
    np.testing.assert_allclose(losses["gpu"], losses["cpu"], rtol=2**-6)  # steps of bf16 are 2**-8
