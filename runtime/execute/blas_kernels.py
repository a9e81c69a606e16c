"""The BLAS library with which this process multiplies matrices, and the kernels that it has chosen."""

from __future__ import annotations

from typing import Any

from threadpoolctl import threadpool_info


def blas_kernels() -> str:
    """Name, version and kernels of the BLAS library of NumPy, such as "openblas 0.3.31 SkylakeX".

    The library chooses its kernels by the processor when it is loaded, unless the environment does
    (`OPENBLAS_CORETYPE`). "" where NumPy is linked with a library that cannot be asked.
    """
    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    of_numpy = [library for library in libraries if "numpy" in library["filepath"]]
    return next(map(_name, of_numpy or libraries), "")


def _name(library: dict[str, Any]) -> str:
    parts = (library.get(part) for part in ("internal_api", "version", "architecture"))
    return " ".join(str(part) for part in parts if part)
