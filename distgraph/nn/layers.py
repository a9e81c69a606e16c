"""The layers: linear, embedding, norms, dropout, convolution, pooling, and containers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.errors.arguments import Count, NonNegative, Rate, Size, checked_arguments
from distgraph.nn.initializers import Init, fan_in_uniform
from distgraph.nn.module import Module
from distgraph.nn.parameter import Parameter
from distgraph.ops.contraction import as_tensors
from distgraph.tracing.tensor import Tensor


@checked_arguments()
class Linear(Module):
    """y = x w + b.

    Args:
        inputs, outputs: lengths of the last dim before and after.
        bias: whether there is a b.
        init: of w; by default uniform within 1 / sqrt(inputs).

    Parameters: weight [inputs, outputs], bias [outputs].
    """

    def __init__(
        self,
        inputs: Count,
        outputs: Count,
        bias: bool = True,
        init: Init | None = None,
        dtype: Any = "f32",
    ) -> None:
        self.weight = Parameter((inputs, outputs), dtype, fan_in_uniform(inputs) if init is None else init)
        self.bias = Parameter((outputs,), dtype, ("zeros",)) if bias else None

    def forward(self, x: Any) -> Tensor:
        """x [..., inputs] -> [..., outputs]."""
        y = ops.matmul(x, self.weight)
        return y if self.bias is None else y + self.bias


@checked_arguments()
class Embedding(Module):
    """A table of rows that are looked up by number. Parameters: weight [rows, width]."""

    def __init__(self, rows: Count, width: Count, init: Init = ("normal", 0.02), dtype: Any = "f32") -> None:
        self.weight = Parameter((rows, width), dtype, init)

    def forward(self, ids: Any) -> Tensor:
        """ids [...] integers -> [..., width]."""
        return ops.embedding(self.weight, ids)


@checked_arguments()
class LayerNorm(Module):
    """Layer norm over the last dim. Parameters: weight [width], bias [width]."""

    def __init__(self, width: Count, eps: NonNegative = 1e-5, dtype: Any = "f32") -> None:
        self.weight = Parameter((width,), dtype, ("ones",))
        self.bias = Parameter((width,), dtype, ("zeros",))
        self.eps = eps

    def forward(self, x: Any) -> Tensor:
        """x [..., width] -> the same shape."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


@checked_arguments()
class RMSNorm(Module):
    """Root-mean-square norm over the last dim. Parameters: weight [width]."""

    def __init__(self, width: Count, eps: NonNegative = 1e-6, dtype: Any = "f32") -> None:
        self.weight = Parameter((width,), dtype, ("ones",))
        self.eps = eps

    def forward(self, x: Any) -> Tensor:
        """x [..., width] -> the same shape."""
        return ops.rms_norm(x, self.weight, self.eps)


@checked_arguments()
class Dropout(Module):
    """Zeroes elements with probability `rate` while training and scales the rest by 1 / (1 - rate).

    Which elements are dropped depends only on seed, step and position: not on the layout, the ranks or the
    number of micro-batches, which are consecutive along `batch_dim`.
    """

    def __init__(self, rate: Rate, batch_dim: Size | None = 0) -> None:
        self.rate = rate
        self.batch_dim = batch_dim

    def forward(self, x: Any) -> Any:
        """Any shape."""
        return ops.dropout(x, self.rate, self.batch_dim) if self.rate and self.training else x


class Sequential(Module):
    """Modules and functions, one after the other."""

    def __init__(self, *steps: Callable[..., Any]) -> None:
        for position, step in enumerate(steps):
            _check_step(position, step)
        self.steps = list(steps)

    def forward(self, x: Any) -> Any:
        """The output of each step is the input of the next."""
        for step in self.steps:
            x = step(x)
        return x

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, position: int) -> Callable[..., Any]:
        return self.steps[position]


def _check_step(position: int, step: object) -> None:
    if isinstance(step, type) or not callable(step):
        actual = f"the class {step.__name__}" if isinstance(step, type) else f"a {type(step).__name__}"
        raise GraphError(
            f"step {position} of Sequential is {actual} but must be a module or a function; write "
            f"Sequential(Linear(2, 3), ReLU()), or Sequential(*modules) for a list"
        )


class ReLU(Module):
    """max(x, 0)."""

    def forward(self, x: Any) -> Tensor:
        """Any shape."""
        return ops.relu(x)


@checked_arguments()
class GELU(Module):
    """x times the normal distribution function, or its tanh approximation."""

    def __init__(self, approximate: bool = False) -> None:
        self.approximate = approximate

    def forward(self, x: Any) -> Tensor:
        """Any shape."""
        return ops.gelu(x, self.approximate)


class SiLU(Module):
    """x * sigmoid(x)."""

    def forward(self, x: Any) -> Tensor:
        """Any shape."""
        return ops.silu(x)


class Tanh(Module):
    """Hyperbolic tangent."""

    def forward(self, x: Any) -> Tensor:
        """Any shape."""
        return ops.tanh(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Any) -> Tensor:
        """Any shape."""
        return ops.sigmoid(x)


class Flatten(Module):
    """All dims but the first in one."""

    def forward(self, x: Any) -> Tensor:
        """x [n, ...] -> [n, rest]."""
        return ops.reshape(x, (x.shape[0], -1))


class CrossEntropy(Module):
    """Mean cross-entropy of logits [..., classes] and integer labels [...]."""

    def forward(self, logits: Any, labels: Any) -> Tensor:
        """A scalar."""
        return ops.mean(ops.cross_entropy(logits, labels))


class MeanSquaredError(Module):
    """Mean of the squared differences of a prediction and a target of the same shape."""

    def forward(self, prediction: Any, target: Any) -> Tensor:
        """A scalar.

        Raises:
            GraphError: the shapes differ: of [n, 1] and [n] there would be n x n differences.
        """
        prediction, target = as_tensors(prediction, target)
        if target.shape not in ((), prediction.shape):
            raise GraphError(
                f"MeanSquaredError gets a prediction of shape {prediction.shape} and a target of shape "
                f"{target.shape} but they must be equal; reshape one of them"
            )
        return ops.mean(ops.square(prediction - target))
