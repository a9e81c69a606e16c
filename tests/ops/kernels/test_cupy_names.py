"""Every name that is used of CuPy exists in the CuPy that is installed; needs the package but no GPU."""

from __future__ import annotations

import ast
import inspect
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import distgraph
import distgraph.ops
from distgraph.ir.op_registry import REGISTRY

ROOT = Path(distgraph.__file__).parent
NAMESPACES = ("xp", "self.xp", "cupy", "self.cupy", "self._cuda", "self._nccl", "special")


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy")


def used() -> set[str]:
    """Dotted names below an array namespace, of everything that runs with CuPy."""
    dotted = set()
    for folder in ("kernels", "ops", "nn", "engine", "runtime"):
        for file in (ROOT / folder).rglob("*.py"):
            spaces = [space for space in NAMESPACES if space != "self._nccl" or file.name == "nccl.py"]
            for node in ast.walk(ast.parse(file.read_text())):
                name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
                if re.fullmatch(r"[\w.]+", name) and any(name.startswith(f"{space}.") for space in spaces):
                    dotted.add(name)
    return dotted - {"xp.special"}  # of registered devices alone


def resolve(cupy: Any, name: str) -> Any:
    if name.startswith("special."):
        import cupyx.scipy.special as special

        return reduce(getattr, name.split(".")[1:], special)
    for prefix, home in (("self._cuda.", cupy.cuda), ("self._nccl.", cupy.cuda.nccl)):
        if name.startswith(prefix):
            return reduce(getattr, name.removeprefix(prefix).split("."), home)
    return reduce(getattr, name.removeprefix("self.").split(".")[1:], cupy)


def test_names_of_the_namespace(cupy: Any) -> None:
    import cupy.cuda.nccl  # the wheel of NCCL is part of the extra

    names = used()
    assert {"xp.where", "xp.RawKernel", "self._cuda.Stream", "self._nccl.NcclCommunicator"} <= names
    missing = []
    for name in sorted(names):
        try:
            resolve(cupy, name)
        except AttributeError:
            missing.append(name)
    assert missing == []


def test_ufuncs_of_the_ops(cupy: Any) -> None:
    names = {op.ufunc for op in REGISTRY.values() if op.ufunc}
    assert "add" in names
    assert [name for name in sorted(names) if not isinstance(getattr(cupy, name, None), cupy.ufunc)] == []


def test_what_is_called_by_name(cupy: Any) -> None:
    import cupyx

    assert {"stream", "out", "blocking"} <= set(inspect.signature(cupy.asnumpy).parameters)
    assert {"shape", "dtype"} <= set(inspect.signature(cupyx.empty_pinned).parameters)
    assert {"casting", "where"} <= set(inspect.signature(cupy.copyto).parameters)
    assert callable(cupyx.scatter_add)
    for kind, names in {
        cupy.cuda.Stream: (
            "wait_event", "record", "synchronize", "__enter__", "begin_capture", "end_capture",
        ),
        cupy.cuda.Graph: ("launch",),
        cupy.cuda.MemoryPool: ("malloc",),
        cupy.cuda.Event: ("done", "record", "synchronize"),
        cupy.cuda.Device: ("use", "__enter__", "id"),
        cupy.ndarray: ("set", "get", "view", "data", "nbytes", "flags", "astype", "__array_ufunc__"),
        cupy.cuda.nccl.NcclCommunicator: (
            "allReduce", "allGather", "reduceScatter", "reduce", "bcast", "send", "recv", "abort", "destroy",
        ),
    }.items():  # fmt: skip
        assert [name for name in names if not hasattr(kind, name)] == []
