"""Mixed precision as data: the 16-bit type, which ops compute in it, and the scale of the loss.

Sources: Micikevicius et al., "Mixed Precision Training", ICLR 2018 (master copies, loss scaling); Kalamkar et
al., "A Study of BFLOAT16 for Deep Learning Training", 2019 (no scaling is needed for bfloat16).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real

from distgraph.errors import ShardingError
from distgraph.ir.dtypes import is_integer

HALVES = {"bf16": "bf16", "fp16": "f16"}
"""Name of a precision -> dtype in the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """How a program computes in 16 bits. Parameters, states and reduced gradients stay in f32.

    Attributes:
        dtype: "bf16", which has the range of f32 and needs no scale of the loss, or "fp16", which has more
            digits and less range; the only positional argument.
        allow: kinds of ops that are computed in 16 bits, in addition to those of the pass.
        deny: kinds of ops that are computed in f32, whatever else is said.
        loss_scale: under fp16, the number by which the loss is multiplied at first, so that small gradients
            do not become zero.
        growth_interval: finished steps without overflow after which the scale grows.
        growth: factor by which it grows.
        backoff: factor by which it shrinks when a gradient overflows; the update of that step is left out.

    Raises:
        ShardingError: an unknown dtype, lists of something else than names, an op in both lists, or numbers
            with which the scale would not grow and shrink.

    Example:
        >>> MixedPrecision("fp16", deny=["attention"]).half
        'f16'
    """

    dtype: str = field(default="bf16", kw_only=False)
    allow: Sequence[str] = ()
    deny: Sequence[str] = ()
    loss_scale: float = 65536.0
    growth_interval: int = 2000
    growth: float = 2.0
    backoff: float = 0.5

    def __post_init__(self) -> None:
        if self.dtype not in HALVES:
            raise ShardingError(
                f"dtype of MixedPrecision is {self.dtype!r} but must be one of {', '.join(HALVES)}"
            )
        for name in ("allow", "deny"):
            value: object = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence) or not all(map(_is_text, value)):
                raise ShardingError(
                    f"{name} of MixedPrecision is {value!r} but must be a list of kinds of ops, such as "
                    f'["attention"]'
                )
            object.__setattr__(self, name, tuple(value))
        both = sorted(set(self.allow).intersection(self.deny))
        if both:
            raise ShardingError(
                f"allow and deny of MixedPrecision both name {', '.join(both)}; leave each out of one of them"
            )
        self._check_scale()

    def _check_scale(self) -> None:
        for name, low, high in (
            ("loss_scale", 1.0, 2.0**126),
            ("growth", 1.0, 2.0**16),
            ("backoff", 2.0**-16, 1.0),
        ):
            number: object = getattr(self, name)
            fits = isinstance(number, Real) and low <= float(number) <= high
            if not fits or number is True or (name == "backoff" and number == 1):
                raise ShardingError(
                    f"{name} of MixedPrecision is {number!r} but must be a number from {low:g} to {high:g}"
                    f"{', less than 1' if name == 'backoff' else ''}"
                )
        if not is_integer(self.growth_interval) or self.growth_interval < 1:
            raise ShardingError(
                f"growth_interval of MixedPrecision is {self.growth_interval!r} but must be a number of "
                "steps from 1 up"
            )

    @property
    def half(self) -> str:
        """The 16-bit dtype of the graph."""
        return HALVES[self.dtype]

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled."""
        return self.dtype == "fp16"


def precision_of(precision: object) -> MixedPrecision | None:
    """`Strategy.precision` as an object. Raises ShardingError if it is none."""
    if precision is None or isinstance(precision, MixedPrecision):
        return precision
    if isinstance(precision, str) and precision in HALVES:
        return MixedPrecision(dtype=precision)
    raise ShardingError(
        f"precision {precision!r} of Strategy does not exist; it is one of {', '.join(HALVES)}, a "
        "dg.MixedPrecision(...), or None for that of the model"
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)
