"""What users get wrong under `distgraph run -n 2`, and what fails there: both ranks say why they stop, with
an exit code that is not 0 and no process left."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distgraph.runtime.execute.checkpoint import Checkpoint

HANGS = 60  # seconds until a test that hangs fails; a launch takes about 3
needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
PREAMBLE = """
import os, resource, signal, sys
import numpy as np
import distgraph as dg
from distgraph import nn, optim
from distgraph.engine.callbacks import Callback
from distgraph.runtime.launch.mpi_rank import current_transport

rank = current_transport().rank
print("pid", os.getpid())
x, y = np.ones((40, 6), "f4"), np.arange(40, dtype="i4") % 3
both = dg.ProcessMesh.grid(dp=2)

def train(x=x, y=y, mesh=both, width=3, hook=None, epochs=1, batch=10, **given):
    model = nn.Linear(6, width)
    given.setdefault("strategy", dg.Strategy(mesh=mesh, batch_axis="dp", micro_batches=given.pop("micro", 1)))
    engine = dg.Engine(model, nn.CrossEntropy(), optim.Adam(1e-3), **given)
    watcher = Callback()
    watcher.on_batch_end = lambda engine, step, logs: hook and hook(step)
    data = x if y is None else (x, y)
    engine.fit(data, epochs=epochs, batch_size=batch, callbacks=[watcher])
    return engine

def is_step_2(step):
    return rank == 1 and step == 2
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a launched script ended."""

    code: int
    out: str
    err: str

    @property
    def survivors(self) -> list[int]:
        """Ranks that still exist and are more than an entry in a table."""
        pids = [int(line.split()[1]) for line in self.out.splitlines() if line.startswith("pid ")]
        assert len(pids) == 2, self.err
        return [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def command(directory: Path, body: str) -> SimpleNamespace:
    """What `distgraph run -n 2` of a script is started with."""
    script = directory / "script.py"
    script.write_text(PREAMBLE + textwrap.dedent(body))
    return SimpleNamespace(
        args=[sys.executable, "-m", "distgraph", "run", "-n", "2", str(script)],
        options={"cwd": directory, "text": True, "env": {**os.environ, "PYTHONUNBUFFERED": "1"}},
    )


def launch(directory: Path, body: str) -> Ended:
    it = command(directory, body)
    done = subprocess.run(it.args, **it.options, capture_output=True, timeout=HANGS, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


SCRIPTS: dict[str, tuple[str, str]] = {
    "mesh of four ranks": (
        "train(mesh=dg.ProcessMesh.grid(dp=4))",
        "mesh(dp=4) needs 4 ranks but the MPI job has 2; start it with distgraph run -n 4",
    ),
    "axis unknown": (
        'dg.shard_tensor(nn.Linear(6, 3).weight, both, [None, "tp"])',
        "spec [_, tp] names axis 'tp' but mesh(dp=2) has dp",
    ),
    "axis used twice": (
        'dg.shard_tensor(nn.Linear(6, 3).weight, both, ["dp", "dp"])',
        "axis 'dp' is used twice; an axis splits one dim only",
    ),
    "batch does not divide": (
        "train(micro=4)",
        "batch_size is 10 but micro_batches is 4, which does not divide it; change one of them",
    ),
    "shape mismatch": ("train(x[:, :5])", "index k is 5 in the left operand but 6 in the right"),
    "dtype mismatch": (
        'train(x.astype("f8"))',
        "a contraction needs one dtype, cast one of them with .astype",
    ),
    "missing data": ("train(None, None)", "data is None; pass arrays such as (x, y)"),
    "malformed resource file": (
        'open("x.yaml", "w").write("name: x\\nmachines: 4\\n"); train(cluster="x.yaml")',
        "x.yaml: machines: expected a list, got 4",
    ),
    "checkpoint of another model": (
        'train().save("saved"); dg.Engine(nn.Linear(6, 4)).load("saved")',
        "is of another model: parameter weight is f32[6, 4] in the model but f32[6, 3] in the checkpoint",
    ),
    "labels out of range": ("train(y=y + 1)", "label 3 is outside the 3 classes 0..2; check the data"),
    "loss is nan": ("train(x * np.nan)", "loss is nan in step 1 (epoch 0, samples from 0)"),
    "save on one rank, at the end": (
        'engine = train()\nif engine.is_chief: engine.save("saved")',
        "engine.save() on rank 0 but the end of the script on rank 1; calls of the engine are collective",
    ),
    "save on one rank, between steps": (
        'engine = train()\nif rank == 1: engine.save("saved")\nengine.run((x[:10], y[:10]))',
        "engine.run() on rank 0 but engine.save() on rank 1; calls of the engine are collective",
    ),
    "a step on one rank": (
        "engine = train()\nif rank == 1: engine.run((x[:10], y[:10]))\nengine.predict(x)",
        "engine.predict() on rank 0 but engine.run() on rank 1; calls of the engine are collective",
    ),
}


@needs_mpi
@pytest.mark.parametrize("mistake", SCRIPTS)
def test_mistake_on_two_ranks(mistake: str, tmp_path: Path) -> None:
    """One message that says that both ranks failed, and no traceback."""
    body, message = SCRIPTS[mistake]
    ended = launch(tmp_path, body)
    assert ended.code == 1, ended.err
    assert "Traceback" not in ended.err
    assert ended.err.count(message) == 1
    (line,) = ended.err.splitlines()
    alone = re.match(r"error: rank ([01]): .*; rank ([01]) stops too", line)
    assert line.startswith("error: ranks 0-1: ") or (alone and alone[1] != alone[2]), line
    assert ended.survivors == []


FAILURES: dict[str, tuple[str, int, str]] = {
    "a rank that raises": (
        "def hook(step):\n    if is_step_2(step): raise ValueError('page 17 is torn')\n",
        1,
        "error: rank 1: ValueError: page 17 is torn; rank 0 stops too",
    ),
    "a rank that is killed": (
        "def hook(step):\n    if is_step_2(step): os.kill(os.getpid(), signal.SIGKILL)\n",
        137,
        "error: rank 1 was killed by SIGKILL, all 2 ranks are stopped",
    ),
    "a rank that exits": (
        "def hook(step):\n    if is_step_2(step): sys.exit('no more pages')\n",
        1,
        "error: rank 1: no more pages; rank 0 stops too",
    ),
}


@needs_mpi
@pytest.mark.parametrize("failure", FAILURES)
def test_failure_in_the_middle_of_training(failure: str, tmp_path: Path) -> None:
    """One rank goes in step 2; the other, which waits for its gradients, stops too."""
    hook, code, told = FAILURES[failure]
    ended = launch(tmp_path, hook + "train(hook=hook, epochs=100)\nprint('done')")
    assert ended.code == code, ended.err
    assert "done" not in ended.out
    assert ended.err.splitlines()[-1].startswith(told)
    assert ended.err.count("error: ") == 1
    assert ended.err.count("Traceback") == ("raises" in failure)
    assert ended.survivors == []


@needs_mpi
def test_disk_full_on_one_of_two_ranks(tmp_path: Path) -> None:
    """A limit on the size of files stands for rank 1's full disk. Both hear of it; the old one is whole."""
    body = """
        split = dg.ProcessMesh.grid(tp=2)
        model = nn.Linear(6, 4000)
        dg.shard_tensor(model.weight, split, [None, "tp"])
        engine = dg.Engine(model, nn.CrossEntropy(), optim.SGD(0.1))
        engine.fit((x, y), batch_size=20)
        engine.save("saved")
        engine.fit((x, y), batch_size=20)
        if rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, 16_384))
        engine.save("saved")
        """
    ended = launch(tmp_path, body)
    assert ended.code == 1, ended.err
    assert ended.err.count("could not be written: rank 1: step-00000004") == 1
    assert ended.err.startswith("error: ranks 0-1: ")
    assert ended.survivors == []
    checkpoint = Checkpoint.open(tmp_path / "saved")
    assert checkpoint.index["step"] == 2
    assert checkpoint.read("weight").shape == (6, 4000)
    named = {shard["file"] for tensor in checkpoint.tensors.values() for shard in tensor["shards"]}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == named | {"index.json", ".lock"}


@needs_mpi
def test_interrupt_on_two_ranks(tmp_path: Path) -> None:
    """Ctrl-C at `distgraph run` in the middle of training."""
    body = "train(epochs=10**6, hook=lambda step: step == 2 and print('step 2'))"
    it = command(tmp_path, body)
    with subprocess.Popen(it.args, **it.options, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]  # pids and steps of both
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANGS)
    ended = Ended(process.returncode, "".join(lines) + out, err)
    assert (ended.code, ended.err) == (130, "error: interrupted; all ranks are stopped\n")
    assert ended.survivors == []


@needs_mpi
def test_output_that_nobody_reads(tmp_path: Path) -> None:
    """`distgraph run ... | head -1`: the script goes on to its end, without a word about the pipe."""
    body = "for i in range(9000): print('line', i)\nopen(f'end.{rank}', 'w').close()"
    it = command(tmp_path, body)
    with subprocess.Popen(it.args, **it.options, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=HANGS) == 0
    assert err == ""
    assert sorted(path.name for path in tmp_path.glob("end.*")) == ["end.0", "end.1"]


def test_interrupt_of_ranks_in_one_process(tmp_path: Path) -> None:
    """Ctrl-C at `python script.py`: the threads of the other ranks hold nothing up."""
    script = tmp_path / "script.py"
    script.write_text(
        PREAMBLE.replace("rank = current_transport().rank", "rank = 0")
        + "train(epochs=10**6, hook=lambda step: step == 2 and print('step 2'))"
    )
    options: dict[str, Any] = {"text": True, "env": {**os.environ, "PYTHONUNBUFFERED": "1"}}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "step 2\n":
            pass
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HANGS)
    assert process.returncode in (130, -signal.SIGINT)
    assert err.splitlines()[-1] == "KeyboardInterrupt"
