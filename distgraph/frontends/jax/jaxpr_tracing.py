"""Tracing by JAX: the jaxpr of a function, with the names of its inputs, parameters and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from distgraph.errors import GraphError
from distgraph.frontends.jax.folded_constant import is_key
from distgraph.ir.dtypes import short, to_numpy

_FAILURES = (
    TypeError, ValueError, AssertionError, AttributeError, KeyError, IndexError, NameError,
    NotImplementedError,
)  # fmt: skip
_PACKAGES = tuple(f"/{name}/" for name in ("jax", "jaxlib", "flax", "equinox", "haiku", "optax"))


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of the arguments of a function.

    Attributes:
        kind: "parameter", "buffer" (of the parameters, not floating), "state", "input", "key" (a random key)
            or "static" (part of the program).
        name: path of the parameter or state, name of the input.
        shape: of the example.
        dtype: of the example, as JAX has it; None for a static leaf.
        value: the array or object of the example; None where only its shape is known.
    """

    kind: str
    name: str
    shape: tuple[int, ...] = ()
    dtype: Any = None
    value: Any = None

    @property
    def type(self) -> str:
        """Short dtype and shape, such as "f32[2, 3]"."""
        return f"{short(self.dtype)}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Arguments:
    """The flattened arguments of a function.

    Attributes:
        function: of the parameters, the state where there is one, and the inputs.
        tree: how leaves form the arguments.
        leaves: every leaf, in order.
        wide: whether JAX computes with 64 bits (`jax_enable_x64`).
    """

    function: Callable[..., Any]
    tree: Any
    leaves: tuple[Leaf, ...]
    wide: bool

    @property
    def name(self) -> str:
        """Name of the function."""
        return function_name(self.function)

    def of_kind(self, *kinds: str) -> list[Leaf]:
        """The leaves of some kinds, in order."""
        return [leaf for leaf in self.leaves if leaf.kind in kinds]


@dataclass(frozen=True, slots=True)
class TracedFunction:
    """A jaxpr.

    Attributes:
        closed: the jaxpr with its constants; its inputs are the leaves that are not static.
        outputs: name of each output.
        kind: "tensor" where the function returns one array, "tuple" or "dict".
        states: number of outputs at the end that are the new state.
    """

    closed: Any
    outputs: tuple[str, ...]
    kind: str
    states: int


def function_name(function: Any) -> str:
    """Name of a function, or of the type of an object that is called."""
    return str(getattr(function, "__name__", type(function).__name__))


def flatten_arguments(
    function: Callable[..., Any], params: Any, state: Any, examples: Sequence[Any], has_state: bool
) -> Arguments:
    """The leaves of the arguments of a function, with their names.

    Raises:
        GraphError: two leaves have one name, or a dtype is not supported.
    """
    roots = (params, state, *examples) if has_state else (params, *examples)
    first = 2 if has_state else 1
    names = _argument_names(function, first, len(examples))
    paths, tree = jax.tree_util.tree_flatten_with_path(roots)
    leaves = []
    for path, value in paths:
        position = path[0].idx
        parts = [jax.tree_util.keystr((entry,), simple=True) for entry in path[1:]]
        if position < first:
            kind = "parameter" if position == 0 else "state"
            leaves.append(_leaf(kind, ".".join(parts) or ("params", "state")[position], value))
        else:
            leaves.append(_leaf("input", "_".join([names[position - first], *parts]), value))
    _check_names(leaves)
    return Arguments(function, tree, tuple(leaves), bool(jax.config.read("jax_enable_x64")))


def _argument_names(function: Any, first: int, count: int) -> list[str]:
    """Names of the arguments after the parameters (and the state)."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [p.name for p in parameters if p.kind in kinds][first:]
    return [names[i] if i < len(names) else f"x{i}" for i in range(count)]


def _leaf(kind: str, name: str, value: Any) -> Leaf:
    """A leaf as it is used: arrays that are not floating are state, objects that are no arrays are static."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return Leaf("static", name, value=value)
    shape = tuple(int(n) for n in value.shape)
    if is_key(value) or (kind == "input" and shape == (2,) and value.dtype == np.uint32):
        return Leaf("key", name, shape, value.dtype, value)
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    try:
        short(dtype)
    except GraphError as error:
        raise GraphError(f"{kind} {name}: {error}") from None
    if kind == "parameter" and not jax.numpy.issubdtype(dtype, np.floating):
        kind = "buffer"
    constant = None if isinstance(value, jax.ShapeDtypeStruct) else value
    return Leaf(kind, name, shape, dtype, constant)


def _check_names(leaves: Sequence[Leaf]) -> None:
    for kinds in (("parameter", "buffer", "state"), ("input", "key")):
        names = [leaf.name for leaf in leaves if leaf.kind in kinds]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise GraphError(f"two leaves of the arguments are named {twice[0]!r}; rename one of their keys")


def trace_function(
    arguments: Arguments, types: Mapping[str, tuple[tuple[int, ...], str]], has_state: bool
) -> TracedFunction:
    """The jaxpr of a function for inputs of given shapes and dtypes.

    Args:
        arguments: see `flatten_arguments`.
        types: name of each input -> shape and short dtype; the others are as in the example.
        has_state: whether the function returns (outputs, new state).

    Raises:
        GraphError: JAX cannot trace the function with such inputs.
    """

    def flat(*arrays: Any) -> Any:
        dynamic = iter(arrays)
        values = [leaf.value if leaf.kind == "static" else next(dynamic) for leaf in arguments.leaves]
        return arguments.function(*jax.tree_util.tree_unflatten(arguments.tree, values))

    leaves = [
        replace(leaf, shape=types[leaf.name][0], dtype=to_numpy(types[leaf.name][1]))
        if leaf.kind == "input" and leaf.name in types
        else leaf
        for leaf in arguments.leaves
    ]
    given = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves if leaf.kind != "static"]
    try:
        with jax.enable_x64(arguments.wide):
            closed, returned = jax.make_jaxpr(flat, return_shape=True)(*given)
    except (*_FAILURES, jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise _refused(arguments.name, leaves, error) from error
    if not has_state:
        return TracedFunction(closed, *_named_outputs(returned), states=0)
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise GraphError(
            f"{arguments.name} is imported with a state but returns {type(returned).__name__}; return "
            "(outputs, new state)"
        )
    names, kind = _named_outputs(returned[0])
    _check_state(arguments, returned[1])
    return TracedFunction(closed, names, kind, len(jax.tree_util.tree_leaves(returned[1])))


def _refused(name: str, leaves: Sequence[Leaf], error: BaseException) -> GraphError:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    shown = ", ".join(f"{leaf.name} {leaf.type}" for leaf in leaves if leaf.kind == "input")
    where = _place_of(error)
    advice = "give inputs that it takes"
    if isinstance(error, (jax.errors.JAXTypeError, jax.errors.JAXIndexError)):
        advice = (
            "write control flow that depends on numbers with jax.numpy.where or jax.lax.cond, and give "
            "arguments that are no arrays as numbers of Python"
        )
    reason = lines[0].rstrip(".") if lines else type(error).__name__
    return GraphError(f"{name}({shown}) cannot be traced by jax{where}: {reason}; {advice}")


def _place_of(error: BaseException) -> str:
    """(file:line) of the innermost frame of the user's code in a traceback, with a space before it."""
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        path = traceback.tb_frame.f_code.co_filename
        if _is_user_code(path):
            place = f" ({path.rsplit('/', 1)[-1]}:{traceback.tb_lineno})"
        traceback = traceback.tb_next
    return place


def _check_state(arguments: Arguments, new: Any) -> None:
    """Raises GraphError where the new state has other leaves than the state."""
    before = [leaf.shape for leaf in arguments.of_kind("state")]
    after = [tuple(x.shape) for x in jax.tree_util.tree_leaves(new)]
    if before != after:
        raise GraphError(
            f"state of {arguments.name} has leaves of shapes {before} but the new state {after}; return the "
            "whole state in the same structure"
        )


def _named_outputs(returned: Any) -> tuple[tuple[str, ...], str]:
    """Name of each output, and how the function returns them ("tensor", "tuple" or "dict")."""
    paths, _ = jax.tree_util.tree_flatten_with_path(returned)
    names = tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths)
    if names == ("",):
        return ("output",), "tensor"
    plain = type(returned) in (tuple, list)
    return names, "tuple" if plain else "dict"


def source_line(eqn: Any) -> str:
    """file:line of the innermost frame of the user that called a primitive."""
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else list(traceback.frames)
    for frame in frames:
        if _is_user_code(frame.file_name):
            return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.line_num}"
    return "?"


def _is_user_code(path: str) -> bool:
    inside = path.replace("\\", "/")
    _, separator, rest = inside.rpartition("-packages/")
    if separator:
        return not f"/{rest}".startswith(_PACKAGES)
    return not inside.startswith("<") and not inside.endswith(__name__.replace(".", "/") + ".py")


def scope_names(eqn: Any) -> list[str]:
    """Names of `jax.named_scope` (of Flax: of modules) around a primitive, outermost first."""
    entries = eqn.source_info.name_stack.stack
    names = [entry.name for entry in entries if type(entry).__name__ == "Scope"]
    return [name for name in names if name.replace("_", "").replace(".", "").isalnum()]
