"""Parameter: a tensor that is learned. It has a shape and an initialisation; the engine holds its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from distgraph.errors import GraphError
from distgraph.errors.arguments import Size, array_of, checked_arguments
from distgraph.ir.dtypes import short, to_numpy
from distgraph.ir.sharding_spec import AxisAttr, DistAttr
from distgraph.nn.initializers import Init, check_init, check_numbers
from distgraph.tracing.tensor import Tensor, TensorOperators
from distgraph.tracing.tracer import Trace


class Settings(NamedTuple):
    """What a program takes from a parameter when it is compiled."""

    trainable: bool
    annotation: DistAttr | AxisAttr | None
    init: Init
    value: np.ndarray | None

    def same(self, other: Settings) -> bool:
        """Whether other settings are equal, with the same array."""
        return self[:3] == other[:3] and self.value is other.value


@checked_arguments()
class Parameter(TensorOperators):
    """A learned tensor of a module (or, as a `Buffer`, one that is not learned). A trace uses it as a tensor.

    Attributes:
        shape, dtype: global shape and short dtype name.
        init: see `distgraph.nn.initializers`.
        trainable: whether the optimiser changes it.
        annotation: layout that the user annotated, on a mesh or by names of axes; or None.
        name: module path such as "blocks.3.attn.q.weight"; set when the root module is entered.
        value: the array that it starts from, if one was assigned; see `assign`.
        changes: how many settings of parameters have changed so far in this process, see `Settings`.
    """

    kind = "param"
    dtype: str
    changes: ClassVar[int] = 0

    def __init__(
        self,
        shape: Sequence[Size] | Size,
        dtype: Any = "f32",
        init: Any = ("normal", 0.02),
        trainable: bool = True,
        annotation: DistAttr | AxisAttr | None = None,
    ) -> None:
        check_init(init)
        lengths = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        self.shape: tuple[int, ...] = tuple(int(n) for n in lengths)
        self.dtype = short(dtype)
        check_numbers(init, self.dtype)
        self.init: Init = init
        self.trainable = trainable
        self.annotation = annotation
        self.name = ""
        self.value: np.ndarray | None = None

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            """Count changes of settings, so that an engine compares them only where there are new ones."""
            if name in Settings._fields:
                Parameter.changes += 1
            super().__setattr__(name, value)

    @property
    def settings(self) -> Settings:
        """What a program takes from this parameter when it is compiled."""
        return Settings(self.trainable, self.annotation, self.init, self.value)

    def assign(self, value: Any) -> None:
        """Start from the numbers of an array instead of those of `init`; the array is copied.

        An engine reads them when it first needs the parameter, so they must be assigned before it trains;
        `engine.assign` changes the numbers that an engine has.

        Raises:
            GraphError: the array has another shape, or numbers that the dtype of the parameter cannot hold.
        """
        array, dtype = array_of(f"value of parameter {self.name or '?'}", value), to_numpy(self.dtype)
        if array.shape != self.shape:
            raise GraphError(
                f"parameter {self.name or '?'} has shape {self.shape} but is given an array of {array.shape}"
            )
        if array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind"):
            raise GraphError(
                f"parameter {self.name or '?'} is {self.dtype} but is given an array of {array.dtype}; "
                f"convert it first with .astype"
            )
        self.value = np.array(array, dtype=dtype)
        self.init = ("given",)

    def __distgraph_tensor__(self, trace: Trace) -> Tensor:
        """The tensor of this parameter in a trace. Raises GraphError when another one has its name."""
        if not self.name:
            raise GraphError(
                f"a parameter of shape {self.shape} is used outside of a module; call its module, and "
                "keep it in an attribute of that, or in a list, tuple or dict"
            )
        first = trace.parameters.setdefault(self.name, self)
        if first is not self:
            raise GraphError(
                f"two parameters are named {self.name!r} in trace {trace.name!r}; make both modules "
                "attributes of one module, in its __init__"
            )
        tensor = trace.source(self.kind, self.name, self.shape, self.dtype, init=self.init, **self._attrs())
        if isinstance(self.annotation, AxisAttr):
            trace.annotate_axes(tensor.value, self.annotation)
        elif self.annotation is not None:
            trace.annotate(tensor.value, self.annotation)
        return tensor

    def _attrs(self) -> dict[str, Any]:
        return {"trainable": self.trainable}

    def tensor(self) -> Tensor:
        """The tensor of this parameter in the current trace."""
        return Trace.current().tensor(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name or '?'} : {self.dtype}[{', '.join(map(str, self.shape))}])"


@checked_arguments()
class Buffer(Parameter):
    """A tensor that a module updates from step to step without learning it, such as running statistics."""

    kind = "state"

    def __init__(self, shape: Sequence[Size] | Size, dtype: Any = "f32", init: Any = ("zeros",)) -> None:
        super().__init__(shape, dtype, init, trainable=False)

    def _attrs(self) -> dict[str, Any]:
        return {}

    def update(self, new: Tensor) -> None:
        """Set the value at the end of the step. Raises GraphError when the shape or dtype differs."""
        old = self.tensor()
        if new.value.type != old.value.type:
            raise GraphError(f"buffer {self.name} is {old.value.type} but its new value is {new.value.type}")
        new.trace.updates.append((old.value.name, new.value))
