"""Calls of ops whose arrays are the same at every step: one ufunc call of an op, one function of several ops.

einsum_12(g_9, w_3, out=dx_14)             # before
matmul(g_9, w_3_turned, out=dx_14)         # after: a view of w_3 is bound

adam(p_1, g_2, m_3, v_4, lr, step, out=(p_5, m_6, v_7))
adam_16(p_8, g_9, m_10, v_11, lr, step, out=(p_12, m_13, v_14))
adam_of_2(lr, step)                        # the same
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from distgraph.ir.op_registry import lookup
from distgraph.ir.printer import name_text
from distgraph.passes.partition import LocalOp
from distgraph.runtime.program.identifiers import commented

Bind: TypeAlias = Callable[[str, Any], str]
"""Gives an object a name in the program, made of a hint."""


@dataclass(frozen=True, slots=True)
class Call:
    """An op, and the names of its operands and results in the program."""

    local: LocalOp
    operands: tuple[str, ...]
    targets: tuple[str, ...]

    def goes_with(self, other: Call, bound: Mapping[str, Any]) -> bool:
        """Whether one function may run both ops."""
        same = self.local.op.kind == other.local.op.kind and self.local.attrs == other.local.attrs
        return same and self.scalars(bound) == other.scalars(bound)

    def scalars(self, bound: Mapping[str, Any]) -> list[str]:
        """Names of the operands that are handed over at every step."""
        return [name for name in self.operands if not isinstance(bound.get(name), np.ndarray)]


def fixed(names: Sequence[str], bound: Mapping[str, Any]) -> tuple[Any, ...]:
    """The NumPy arrays among the things of some names."""
    return tuple(bound[name] for name in names if isinstance(bound.get(name), np.ndarray))


def direct_call(call: Call, bound: Mapping[str, Any], xp: Any, bind: Bind) -> str | None:
    """Text of the ufunc call of `OpDef.direct` for an op with one result; None where there is none."""
    declared = lookup(call.local.op.kind).direct
    names = (*call.operands, *call.targets)
    arrays = fixed(names, bound)
    if declared is None or len(call.targets) > 1 or len(arrays) < len(names):
        return None
    written = declared(xp, *arrays[:-1], out=arrays[-1], **call.local.attrs)
    if written is None:
        return None
    ufunc, operands, out = written
    views = [
        name if _is_same(bound[name], array) else bind(f"{name}_view", array)
        for name, array in zip(names, (*operands, out), strict=True)
    ]
    return f"{bind(ufunc, getattr(xp, ufunc))}({', '.join(views[:-1])}, out={views[-1]})"


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (a.shape == b.shape and a.strides == b.strides and a.ctypes.data == b.ctypes.data)


def call_of_several(calls: Sequence[Call], bound: Mapping[str, Any], xp: Any, bind: Bind) -> str | None:
    """Text of the call of `OpDef.together` for ops of one kind and attributes; None where there is none."""
    kind = calls[0].local.op.kind
    declared = lookup(kind).together
    assert declared is not None
    arrays = [[fixed(names, bound) for names in (call.operands, call.targets)] for call in calls]
    run = declared(xp, *zip(*arrays, strict=True), **calls[0].local.attrs)
    if run is None:
        return None
    function = bind(f"{kind.replace('.', '_')}_of_{len(calls)}", run)
    first, last = (name_text(calls[i].local.op.results[0].name) for i in (0, -1))
    text = f"{function}({', '.join(calls[0].scalars(bound))})"
    return f"{text:<70}  # %{first} to %{last} {commented(kind)}"
