"""Names that Unicode or Python take for one, and models that use them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from distgraph import nn, ops, optim
from distgraph.engine import Engine
from distgraph.ir.graph import Graph
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import Strategy
from distgraph.tracing.tensor import emit_one
from distgraph.tracing.tracer import Trace

BREAKS = ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")


ODD = (
    *("m", "work", "sent", "xp", "comm", "feeds", "pending", "copyto", "class", "None", "print", "sum", "lr"),
    *("x\u00b2", "0", "_", "__", "", " ", "a b", "a.b", "a_b", "1.5", "'", '"', "\\", "'''", '"""', "#", "%"),
    *("{0..1}", "work_1", "m_1", "forward_s0_last", "exchange_start", "x" * 300, "\x7f", "\U0001f600"),
    *(f"a{each}raise SystemExit(3)" for each in BREAKS),
    *(f"a{each}    raise SystemExit(3)" for each in BREAKS),
)


def weighted_sum(names: list[str], params: list[str], source: str = "") -> Graph:
    """Sum of every input times its parameter, and the new value of every parameter."""
    trace = Trace("odd")
    with trace.activate():
        total: Any = None
        for i, (x, w) in enumerate(zip(names, params, strict=True)):
            product = trace.source("input", x, (4, 6), "f64") @ trace.source("param", w, (6, 5), "f64")
            part = ops.tanh(product) * float(i + 1)
            total = part if total is None else total + part
        loss = emit_one("accumulate", ops.mean(total))
        for w in params:
            tensor = trace.source("param", w, (6, 5), "f64")
            trace.updates.append((tensor.value.name, (tensor - loss).value))
    graph = trace.finish({"out": total, "loss": loss})
    return graph.with_ops([replace(op, source=source or op.source) for op in graph.ops])


texts = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12)


class Odd(nn.Module):
    """Inputs and parameters of any names."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.parts = {name: nn.Parameter((3, 2), "f64") for name in names}

    def forward(self, **inputs: Any) -> Any:
        total: Any = 0.0
        for i, (name, x) in enumerate(inputs.items()):
            total = total + ops.tanh(x @ self.parts[name]) * (i + 1.0)
        return ops.mean(total)


def losses(names: tuple[str, ...], how: Strategy | Plan, rng: np.random.Generator) -> list[float]:
    rows = {name: rng.normal(size=(8, 3)) for name in names}
    options: Any = {"plan" if isinstance(how, Plan) else "strategy": how}
    with closing(Engine(Odd(names), None, optim.Adam(lr=0.1), seed=1, **options)) as engine:
        return [engine.run(rows)["loss"] for _ in range(3)]
