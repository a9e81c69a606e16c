"""Steps whose loss or gradients are nan or infinite: they end training, are left out, or are warned of; they
never reach parameters, states and checkpoints unnoticed."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs.overflowing import batch, engine, loss
from support.programs.training import INPUTS, LAYOUTS, OUTPUTS

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine.callbacks import Callback, CSVLogger, ModelCheckpoint
from distgraph.errors import NonFiniteError, ShardingError
from distgraph.optim import shard_states
from distgraph.runtime.execute.checkpoint import Checkpoint, files
from distgraph.runtime.execute.finite_check import all_finite

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow):RuntimeWarning")


def contents(trained: dg.Engine) -> dict[tuple[str, int], bytes]:
    records = trained.memory.records
    return {
        (n, r): trained.memory.block(n, r).tobytes() for n in records for r in records[n].attr.mesh.members
    }


def rows_of(*kinds: str) -> tuple[np.ndarray, np.ndarray]:
    """Batches one after the other."""
    parts = [batch(kind) for kind in kinds]
    return np.concatenate([x for x, _ in parts]), np.concatenate([t for _, t in parts])


@pytest.mark.parametrize(("bad", "clip"), [("gradient", None), ("gradient", 1.0), ("loss", None)])
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize(
    ("layout", "micro"), [("serial", 1), ("dp3", 2), ("dp2tp2", 1), ("pp1_3", 3), ("dp2pp2", 2)]
)
def test_parameters_stay_those_of_before_the_step(
    layout: str, micro: int, policy: str, bad: str, clip: float | None
) -> None:
    trained = engine(layout, policy, micro, optimizer=optim.Adam(lr=0.01, clip_norm=clip))
    untouched = engine(layout, policy, micro, optimizer=optim.Adam(lr=0.01, clip_norm=clip))
    trained.run(batch()), untouched.run(batch())
    before = contents(trained)
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=r" in step 2 .*; the step was not applied"):
            trained.run(batch(bad))
        assert (trained.step, trained.history.skipped) == (1, [])
    else:
        trained.run(batch(bad))
        assert (trained.step, trained.history.skipped) == (2, [2])
    assert contents(trained) == before
    trained.run(batch()), untouched.run(batch())  # and goes on as if the bad step had not been
    assert contents(trained) == contents(untouched)


@pytest.mark.parametrize("layout", ["serial", "dp2tp2", "pp2"])
def test_error_names_loss_parameter_and_ranks(layout: str) -> None:
    trained = engine(layout)
    with pytest.raises(NonFiniteError) as caught:
        trained.run(batch("gradient"))
    message = str(caught.value)
    ranks = {"serial": "rank 0", "dp2tp2": "ranks 0, 1, 2, 3", "pp2": "rank 0"}[layout]
    assert "loss is" not in message
    assert message.startswith("gradient of up.weight (and of 3 more) is not finite in step 1 in ")
    assert f" values on {ranks}; the step was not applied" in message
    assert "lower lr, set clip_norm of the optimizer, look for nan in the data, or leave" in message
    with pytest.raises(NonFiniteError, match=r"^loss is inf in step 1 and gradient of "):
        trained.run(batch("loss"))


def test_fit_stops_at_an_infinite_loss_and_says_where() -> None:
    trained = engine()
    with pytest.raises(NonFiniteError, match=r"^loss is inf in step 2 \(epoch 0, samples from 12\)"):
        trained.fit(rows_of("", "loss"), batch_size=12, shuffle=False, progress=False)
    assert len(trained.history.losses) == trained.step == 1
    assert trained.position == 12


def test_skipped_steps_are_counted_and_left_out_of_means(tmp_path: Path) -> None:
    trained = engine(policy="skip")
    log = CSVLogger(tmp_path / "log.csv")
    data = rows_of("", "gradient", "", "loss")
    history = trained.fit(data, epochs=2, batch_size=12, shuffle=False, callbacks=[log], progress=False)
    assert history.skipped == [2, 4, 6, 8]
    assert history["skipped_steps"] == [2.0, 2.0]
    counted = [history.losses[0], history.losses[2]]
    assert history["loss"][0] == pytest.approx(np.mean(counted))
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [row["skipped_steps"] for row in rows] == ["2.0", "2.0"]


def test_skipped_steps_survive_a_checkpoint(tmp_path: Path) -> None:
    data = rows_of("", "gradient", "", "", "gradient", "")
    whole, parts = engine(policy="skip"), engine(policy="skip")
    whole.fit(data, epochs=1, batch_size=12, shuffle=False, progress=False)

    class Stop(Callback):
        def on_batch_end(self, engine: Any, step: int, logs: Any) -> None:
            engine.should_stop = step == 3

    parts.fit(data, epochs=1, batch_size=12, shuffle=False, callbacks=[Stop()], progress=False)
    parts.save(tmp_path)
    again = engine(policy="skip")
    again.load(tmp_path)
    again.fit(data, epochs=1, batch_size=12, shuffle=False, resume=True, progress=False)
    assert again.history == whole.history
    assert contents(again) == contents(whole)


def test_an_epoch_of_skipped_steps_only_ends_training() -> None:
    with pytest.raises(NonFiniteError, match=r"all 2 steps of epoch 0 were skipped because"):
        engine(policy="skip").fit(rows_of("gradient", "loss"), batch_size=12, shuffle=False, progress=False)


@pytest.mark.parametrize("layout", ["serial", "dp2tp2"])
def test_warn_trains_on_and_says_so_once(layout: str) -> None:
    trained = engine(layout, "warn")
    with pytest.warns(
        RuntimeWarning, match=r"gradient of up.weight .* in step 1 .*; Strategy\(nonfinite=\"warn\"\)"
    ):
        trained.run(batch("gradient"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "gradient of|loss is")
        trained.run(batch())
    assert trained.step == 2
    assert np.isnan(trained.memory.block("up.weight", 0)).all()


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_states_split_over_ranks(axis: str) -> None:
    """With ZeRO every rank updates a shard of its own, so the ranks have to agree."""
    mesh = dg.ProcessMesh.grid(dp=2, tp=2)
    trained = engine("dp2tp2", "skip", 2, optimizer=optim.Adam(lr=0.01, state_spec=shard_states(mesh, axis)))
    trained.run(batch())
    before = contents(trained)
    trained.run(batch("gradient"))
    assert contents(trained) == before


def test_running_statistics_stay_too() -> None:
    """Buffers that the forward part updates are those of before the step as well."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            self.up, self.norm = nn.Linear(INPUTS, OUTPUTS, dtype="f64"), nn.BatchNorm2d(OUTPUTS, dtype="f64")

        def forward(self, x: Any) -> Any:
            return self.norm(self.up(x))

    trained = dg.Engine(Normed(), loss, optim.SGD(lr=0.1), strategy=dg.Strategy(nonfinite="skip"))
    trained.run(batch())
    before = contents(trained)
    assert any(name == "norm.running_mean" for name, _ in before)
    trained.run(batch("data"))
    assert contents(trained) == before


def test_tied_parameter_of_two_stages() -> None:
    """Its gradient is a sum over two meshes, taken once a step, before the check."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            self.up = nn.Linear(INPUTS, INPUTS, dtype="f64", bias=False)
            self.down = nn.Linear(INPUTS, OUTPUTS, dtype="f64")

        def forward(self, x: Any) -> Any:
            hidden = ops.tanh(self.up(dg.shard_tensor(x, dg.ProcessMesh.grid(dp=2), ["dp", None])))
            with dg.on(dg.ProcessMesh.grid(2, dp=1)):
                return self.down(self.up(hidden))

    strategy = dg.Strategy(nonfinite="skip", micro_batches=2)
    trained = dg.Engine(Tied(), loss, optim.SGD(lr=0.1, momentum=0.9), strategy=strategy)
    trained.run(batch())
    before = contents(trained)
    trained.run(batch("gradient"))
    assert contents(trained) == before
    assert np.isfinite(trained.run(batch())["loss"])


def test_large_finite_gradients_are_no_fault() -> None:
    """The sum of their squares overflows f32; the exact look that follows tells that from an infinity."""
    assert all_finite(np, np.full(5, 1e30, "f4"))
    assert not all_finite(np, np.array([1e30, np.inf], "f4"))
    assert all_finite(np, np.full(5, 6e4, "f2"))
    model = nn.Linear(2, 1, dtype="f4")
    trained = dg.Engine(model, lambda out, target: ops.mean(out * target), optim.SGD(lr=1e-30))
    trained.run((np.full((4, 2), 1e15, "f4"), np.full((4, 1), 1e10, "f4")))
    assert trained.step == 1


def test_newest_good_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    trained = engine("dp2tp2", "warn")
    trained.run(batch())
    trained.save(tmp_path)
    with pytest.warns(RuntimeWarning, match="gradient of"):
        trained.run(batch("gradient"))
    with pytest.raises(
        NonFiniteError, match=r"is not written: param down.bias is not finite in 3 of 3 values on rank"
    ):
        trained.save(tmp_path)
    assert Checkpoint.open(tmp_path).index["step"] == 1
    trained.load(tmp_path)
    trained.run(batch())
    trained.save(tmp_path)
    assert Checkpoint.open(tmp_path).index["step"] == 2


def test_checkpoints_under_warn_are_left_out_with_a_warning(tmp_path: Path) -> None:
    trained = engine(policy="warn")
    saving = ModelCheckpoint(tmp_path, every_steps=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained.fit(rows_of("", "gradient"), batch_size=12, shuffle=False, callbacks=[saving], progress=False)
    assert any("is not written: param " in str(each.message) for each in said)
    assert Checkpoint.open(tmp_path).index["step"] == 1


def test_a_mask_of_infinities_may_be_saved(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            self.up, self.mask = nn.Linear(INPUTS, OUTPUTS, dtype="f64"), nn.Buffer((OUTPUTS,), "f64")

        def forward(self, x: Any) -> Any:
            return self.up(x) + 0.0 * ops.maximum(self.mask, 0.0)

    trained = dg.Engine(Masked(), loss, optim.SGD(lr=0.1))
    trained.run(batch())
    trained.memory.block("mask", 0)[:] = -np.inf
    trained.save(tmp_path)
    trained.memory.block("mask", 0)[:] = np.nan
    with pytest.raises(NonFiniteError, match="state mask"):
        trained.save(tmp_path)


def test_a_save_fetches_every_block_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = engine("dp2tp2")
    trained.run(batch())
    fetched: list[str] = []
    fetch = trained.memory.block

    def block(name: str, rank: int) -> np.ndarray:
        fetched.append(name)
        return fetch(name, rank)

    monkeypatch.setattr(trained.memory, "block", block)
    trained.save(tmp_path)
    shards = [s for tensor in Checkpoint.open(tmp_path).contents.tensors.values() for s in tensor.shards]
    assert len(fetched) == len(shards)


def test_a_refused_save_counts_the_whole_block_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PAGE", 64)  # the bad values are in two pages behind the first
    trained = engine("dp2tp2")
    trained.run(batch())
    weight = trained.memory.records["up.weight"]
    for rank in weight.attr.mesh.members:
        block = trained.memory.block("up.weight", rank).reshape(-1)
        block[-1], block[-9] = np.nan, np.inf
    with pytest.raises(
        NonFiniteError, match=rf"param up.weight is not finite in 2 of {block.size} values on rank"
    ):
        trained.save(tmp_path / "new" / "checkpoint")
    assert not (tmp_path / "new" / "checkpoint").exists()
    with pytest.raises(NonFiniteError):
        trained.save(tmp_path)  # a folder that was there before stays
    assert {each.name for each in tmp_path.iterdir()} <= {".lock", "new"}


def test_policy_is_checked() -> None:
    with pytest.raises(
        ShardingError, match=r"nonfinite 'stop' of Strategy does not exist; it is one of raise, skip, warn"
    ):
        dg.Strategy(nonfinite="stop")


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_where_ranks_hold_the_same_gradients_they_need_not_agree(layout: str) -> None:
    trained = engine(layout)
    trained.run(batch())
    (compiled,) = trained._session.programs.values()
    controls = {worker.check.guard.control for worker in compiled.workers.values() if worker.check}
    assert (controls == {None}) == (layout in ("serial", "dp3"))


def test_ranks_with_the_same_gradients_read_disjoint_parts_that_cover_them() -> None:
    mesh = dg.ProcessMesh.grid(dp=2)

    class Wide(nn.Module):
        def __init__(self) -> None:
            self.fc = nn.Linear(601, 501)  # more than 1 MiB: the ranks share the reading

        def forward(self, x: dg.Tensor, t: dg.Tensor) -> dg.Tensor:
            return ops.mean((self.fc(dg.shard_tensor(x, mesh, ["dp", None])) - t) ** 2)

    trained = dg.Engine(Wide(), optimizer=optim.SGD(lr=0.01), strategy=dg.Strategy(mesh=mesh))
    rng = np.random.default_rng(0)
    trained.run((rng.random((4, 601), "f4"), rng.random((4, 501), "f4")))
    (program,) = trained._session.programs.values()
    checks = [program.workers[rank].check for rank in range(2)]
    assert all(check is not None and check.guard.control is not None for check in checks)
    readers = {}
    for position in (0, 150_000, 150_550, 301_100):
        for check in checks:
            (block,) = (block for label, block in check._blocks if label == "gradient of fc.weight")
            block.reshape(-1)[position] = np.nan
        readers[position] = [
            rank for rank, check in enumerate(checks) if not check.local_verdict(lambda block: None)
        ]
        for check in checks:
            for _, block in check._blocks:
                block.reshape(-1)[...] = 0
    assert readers == {0: [0], 150_000: [0], 150_550: [1], 301_100: [1]}


@pytest.mark.parametrize("micro", [1, 2])
def test_a_rank_reads_its_part_of_gradients_that_it_keeps_whole(micro: int) -> None:
    """Under ZeRO-1 the rest of the memory holds sums of its own that are not reduced; others read those."""

    class Square(nn.Module):
        def __init__(self) -> None:
            self.fc = nn.Linear(12, 12)

        def forward(self, x: dg.Tensor, t: dg.Tensor) -> dg.Tensor:
            return ops.mean((self.fc(x) - t) ** 2)

    strategy = dg.Strategy(
        mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp", zero=1, micro_batches=micro, nonfinite="skip"
    )
    trained = dg.Engine(Square(), optimizer=optim.Adam(lr=0.01), strategy=strategy)
    rng = np.random.default_rng(0)
    x, t = rng.random((4, 12), "f4"), rng.random((4, 12), "f4")
    trained.run((x, t))
    (program,) = trained._session.programs.values()
    workers = [program.workers[rank] for rank in range(2)]
    for worker in workers:
        assert worker.check is not None
        sizes = {label: block.size for label, block in worker.check._blocks}
        assert (sizes["gradient of fc.weight"], sizes["gradient of fc.bias"]) == (72, 6)
    x[:, 0] = np.inf  # makes row 0 of the weight's gradient infinite, which is a part of rank 0
    trained.run((x, np.nan_to_num(t)))
    assert all(worker.check is not None and not worker.check.passed for worker in workers)


@pytest.mark.parametrize(("rows", "columns"), [(3, 6), (5, 7)])
def test_a_part_of_a_part_of_a_gradient_is_read(rows: int, columns: int) -> None:
    """A rank reduces its row of a weight's gradient over tp and, for states split over dp, half of that row:
    both stay in the memory of the whole gradient. Of five rows only two ranks have one alone."""
    rng, losses = np.random.default_rng(0), []
    x, t = rng.random((24, rows)), rng.random((24, columns))
    mesh = dg.ProcessMesh.grid(dp=2, tp=3)
    split = dg.Strategy(mesh=mesh, batch_axis=("dp", "tp"), micro_batches=2, nonfinite="skip")
    for strategy in (None, split):
        layer = nn.Linear(rows, columns, bias=False, dtype="f64")
        states = None
        if strategy is not None:
            dg.shard_tensor(layer.weight, axes=["tp", None])
            states = shard_states(mesh, "dp")
        optimizer = optim.Adam(lr=0.01, state_spec=states)
        trained = dg.Engine(layer, nn.MeanSquaredError(), optimizer, strategy=strategy, seed=1)
        losses.append([trained.run((x, t))["loss"] for _ in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-12)
    (program,) = trained._session.programs.values()
    checks = [program.workers[rank].check for rank in range(6)]
    sizes = [check._blocks[0][1].size for check in checks if check is not None]
    assert sum(sizes) == rows * columns
    last = checks[5]
    assert last is not None
    last._blocks[0][1][0, -1] = np.nan
    verdicts = [check.local_verdict(lambda block: None) for check in checks if check is not None]
    assert verdicts == [True] * 5 + [False]
