"""Allocation of the buffers that a storage plan asks for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from distgraph.ir.dtypes import to_numpy
from distgraph.passes.partition import RankProgram
from distgraph.runtime.program.compiled_task import Arena
from distgraph.runtime.program.storage import Storage

_NEUTRAL = {"sum": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}

Allocator = Callable[[Any, Any], Any]
"""(shape, dtype) -> a buffer."""


def allocate(
    program: RankProgram, storage: Storage, arena: Arena, xp: Any, buffer: Allocator, scratch: Any
) -> None:
    """Put the buffers of all values into an arena, which has those of the sources in memory.

    Args:
        program, storage: of the rank.
        arena: gets the buffers.
        xp: array namespace.
        buffer: makes a persistent buffer of zeros, or of memory that is written before it is read.
        scratch: `storage.scratch` bytes that scratch values share.
    """
    fills = neutral_elements(program)
    _allocate_fused(program, storage, arena, buffer)
    for name, slot in storage.slots.items():
        if slot.root != name or slot.kind not in ("persistent", "ring", "scratch") or name in arena.fixed:
            continue
        shape, dtype = program.types[name]
        array_type = to_numpy(dtype)
        if slot.kind == "scratch":
            size = math.prod(shape) * array_type.itemsize
            block = scratch[slot.offset : slot.offset + size]
            arena.fixed[name] = block.view(array_type).reshape(shape)
        elif slot.kind == "persistent":
            block = arena.fixed[name] = buffer(shape, array_type)
            if name in fills:
                block[...] = fills[name]
        else:
            count = storage.rings[name]
            arena.rings[name] = [buffer(shape, array_type) for _ in range(count)]


def _allocate_fused(program: RankProgram, storage: Storage, arena: Arena, buffer: Allocator) -> None:
    """Allocate one block for the results of each collective of several tensors."""
    types, slots, fixed = program.types, storage.slots, arena.fixed
    for collective, results in storage.fused.items():
        ends = itertools.accumulate(math.prod(types[name][0]) for name in results)
        count = sum(math.prod(types[name][0]) for name in results)
        block = arena.fused[collective] = buffer(count, to_numpy(types[collective][1]))
        for result, end in zip(results, ends, strict=True):
            part = block[end - math.prod(types[result][0]) : end]
            for name in (slots[result].root, result):
                fixed[name] = part.reshape(types[name][0])


def neutral_elements(program: RankProgram) -> dict[str, float]:
    """Value -> neutral element, for values that are the neutral element of a reduction on this rank."""
    return {
        local.op.result.name: _NEUTRAL[local.attrs["reduction"]]
        for local in program.ops
        if local.mode == "comm.mask" and not local.attrs["keep"]
    }
