"""Whatever operation on a file is the last, the folder loads the old or the new checkpoint, bit for bit."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.files.checkpoint_damage import folder_in_memory, values, write
from support.files.faulty_disk import Crash, FaultyOs

from distgraph.errors import RuntimeFault
from distgraph.runtime.execute.checkpoint import INDEX, Checkpoint


class OneByOne:
    """Two ranks that work one after the other, so that operations have one order. See `World`."""

    size, local, is_chief = 2, (0, 1), True

    def run(self, work: Callable[[int], Any]) -> dict[int, Any]:
        return {rank: work(rank) for rank in self.local}

    def share(self, value: Any, owner: int) -> Any:
        return value

    def gather(self, found: dict[int, Any]) -> dict[int, Any]:
        return found


def save(folder: Path, step: int, world: Any = None, background: bool = False) -> None:
    write(folder, step, world or OneByOne(), background)


def loaded(folder: Path) -> int | None:
    """The step whose values a folder loads, exactly; None where it says that it has no checkpoint."""
    if not (folder / INDEX).exists():
        with pytest.raises(RuntimeFault, match=f"has no {INDEX}"):
            Checkpoint.open(folder)
        return None
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.verify() == []
    for name, array in values(checkpoint.index["step"]).items():
        assert checkpoint.read(name).tobytes() == array.tobytes()
    return int(checkpoint.index["step"])


def with_fault(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    step: int,
    at: int | None,
    error: BaseException,
    lasting: bool,
    background: bool = False,
) -> tuple[FaultyOs, BaseException | None]:
    disk = FaultyOs(folder, at, error, lasting)
    with monkeypatch.context() as patched:
        patched.setattr("distgraph.runtime.execute.checkpoint.files.os", disk)
        try:
            save(folder, step, background=background)
        except (Crash, RuntimeFault) as raised:
            return disk, raised
    return disk, None


def operations(monkeypatch: pytest.MonkeyPatch, folder: Path, before: bool) -> int:
    """How many a save takes."""
    if before:
        save(folder, 1)
    return with_fault(monkeypatch, folder, 2, None, Crash(), False)[0].count


def put(folder: Path, content: dict[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, data in content.items():
        (folder / name).write_bytes(data)


@pytest.fixture
def memory() -> Iterator[Path]:
    with folder_in_memory() as folder:
        yield folder


@pytest.mark.parametrize(
    ("before", "background"),
    [(False, False), (True, False), (True, True)],
    ids=["first", "next", "next in the background"],
)
def test_death_at_any_operation(
    before: bool, background: bool, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9, and power that goes: then what was not flushed is lost."""
    count, old = operations(monkeypatch, memory / "all", before), 1 if before else None
    assert count > 25
    seen = set()
    for at in range(count):
        folder = memory / str(at)
        if before:
            save(folder, 1)
        disk, raised = with_fault(monkeypatch, folder, 2, at, Crash(), True, background)
        assert isinstance(raised, Crash)
        where = f"operation {at}: {disk.failed}"
        state = loaded(folder)
        assert state in (old, 2), where
        seen.add(state)
        for content in disk.states():
            put(memory / "power", content)
            assert loaded(memory / "power") in (old, 2), where
        save(folder, 3)
        assert loaded(folder) == 3, where
        assert_no_rest(folder)
    assert seen == {old, 2}


@pytest.mark.parametrize("before", [False, True], ids=["first", "next"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
def test_an_error_at_any_operation(
    before: bool, code: int, lasting: bool, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that says that it failed leaves the old checkpoint, or says that the new one is in place."""
    count, old = operations(monkeypatch, memory / "all", before), 1 if before else None
    for at in range(count):
        folder = memory / str(at)
        if before:
            save(folder, 1)
        disk, raised = with_fault(monkeypatch, folder, 2, at, OSError(code, "no"), lasting)
        where = f"operation {at}: {disk.failed}: {raised}"
        in_place = raised is None or "is in place but the disk does not confirm" in str(raised)
        assert loaded(folder) == (2 if in_place else old), where
        if raised is None:
            assert disk.failed.startswith(("unlink", "open", "fsync", "close")), where
        save(folder, 3)
        assert loaded(folder) == 3
        assert_no_rest(folder)


def test_a_failed_save_leaves_nothing_behind(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, folder = operations(monkeypatch, memory / "all", True), memory / "one"
    save(folder, 1)
    before = sorted(path.name for path in folder.iterdir())
    for at in range(count):
        _, raised = with_fault(monkeypatch, folder, 2, at, OSError(errno.ENOSPC, "no"), False)
        if raised is None or "in place" in str(raised):
            break
        assert sorted(path.name for path in folder.iterdir()) == before
    assert at > 20


def assert_no_rest(folder: Path) -> None:
    """There is the checkpoint and nothing else."""
    named = set(Checkpoint.open(folder).contents.files) | {INDEX}
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".lock")} == named
