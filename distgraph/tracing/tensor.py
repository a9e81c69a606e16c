"""Tensor: the symbolic tensor that user code computes with while traced. It has a shape and a dtype only."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextvars import ContextVar
from math import prod
from typing import TYPE_CHECKING, Any

from distgraph.errors import GraphError
from distgraph.ir.dtypes import short
from distgraph.ir.graph import Value

if TYPE_CHECKING:
    from distgraph.tracing.tracer import Trace

ACTIVE: ContextVar[Trace | None] = ContextVar("distgraph_trace", default=None)


def current_trace() -> Trace:
    """The innermost active trace. Raises GraphError outside of one."""
    trace = ACTIVE.get()
    if trace is None:
        raise GraphError("no trace is active; tensor operations run inside dg.trace(...) or an Engine")
    return trace


def owning_trace(operands: Sequence[Any]) -> Trace:
    """The trace that an op of these operands belongs to: theirs, else the current one.

    Inside the body of a loop it is that of the body, whose operands may come from outside.
    """
    owner = next((x.trace for x in operands if isinstance(x, Tensor)), None)
    active = ACTIVE.get()
    if owner is None or (active is not None and active.is_inside(owner)):
        return current_trace()
    return owner


def emit(kind: str, *operands: Any, **attrs: Any) -> Any:
    """Append an op to the trace of its tensor operands (else the current trace).

    Returns the tuple of its results, or the result itself where there is one.
    """
    results = owning_trace(operands).emit(kind, operands, attrs)
    return results[0] if len(results) == 1 else results


class MissingMethod(GraphError, AttributeError):
    """A method that other array types have and traced tensors have not."""


class TensorOperators:
    """Operators and array methods of traced tensors and of parameters (which become tensors on use)."""

    __array_priority__ = 1000

    def __add__(self, other: Any) -> Tensor:
        return _binary("add", self, other)

    def __radd__(self, other: Any) -> Tensor:
        return _binary("add", other, self)

    def __sub__(self, other: Any) -> Tensor:
        return _binary("subtract", self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return _binary("subtract", other, self)

    def __mul__(self, other: Any) -> Tensor:
        return _binary("multiply", self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return _binary("multiply", other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return _binary("divide", self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return _binary("divide", other, self)

    def __floordiv__(self, other: Any) -> Tensor:
        return _binary("floor_divide", self, other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return _binary("floor_divide", other, self)

    def __mod__(self, other: Any) -> Tensor:
        return _binary("remainder", self, other)

    def __rmod__(self, other: Any) -> Tensor:
        return _binary("remainder", other, self)

    def __divmod__(self, other: Any) -> tuple[Tensor, Tensor]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Tensor, Tensor]:
        return other // self, other % self

    def __pow__(self, other: Any) -> Tensor:
        return _binary("power", self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return _binary("power", other, self)

    def __and__(self, other: Any) -> Tensor:
        return _binary("bitwise_and", self, other)

    def __rand__(self, other: Any) -> Tensor:
        return _binary("bitwise_and", other, self)

    def __or__(self, other: Any) -> Tensor:
        return _binary("bitwise_or", self, other)

    def __ror__(self, other: Any) -> Tensor:
        return _binary("bitwise_or", other, self)

    def __xor__(self, other: Any) -> Tensor:
        return _binary("bitwise_xor", self, other)

    def __rxor__(self, other: Any) -> Tensor:
        return _binary("bitwise_xor", other, self)

    def __lshift__(self, other: Any) -> Tensor:
        return _binary("left_shift", self, other)

    def __rlshift__(self, other: Any) -> Tensor:
        return _binary("left_shift", other, self)

    def __rshift__(self, other: Any) -> Tensor:
        return _binary("right_shift", self, other)

    def __rrshift__(self, other: Any) -> Tensor:
        return _binary("right_shift", other, self)

    def __invert__(self) -> Tensor:
        return emit_one("bitwise_not", self)

    def __neg__(self) -> Tensor:
        return emit_one("negative", self)

    def __pos__(self) -> Tensor:
        return emit_one("identity", self)

    def __abs__(self) -> Tensor:
        return emit_one("absolute", self)

    def __lt__(self, other: Any) -> Tensor:
        return _binary("less", self, other)

    def __le__(self, other: Any) -> Tensor:
        return _binary("less_equal", self, other)

    def __gt__(self, other: Any) -> Tensor:
        return _binary("greater", self, other)

    def __ge__(self, other: Any) -> Tensor:
        return _binary("greater_equal", self, other)

    def __eq__(self, other: object) -> Any:
        return _binary("equal", self, other)

    def __ne__(self, other: object) -> Any:
        return _binary("not_equal", self, other)

    __hash__ = object.__hash__

    def __setitem__(self, key: Any, value: Any) -> None:
        raise GraphError(
            f"{type(self).__name__} is never written to; make a new one with distgraph.ops.where, concat or "
            f"dynamic_update_slice"
        )

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def T(self) -> Tensor:
        """Dims in reverse order."""
        return self.transpose()

    @property
    def mT(self) -> Tensor:
        """Last two dims swapped."""
        return self.swapaxes(-1, -2)

    def astype(self, dtype: Any) -> Tensor:
        """Cast."""
        return emit_one("cast", self, dtype=short(dtype))

    def swapaxes(self, first: int, second: int) -> Tensor:
        """Two dims exchanged."""
        order = list(range(self.ndim))
        order[first], order[second] = order[second], order[first]
        return self.transpose(order)

    def argmax(self, axis: int = -1) -> Tensor:
        """Position of the first largest element along a dim."""
        return emit_one("argmax", self, dim=axis % self.ndim)

    if TYPE_CHECKING:  # of subclasses; made of ops: `distgraph.ops.tensor_methods` and `array_api` bind them

        @property
        def shape(self) -> tuple[int, ...]: ...
        @property
        def dtype(self) -> str: ...
        def reshape(self, *shape: int | Sequence[int]) -> Tensor: ...
        def transpose(self, *dims: int | Sequence[int]) -> Tensor: ...
        def sum(self, axis: Any = None, keepdims: bool = False) -> Tensor: ...
        def mean(self, axis: Any = None, keepdims: bool = False) -> Tensor: ...
        def var(self, axis: Any = None, keepdims: bool = False) -> Tensor: ...
        def max(self, axis: Any = None, keepdims: bool = False) -> Tensor: ...
        def min(self, axis: Any = None, keepdims: bool = False) -> Tensor: ...
        def __matmul__(self, other: Any) -> Tensor: ...
        def __rmatmul__(self, other: Any) -> Tensor: ...
        def __getitem__(self, key: Any) -> Tensor: ...
        def __array_namespace__(self, *, api_version: str | None = None) -> Any: ...
        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any: ...
        def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any: ...

    else:

        def __getattr__(self, name: str) -> Any:
            """Raises MissingMethod, which is also an AttributeError, so that `hasattr` returns False."""
            if name.startswith("_"):
                raise AttributeError(name)
            raise MissingMethod(
                f"{type(self).__name__} has no {name!r}; use a function of distgraph.ops, NumPy or the array "
                f"API instead"
            )


def _binary(kind: str, left: Any, right: Any) -> Tensor:
    return emit_one(kind, left, right)


def emit_one(kind: str, *operands: Any, **attrs: Any) -> Tensor:
    """`emit` for an op that has one result."""
    result: Tensor = emit(kind, *operands, **attrs)
    return result


class Tensor(TensorOperators):
    """A traced value.

    Attributes:
        value: the value of the graph.
        trace: the trace it belongs to.
    """

    __slots__ = ("trace", "value")

    def __init__(self, value: Value, trace: Trace) -> None:
        self.value = value
        self.trace = trace

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.value.shape

    @property
    def dtype(self) -> str:
        """Short dtype name."""
        return self.value.dtype

    def __bool__(self) -> bool:
        if self.trace.numbers is not None:
            raise GraphError(
                f"%{self.value.name} is a tensor of a model: its number is known in eager() but not where an "
                "engine traces the model; use dg.ops.where or dg.ops.while_loop instead of if and while, or "
                "bool(np.asarray(tensor)) to debug"
            )
        raise GraphError(
            f"%{self.value.name} is traced: its number is not known yet; use dg.ops.where or "
            "dg.ops.while_loop instead of if and while"
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self._concrete("np.asarray")
        return array if dtype is None else array.astype(dtype)

    def __float__(self) -> float:
        return float(self._concrete("float"))

    def __int__(self) -> int:
        return int(self._concrete("int"))

    def __index__(self) -> int:
        return operator.index(self._concrete("int"))

    def __format__(self, spec: str) -> str:
        return format(self._concrete("format"), spec) if spec else str(self)

    def _concrete(self, name: str) -> Any:
        """The array of this value in an eager trace. Raises GraphError in others."""
        if self.trace.numbers is not None:
            return self.trace.numbers[self.value.name]
        raise GraphError(
            f"%{self.value.name} is traced: its numbers are not known yet, so {name}() of it has no answer; "
            "return it from the function, compute with distgraph.ops, or debug in distgraph.eager()"
        )

    def __len__(self) -> int:
        if not self.shape:
            raise GraphError(f"%{self.value.name} has no dims and so no length")
        return self.shape[0]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        numbers = "" if self.trace.numbers is None else f" = {self.trace.numbers[self.value.name]}"
        return f"Tensor(%{self.value.name} : {self.value.type}{numbers})"
