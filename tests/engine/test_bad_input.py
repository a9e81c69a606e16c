"""What users get wrong in one process: each mistake ends in one message of ours and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import callbacks, nn, ops, optim
from distgraph.engine.callbacks import Callback, ModelCheckpoint
from distgraph.errors import DistGraphError, GraphError, ResourceError, RuntimeFault, ShardingError
from distgraph.runtime.execute.checkpoint import Checkpoint

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
    "masked data": (
        lambda: train(data=(np.ma.masked_array(X, X > 1), Y)),
        RuntimeFault,
        "data field batch.0 is a masked array but masks are not kept; fill it",
    ),
    "masked constant": (
        lambda: dg.trace(lambda x: x + np.ma.masked_array([1.0, 2.0], [True, False]), X),
        GraphError,
        "constant is a masked array",
    ),
    "bounds of clip in the wrong order": (
        lambda: dg.trace(lambda x: ops.clip(x, 2, 1), X),
        GraphError,
        "clip has the bounds 2 and 1 but low must not be above high",
    ),
    "two callbacks write one file": (
        lambda: train(fit_callbacks=[callbacks.CSVLogger("a.csv"), callbacks.CSVLogger("./a.csv")]),
        RuntimeFault,
        r"callbacks CSVLogger and CSVLogger both write a.csv; give each a path of its own",
    ),
    "metric with the name of an epoch's number": (
        lambda: train(metrics={"epoch": lambda o, t: o.mean()}),
        GraphError,
        "a metric is named 'epoch' but a history uses that name",
    ),
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
    "rate as text": (
        lambda: optim.Adam("1e-3"),
        GraphError,
        "lr of Adam is '1e-3' but must be a number of at least 0 or a function",
    ),
    "rate of None": (lambda: optim.Adam(lr=None), GraphError, "lr of Adam is None but must be a number"),
    "rate that is true": (lambda: optim.SGD(lr=True), GraphError, "lr of SGD is True but must be a number"),
    "rate of a schedule": (
        lambda: train(optimizer=optim.SGD(lr=lambda step: float("nan"))),
        GraphError,
        "lr after step 0 of SGD is nan but must be a number of at least 0",
    ),
    "moment of 1": (
        lambda: optim.Adam(beta1=1),
        GraphError,
        "beta1 of Adam is 1 but must be a number of at least 0 and below 1",
    ),
    "eps below 0": (
        lambda: optim.AdamW(eps=-1),
        GraphError,
        "eps of AdamW is -1 but must be a number",
    ),
    "decay as text": (
        lambda: optim.Adam(weight_decay="x"),
        GraphError,
        "weight_decay of Adam is 'x' but must",
    ),
    "momentum below 0": (
        lambda: optim.SGD(momentum=-1),
        GraphError,
        "momentum of SGD is -1 but must be a nu",
    ),
    "nesterov without momentum": (lambda: optim.SGD(nesterov=True), GraphError, "but momentum is 0; give a"),
    "clip of 0": (
        lambda: optim.Adafactor(clip=0),
        GraphError,
        "clip of Adafactor is 0 but must be a number ab",
    ),
    "norm of 0": (
        lambda: optim.SGD(clip_norm=0),
        GraphError,
        "clip_norm of SGD is 0 but must be a number ab",
    ),
    "decays of a number": (
        lambda: optim.SGD(decays=3),
        GraphError,
        "decays of SGD is 3 but must be a function",
    ),
    "layouts of a number": (
        lambda: optim.SGD(state_spec=3),
        GraphError,
        "state_spec of SGD is 3 but must be a",
    ),
    "checkpoints by epochs and steps": (
        lambda: callbacks.ModelCheckpoint("c", every=2, every_steps=3),
        RuntimeFault,
        "every is 2 epochs but every_steps is 3; leave one out",
    ),
    "log at a number": (
        lambda: callbacks.CSVLogger(3),
        RuntimeFault,
        "path of CSVLogger is 3 but",
    ),
    "timeline at None": (
        lambda: callbacks.Timeline(None),
        RuntimeFault,
        "path of Timeline is None but",
    ),
    "board at a number": (
        lambda: callbacks.TensorBoard(3),
        RuntimeFault,
        "directory of TensorBoard is 3",
    ),
    "monitor of a number": (
        lambda: callbacks.EarlyStopping(3),
        RuntimeFault,
        "monitor of EarlyStopping is 3 but must be text",
    ),
    "batch axis of a number": (
        lambda: dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis=3),
        ShardingError,
        "batch_axis of Strategy is 3 but must be text",
    ),
    "no batch axis": (
        lambda: dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis=[]),
        ShardingError,
        r"batch_axis of Strategy is \[\] but must be the name of an axis, or several",
    ),
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
    "seed of 70 bits": (lambda: train(seed=2**70), GraphError, "seed is .* must fit into 64 bits; use"),
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
    "negative width": (
        lambda: nn.Linear(-2, 3),
        GraphError,
        r"inputs of Linear is -2 but must",
    ),
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
    "ids too large": (
        lambda: train(IDS, data=(Y + 8, Y)),
        RuntimeFault,
        "op %0 embedding .*: position 10 is outside",
    ),
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
        "batch_size of fit is 0 but must be an integer",
    ),
    "batch as text": (
        lambda: train(fit_batch_size="4"),
        RuntimeFault,
        "batch_size of fit is '4' but must be an integer",
    ),
    "batch < micro_batches": (
        lambda: train(strategy=dg.Strategy(micro_batches=4), fit_batch_size=2),
        GraphError,
        "batch_size is 2 but micro_batches is 4, which does not divide it",
    ),
    "negative epochs": (
        lambda: train(fit_epochs=-1),
        RuntimeFault,
        "epochs of fit is -1 but must be an integer of at least 0",
    ),
    "callback is a class": (
        lambda: train(fit_callbacks=[Callback]),
        RuntimeFault,
        r"callbacks of fit is \[the class Callback\] but must be a list \(each item: a Callback\)",
    ),
    "callback, no list": (
        lambda: train(fit_callbacks=Callback()),
        RuntimeFault,
        r"must be a list \(each item: a Callback\)",
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
            (None, "path of load is None but must be text or a path"),
            (b"x", "path of load is a bytes but must be text or a path"),
            (5, "path of load is 5 but must be text or a path"),
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
        "path of save is None but must be text or a path",
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


def test_an_id_out_of_range_is_reported_with_its_op_while_steps_are_recorded() -> None:
    engine = dg.Engine(IDS, nn.CrossEntropy(), optim.SGD(lr=0.1))
    engine.prepare((Y, Y))
    engine.start_recording()
    with pytest.raises(RuntimeFault, match=r"rank 0 forward\.s0, op %0 embedding .*: position 10 is outside"):
        engine.run((Y + 8, Y))
