"""Where the package is found once it is installed, as README says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT


@pytest.mark.parametrize("command", [[], ["-m", "distgraph", "check"]], ids=["python", "check"])
def test_a_script_beside_the_clone_imports_the_package(command: list[str], tmp_path: Path) -> None:
    """The clone's folder is called distgraph too, and a folder without __init__.py can be imported."""
    (tmp_path / "distgraph").symlink_to(ROOT, target_is_directory=True)
    script = tmp_path / "train.py"
    script.write_text("import distgraph as dg\nprint(dg.Engine.__name__)\nprint(dg.__file__)\n")
    done = subprocess.run(
        [sys.executable, *command, script.name],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    engine, file = done.stdout.split()
    assert engine == "Engine"
    assert Path(file).name == "__init__.py", done.stderr


def test_starting_imports_no_package_that_few_runs_need() -> None:
    """Every command and every rank of a job starts so; the packages are imported where they are used."""
    program = """
import sys
import distgraph as dg
dg.Engine
dg.load_cluster("dgx_a100_pod")
slow = {"cupy", "cvxpy", "lark", "mpi4py", "networkx", "numba", "pint", "plotly", "pyscipopt", "scipy"}
print(sorted(slow & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
