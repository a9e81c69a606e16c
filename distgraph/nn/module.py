"""Module: a part of a model whose parameters and submodules are attributes, named by their path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from distgraph.errors import GraphError
from distgraph.nn.parameter import Buffer, Parameter
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

_FAMILIAR = {  # name in other frameworks -> how it is done here
    "load_state_dict": "engine.load reads parameters from a checkpoint",
    "state_dict": "named_tensors() lists parameters and buffers, engine.save writes their values",
    "train": "engine.fit trains, engine.evaluate and engine.predict do not",
    "eval": "engine.evaluate and engine.predict run a model without training it",
    "to": 'Strategy(device="gpu") computes on GPUs, dtypes are given when layers are made',
    "cuda": 'Strategy(device="gpu") computes on GPUs',
    "fit": "dg.Engine(model, loss, optimizer).fit trains a model",
}


class MissingPart(GraphError, AttributeError):
    """A module has no attribute of this name."""


class Module:
    """A part of a model. Subclasses set parameters and submodules as attributes and define `forward`.

    Submodules may also be items of lists, tuples and dicts. A parameter that two modules share has the path
    of its first occurrence, and its gradients are summed.

    Example:
        class MLP(Module):
            def __init__(self) -> None:
                self.up, self.down = Linear(64, 256), Linear(256, 64)

            def forward(self, x):
                return self.down(gelu(self.up(x)))
    """

    _path: str | None = None
    _assigned: ClassVar[int] = 0  # settings of any module that were assigned another value in this process

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Raises GraphError where a class defines `__call__`, not `forward`."""
        super().__init_subclass__(**arguments)
        if "__call__" in cls.__dict__:
            raise GraphError(
                f"{cls.__name__} defines __call__, which would leave its parameters without their paths; "
                f"define forward instead, which a call of the module runs"
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes."""
        raise GraphError(f"{type(self).__name__} does not define forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trace `forward`; its ops carry the module's path as their scope."""
        trace = Trace.current()
        if self._path is None or (not self._path and not trace.scope):
            name_tree(self)  # a root names its tree at every call: modules may have been added since
        path = self._path or ""
        if trace.scope and path.startswith(f"{trace.scope}."):
            path = path[len(trace.scope) + 1 :]
        elif path == trace.scope:
            path = ""
        with trace.within(scope=path):
            return self.forward(*args, **kwargs)

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            """Raises GraphError where a tensor of a trace would take the place of a parameter or buffer."""
            if isinstance(value, Tensor) and isinstance(held := vars(self).get(name), Parameter):
                what = "buffer" if isinstance(held, Buffer) else "parameter"
                way = f"call self.{name}.update(new), which stores it at the end of the step"
                if what == "parameter":
                    way = f"make it an nn.Buffer and {way}, or keep the tensor in a variable"
                raise GraphError(
                    f"{type(self).__name__}.{name} is a {what} of {held.dtype}{list(held.shape)} but is "
                    f"assigned a computed tensor of {value.value.type}; {way}"
                )
            if name != "_path" and vars(self).get(name, value) is not value:
                Module._assigned += 1
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            """Raises MissingPart, which is also an AttributeError, so that `hasattr` returns False."""
            if name.startswith("_"):
                raise AttributeError(name)
            advice = _FAMILIAR.get(
                name, "set it in __init__, and call super().__init__ where that overrides another"
            )
            raise MissingPart(f"{type(self).__name__} has no {name!r}; {advice}")

    def children(self) -> Iterator[tuple[str, Any]]:
        """(relative path, module or parameter) of the attributes of this module."""
        for name, value in vars(self).items():
            if not name.startswith("_"):
                yield from _held(name, value)

    def private_children(self) -> Iterator[tuple[str, Any]]:
        """The same of attributes that start with _; what public ones hold too has its path there."""
        for name, value in vars(self).items():
            items = value if isinstance(value, (list, tuple)) else (value,)
            if name.startswith("_") and all(isinstance(item, (Module, Parameter)) for item in items):
                yield from _held(name, value)

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """(path, module) of this module and all modules below it, each once."""
        yield from _modules(self, prefix, set())

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """(path, parameter), a module's own before those below it, each once; buffers not included."""
        return [(path, p) for path, p in self.named_tensors() if not isinstance(p, Buffer)]

    def named_buffers(self) -> list[tuple[str, Buffer]]:
        """(path, buffer), a module's own before those below it."""
        return [(path, p) for path, p in self.named_tensors() if isinstance(p, Buffer)]

    def named_tensors(self) -> list[tuple[str, Parameter]]:
        """(path, parameter or buffer) relative to this module; names the tree if it is not yet named."""
        if self._path is None:
            name_tree(self)
        return _tensors(self)

    def parameters(self) -> list[Parameter]:
        """Every parameter, in the order of `named_parameters`."""
        return [p for _, p in self.named_parameters()]

    def parameter_count(self) -> int:
        """Number of learned numbers."""
        return sum(p.size for p in self.parameters())

    @property
    def training(self) -> bool:
        """True while the training graph is traced, False in evaluation and prediction."""
        return Trace.current().training


def assigned_settings() -> int:
    """How often an attribute of any module was given another value so far in this process."""
    return Module._assigned


def name_tree(root: Module, prefix: str = "") -> None:
    """Give every module and parameter below a root its path; a root entered later renames them."""
    for path, module in root.named_modules(prefix):
        module._path = path
    for path, parameter in _tensors(root):
        parameter.name = f"{prefix}.{path}" if prefix else path


def _held(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (Module, Parameter)):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from _held(f"{name}.{position}", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _held(f"{name}.{key}", item)


def _modules(module: Module, path: str, visited: set[int]) -> Iterator[tuple[str, Module]]:
    """Modules that are reached by public attributes, then those that only private ones lead to."""
    reached = list(_public_modules(module, path, visited))
    yield from reached
    for place, parent in reached:
        if type(parent).children is Module.children:
            for name, value in parent.private_children():
                if isinstance(value, Module):
                    yield from _modules(value, f"{place}.{name}" if place else name, visited)


def _public_modules(module: Module, path: str, visited: set[int]) -> Iterator[tuple[str, Module]]:
    if id(module) in visited:
        return
    visited.add(id(module))
    yield path, module
    for name, value in module.children():
        if isinstance(value, Module):
            yield from _public_modules(value, f"{path}.{name}" if path else name, visited)


def _tensors(root: Module) -> list[tuple[str, Parameter]]:
    tensors: list[tuple[str, Parameter]] = []
    visited: set[int] = set()
    modules = list(root.named_modules())
    held = [(path, module.children()) for path, module in modules]
    held += [(p, m.private_children()) for p, m in modules if type(m).children is Module.children]
    for path, children in held:
        for name, value in children:
            if isinstance(value, Parameter) and id(value) not in visited:
                visited.add(id(value))
                tensors.append((f"{path}.{name}" if path else name, value))
    return tensors
