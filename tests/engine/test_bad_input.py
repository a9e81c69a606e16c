"""What users get wrong: each mistake ends in one message of ours, on every rank, and leaves nothing behind.

The first table is of mistakes in one process; the second of scripts under `distgraph run -n 2`, where both
ranks must say why they stop, with an exit code that is not 0 and no process left.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine.callbacks import Callback, ModelCheckpoint
from distgraph.errors import DistGraphError, GraphError, ResourceError, RuntimeFault, ShardingError
from distgraph.runtime.execute.checkpoint import Checkpoint

HANGS = 60  # seconds until a test that hangs fails; a launch takes about 3
X = np.random.default_rng(0).normal(size=(20, 6)).astype("f4")
Y = np.arange(20, dtype="i4") % 3
TP = dg.ProcessMesh.grid(tp=2)


def train(
    model: Any = None, loss: Any = None, optimizer: Any = None, data: Any = (X, Y), **given: Any
) -> dg.Engine:
    """A small engine and one epoch of it; `fit_` arguments go to fit, the others to the engine."""
    fit = {name[4:]: given.pop(name) for name in list(given) if name.startswith("fit_")}
    engine = dg.Engine(
        model or nn.Linear(6, 3), loss or nn.CrossEntropy(), optimizer or optim.SGD(lr=0.1), **given
    )
    engine.fit(data, **({"batch_size": 10, "progress": False} | fit))
    return engine


def layer(forward: Callable[[Any, Any], Any]) -> nn.Module:
    """A module with a linear layer `l` and this forward."""

    class Written(nn.Module):
        def __init__(self) -> None:
            self.l = nn.Linear(6, 3)

    Written.forward = forward  # type: ignore[method-assign]
    return Written()


def annotated_twice() -> None:
    weight = nn.Linear(6, 3).weight
    dg.shard_tensor(weight, TP, [None, "tp"])
    dg.shard_tensor(weight, TP, ["tp", None])


class NoInit(nn.Linear):
    def __init__(self) -> None:
        pass


def shard(dims: Any, mesh: Any = TP) -> None:
    dg.shard_tensor(nn.Linear(6, 3).weight, mesh, dims)


NAN = np.where(np.arange(120).reshape(20, 6) == 70, np.nan, X).astype("f4")
IDS = nn.Sequential(nn.Embedding(10, 3))
MISTAKES: dict[str, tuple[Callable[[], Any], type[DistGraphError], str]] = {
    # meshes and annotations
    "axis unknown": (lambda: shard([None, "dp"]), ShardingError, r"names axis 'dp' but mesh\(tp=2\) has tp"),
    "axis used twice": (
        lambda: shard(["tp", "tp"]),
        ShardingError,
        "'tp' is used twice; an axis splits one dim",
    ),
    "too few dims": (lambda: shard(["tp"]), ShardingError, r"has 1 dims but shape \(6, 3\) has 2"),
    "dims as text": (lambda: shard("tp"), ShardingError, "spec is 'tp' but must be a list"),
    "axis by number": (lambda: shard([0, None]), ShardingError, "0 is no axis; each entry is a name"),
    "mesh is a list": (
        lambda: shard([None, "tp"], [0, 1]),
        ShardingError,
        "mesh is a list but must be a Proc",
    ),
    "annotated twice": (annotated_twice, ShardingError, r"annotated \[tp, _\].* but was annotated \[_, tp\]"),
    "annotates a module": (
        lambda: dg.shard_tensor(nn.Linear(6, 3), TP, [None, "tp"]),
        ShardingError,
        "Linear cannot be annotated; pass a parameter such as layer.weight",
    ),
    "names of a mesh": (lambda: dg.ProcessMesh([0, 1], ["a", "b"]), ShardingError, "1 dims but 2 axis names"),
    "ragged mesh": (
        lambda: dg.ProcessMesh([[0, 1], [2]], ["a", "b"]),
        ShardingError,
        "rows differ in length",
    ),
    "mesh of fractions": (
        lambda: dg.ProcessMesh([0.5], ["a"]),
        ShardingError,
        "float64 but must be integers",
    ),
    "mesh of nothing": (lambda: dg.ProcessMesh.grid(dp=0), ShardingError, "must be numbers from 1 up"),
    # parts of an engine
    "model is a class": (
        lambda: dg.Engine(nn.ReLU),
        GraphError,
        "model is the class ReLU .* call it: ReLU()",
    ),
    "loss by name": (lambda: train(loss="mse"), GraphError, "loss is 'mse' but must be a function"),
    "loss is a class": (lambda: train(loss=nn.CrossEntropy), GraphError, "loss is the class CrossEntropy"),
    "loss of one argument": (
        lambda: train(loss=lambda y: y),
        GraphError,
        "loss takes .y. but is called with 2",
    ),
    "loss of a vector": (
        lambda: train(loss=ops.cross_entropy),
        GraphError,
        r"loss is f32\[10\] .* take its mean",
    ),
    "loss is a number": (
        lambda: train(loss=lambda y, t: 1.0),
        GraphError,
        "loss is float but must be one number",
    ),
    "optimizer by name": (
        lambda: train(optimizer="adam"),
        GraphError,
        "optimizer is 'adam' but must be an obj",
    ),
    "optimizer is a class": (lambda: train(optimizer=optim.Adam), GraphError, "optimizer is the class Adam"),
    "rate as text": (lambda: optim.Adam("1e-3"), GraphError, "lr of Adam is '1e-3' but must be 0 or more"),
    "metric by name": (
        lambda: train(metrics=["accuracy"]),
        GraphError,
        r"metrics\[0\] is 'accuracy' but must",
    ),
    "metric of a vector": (
        lambda: train(metrics=[lambda y, t: t]),
        GraphError,
        r"i32\[10\] but must be one num",
    ),
    "metric of nothing": (
        lambda: train(metrics={"m": lambda y, t: None}),
        GraphError,
        "metric m is NoneType",
    ),
    "schedule unknown": (
        lambda: dg.Strategy(schedule="zb"),
        ShardingError,
        "'zb' of Strategy does not exist; the",
    ),
    "strategy by name": (
        lambda: train(strategy="semi"),
        GraphError,
        "strategy is 'semi' but must be an object",
    ),
    "cluster unknown": (
        lambda: train(cluster="nosuch"),
        ResourceError,
        "nosuch: neither a file nor a shipped",
    ),
    "cluster by size": (lambda: train(cluster=4), ResourceError, "cluster is 4 but must be a Cluster"),
    "seed as text": (lambda: train(seed="a"), GraphError, "seed is 'a' but must be an integer"),
    # models
    "if of a tensor": (
        lambda: train(layer(lambda s, x: s.l(x) if x.mean() > 0 else x)),
        GraphError,
        "is traced: its number is not known yet; use dg.ops.where",
    ),
    "NumPy without rule": (
        lambda: train(layer(lambda s, x: s.l(np.fft.fft(x)))),
        GraphError,
        "numpy.fft.fft does not trace; compose it from",
    ),
    "method of torch": (
        lambda: train(layer(lambda s, x: s.l(x.view(-1)))),
        GraphError,
        "Tensor has no 'view'; use a function of distgraph.ops",
    ),
    "tensor written to": (
        lambda: train(layer(lambda s, x: x.__setitem__(0, 1))),
        GraphError,
        "Tensor is never written to",
    ),
    "forward without return": (
        lambda: train(layer(lambda s, x: None)),
        GraphError,
        "model Written returned None .* may lack a return",
    ),
    "no forward": (lambda: train(nn.Module()), GraphError, "Module does not define forward"),
    "no super().__init__": (
        lambda: train(NoInit()),
        GraphError,
        r"NoInit has no 'weight'.*super\(\).__init__",
    ),
    "list in Sequential": (
        lambda: nn.Sequential([nn.ReLU()]),
        GraphError,
        r"Sequential is a list.*\*modules",
    ),
    "negative width": (lambda: nn.Linear(-2, 3), GraphError, r"\(-2, 3\) but must be numbers from 0 up"),
    "heads do not divide": (
        lambda: nn.MultiHeadAttention(10, 3),
        GraphError,
        "width 10, heads 3 .* multiple of",
    ),
    "nothing to learn": (lambda: train(nn.ReLU()), GraphError, "no trainable parameter"),
    # data
    "shape mismatch": (
        lambda: train(data=(X[:, :5], Y)),
        GraphError,
        "k is 5 in the left operand but 6 in the",
    ),
    "dtype mismatch": (
        lambda: train(data=(X.astype("f8"), Y)),
        GraphError,
        r"f64\[10, 6\] but operand 1 is f32",
    ),
    "targets of two dims": (
        lambda: train(data=(X, Y[:, None])),
        GraphError,
        r"want one label a row, \(10,\)",
    ),
    "targets not integer": (
        lambda: train(data=(X, X[:, 0])),
        GraphError,
        "labels are f32.* must be integers",
    ),
    "targets too large": (
        lambda: train(data=(X, Y + 3)),
        RuntimeFault,
        "label 5 is outside the 3 classes 0..2",
    ),
    "ids not integer": (lambda: train(IDS, data=(X[:, 0], Y)), GraphError, "positions must be integers"),
    "ids too large": (lambda: train(IDS, data=(Y + 8, Y)), RuntimeFault, "position 10 is outside 0..9"),
    "no data": (lambda: train(data=None), RuntimeFault, "data is None; pass arrays"),
    "no targets": (lambda: train(data=X), GraphError, "no target but the loss needs one"),
    "no samples": (lambda: train(data=(X[:0], Y[:0])), RuntimeFault, "0 samples; there is nothing to do"),
    "arrays of objects": (
        lambda: train(data=(X.astype(object), Y)),
        RuntimeFault,
        r"batch\.0: dtype.*asarray",
    ),
    "batch of nothing": (
        lambda: train(fit_batch_size=0),
        RuntimeFault,
        "batch_size is 0 but must be a number fr",
    ),
    "batch as text": (
        lambda: train(fit_batch_size="4"),
        RuntimeFault,
        "batch_size is '4' but must be a number",
    ),
    "batch < micro_batches": (
        lambda: train(strategy=dg.Strategy(micro_batches=4), fit_batch_size=2),
        GraphError,
        "batch_size is 2 but micro_batches of the strategy is 4",
    ),
    "negative epochs": (
        lambda: train(fit_epochs=-1),
        RuntimeFault,
        "epochs is -1 but must be a number from 0 up",
    ),
    "callback is a class": (
        lambda: train(fit_callbacks=[Callback]),
        RuntimeFault,
        r"\[0\] is the class Callback",
    ),
    "callback, no list": (
        lambda: train(fit_callbacks=Callback()),
        RuntimeFault,
        "must be a list of callbacks",
    ),
    "loss is nan": (lambda: train(data=(NAN, Y)), RuntimeFault, "loss is nan in step [12] .*; lower lr"),
    "predict another shape": (
        lambda: train().predict(X[:, :4]),
        GraphError,
        "k is 4 in the left operand but 6",
    ),
    # checkpoints
    "save before there is anything": (
        lambda: dg.Engine(nn.ReLU()).save("checkpoint"),
        RuntimeFault,
        "engine has no parameters yet",
    ),
    "load nothing": (lambda: train().load("nosuch"), RuntimeFault, "checkpoint nosuch has no index.json"),
    **{
        f"load {path!a}": (lambda path=path: train().load(path), RuntimeFault, message)
        for path, message in (
            (None, "checkpoint path is None but must be the path of a directory; give a text"),
            (b"x", "checkpoint path is b'x' but must be the path of a directory"),
            (5, "checkpoint path is 5 but must be the path of a directory"),
            ("", 'checkpoint path is "" but must be that of a directory'),
            ("\0", r"checkpoint '.x00' cannot be read: embedded null character; choose another"),
            ("\ud800", r"checkpoint '.ud800' cannot be read: .*; choose another"),
            ("a\n", r"checkpoint 'a.n' has no index.json"),
        )
    },
    "save nowhere": (lambda: train().save(""), RuntimeFault, 'checkpoint path is "" but must be that of a'),
    "save to None": (
        lambda: train().save(None),
        RuntimeFault,
        "checkpoint path is None but must be the path",
    ),
    "save below a file": (
        lambda: train().save(f"{__file__}/a/b"),
        RuntimeFault,
        r"a/b cannot be written: .*test_bad_input.py is a file; choose another directory",
    ),
    "save to what nobody writes": (
        lambda: train().save("/proc/sys/checkpoint"),
        RuntimeFault,
        "folder .*/proc/sys/checkpoint cannot be made: .*; choose another|/proc/sys takes no new files",
    ),
    "save to a folder that cannot be made": (
        lambda: train().save("/proc/x"),
        RuntimeFault,
        "checkpoint /proc/x cannot be written: (the folder /proc/x cannot be made|/proc takes no).*; choose",
    ),
    "save to a long name": (
        lambda: train().save("x" * 300),
        RuntimeFault,
        "cannot be written: File name too long; choose another",
    ),
    "save to a name with NUL": (
        lambda: train().save("a\0b"),
        RuntimeFault,
        r"'a.x00b' cannot be written: embedded null",
    ),
    "save into a file": (
        lambda: train().save(__file__),
        RuntimeFault,
        "checkpoint .*test_bad_input.py cannot be written: it is a file; choose another directory",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_in_one_process(mistake: str) -> None:
    call, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        call()


def test_what_is_no_mistake(tmp_path: Path) -> None:
    """Predicting before fitting, no epochs, a large batch, a shared parameter: all of it has a meaning."""
    engine = dg.Engine(nn.Linear(6, 3), nn.CrossEntropy(), optim.Adam(1e-3))
    assert engine.predict(X).shape == (20, 3)
    assert engine.fit((X, Y), epochs=0, progress=False).losses == []
    assert len(engine.fit((X, Y), batch_size=64, progress=False).losses) == 1
    if engine.is_chief:  # one process drives all ranks: what it calls, all of them do
        engine.save(tmp_path)
    assert Checkpoint.open(tmp_path).index["step"] == 1
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    tied.steps[1].weight = tied.steps[0].weight  # type: ignore[attr-defined]
    assert len([name for name in train(tied).memory.records if name.endswith("weight")]) == 2


def test_checkpoints_of_a_model_gone_nan_are_not_written(tmp_path: Path) -> None:
    """The first epoch is saved; the nan of the second ends training before it could replace that."""

    class Poison(Callback):
        def on_epoch_begin(self, engine: Any, epoch: int, batches: int) -> None:
            if epoch == 1:
                engine.memory.block("weight", 0)[:] = np.nan

    with pytest.raises(RuntimeFault, match=r"loss is nan in step 3 \(epoch 1"):
        train(fit_epochs=3, fit_callbacks=[Poison(), ModelCheckpoint(tmp_path)])
    assert np.isfinite(Checkpoint.open(tmp_path).read("weight")).all()


# Scripts on two MPI ranks
# ------------------------------------------------------------------------------------------------------

needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
PREAMBLE = """
import os, resource, signal, sys
import numpy as np
import distgraph as dg
from distgraph import nn, optim
from distgraph.engine.callbacks import Callback
from distgraph.runtime.launch.launch import current_transport

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
        "batch_size is 10 but micro_batches of the strategy is 4; make one a multiple of the other",
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
