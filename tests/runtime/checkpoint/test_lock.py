"""Two jobs and one folder: the second hears of the first; a lock ends with its process, however that ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.files.saving import save
from support.paths import TESTS

from distgraph.errors import RuntimeFault
from distgraph.runtime.execute.checkpoint import Checkpoint, lock
from distgraph.runtime.job.job_files import JOB
from distgraph.runtime.job.losses import ELASTIC

ENDING = 0.1
"""Seconds that a process which ends may hold its locks, in tests in which the holder does not end."""


@contextmanager
def job(body: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a script, which has said a line, and ends at the latest with the block."""
    script = f"import sys; sys.path.insert(0, {str(TESTS)!r})\n" + textwrap.dedent(body)
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", script], text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_the_second_job_is_refused_with_the_name_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the first is killed, the second takes over and says so. Children of the first change nothing."""
    body = f"""
        import os, time
        from pathlib import Path
        from support.files.saving import save
        save(Path({str(tmp_path)!r}), 1)
        if not os.fork():
            sys.stdin.close()
            os.close(1)
            time.sleep(60)
            os._exit(0)
        print("ready", flush=True)
        sys.stdin.read()
        """
    with job(body) as first:
        with monkeypatch.context() as patched:
            patched.setattr(lock, "_ENDING_SECONDS", ENDING)
            with pytest.raises(RuntimeFault, match=rf"by another job: process {first.pid} on .* since 20"):
                save(tmp_path, 2)
        assert Checkpoint.open(tmp_path).index["step"] == 1
        assert Checkpoint.open(tmp_path).verify() == []
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert capsys.readouterr().err == ""
        save(tmp_path, 2)
        told = capsys.readouterr().err
        assert told.startswith(
            f"distgraph: checkpoint {tmp_path}: its lock was left by process {first.pid} on "
        )
        assert told.endswith(", which has ended; taken over\n")
        save(tmp_path, 3)
        assert capsys.readouterr().err == ""
    assert Checkpoint.open(tmp_path).index["step"] == 3


@pytest.mark.parametrize("later", [True, False])
def test_a_later_start_of_an_elastic_job_takes_the_lock_of_a_lost_process(
    later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process may only be stopped, with its host; when it runs again it cannot save any more."""
    body = f"""
        from pathlib import Path
        from distgraph.errors import RuntimeFault
        from distgraph.runtime.execute.checkpoint import lock
        from support.files.saving import save
        lock._ENDING_SECONDS = {ENDING}
        save(Path({str(tmp_path)!r}), 1)
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            save(Path({str(tmp_path)!r}), 3)
        except RuntimeFault as error:
            print(error)
        """
    monkeypatch.setenv(ELASTIC, "/job")
    monkeypatch.setenv(JOB, "2")
    monkeypatch.setattr(lock, "_ENDING_SECONDS", ENDING)
    with job(body) as first:
        monkeypatch.setenv(JOB, "3" if later else "1")
        if not later:
            with pytest.raises(RuntimeFault, match=rf"by another job: process {first.pid} on"):
                save(tmp_path, 2)
            return
        save(tmp_path, 2)
        assert capsys.readouterr().err.endswith("which this job has lost; taken over\n")
        said, _ = first.communicate("\n")
        assert f"is written by another job: process {os.getpid()} on" in said
    assert Checkpoint.open(tmp_path).index["step"] == 2


def test_a_holder_that_is_ending_is_waited_for(tmp_path: Path) -> None:
    """The kernel frees the memory of a killed process before its locks."""
    held = os.open(tmp_path / lock.LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    ending = threading.Timer(0.3, os.close, [held])
    ending.start()
    save(tmp_path, 1)
    assert json.loads((tmp_path / lock.LOCK).read_text())["process"] == os.getpid()
    ending.join()


def test_a_job_that_ends_normally_leaves_an_empty_lock_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = f"""
        from pathlib import Path
        from support.files.saving import save
        save(Path({str(tmp_path)!r}), 1)
        print("ready", flush=True)
        sys.exit(3)
        """
    with job(body) as first:
        assert first.wait() == 3
    assert (tmp_path / ".lock").read_bytes() == b""
    save(tmp_path, 2)
    assert capsys.readouterr().err == ""


def test_one_thread_at_a_time(tmp_path: Path) -> None:
    tmp_path = tmp_path / "ckpt"
    tmp_path.mkdir()
    inside, done = threading.Event(), threading.Event()

    def occupy() -> None:
        with lock.writing(tmp_path):
            inside.set()
            assert done.wait(60)

    thread = threading.Thread(target=occupy)
    thread.start()
    assert inside.wait(60)
    with pytest.raises(RuntimeFault, match="is being written by another thread of this process"):
        save(tmp_path, 1)
    done.set()
    thread.join()
    save(tmp_path, 1)


def test_a_folder_that_was_deleted_is_locked_again(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    save(folder, 1)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    save(folder, 2)
    assert json.loads((folder / ".lock").read_text())["process"] == os.getpid()
    with (folder / ".lock").open("r+") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_number_of_open_descriptors_is_limited(tmp_path: Path) -> None:
    """A job that writes a folder for each step keeps the locks of the last ones."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(100):
        (tmp_path / str(number)).mkdir()
        lock.hold(tmp_path / str(number))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 64
    assert (tmp_path / "0" / ".lock").read_bytes() == b""
    assert b'"process"' in (tmp_path / "99" / ".lock").read_bytes()


def test_a_planted_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(RuntimeFault, match=r"cannot be locked: .*symbolic link"):
        save(tmp_path / "link", 1)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / ".lock")
    with pytest.raises(RuntimeFault, match=r"\.lock is no regular file|cannot be locked"):
        save(tmp_path / "pipe", 1)
    assert (tmp_path / "victim").read_text() == "precious"


OTHER = {
    "host": "another",
    "process": 7,
    "start": "1",
    "since": "2026-01-01T00:00:00+00:00",
    "command": "train.py",
}


def test_where_locks_are_not_shared_the_names_decide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job of another machine that took over is not overwritten in turn."""
    save(tmp_path, 1)
    (tmp_path / ".lock").write_text(json.dumps(OTHER))
    with pytest.raises(
        RuntimeFault, match=r"has been taken over by another job: process 7 on another \(train.py\)"
    ):
        save(tmp_path, 2)
    assert Checkpoint.open(tmp_path).index["step"] == 1
    capsys.readouterr()


@pytest.mark.parametrize(
    ("holder", "refused"),
    [
        (OTHER, True),
        ({**OTHER, "host": lock.socket.gethostname(), "process": os.getpid()}, False),  # another start
        ({**OTHER, "process": "7"}, False),
        ({"x": [1]}, False),
    ],
)
def test_without_locks_the_names_decide(
    holder: Any, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*args: Any) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    (tmp_path / ".lock").write_text(json.dumps(holder))
    if refused:
        with pytest.raises(RuntimeFault, match=r"process 7 on another .*, if it has ended, delete .*\.lock"):
            save(tmp_path, 1)
    else:
        save(tmp_path, 1)
        assert Checkpoint.open(tmp_path).index["step"] == 1
