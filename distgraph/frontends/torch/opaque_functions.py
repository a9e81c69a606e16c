"""What an opaque op of torch runs: the op itself, or functions of NumPy that the user gives.

Each becomes a `HostFunction` of arrays. Arguments of a call come as a template of numbers, in which tensors
are {"operand": position} and dtypes {"dtype": name}.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from distgraph.frontends.torch.torch_dtypes import as_array, as_tensor, torch_dtype
from distgraph.ir.graph import Value
from distgraph.ops.opaque import FUNCTIONS, HostFunction

Function = Callable[..., Any]


def registered(name: str, function: Function | None, gradient: Function | None) -> str:
    """The name under which an op is found when the program runs.

    The op of torch itself has one name. Functions of the user are numbered in the order of their imports,
    and equal ones, such as those of a module that is executed again, are one.
    """
    if function is None and gradient is None:
        FUNCTIONS.setdefault(f"torch:{name}", _TorchFunction(name).host_function())
        return f"torch:{name}"
    mine = _UserFunction(name, function, gradient)
    for number in range(1, len(FUNCTIONS) + 2):
        key = f"user:{name}" + (f"#{number}" if number > 1 else "")
        if key not in _USER:
            _USER[key] = mine
            FUNCTIONS[key] = mine.host_function()
        if _same(_USER[key].function, function) and _same(_USER[key].gradient, gradient):
            return key
    raise AssertionError("one of these numbers is free")


def _same(a: Any, b: Any) -> bool:
    """Whether two functions are one object, or were made by the same code over the same objects."""
    if a is b or not (hasattr(a, "__code__") and hasattr(b, "__code__")):
        return a is b
    try:
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
    except ValueError:  # a variable of a closure has no value yet
        return False
    held = [
        [*each, *(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]
        for each, f in zip(cells, (a, b), strict=True)
    ]
    return (
        a.__code__ == b.__code__
        and a.__globals__ is b.__globals__
        and len(held[0]) == len(held[1])
        and all(x is y for x, y in zip(*held, strict=True))
    )


class _TorchFunction:
    """An op of torch as a function of arrays."""

    def __init__(self, name: str) -> None:
        library, op, overload = name.split(".")
        self.op = getattr(getattr(getattr(torch.ops, library), op), overload)

    def host_function(self) -> HostFunction:
        return HostFunction(self.run, self.pull_back, self.no_gradient)

    def run(self, operands: Sequence[Any], arguments: Any) -> list[Any]:
        args, kwargs = _filled(arguments, [as_tensor(x) for x in operands])
        with torch.no_grad():
            return [as_array(x) for x in pytree.tree_leaves(self.op(*args, **kwargs))]

    def pull_back(self, operands: Sequence[Any], received: Sequence[Any], arguments: Any) -> list[Any]:
        given = [None if g is None else as_tensor(g) for g in received]
        grads = self._vector_product([as_tensor(x) for x in operands], given, arguments)
        return [None if g is None else as_array(g) for g in grads]

    def no_gradient(self, operands: Sequence[Value], arguments: Any) -> str:
        """Tries autograd on tensors without numbers; see `HostFunction`."""
        made = [torch.empty(x.shape, dtype=torch_dtype(x.dtype), device="meta") for x in operands]
        try:
            grads = self._vector_product(made, None, arguments)
        except Exception as error:  # noqa: BLE001 - whatever the op's own code raises
            lines = str(error).strip().splitlines()
            return f"autograd of torch fails ({lines[0] if lines else type(error).__name__})"
        return "" if any(g is not None for g in grads) else "autograd of torch has none for it"

    def _vector_product(
        self, operands: list[torch.Tensor], received: Sequence[Any] | None, arguments: Any
    ) -> list[torch.Tensor | None]:
        """Gradients of the operands; without `received`, of undefined gradients of all results."""
        with torch.enable_grad():
            own = [x.detach().requires_grad_(x.is_floating_point()) for x in operands]
            args, kwargs = _filled(arguments, own)
            results = pytree.tree_leaves(self.op(*args, **kwargs))
            grads = [torch.empty_like(y) for y in results] if received is None else received
            pairs = [
                (y, g.to(y.dtype))
                for y, g in zip(results, grads, strict=True)
                if y.requires_grad and g is not None
            ]
            wrt = [x for x in own if x.requires_grad]
            if not pairs or not wrt:
                return [None] * len(own)
            ys, gs = zip(*pairs, strict=True)
            grads_of = iter(torch.autograd.grad(ys, wrt, gs, allow_unused=True))
        return [next(grads_of) if x.requires_grad else None for x in own]


class _UserFunction(_TorchFunction):
    """An op of torch of which the user gives the function, the gradient or both."""

    def __init__(self, name: str, function: Function | None, gradient: Function | None) -> None:
        super().__init__(name)
        self.function, self.gradient = function, gradient

    def run(self, operands: Sequence[Any], arguments: Any) -> list[Any]:
        if self.function is None:
            return super().run(operands, arguments)
        args, kwargs = _filled(arguments, _read_only(operands), arrays=True)
        results = self.function(*args, **kwargs)
        return list(results) if isinstance(results, (tuple, list)) else [results]

    def pull_back(self, operands: Sequence[Any], received: Sequence[Any], arguments: Any) -> list[Any]:
        if self.gradient is None:
            return super().pull_back(operands, received, arguments)
        args, kwargs = _filled(arguments, _read_only(operands), arrays=True)
        grads = self.gradient(tuple(_read_only(received)), *args, **kwargs)
        return list(grads) if isinstance(grads, (tuple, list)) else [grads]

    def no_gradient(self, operands: Sequence[Value], arguments: Any) -> str:
        return super().no_gradient(operands, arguments) if self.gradient is None else ""


_USER: dict[str, _UserFunction] = {}
"""Name in `FUNCTIONS` -> function of the user."""


def _read_only(arrays: Sequence[Any]) -> list[Any]:
    """Views that a function cannot write to: other ops of the program read the same memory."""
    views = [None if x is None else x.view() for x in arrays]
    for view in views:
        if view is not None:
            view.flags.writeable = False
    return views


def _filled(template: Any, operands: Sequence[Any], *, arrays: bool = False) -> Any:
    """A template with its operands: (args, kwargs)."""

    def walk(x: Any) -> Any:
        if isinstance(x, Mapping) and "operand" in x:
            return operands[x["operand"]]
        if isinstance(x, Mapping) and "dtype" in x:
            return x["dtype"] if arrays else torch_dtype(x["dtype"])
        return [walk(each) for each in x] if isinstance(x, (list, tuple)) else x

    return [walk(x) for x in template["args"]], {k: walk(x) for k, x in template["kwargs"].items()}
