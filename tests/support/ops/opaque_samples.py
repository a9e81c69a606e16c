"""Sample instances of opaque ops, which call functions of NumPy registered here."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.ops.op_checks import Sample

from distgraph.ops.opaque import FUNCTIONS, HostFunction

_RNG = np.random.default_rng(5)


def _damped(operands: Any, arguments: Any) -> list[Any]:
    x, rate = operands
    return [np.exp(-arguments["scale"] * rate * x * x)]


def _damped_gradient(operands: Any, received: Any, arguments: Any) -> list[Any]:
    (x, rate), s = operands, arguments["scale"]
    dy = received[0] * _damped(operands, arguments)[0]
    by_rate = -s * x * x * dy
    by_rate = by_rate.sum(tuple(range(by_rate.ndim - rate.ndim)))
    short = tuple(d for d, n in enumerate(rate.shape) if n != by_rate.shape[d])
    return [-2 * s * rate * x * dy, by_rate.sum(short, keepdims=True) if short else by_rate]


def _standardised(operands: Any, arguments: Any) -> list[Any]:
    """Rows minus their mean, and the largest absolute value of each."""
    (x,) = operands
    centred = x - x.mean(-1, keepdims=True)
    return [centred, np.abs(x)]


def _standardised_gradient(operands: Any, received: Any, arguments: Any) -> list[Any]:
    x, total = operands[0], np.zeros_like(operands[0])
    if received[0] is not None:
        total = received[0] - received[0].mean(-1, keepdims=True)
    return [total if received[1] is None else total + np.sign(x) * received[1]]


FUNCTIONS["test:damped"] = HostFunction(_damped, _damped_gradient, lambda operands, arguments: "")
FUNCTIONS["test:standardised"] = HostFunction(
    _standardised, _standardised_gradient, lambda operands, arguments: ""
)
_DAMPED = {
    "function": "test:damped", "rule": "..., ... -> ...", "dtypes": ("f64",), "sizes": {},
    "arguments": {"scale": 0.5}, "traffic": 1.0,
}  # fmt: skip
_ROWS = {
    "function": "test:standardised", "rule": "... d! -> ... d!, ... d!", "dtypes": ("f64", "f64"),
    "sizes": {}, "arguments": None, "traffic": 2.0,
}  # fmt: skip


def _sample(operands: Any, attrs: Any, reference: Any, wrt: Any = None) -> Sample:
    return Sample(tuple(operands), attrs, reference, wrt, ())


_x, _rate, _column = _RNG.standard_normal((5, 6)), 0.5 + _RNG.random(6), 0.5 + _RNG.random((5, 1))
_dy = _RNG.standard_normal((5, 6))
_PULLED = {"needs": (True, True), "received": (True,)}
SAMPLES: dict[str, list[Sample]] = {
    "opaque": [
        _sample((_x, _rate), _DAMPED, lambda x, rate: np.exp(-rate * x * x / 2)),
        _sample((_x, _column), _DAMPED, lambda x, rate: np.exp(-rate * x * x / 2)),
        _sample((_RNG.standard_normal((6, 5, 4)),), _ROWS, lambda x: (x - x.mean(-1, keepdims=True), abs(x))),
    ],
    "opaque_gradient": [
        _sample(
            (_x, rate, _dy), _DAMPED | _PULLED, lambda *a: _damped_gradient(a[:2], a[2:], {"scale": 0.5}), ()
        )
        for rate in (_rate, _column)
    ]
    + [
        _sample(
            (_RNG.standard_normal((6, 5, 4)), _RNG.standard_normal((6, 5, 4))),
            _ROWS | {"needs": (True,), "received": (False, True)},
            lambda x, dy: np.sign(x) * dy,
            (),
        )
    ],
}
