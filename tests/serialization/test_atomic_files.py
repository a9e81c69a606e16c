"""Files are written whole, with the user's permissions, and never through a name that somebody planted."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from distgraph.errors import GraphError
from distgraph.serialization import atomic_files
from distgraph.serialization.atomic_files import check_writable, write_atomically


@pytest.fixture
def umask() -> object:
    """The umask is the process's: it is set back."""
    old = os.umask(0o027)
    yield
    os.umask(old)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_a_new_file_has_the_permissions_of_the_umask_and_a_replaced_one_its_own(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_atomically(path, "1", GraphError)
    assert mode_of(path) == 0o640
    path.chmod(0o600)
    write_atomically(path, b"2", GraphError)
    assert (mode_of(path), path.read_text()) == (0o600, "2")
    assert os.listdir(tmp_path) == ["x"]  # noqa: PTH208


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "replace":
        monkeypatch.setattr(Path, "replace", fail)
    elif failing == "fsync":
        monkeypatch.setattr(atomic_files.os, "fsync", fail)
    else:
        monkeypatch.setattr(atomic_files.os, "fchmod", fail)
    with pytest.raises(GraphError, match=r"x: cannot be written: No space left on device; choose another"):
        write_atomically(path, "new", GraphError)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_an_interrupt_leaves_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic_files.os, "fsync", fail)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "x", "new", GraphError)
    assert not list(tmp_path.iterdir())


def test_a_link_planted_at_the_temporary_name_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can guess the name; where somebody does, the write fails and the link's target is as it was."""
    monkeypatch.setattr(secrets, "token_hex", lambda n: "0" * 2 * n)
    victim, path = tmp_path / "victim", tmp_path / "x"
    victim.write_text("precious")
    (tmp_path / f".x.{'0' * 16}.tmp").symlink_to(victim)
    with pytest.raises(GraphError, match="x: cannot be written: File exists"):
        write_atomically(path, "new", GraphError)
    assert victim.read_text() == "precious"
    assert not path.exists()


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "x").symlink_to(tmp_path / "folder" / "y")
    write_atomically(tmp_path / "x", "1", GraphError)
    assert (tmp_path / "x").is_symlink()
    assert (tmp_path / "folder" / "y").read_text() == "1"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    check_writable(pipe, GraphError)
    write_atomically(pipe, "through", GraphError)
    reader.join(10)
    assert got == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_standard_output_is_written_to_and_stays(tmp_path: Path) -> None:
    """Into a pipe, and into a file that the shell opened, after what is in it."""
    code = (
        "from distgraph.serialization.atomic_files import check_writable, write_atomically as write\n"
        "check_writable('/dev/stdout', ValueError); print('first', flush=True)\n"
        "write('/dev/stdout', 'second\\n', ValueError)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("first\nsecond\n", "")
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, timeout=60, check=True)
    assert (tmp_path / "out").read_text() == "first\nsecond\n"
    assert Path("/dev/stdout").is_symlink()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "it is a folder"),
        ("no/x", "no is no folder"),
        ("a\0b", "embedded null byte"),
        ("loop", "Too many levels of symbolic links"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_bad_place_is_told_before_and_when_writing(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(GraphError, match=f"cannot be written: .*({reason}|directory)"):
        write_atomically(tmp_path / name, "1", GraphError)
    with pytest.raises(GraphError, match=f"cannot be written: .*({reason}); choose another place"):
        check_writable(tmp_path / name, GraphError)


def test_text_that_no_file_takes_is_a_house_error(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"x: cannot be written: .*surrogates not allowed"):
        write_atomically(tmp_path / "x", "\ud800", GraphError)
