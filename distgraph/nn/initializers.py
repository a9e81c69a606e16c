"""Initial values of parameters, computed block by block.

    ("normal", 0.02)   normal with this standard deviation
    ("uniform", 0.1)   uniform in [-0.1, 0.1)
    ("zeros",) ("ones",) ("constant", 3.0)
    ("like", "fc1.weight", "normal", 0.02)   the numbers of another parameter, whose own init follows its name
    ("given",)           the array that was assigned to the parameter, which the engine copies

A block is computed from the seed, the parameter's name and the global positions of the block: no rank ever
holds the whole parameter, and the numbers are the same under every layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.errors.arguments import CHECKED_LATER, is_number, shown
from distgraph.ir.dtypes import is_float, to_numpy
from distgraph.kernels.random import random_key, random_normal, random_uniform

Init = Annotated[tuple[Any, ...], CHECKED_LATER]
"""An initialisation in one of the forms above; `check_init` checks it."""

_ARGUMENTS = {"normal": 1, "uniform": 1, "constant": 1, "zeros": 0, "ones": 0, "given": 0}
_LEAST = {"normal": 0.0, "uniform": 0.0}  # of the number of a distribution
_FORMS = {
    "normal": '("normal", std)', "uniform": '("uniform", bound)', "constant": '("constant", value)',
    "zeros": '("zeros",)', "ones": '("ones",)',
}  # fmt: skip


def check_init(init: Any) -> None:
    """Raises GraphError when an initialisation is malformed."""
    rest = init
    if isinstance(init, (tuple, list)) and len(init) > 1 and init[0] == "like" and isinstance(init[1], str):
        rest = init[2:]
    if not _is_init(rest):
        raise GraphError(_malformed(init))


def check_numbers(init: Init, dtype: str) -> None:
    """Raises GraphError when a dtype cannot hold the numbers of an initialisation."""
    if init[0] in ("normal", "uniform") and not is_float(dtype):
        raise GraphError(
            f"init is {shown(init)} but the parameter is {dtype}, which cannot hold fractions; give a float "
            f'dtype, or an init such as ("zeros",)'
        )
    if init[0] != "constant":
        return
    number, kind = init[1], to_numpy(dtype)
    if is_float(dtype):
        with np.errstate(over="ignore"):
            fits = bool(np.isfinite(np.asarray(number, "f8").astype(kind)))
    else:
        least, most = (0, 1) if dtype == "bool" else (np.iinfo(kind).min, np.iinfo(kind).max)
        fits = number == int(number) and least <= number <= most
    if not fits:
        raise GraphError(
            f"init is {shown(init)} but the parameter is {dtype}, which cannot hold that number; give "
            f"another number or dtype"
        )


def _malformed(init: Any) -> str:
    """What is wrong with an initialisation, and how to write it."""
    if not is_number(init) and hasattr(init, "shape") and hasattr(init, "dtype"):
        return (
            f"init is an array of shape {tuple(init.shape)} and dtype {init.dtype} but must name a "
            f'distribution, such as ("normal", 0.02); give values with parameter.assign(array)'
        )
    if is_number(init) and math.isfinite(init):
        return f'init is {shown(init)} but must be a tuple; write ("constant", {shown(init)})'
    if isinstance(init, str) and init in _FORMS:
        return f"init is {init!r} but must be a tuple; write {_FORMS[init]}"
    if isinstance(init, (tuple, list)) and init and isinstance(init[0], str):
        if init[0] in _FORMS:
            numbers = "one finite number after" if _ARGUMENTS[init[0]] else "nothing after"
            if init[0] in _LEAST:
                numbers = "one finite number of at least 0 after"
            return f"init is {shown(init)} but must have {numbers} {init[0]!r}; write {_FORMS[init[0]]}"
        if init[0] == "like":
            return (
                f"init is {shown(init)} but must have the name of a parameter and its init after 'like'; "
                'write ("like", "fc1.weight", "normal", 0.02)'
            )
    *forms, last = _FORMS.values()
    return f"init is {shown(init)} but must be {', '.join(forms)} or {last}; choose one of these"


def _is_init(init: Any) -> bool:
    if not isinstance(init, (tuple, list)) or not init or not isinstance(init[0], str):
        return False
    numbers, least = init[1:], _LEAST.get(init[0], -math.inf)
    if _ARGUMENTS.get(init[0]) != len(numbers):
        return False
    return all(is_number(x) and math.isfinite(x) and x >= least for x in numbers)


def materialize(
    init: Init,
    name: str,
    seed: int,
    shape: Sequence[int],
    starts: Sequence[int] | None = None,
    local_shape: Sequence[int] | None = None,
    dtype: str = "f32",
    xp: Any = np,
) -> Any:
    """The initial values of one block of a parameter.

    Args:
        init: as in the module's docstring.
        name: of the parameter; two parameters of one seed start from different numbers.
        seed: of the run.
        shape: of the whole parameter.
        starts: position of the block in it; zeros by default.
        local_shape: shape of the block; the whole parameter by default.
        dtype: short name.
        xp: array namespace, numpy or cupy.

    Raises:
        GraphError: malformed init; it is the array of a parameter.
    """
    check_init(init)
    if init[0] == "like":
        name, init = init[1], init[2:]
    if init[0] == "given":
        raise GraphError(
            f"{name} starts from an array that was assigned to its parameter but none is at hand; assign one "
            f"with parameter.assign"
        )
    global_shape = tuple(shape)
    local = global_shape if local_shape is None else tuple(local_shape)
    kind, numpy_dtype = init[0], to_numpy(dtype)
    if kind in ("zeros", "ones", "constant"):
        value = {"zeros": 0.0, "ones": 1.0}.get(kind) if kind != "constant" else init[1]
        return xp.full(local, value, dtype=numpy_dtype)
    draw = random_normal if kind == "normal" else random_uniform
    draw_dtype = to_numpy("f64" if dtype == "f64" else "f32")
    values = draw(
        xp, random_key(seed, name), shape=global_shape, starts=starts, local_shape=local, dtype=draw_dtype
    )
    if kind == "normal":
        values *= draw_dtype.type(init[1])
    else:
        values *= draw_dtype.type(2 * init[1])
        values -= draw_dtype.type(init[1])
    return values if values.dtype == numpy_dtype else values.astype(numpy_dtype)


def fan_in_uniform(fan_in: int) -> Init:
    """Uniform within 1 / sqrt(fan_in): a linear layer's output has a third of its input's variance."""
    return ("uniform", 1 / math.sqrt(max(1, fan_in)))
