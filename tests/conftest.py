"""What every test may ask for: a seeded generator, golden files, and skips that say what is missing."""

from __future__ import annotations

import difflib
import importlib.util
import os
import shutil
import signal
import tempfile
import zlib
from collections.abc import Callable

import hypothesis
import numpy as np
import pytest
from support.paths import GOLDEN

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # started in the background: programs that the tests start would inherit that Ctrl-C means nothing
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("default", derandomize=True, deadline=None, max_examples=20)
hypothesis.settings.register_profile("thorough", derandomize=False, deadline=None, max_examples=500)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden/*.txt, then review them"
    )


def missing_mpi() -> str | None:
    sizes = (os.environ.get(name) for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"))
    if any(size and int(size) > 1 for size in sizes):
        return None
    return "one rank only; run under `mpiexec -n 2 python -m pytest -m mpi`"


def missing_gpu() -> str | None:
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    return None if count else "no CUDA device"


def missing_package(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"{name} is not installed"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give every rank of an MPI job a folder of its own for `tmp_path`, and programs that tests start one for
    bytecode where the environment lets them write none.

    Every pytest keeps the folders of its last three runs and removes older ones. Ranks which list and
    remove the same folders at the same time can end with an error of pytest after the last test. A rank that
    compiles all modules takes twice as long to start.
    """
    if missing_mpi() is None:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder_of_run(config, "pytest-rank-")
    elif os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ["PYTHONPYCACHEPREFIX"] = folder_of_run(config, "pytest-bytecode-")


def folder_of_run(config: pytest.Config, prefix: str) -> str:
    """A folder that is removed when pytest ends."""
    root = tempfile.mkdtemp(prefix=prefix)
    config.add_cleanup(lambda: shutil.rmtree(root, ignore_errors=True))
    return root


MISSING: dict[str, Callable[[], str | None]] = {
    "mpi": missing_mpi,
    "gpu": missing_gpu,
    "torch": lambda: missing_package("torch"),
    "jax": lambda: missing_package("jax"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, each with its reason."""
    for marker, missing in MISSING.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = missing() if marked else None
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator whose seed is a hash of the test's own name: the same in every run and on every rank."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares text with tests/golden/<name>.txt; `--update-golden` writes the file."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        if not path.exists():
            pytest.fail(
                f"{path} does not exist; write it with --update-golden, then review it", pytrace=False
            )
        expected = path.read_text()
        if text != expected:
            lines = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), "golden", "now", lineterm=""
            )
            pytest.fail(f"{path} differs:\n" + "\n".join(lines), pytrace=False)

    return compare
