"""Mixed precision as data: the 16-bit type, which ops compute in it, and the scale of the loss.

Sources: Micikevicius et al., "Mixed Precision Training", ICLR 2018 (master copies, loss scaling); Kalamkar et
al., "A Study of BFLOAT16 for Deep Learning Training", 2019 (no scaling is needed for bfloat16).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from distgraph.errors import ShardingError
from distgraph.errors.arguments import Bounds, Count, check_fields

Half = Literal["bf16", "fp16"]
HALVES: dict[Half, str] = {"bf16": "bf16", "fp16": "f16"}
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

    dtype: Half = field(default="bf16", kw_only=False)
    allow: Sequence[str] = ()
    deny: Sequence[str] = ()
    loss_scale: Annotated[float, Bounds(least=1, most=2.0**126)] = 65536.0
    growth_interval: Count = 2000
    growth: Annotated[float, Bounds(least=1, most=2.0**16)] = 2.0
    backoff: Annotated[float, Bounds(least=2.0**-16, below=1)] = 0.5

    def __post_init__(self) -> None:
        check_fields(self, ShardingError)
        for name in ("allow", "deny"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        both = sorted(set(self.allow).intersection(self.deny))
        if both:
            raise ShardingError(
                f"allow and deny of MixedPrecision both name {', '.join(both)}; leave each out of one of them"
            )

        scale = ("loss_scale", "growth_interval", "growth", "backoff")
        defaults = {each.name: each.default for each in fields(self)}
        given = next((name for name in scale if getattr(self, name) != defaults[name]), None)
        if given is not None and not self.scales:
            raise ShardingError(
                f"{given} of MixedPrecision is {getattr(self, given):g} but bf16 scales no loss; leave it "
                f'out, or use "fp16"'
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
        return MixedPrecision(precision)
    raise ShardingError(
        f"precision {precision!r} of Strategy does not exist; it is one of {', '.join(HALVES)}, a "
        "dg.MixedPrecision(...), or None for that of the model"
    )
