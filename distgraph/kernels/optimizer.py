"""Optimizer steps: one pass over the parameter, its gradient and its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

import numpy as np

from distgraph.kernels._common import (
    Array,
    Kernel,
    Namespace,
    computed_in_f32,
    empty,
    flat,
    has_cuda,
    outputs,
    store,
)
from distgraph.kernels._elementwise import LOOP_BLOCK, copy
from distgraph.kernels._jit import jit, pays
from distgraph.kernels.cuda.elementwise_kernel import CudaKernel


def _unshared(inputs: tuple[Array, ...], outs: tuple[Array | None, ...]) -> tuple[Array, ...]:
    """Copy each NumPy input that some output would overwrite too early: inputs[i] may only be outs[i]
    itself."""
    kept = list(inputs)
    for i, x in enumerate(inputs):
        for j, o in enumerate(outs):  # generators take as long as the update of a small tensor
            if o is None or (i == j and x is o) or not np.may_share_memory(x, o):
                continue
            if i != j or _is_new(x, o):
                kept[i] = x.copy()
                break
    return tuple(kept)


def _is_new(x: Array, out: Array) -> bool:
    """Whether ``out`` is anything but the very elements of ``x``."""
    if x is out:
        return False
    return bool(x.ctypes.data != out.ctypes.data or x.strides != out.strides or x.dtype != out.dtype)


def _of_vectors(count: int) -> Callable[[Kernel], Kernel]:
    """Decorate a kernel whose first operands and results have one shape, so that it never sees
    tensors of no dims: NumPy gives numbers for those, which nothing can be written into."""

    def decorate(kernel: Kernel) -> Kernel:
        @wraps(kernel)
        def run(xp: Namespace, *arrays: Array, out: Any = None, **attrs: Any) -> Any:
            if arrays[0].ndim:
                return kernel(xp, *arrays, out=out, **attrs)
            vectors = (xp.asarray(a).reshape(1) for a in arrays[:count])
            outs = None if out is None else tuple(None if o is None else o.reshape(1) for o in out)
            results = kernel(xp, *vectors, *arrays[count:], out=outs, **attrs)
            given = (None,) * len(results) if out is None else out
            return tuple(r.reshape(()) if o is None else o for r, o in zip(results, given, strict=True))

        return run

    return decorate


def _scalar(xp: Namespace, value: Any) -> Any:
    """A Python float of a 0-d array; a CuPy 0-d array stays on the device, so that the stream does not
    stall."""
    return value if xp is not np and isinstance(value, xp.ndarray) else float(value)


_LOOP_MIN_SIZE: Final = 1 << 10
"""Elements from which an update is a compiled loop. The tensor alone decides, not those that are updated with
it: ranks that hold copies of a tensor may hold others beside it, and a loop rounds otherwise than passes."""


def _loops(p: Array, *others: Array) -> bool:
    """Whether a tensor is updated by a compiled loop."""
    same = all(other.dtype == p.dtype for other in others)
    return same and pays(np, p, np.float32, np.float64, least=_LOOP_MIN_SIZE)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The update of one of several tensors whose arrays stay the same.

    Attributes:
        dtype: of all arrays.
        operands, results: as vectors.
        new: which of the operands that are updated are written elsewhere.
        loops: whether it is a compiled loop.
    """

    dtype: Any
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    new: tuple[bool, ...]
    loops: bool


def _prepared(
    xp: Namespace,
    tensors: Sequence[tuple[Array, ...]],
    outs: Sequence[tuple[Array, ...]],
    count: int,
    updated: tuple[int, ...],
) -> list[_Prepared] | None:
    """The updates of several tensors of ``count`` operands, of which those in ``updated`` are written.

    None where one of them needs more than a loop or passes over vectors, or all are too small for a loop.
    """
    if xp is not np or any(len(operands) != count for operands in tensors):
        return None
    prepared = []
    for operands, results in zip(tensors, outs, strict=True):
        arrays, dtype = (*operands, *results), operands[0].dtype
        if dtype not in (np.float32, np.float64) or any(a.dtype != dtype for a in arrays):
            return None
        inputs = tuple(operands[i] for i in updated)
        inputs += tuple(a for i, a in enumerate(operands) if i not in updated)
        if not all(a.flags.c_contiguous for a in arrays) or any(
            a is not b for a, b in zip(_unshared(inputs, results), inputs, strict=True)
        ):
            return None
        new = tuple(_is_new(a, r) for a, r in zip(inputs, results, strict=False))
        vectors, written = (tuple(a.reshape(-1) for a in group) for group in (operands, results))
        prepared.append(_Prepared(dtype, vectors, written, new, _loops(*operands)))
    return prepared if any(each.loops for each in prepared) else None


@jit
def _adam_loop(
    coefficients: Any, p: Any, g: Any, m: Any, v: Any, new: Any, new_p: Any, new_m: Any, new_v: Any
) -> None:
    """One step of Adam; ``new`` says for p, m, v whether the output is another array than the input.

    ``coefficients``: beta1, beta2, 1 - beta1, 1 - beta2, step size, 1 / sqrt(1 - beta2^t), eps, coupled and
    decoupled decay, in the dtype of the arrays.
    """
    b1, b2, c1, c2 = coefficients[0], coefficients[1], coefficients[2], coefficients[3]
    size, root, eps, coupled, keep = (
        coefficients[4],
        coefficients[5],
        coefficients[6],
        coefficients[7],
        coefficients[8],
    )
    for start in range(0, p.size, LOOP_BLOCK):
        stop = min(start + LOOP_BLOCK, p.size)
        grad, q, r, s = g[start:stop], new_p[start:stop], new_m[start:stop], new_v[start:stop]
        if new[0]:
            copy(p[start:stop], q)
        if new[1]:
            copy(m[start:stop], r)
        if new[2]:
            copy(v[start:stop], s)
        for j in range(stop - start):
            d = grad[j] + coupled * q[j]
            first = b1 * r[j] + c1 * d
            second = b2 * s[j] + c2 * d * d
            r[j] = first
            s[j] = second
            q[j] = keep * q[j] - size * first / (np.sqrt(second) * root + eps)


_ADAM_CUDA = CudaKernel(
    "adam",
    "T p, T g, T m, T v, T b1, T b2, T size, T root, T eps, T coupled, T keep",
    "T new_p, T new_m, T new_v",
    """
T d = g + coupled * p;
T a = b1 * m + (T(1) - b1) * d;
T b = b2 * v + (T(1) - b2) * d * d;
T q = keep * p - size * a / (sqrt(b) * root + eps);
new_m = a;
new_v = b;
new_p = q;
""",
)


@computed_in_f32(0, 2, 3)
@_of_vectors(4)
def adam(
    xp: Namespace,
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    lr: Any,
    step: Any,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    out: Any = None,
) -> tuple[Array, Array, Array]:
    """One step t of Adam (Kingma and Ba, 2015, algorithm 1) or, ``decoupled``, AdamW (Loshchilov and Hutter,
    2019).

    g' = g + weight_decay * p (or g where decoupled), m' = beta1 m + (1 - beta1) g', v' = beta2 v + (1 -
    beta2) g'^2, p' = p - lr * (m' / (1 - beta1^t)) / (sqrt(v' / (1 - beta2^t)) + eps) [- lr * weight_decay *
    p where decoupled].

    Args:
        p, g, m, v: parameter, gradient, first and second moment, of one shape.
        lr, step: Python numbers or 0-d arrays; the first step is 1.
        out: may hold p, m, v themselves (an update in place).

    Returns:
        p', m', v'.
    """
    outs = outputs(out, 3)
    lr, step = _scalar(xp, lr), _scalar(xp, step)
    numbers = _adam_numbers(lr, step, beta1, beta2, eps, weight_decay, decoupled)
    dtype = p.dtype
    if has_cuda(xp):
        results = tuple(empty(xp, o, p.shape, a.dtype) for o, a in zip(outs, (p, m, v), strict=True))
        scalars = (xp.asarray(s, dtype=dtype) for s in numbers)
        _ADAM_CUDA(p, g, m, v, *scalars, *results)
    elif xp is not np:  # `out` may share memory with operands
        results = tuple(xp.empty(p.shape, a.dtype) for a in (p, m, v))
        _adam_passes(xp, (p, g, m, v), numbers, results)
    else:
        p, m, v, g = _unshared((p, m, v, g), outs)
        results = tuple(empty(xp, o, p.shape, a.dtype) for o, a in zip(outs, (p, m, v), strict=True))
        if _loops(p, g, m, v):
            new = tuple(_is_new(a, r) for a, r in zip((p, m, v), results, strict=True))
            flat_results = [r.reshape(-1) for r in results]
            coefficients = _coefficients(numbers, dtype)
            _adam_loop(coefficients, flat(p), flat(g), flat(m), flat(v), new, *flat_results)
        else:
            _adam_passes(xp, (p, g, m, v), numbers, results)
    return tuple(store(xp, r, o) for r, o in zip(results, outs, strict=True))


def adam_together(
    xp: Namespace,
    tensors: Sequence[tuple[Array, ...]],
    outs: Sequence[tuple[Array, ...]],
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = False,
) -> Callable[[Any, Any], None] | None:
    """A function of lr and step that takes the step of `adam` for several tensors, whose (p, g, m, v) and
    (p', m', v') are the same arrays at every step; None where each is to be updated by a call of `adam`."""
    updates = _prepared(xp, tensors, outs, 4, (0, 2, 3))
    if updates is None:
        return None
    dtypes = {each.dtype for each in updates}

    def run(lr: Any, step: Any) -> None:
        numbers = _adam_numbers(float(lr), float(step), beta1, beta2, eps, weight_decay, decoupled)
        coefficients = {dtype: _coefficients(numbers, dtype) for dtype in dtypes}
        for each in updates:
            if each.loops:
                p, g, m, v = each.operands
                _adam_loop(coefficients[each.dtype], p, g, m, v, each.new, *each.results)
            else:
                _adam_passes(np, each.operands, numbers, each.results)

    return run


def _adam_numbers(
    lr: Any, step: Any, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool
) -> tuple[Any, ...]:
    """beta1, beta2, step size, 1 / sqrt(1 - beta2^t), eps, coupled decay, and what decoupled decay leaves."""
    coupled, keep = (0.0, 1 - lr * weight_decay) if decoupled else (weight_decay, 1.0)
    return beta1, beta2, lr / (1 - beta1**step), (1 - beta2**step) ** -0.5, eps, coupled, keep


def _coefficients(numbers: tuple[Any, ...], dtype: Any) -> Array:
    """What `_adam_loop` takes of `_adam_numbers`."""
    beta1, beta2, *others = numbers
    return np.array((beta1, beta2, 1 - beta1, 1 - beta2, *others), dtype)


def _adam_passes(
    xp: Namespace, state: tuple[Array, ...], numbers: tuple[float, ...], results: tuple[Array, ...]
) -> None:
    """`adam` in array functions, with two temporaries."""
    (p, g, m, v), (beta1, beta2, size, root, eps, coupled, keep) = state, numbers
    new_p, new_m, new_v = results
    d = g + coupled * p if coupled else g
    change = d * (1 - beta1)
    xp.multiply(m, beta1, out=new_m)
    new_m += change
    xp.multiply(d, d, out=change)
    change *= 1 - beta2
    xp.multiply(v, beta2, out=new_v)
    new_v += change
    xp.sqrt(new_v, out=change)
    change *= root
    change += eps
    xp.divide(new_m, change, out=change)
    change *= size
    xp.multiply(p, keep, out=new_p)
    new_p -= change


@jit
def _momentum_loop(
    coefficients: Any, nesterov: bool, p: Any, g: Any, buf: Any, new: Any, new_p: Any, new_buf: Any
) -> None:
    """One step of SGD with momentum; ``coefficients``: lr, momentum, weight decay."""
    lr, mu, decay = coefficients[0], coefficients[1], coefficients[2]
    for start in range(0, p.size, LOOP_BLOCK):
        stop = min(start + LOOP_BLOCK, p.size)
        grad, q, r = g[start:stop], new_p[start:stop], new_buf[start:stop]
        if new[0]:
            copy(p[start:stop], q)
        if new[1]:
            copy(buf[start:stop], r)
        if nesterov:
            for j in range(stop - start):
                d = grad[j] + decay * q[j]
                b = mu * r[j] + d
                r[j] = b
                q[j] = q[j] - lr * (d + mu * b)
        else:
            for j in range(stop - start):
                b = mu * r[j] + (grad[j] + decay * q[j])
                r[j] = b
                q[j] = q[j] - lr * b


@computed_in_f32(0, 2)
@_of_vectors(3)
def momentum(
    xp: Namespace,
    p: Array,
    g: Array,
    buf: Array,
    lr: Any,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    out: Any = None,
) -> tuple[Array, Array]:
    """One step of gradient descent with momentum: g' = g + weight_decay * p, buf' = momentum * buf + g',
    p' = p - lr * buf', or p - lr * (g' + momentum * buf') where ``nesterov`` (Sutskever et al., 2013).

    Args:
        p, g, buf: parameter, gradient and velocity, of one shape; the velocity starts at 0.
        lr: Python number or 0-d array.
        out: may hold p and buf themselves (an update in place).

    Returns:
        p', buf'.
    """
    outs = outputs(out, 2)
    lr = _scalar(xp, lr)
    if xp is np:
        p, buf, g = _unshared((p, buf, g), outs)
    if xp is np and _loops(p, g, buf):
        results = tuple(empty(xp, o, p.shape, p.dtype) for o in outs)
        new = tuple(_is_new(a, r) for a, r in zip((p, buf), results, strict=True))
        numbers = np.array((lr, momentum, weight_decay), p.dtype)
        flat_results = [r.reshape(-1) for r in results]
        _momentum_loop(numbers, nesterov, flat(p), flat(g), flat(buf), new, *flat_results)
        return store(xp, results[0], outs[0]), store(xp, results[1], outs[1])
    moved, velocity = _momentum_passes(p, g, buf, lr, momentum, nesterov, weight_decay)
    return store(xp, moved, outs[0]), store(xp, velocity, outs[1], buf.dtype)


def _momentum_passes(
    p: Array, g: Array, buf: Array, lr: Any, momentum: float, nesterov: bool, weight_decay: float
) -> tuple[Array, Array]:
    """`momentum` in array functions."""
    d = g + weight_decay * p if weight_decay else g
    velocity = momentum * buf + d
    change = d + momentum * velocity if nesterov else velocity
    return (p - lr * change).astype(p.dtype, copy=False), velocity


def momentum_together(
    xp: Namespace,
    tensors: Sequence[tuple[Array, ...]],
    outs: Sequence[tuple[Array, ...]],
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Callable[[Any], None] | None:
    """For `momentum` what `adam_together` is for `adam`: a function of lr."""
    updates = _prepared(xp, tensors, outs, 3, (0, 2))
    if updates is None:
        return None
    dtypes = {each.dtype for each in updates}

    def run(lr: Any) -> None:
        rate = float(lr)
        numbers = {dtype: np.array((rate, momentum, weight_decay), dtype) for dtype in dtypes}
        for each in updates:
            p, g, buf = each.operands
            if each.loops:
                _momentum_loop(numbers[each.dtype], nesterov, p, g, buf, each.new, *each.results)
                continue
            made = _momentum_passes(p, g, buf, rate, momentum, nesterov, weight_decay)
            for target, values in zip(each.results, made, strict=True):
                np.copyto(target, values)

    return run
