"""Scripts with an engine under `launch`: one rank that fails takes all along, and says why."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from pathlib import Path

import pytest

from distgraph.runtime.launch import launch as launcher

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")

SCRIPT = """
import numpy as np
import distgraph as dg
from distgraph import nn, optim
from distgraph.runtime.launch.mpi_rank import current_transport

mesh = dg.ProcessMesh.grid(dp=2)
RANK = current_transport().rank

class Samples:
    def __len__(self):
        return 40
    def __getitem__(self, row):
        {trouble}
        return np.ones(3, "f4"), np.ones(2, "f4")

strategy = dg.Strategy(mesh=mesh, batch_axis="dp")
engine = dg.Engine(nn.Linear(3, 2), nn.MeanSquaredError(), optim.SGD(lr=0.1), strategy=strategy)
engine.fit(Samples(), epochs=2, batch_size=10, shuffle=False)
if engine.is_chief:
    print("steps", engine.step, "ranks", engine.plan.build.ranks)
"""


def start(tmp_path: Path, trouble: str, ranks: int = 2) -> tuple[int, str, str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(trouble=trouble))
    out, err = io.StringIO(), io.StringIO()
    code = launcher.launch(ranks, [str(script)], stdout=out, stderr=err)
    return code, out.getvalue(), err.getvalue()


def test_the_same_script_on_ranks_with_one_idle(tmp_path: Path) -> None:
    code, out, err = start(tmp_path, "pass", ranks=3)
    assert (code, out) == (0, "steps 8 ranks (0, 1)\n"), err


def test_a_rank_that_raises(tmp_path: Path) -> None:
    code, out, err = start(tmp_path, "if RANK == 1 and row == 17: raise ValueError('page 17 is torn')")
    assert code != 0
    assert "steps" not in out
    trace, _, line = err.partition("error: ")
    assert "ValueError: page 17 is torn" in trace
    assert line == "rank 1: ValueError: page 17 is torn; rank 0 stops too\n"
    assert err.count("Traceback") == 1


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    code, _, err = start(tmp_path, "if RANK == 1 and row == 17: import os; os.kill(os.getpid(), 9)")
    assert code == 137
    assert "rank 1 was killed by SIGKILL" in err


def test_too_few_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(trouble="pass").replace("dp=2", "dp=3"))
    out, err = io.StringIO(), io.StringIO()
    assert launcher.launch(2, [str(script)], stdout=out, stderr=err) != 0
    assert (
        "mesh(dp=3) needs 3 ranks but the MPI job has 2; start it with distgraph run -n 3" in err.getvalue()
    )
    assert "Traceback" not in err.getvalue()


def test_a_program_that_trains_loads_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    """Every rank loads its modules anew: what only searches, files or commands need would delay its start."""
    script = tmp_path / "script.py"
    others = "pydantic yaml lark scipy networkx cvxpy pyscipopt numba rich typer mpi4py numpy.ma"
    program = SCRIPT.format(trouble="pass").replace("RANK = current_transport().rank", "")
    script.write_text(f"{program}\nimport sys\nprint(sorted({{*{others.split()}}} & {{*sys.modules}}))")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["steps 8 ranks (0, 1)", "[]"]
