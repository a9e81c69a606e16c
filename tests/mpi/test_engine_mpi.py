"""The engine on every rank of `mpiexec -n 2 python -m pytest tests/mpi`; or 4."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs import adaptive_program
from support.programs.training import LAYOUTS, data, engine

from distgraph.engine import Engine
from distgraph.engine.callbacks import Adapt, ModelCheckpoint, Timeline, adapt
from distgraph.engine.data import whole
from distgraph.errors import ResourceError, RuntimeFault
from distgraph.runtime.execute.checkpoint import Checkpoint
from distgraph.runtime.execute.measured_timeline import MeasuredTimeline
from distgraph.runtime.launch.mpi_rank import current_transport
from distgraph.runtime.transport.mpi import MpiTransport

pytestmark = pytest.mark.mpi
RANKS = {
    name: 1 if first is None else max(first.members + second.members) + 1
    for name, (first, second) in LAYOUTS.items()
}


@pytest.fixture
def transport() -> MpiTransport:
    found = current_transport()
    assert found is not None
    found.barrier()
    return found


@pytest.fixture
def shared(transport: MpiTransport) -> Any:
    """A directory that all ranks see."""
    with tempfile.TemporaryDirectory() as mine:
        yield Path(transport.broadcast_object(mine, 0))
        transport.barrier()


def fitting(transport: MpiTransport) -> list[str]:
    return [name for name, ranks in RANKS.items() if 1 < ranks <= transport.size]


def test_losses_equal_serial_on_every_rank(transport: MpiTransport) -> None:
    """The serial one runs on rank 0, and the others learn its losses."""
    x, y = data(50)
    metrics = {"accuracy": lambda logits, labels: (logits.argmax(-1) == labels).astype("f64").mean()}
    serial = engine(dropout=0.3, metrics=metrics)
    serial.fit((x, y), epochs=2, batch_size=16, valid_data=data(10, seed=9), progress=False)
    for layout in fitting(transport):
        for micro in (1, 4):
            trained = engine(layout, dropout=0.3, micro=micro, metrics=metrics)
            trained.fit((x, y), epochs=2, batch_size=16, valid_data=data(10, seed=9), progress=False)
            np.testing.assert_allclose(trained.history.losses, serial.history.losses, rtol=1e-10)
            np.testing.assert_allclose(
                trained.history["valid_loss"], serial.history["valid_loss"], rtol=1e-10
            )
            everyone = transport.gather_objects(trained.history.epochs, 0)
            assert everyone is None or all(epochs == everyone[0] for epochs in everyone)


def test_predictions_are_whole_on_every_rank(transport: MpiTransport) -> None:
    x, y = data(23)
    serial = engine()
    serial.fit((x, y), batch_size=8, progress=False)
    wanted = serial.predict(x, batch_size=10)
    assert wanted.shape == (23, 3)
    for layout in fitting(transport):
        trained = engine(layout)
        trained.fit((x, y), batch_size=8, progress=False)
        np.testing.assert_allclose(trained.predict(x, batch_size=10), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_resume_is_bit_for_bit(transport: MpiTransport, shared: Path, asynchronous: bool) -> None:
    x, y = data(22)
    for layout in fitting(transport):
        through = engine(layout, dropout=0.3)
        through.fit((x, y), epochs=3, batch_size=8, progress=False)
        stopped = engine(layout, dropout=0.3)
        saver = ModelCheckpoint(shared / layout, every_steps=5, asynchronous=asynchronous)
        stopped.fit((x, y), epochs=2, batch_size=8, callbacks=[saver], progress=False)
        resumed = engine(layout, dropout=0.3)
        resumed.load(shared / layout)
        resumed.fit((x, y), epochs=3, batch_size=8, resume=True, progress=False)
        assert resumed.history.losses == through.history.losses
        fewer = engine(dropout=0.3)
        fewer.load(shared / layout)
        fewer.fit((x, y), epochs=3, batch_size=8, resume=True, progress=False)
        np.testing.assert_allclose(fewer.history.losses, through.history.losses, rtol=1e-10)


def save_and_train(trained: Engine, path: Path, asynchronous: bool) -> None:
    """Ends at the first step after a rank could not write."""
    trained.save(path, asynchronous=asynchronous)
    while True:
        trained.run(next(iter(trained.dataloader(data(8), 8))))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_rank_cannot_write(
    transport: MpiTransport, shared: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Every rank gets the error, and the previous checkpoint is whole."""
    trained = engine("tp2")
    trained.fit(data(8), batch_size=8, progress=False)
    trained.save(shared / "ckpt")
    before = Checkpoint.open(shared / "ckpt").index
    transport.barrier()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    if transport.rank == 1:
        monkeypatch.setattr("distgraph.runtime.execute.checkpoint.writing.write_blocks", full)
    with pytest.raises(RuntimeFault, match=r"rank 1: step-.*No space left on device"):
        save_and_train(trained, shared / "ckpt", asynchronous)
    transport.barrier()
    checkpoint = Checkpoint.open(shared / "ckpt")
    assert checkpoint.index == before
    assert checkpoint.read("up.weight").shape == (6, 10)


def test_mesh_larger_than_the_job(transport: MpiTransport) -> None:
    too_large = next((name for name, ranks in RANKS.items() if ranks > transport.size), None)
    if too_large is None:
        pytest.skip(f"every layout fits on {transport.size} ranks")
    with pytest.raises(
        ResourceError, match=f"needs {RANKS[too_large]} ranks but the MPI job has {transport.size}"
    ):
        engine(too_large).fit(data(16), batch_size=16, progress=False)


@pytest.mark.parametrize("layout", ["pp2", "dp2pp2"])
def test_a_timeline_has_all_ranks_and_one_file(transport: MpiTransport, shared: Path, layout: str) -> None:
    """Every process learns what ran on all ranks; rank 0 writes it; training is as without it."""
    if layout not in fitting(transport):
        pytest.skip(f"{layout} needs {RANKS[layout]} ranks")
    trained, plain = engine(layout, micro=2), engine(layout, micro=2)
    path = shared / "timeline.json"
    callback = Timeline(path, after=1, steps=2)
    trained.fit(data(24), batch_size=6, callbacks=[callback], progress=False)
    plain.fit(data(24), batch_size=6, progress=False)
    assert trained.history.losses == plain.history.losses
    transport.barrier()
    found = MeasuredTimeline.read(path)
    assert [step.number for step in found.steps] == [2, 3]
    compiled = trained._session.program("train", whole((data(24)[0][:6], data(24)[1][:6])))
    for step in found.steps:
        assert sorted(step.ranks) == list(compiled.build.ranks)
        for rank, did in step.ranks.items():
            order = compiled.build.schedule.order(rank)
            assert tuple((run.task, run.micro) for run in did.runs) == order
            assert did.messages
    trained.start_recording()
    trained.run((data(24)[0][:6], data(24)[1][:6]))
    own = trained.stop_recording()
    assert transport.broadcast_object(own, 0) == own


def test_rank_0_decides_what_adapt_proposes(
    transport: MpiTransport, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank measures something else; all have the proposal of rank 0, and train on."""
    factors = {0: {1: 3.0}, 1: {0: 5.0}}.get(transport.rank, {})
    monkeypatch.setattr(
        adapt, "computing_seconds", lambda steps: {rank: factors.get(rank, 1.0) for rank in steps[0]}
    )
    watcher = Adapt(every=2, steps=2, gain=0.0, path=shared / "plan.json")
    trained = adaptive_program.engine(2)
    trained.fit(adaptive_program.data(480), 1, 48, callbacks=[watcher], progress=False)
    assert trained.step == 10
    proposal = watcher.proposal
    assert proposal is not None
    everyone = transport.gather_objects((proposal.plan.text(), proposal.step, proposal.text), 0)
    assert everyone is None or set(everyone) == {everyone[0]}
    weights = proposal.plan.stages[0].mesh.weights["dp"]
    assert weights[0] > weights[1]
    trained.close()
