"""The parts that the hand-written NumPy programs of the MLP are made of: layers, Adam, forward, backward.

Everything writes into buffers made once. Measured while choosing, one thread, 256 x 1024 fp32: maximum
against a scalar 83 us, against a row of zeros 26 us; ReLU gradient by a boolean mask 52 us, by sign 108 us,
by copyto(where) 1042 us; column sum as a product with ones 11 us, by add.reduce 16 us. Adam over 8.4 million
parameters: whole arrays 17.8 ms, blocks of 64 Ki elements 11.0 ms. Weight gradient of 128 rows added to an
old one: sgemm with beta = 1 as fast as matmul alone (2.26 ms), matmul and add 2.38 ms.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.blas import sgemm

from benchmarks.support.peers import BETA1, BETA2, EPSILON, LEARNING_RATE, Array, MlpSizes

ADAM_BLOCK = 1 << 16  # elements; 4 operands and 2 scratch blocks of 256 KiB stay near the core


@dataclass(frozen=True, slots=True)
class Layer:
    """One linear layer: `flat` holds the weight [in, out] and then the bias [out], which are views of it."""

    flat: Array
    weight: Array
    bias: Array


@dataclass(frozen=True, slots=True)
class Moments:
    """Adam's running means of g and g^2, divided by (1 - beta), which saves a pass each."""

    first: Array
    second: Array


def empty_layer(inputs: int, outputs: int) -> Layer:
    """A layer, or a layer's gradient, of the given sizes; not initialised."""
    flat: Array = np.empty(inputs * outputs + outputs, np.float32)
    return Layer(flat, flat[: inputs * outputs].reshape(inputs, outputs), flat[inputs * outputs :])


def make_layer(weight: Array, bias: Array) -> Layer:
    """A layer with a copy of these parameters."""
    layer = empty_layer(*weight.shape)
    layer.weight[:] = weight
    layer.bias[:] = bias
    return layer


def make_moments(size: int) -> Moments:
    """Zero moments for `size` parameters."""
    return Moments(np.zeros(size, np.float32), np.zeros(size, np.float32))


class Adam:
    """Adam without weight decay (Kingma and Ba 2015, algorithm 1), ten passes over cached blocks."""

    def __init__(self) -> None:
        self.step = 0
        self.gradient: Array = np.empty(ADAM_BLOCK, np.float32)
        self.update: Array = np.empty(ADAM_BLOCK, np.float32)

    def next_step(self) -> None:
        """Fold 1 / (1 - beta^t) and the scale of the stored moments into one rate and one epsilon."""
        self.step += 1
        second_scale = math.sqrt((1 - BETA2) / (1 - BETA2**self.step))
        self.rate = np.float32(LEARNING_RATE * (1 - BETA1) / (1 - BETA1**self.step) / second_scale)
        self.epsilon = np.float32(EPSILON / second_scale)

    def __call__(self, values: Array, moments: Moments, gradient: Array, other: Array | None = None) -> None:
        """Update `values` by `gradient`, or by `gradient + other` (two ranks' sum without its own pass)."""
        for start in range(0, values.size, ADAM_BLOCK):
            block = slice(start, min(start + ADAM_BLOCK, values.size))
            first, second = moments.first[block], moments.second[block]
            update = self.update[: first.size]
            g = gradient[block]
            if other is not None:
                g = np.add(g, other[block], out=self.gradient[: g.size])
            np.multiply(first, BETA1, out=first)
            np.add(first, g, out=first)
            np.multiply(second, BETA2, out=second)
            np.multiply(g, g, out=update)
            np.add(second, update, out=second)
            np.sqrt(second, out=update)
            np.add(update, self.epsilon, out=update)
            np.divide(first, update, out=update)
            np.multiply(update, self.rate, out=update)
            np.subtract(values[block], update, out=values[block])


def add_relu(output: Array, bias: Array, zeros: Array, mask: NDArray[np.bool_]) -> None:
    """output = max(output + bias, 0) in place; `mask` keeps where it is positive."""
    np.add(output, bias, out=output)
    np.greater(output, zeros, out=mask)
    np.maximum(output, zeros, out=output)


class Activations:
    """Activations [rows, width of each layer] and ReLU masks of one pass through consecutive layers."""

    def __init__(self, rows: int, widths: list[int], last: bool) -> None:
        self.last = last  # the last of these layers is the model's last: no ReLU after it
        self.outputs: list[Array] = [np.empty((rows, width), np.float32) for width in widths]
        self.masks: list[NDArray[np.bool_]] = [np.empty((rows, width), np.bool_) for width in widths]
        self.zeros: list[Array] = [np.zeros(width, np.float32) for width in widths]

    def forward(self, layers: list[Layer], x: Array) -> Array:
        """Run the layers on x [rows, in]; returns the last output."""
        for index, layer in enumerate(layers):
            output = self.outputs[index]
            np.matmul(x, layer.weight, out=output)
            if self.last and index == len(layers) - 1:
                np.add(output, layer.bias, out=output)
            else:
                add_relu(output, layer.bias, self.zeros[index], self.masks[index])
            x = output
        return x


def loss_gradient(output: Array, target: Array, sizes: MlpSizes, out: Array) -> float:
    """Write d loss / d output into `out`; returns these rows' share of the loss."""
    elements = sizes.batch * sizes.width
    np.subtract(output, target, out=out)
    share = float(np.vdot(out, out)) / elements
    np.multiply(out, np.float32(2.0 / elements), out=out)
    return share


def weight_gradient(x: Array, dz: Array, ones: Array, out: Layer) -> None:
    """Write the gradients of a layer's weight and bias for input x [rows, in] and dz [rows, out]."""
    np.matmul(x.T, dz, out=out.weight)
    np.matmul(ones, dz, out=out.bias)


def add_weight_gradient(x: Array, dz: Array, ones: Array, out: Layer) -> None:
    """As `weight_gradient`, but add to `out`."""
    # BLAS counts columns first and so sees the transposes: out.T = dz.T @ x + out.T, in place
    sgemm(1.0, dz.T, x.T, beta=1.0, c=out.weight.T, overwrite_c=1, trans_b=1)
    np.add(out.bias, ones @ dz, out=out.bias)


class Backward:
    """Backward through consecutive layers for a fixed number of rows.

    `dz` [rows, width] is filled by the caller with the gradient at the last layer's linear output.
    """

    def __init__(self, layers: list[Layer], rows: int) -> None:
        self.layers = layers
        width = layers[0].bias.size
        self.dz: Array = np.empty((rows, width), np.float32)
        self.dx: Array = np.empty((rows, width), np.float32)
        self.ones: Array = np.ones(rows, np.float32)

    def __call__(
        self,
        activations: Activations,
        x: Array,
        gradients: list[Layer],
        *,
        ready: Callable[[int], None] | None = None,
        accumulate: bool = False,
        input_gradient: Array | None = None,
    ) -> None:
        """Write every layer's gradient, last layer first.

        Args:
            activations: outputs and masks of the forward pass on `x`.
            x: input of the first layer, [rows, in].
            gradients: one per layer, written, or added to with `accumulate`.
            ready: called with a layer's index as soon as its gradient is complete.
            accumulate: add to the gradients instead of replacing them.
            input_gradient: receives d loss / d x where given.
        """
        dz, dx = self.dz, self.dx
        write = add_weight_gradient if accumulate else weight_gradient
        for index in reversed(range(len(self.layers))):
            write(activations.outputs[index - 1] if index else x, dz, self.ones, gradients[index])
            if ready is not None:
                ready(index)
            if index:
                np.matmul(dz, self.layers[index].weight.T, out=dx)
                np.multiply(dx, activations.masks[index - 1], out=dx)
                dz, dx = dx, dz
            elif input_gradient is not None:
                np.matmul(dz, self.layers[0].weight.T, out=input_gradient)
