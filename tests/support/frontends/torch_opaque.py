"""Ops of torch without a rule, and models that call them."""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("dgtest::ranked", mutates_args=())
def ranked(x: torch.Tensor, scale: float, names: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row in descending order, scaled, and the positions."""
    values, places = torch.sort(x, dim=-1, descending=True, stable=True)
    return values * scale, places


@ranked.register_fake
def _(x: Any, scale: float, names: list[int]) -> Any:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1])
    ctx.scale = inputs[1]


def _ranked_gradient(ctx: Any, values: Any, places: Any) -> Any:
    (order,) = ctx.saved_tensors
    return torch.zeros_like(values).scatter(-1, order, values * ctx.scale), None, None


ranked.register_autograd(_ranked_gradient, setup_context=_keep)


@torch.library.custom_op("dgtest::cubed", mutates_args=())
def cubed(x: torch.Tensor) -> torch.Tensor:
    """An op that has no gradient of torch."""
    return x**3


@cubed.register_fake
def _(x: Any) -> Any:
    return torch.empty_like(x)


@torch.library.custom_op("dgtest::doubled_", mutates_args=("x",))
def doubled_(x: torch.Tensor) -> None:
    """An op that changes its operand."""
    x.mul_(2)


@doubled_.register_fake
def _(x: Any) -> None:
    return None


@torch.library.custom_op("dgtest::corners", mutates_args=())
def corners(x: torch.Tensor) -> torch.Tensor:
    """Three numbers for each row, a dim that no operand has."""
    return torch.stack([x.amin(-1), x.amax(-1), x.mean(-1)], -1)


@corners.register_fake
def _(x: Any) -> Any:
    return x.new_empty((*x.shape[:-1], 3))


@torch.library.custom_op("dgtest::packed", mutates_args=())
def packed(x: torch.Tensor, table: torch.Tensor, *, layout: int = 1) -> torch.Tensor:
    """An op with an argument whose name is also one that ops which make tensors have."""
    return x * table * layout


@packed.register_fake
def _(x: Any, table: Any, *, layout: int = 1) -> Any:
    return torch.empty_like(x)


RANKED = {"dgtest.ranked.default": "... d! -> ... d!, ... d!"}


class Ranks(torch.nn.Module):  # type: ignore[misc]
    """A block with an op of two results, of which one has integers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        values, places = torch.ops.dgtest.ranked(torch.tanh(self.up(x)), 1.5, [1, 2])
        return x + self.down(values * (1 + 0.1 * places))


class RankedStack(torch.nn.Module):  # type: ignore[misc]
    """Equal layers, of which only the first are exported."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Ranks() for _ in range(layers))
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Special(torch.nn.Module):  # type: ignore[misc]
    """Elementwise ops without a rule, with operands that broadcast, and one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
        self.order = torch.nn.Parameter(torch.linspace(0.5, 2, 8))

    def forward(self, x: Any) -> Any:
        h = torch.special.i0e(self.up(x)) + torch.special.xlog1py(h := self.up(x), self.order)
        return self.down((h.abs() + 1).digamma_() + torch.polygamma(1, h.abs() + 1) + h)
