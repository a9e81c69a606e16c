"""`apply_to_jax`: a plan applied to a function of JAX, as shardings of its arguments and of activations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distgraph.errors import GraphError, ResourceError, ShardingError
from distgraph.frontends.jax.jaxpr_tracing import scope_names
from distgraph.plan.export.jax import export_jax
from distgraph.plan.export.result import listed, surface

if TYPE_CHECKING:
    from distgraph.plan.plan import Plan

_CALLS = ("jit", "pjit")


class DistributedFunction:
    """A function of JAX that is compiled with the shardings of a plan; made by `Plan.apply_to_jax`.

    It is called, differentiated and compiled as the function itself.

    Attributes:
        mesh: of the plan, on devices of JAX.
        plan: what was applied.
        notes: what JAX does in another way than planned, one line each.
    """

    def __init__(self, plan: Plan, function: Callable[..., Any], mesh: Mesh, notes: Sequence[str]) -> None:
        export = export_jax(plan)
        (self._specs,) = export.data["stages"]
        self.plan, self.mesh, self.notes = plan, mesh, (*export.notes, *notes)
        self._function = function
        self._compiled: dict[Any, Any] = {}

    def __call__(self, params: Any, *inputs: Any, **options: Any) -> Any:
        """What the function computes; gradients pass through it.

        Args:
            params: pytree with the paths of the plan. Leaves that are no arrays are part of the program, as
                they are for `import_function`.
            inputs: further arguments, in the order of the plan's inputs. Arrays on other devices are moved.
            options: further arguments by keyword.

        Raises:
            GraphError: the arguments are not those of the function.
            ShardingError: parameters have other names or shapes than in the plan.
        """
        args, kwargs = self._bound(params, *inputs, **options)
        shardings = (self.param_shardings(args[0]), *map(self._input_sharding, args[1:]))
        named = {name: self._input_sharding(value) for name, value in kwargs.items()}
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        arrays: list[Any] = []
        fixed: dict[int, Any] = {}
        for number, (leaf, sharding) in enumerate(zip(leaves, _leaves((shardings, named)), strict=True)):
            if sharding is None:
                fixed[number] = leaf
            else:
                arrays.append(jax.device_put(leaf, sharding))
        types = tuple((array.shape, array.dtype, array.weak_type) for array in arrays)
        key = tree, types, repr(fixed)
        if key not in self._compiled:
            self._compiled[key] = jax.jit(partial(self._constrained, tree, fixed))
        return self._compiled[key](arrays)

    def param_shardings(self, params: Any) -> Any:
        """The pytree of the sharding of each parameter, None for leaves that are no arrays. Raises
        ShardingError as a call."""
        return self._shardings(params, {**self._specs["parameters"], **self._specs["states"]})

    def state_shardings(self, params: Any, kind: str) -> Any:
        """The pytree of the sharding of a state of each parameter.

        Args:
            params: the parameters, or a pytree like them.
            kind: of the state, such as "adam_m", or "momentum".

        Raises:
            ShardingError: the optimiser of the plan has no such state, or as a call.
        """
        kinds: dict[str, dict[str, Any]] = {}
        for name in self._specs["parameters"]:
            for state, spec in self._specs["states"].items():
                if state.startswith(f"{name}."):
                    kinds.setdefault(state.removeprefix(f"{name}."), {})[name] = spec
        if kind not in kinds:
            raise ShardingError(
                f"plan of {self.plan.program.name} has no state {kind!r} of parameters; its optimiser has "
                f"{', '.join(kinds) or 'none'}"
            )
        return self._shardings(params, kinds[kind])

    def place(self, params: Any) -> Any:
        """The parameters as arrays that are split over the devices as planned."""
        leaves, tree = jax.tree_util.tree_flatten(params)
        shardings = _leaves(self.param_shardings(params))
        placed = [x if s is None else jax.device_put(x, s) for x, s in zip(leaves, shardings, strict=True)]
        return jax.tree_util.tree_unflatten(tree, placed)

    def _bound(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the function by position, as far as it takes them so, and by keyword."""
        try:
            signature = inspect.signature(self._function)
        except ValueError:  # of functions that are not written in Python
            return args, kwargs
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise GraphError(
                f"{_name(self._function)} is called with other arguments than it has: {error}; its arguments "
                f"are {signature}"
            ) from error
        return bound.args, bound.kwargs

    def _input_sharding(self, inputs: Any) -> Any:
        """Inputs are split by the axes that split the samples of the plan's inputs, where these divide."""
        axes = next((spec[0] for spec in self._specs["inputs"].values() if spec), None)
        axes = tuple(axes) if isinstance(axes, list) else axes

        def of(leaf: Any) -> Any:
            if not hasattr(leaf, "shape") and not isinstance(leaf, (bool, int, float, complex)):
                return None
            names = (axes,) if isinstance(axes, str) else axes or ()
            parts = int(np.prod([self.mesh.shape[name] for name in names], dtype=int))
            split = np.ndim(leaf) and np.shape(leaf)[0] % parts == 0
            return NamedSharding(self.mesh, PartitionSpec(axes) if split else PartitionSpec())

        return jax.tree_util.tree_map(of, inputs)

    def _shardings(self, params: Any, specs: Mapping[str, Any]) -> Any:
        stored = surface(self.plan).tensors

        def of(path: Any, leaf: Any) -> NamedSharding | None:
            if not hasattr(leaf, "shape"):
                return None
            name = ".".join(jax.tree_util.keystr((entry,), simple=True) for entry in path)
            first, lead = (name, 0) if name in specs or f"{name}.0" not in specs else (f"{name}.0", 1)
            if first not in specs:
                raise ShardingError(
                    f"parameter {name} is not in the plan of {self.plan.program.name}, which has "
                    f"{listed(list(specs))}; apply it to the function that it was made for"
                )
            shape = tuple(np.shape(leaf))[lead:]
            if first in stored and stored[first].shape != shape:
                raise ShardingError(
                    f"parameter {name} is {list(shape)} but {list(stored[first].shape)} in the plan; make "
                    "the plan from these parameters, with dg.frontends.jax.import_function"
                )
            layers = [None] * lead  # one spec for all layers that a scan reads
            return NamedSharding(self.mesh, _partition([*layers, *specs[first]]))

        return jax.tree_util.tree_map_with_path(of, params)

    def _constrained(self, tree: Any, fixed: Mapping[int, Any], arrays: Sequence[Any]) -> Any:
        """The function with constraints on the results of its named scopes.

        Args:
            tree: structure of (arguments by position, arguments by keyword).
            fixed: number of a leaf -> its value, of those that are part of the program.
            arrays: the other leaves.
        """

        def of_arrays(given: Sequence[Any]) -> Any:
            remaining = iter(given)
            count = len(given) + len(fixed)
            leaves = [fixed[i] if i in fixed else next(remaining) for i in range(count)]
            args, kwargs = jax.tree_util.tree_unflatten(tree, leaves)
            return self._function(*args, **kwargs)

        closed, returned = jax.make_jaxpr(of_arrays, return_shape=True)(arrays)
        results = self._evaluated(closed.jaxpr, closed.consts, arrays, ())
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(returned), results)

    def _evaluated(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], around: tuple[str, ...]
    ) -> list[Any]:
        values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        leaving = dict(self._leaving(jaxpr, around))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name in _CALLS:
                inner = eqn.params["jaxpr"]
                results = self._evaluated(inner.jaxpr, inner.consts, operands, (*around, *scope_names(eqn)))
            else:
                settings = eqn.primitive.get_bind_params(eqn.params)
                functions: Sequence[Any] = ()
                if isinstance(settings, tuple):  # of older versions of JAX
                    functions, settings = settings
                bound = eqn.primitive.bind(*functions, *operands, **settings)
                results = list(bound) if eqn.primitive.multiple_results else [bound]
            for var, value in zip(eqn.outvars, results, strict=True):
                spec = leaving.get(var)
                if spec is not None:
                    value = jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, spec))
                values[var] = value
        return [read(atom) for atom in jaxpr.outvars]

    def _leaving(self, jaxpr: Any, around: tuple[str, ...]) -> Iterator[tuple[Any, PartitionSpec]]:
        """(variable, spec) of results of named scopes that code outside of them reads."""
        readers: dict[Any, list[tuple[str, ...]]] = {}
        for eqn in jaxpr.eqns:
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    readers.setdefault(atom, []).append((*around, *scope_names(eqn)))
        for atom in jaxpr.outvars:
            if not isinstance(atom, Literal):
                readers.setdefault(atom, []).append(around)
        for eqn in jaxpr.eqns:
            scope = (*around, *scope_names(eqn))
            for var in eqn.outvars:
                for depth in range(len(scope), 0, -1):
                    path = ".".join(scope[:depth])
                    outside = any(reader[:depth] != scope[:depth] for reader in readers.get(var, ()))
                    spec = self._specs["activations"].get(path)
                    if spec is not None and outside and self._fits(path, var.aval.shape):
                        yield var, _partition(spec)
                        break

    def _fits(self, path: str, shape: tuple[int, ...]) -> bool:
        """Whether a result has the shape of the plan's, but for the number of samples."""
        planned = surface(self.plan).modules[path].leaves[0].shape
        parts = self._specs["activations"][path][0] if planned else None
        names = parts if isinstance(parts, list) else [parts] if parts else []
        count = int(np.prod([self.mesh.shape[name] for name in names], dtype=int))
        return len(planned) == len(shape) and planned[1:] == shape[1:] and not (shape and shape[0] % count)


def apply_to_jax(plan: Plan, function: Callable[..., Any], mesh: Any = None) -> DistributedFunction:
    """`Plan.apply_to_jax`, which documents the arguments."""
    if not callable(function):
        raise GraphError(f"function is a {type(function).__name__} but must be callable")
    if len(plan.stages) > 1:
        raise ShardingError(
            f"plan of {plan.program.name} has {len(plan.stages)} stages but JAX has no pipeline; "
            "search a plan with stages=1, or run it with distgraph or PyTorch"
        )
    planned = plan.stages[0].mesh
    if mesh is None:
        if jax.device_count() <= max(planned.members):
            raise ResourceError(
                f"plan of {plan.program.name} uses {planned} but JAX has {jax.device_count()} "
                f"devices; search a plan with devices={jax.device_count()}"
            )
        mesh = Mesh(np.asarray(jax.devices())[planned.ranks], planned.axes)
    sizes = dict(zip(planned.axes, planned.shape, strict=True))
    if not isinstance(mesh, Mesh) or dict(mesh.shape) != sizes:
        shown = dict(mesh.shape) if isinstance(mesh, Mesh) else type(mesh).__name__
        raise ShardingError(
            f"mesh is {shown} but the plan has the axes {sizes}; give a jax.sharding.Mesh of them"
        )
    notes = []
    if plan.micro_batches > 1:
        notes.append(
            f"the plan has {plan.micro_batches} micro-batches: call the function for each, and add "
            "gradients up"
        )
    recomputed = [path for path, part in surface(plan).modules.items() if part.again]
    if recomputed:
        notes.append(f"the plan recomputes {listed(recomputed)}: put jax.checkpoint around them")
    return DistributedFunction(plan, function, mesh, notes)


def _leaves(shardings: Any) -> list[NamedSharding | None]:
    """The leaves of a pytree of shardings, None being one."""
    return list(jax.tree_util.tree_leaves(shardings, is_leaf=lambda x: x is None))


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _partition(spec: Sequence[Any]) -> PartitionSpec:
    return PartitionSpec(*(tuple(dim) if isinstance(dim, list) else dim for dim in spec))
