"""`eager`: a model computes its numbers while it is traced, for debugging."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.errors.arguments import checked_arguments
from distgraph.ir.dtypes import is_float
from distgraph.ir.graph import Op
from distgraph.ir.reference_interpreter import run_op
from distgraph.kernels.random import random_key
from distgraph.nn.initializers import materialize
from distgraph.passes.serial.backward import differentiate
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace


class EagerTrace(Trace):
    """A trace that computes every op at once, with the kernels of one device; made by `eager`.

    Args:
        seed: of initial values and random numbers, as that of an engine.
        training: whether modules compute as in training.
        show: whether to print every op with its source line and the range of its numbers.
    """

    def __init__(self, seed: int, training: bool, show: bool) -> None:
        super().__init__("eager")
        self.training, self.numbers = training, {}
        self._seed, self._show = seed, show

    def input(self, name: str, array: Any) -> Tensor:
        """An array as a tensor of the given name."""
        array = np.asarray(array)
        tensor = super().source("input", name, array.shape, array.dtype)
        assert self.numbers is not None
        self.numbers[tensor.value.name] = array
        return tensor

    def source(self, kind: str, name: str, shape: Sequence[int], dtype: str, **attrs: Any) -> Tensor:
        """A parameter or state, with the value that an engine of this seed starts from."""
        tensor = super().source(kind, name, shape, dtype, **attrs)
        assert self.numbers is not None
        if tensor.value.name not in self.numbers:
            self._compute(self.ops[-1], {kind: {name: self._start(kind, name, tensor, attrs)}})
        return tensor

    def constant(self, data: Any, dtype: str | None = None) -> Tensor:
        """A number or array."""
        tensor = super().constant(data, dtype)
        assert self.numbers is not None
        if tensor.value.name not in self.numbers:
            self._compute(self.ops[-1], {})
        return tensor

    def emit(
        self, kind: str, operands: Sequence[Any], attrs: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, ...]:
        """Compute an op."""
        results = super().emit(kind, operands, attrs)
        self._compute(self.ops[-1], {})
        return results

    def replace_op(self, position: int, op: Op) -> None:
        """Compute an op again that has more results now."""
        super().replace_op(position, op)
        self._compute(op, {})

    def gradients(self, loss: Any) -> dict[str, np.ndarray]:
        """Name -> gradient of a loss, for every trainable parameter that was read.

        Raises:
            GraphError: the loss is no tensor of this `eager`, or not one number, or an op has no gradient.
        """
        if not isinstance(loss, Tensor) or loss.trace is not self:
            actual = f"%{loss.value.name} of another trace" if isinstance(loss, Tensor) else f"{loss!r}"
            raise GraphError(
                f"loss is {actual:.60} but gradients needs a tensor that was computed in this eager(); pass "
                "the loss itself, not float(loss) or an array"
            )
        learned = [op for op in self.ops if op.kind == "param" and op.attrs.get("trainable", True)]
        results = differentiate(self, loss, [Tensor(op.result, self) for op in learned])
        return {str(op.attrs["name"]): np.asarray(g) for op, g in zip(learned, results, strict=True)}

    def _start(self, kind: str, name: str, tensor: Tensor, attrs: Mapping[str, Any]) -> Any:
        if kind == "input":
            if name == "key":
                return np.uint64(random_key(self._seed, "step", 0))
            raise GraphError(f"input {name!r} has no numbers in eager(); give it with .input(name, array)")
        parameter = self.parameters.get(name)
        if parameter is not None and parameter.value is not None:
            return parameter.value
        return materialize(attrs.get("init", ("zeros",)), name, self._seed, tensor.shape, dtype=tensor.dtype)

    def _compute(self, op: Op, sources: Mapping[str, Mapping[str, Any]]) -> None:
        assert self.numbers is not None
        with np.errstate(all="ignore"):  # numbers that are not finite are shown
            arrays = run_op(op, self.numbers, sources, 0, np)
        for value, array in zip(op.results, arrays, strict=True):
            self.numbers[value.name] = array
            if self._show and op.kind != "constant":
                sys.stdout.write(f"%{value.name} {op.kind} {value.type} ({op.source}): {_range(array)}\n")


def _range(array: np.ndarray) -> str:
    """The numbers of a tensor in a few words."""
    if not array.size:
        return "empty"
    if array.size == 1:
        return f"{array.item():.6g}" if is_float_array(array) else str(array.item())
    if not is_float_array(array):
        return f"from {array.min()} to {array.max()}"
    wide = array.astype("f8")
    finite = wide[np.isfinite(wide)]
    if not finite.size:
        return f"all {array.size} not finite"
    text = f"from {finite.min():.6g} to {finite.max():.6g}, mean {finite.mean():.6g}"
    bad = array.size - finite.size
    return f"{text}, {bad} not finite" if bad else text


def is_float_array(array: np.ndarray) -> bool:
    """Whether an array has a floating dtype, of NumPy or bf16."""
    return array.dtype.kind not in "biu" and is_float(str(array.dtype.name).replace("float", "f"))


@checked_arguments()
@contextmanager
def eager(seed: int = 0, *, training: bool = False, show: bool = False) -> Iterator[EagerTrace]:
    """Inside, a model computes its numbers at once: with `numpy.asarray`, `float` and `print` of any tensor.

    The numbers are those that an engine of this seed computes on one rank before its first step.

    Args:
        seed: of initial values and random numbers.
        training: whether modules compute as in training, with dropout and the statistics of the batch.
        show: whether to print every op, with the line that called it and the range of its numbers.

    Example:
        >>> import numpy as np, distgraph as dg
        >>> model = dg.nn.Linear(2, 1, bias=False)
        >>> model.weight.assign([[1], [2]])
        >>> with dg.eager() as run:
        ...     loss = dg.ops.mean(model(run.input("x", np.ones((4, 2), "f4"))) ** 2)
        ...     print(float(loss), run.gradients(loss)["weight"].ravel())
        9.0 [6. 6.]
    """
    trace = EagerTrace(seed, training, show)
    with trace.activate():
        yield trace
