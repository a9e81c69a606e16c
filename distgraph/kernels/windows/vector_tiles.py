"""Tiles of arithmetic that compiled loops hold in vector registers: LLVM instructions in place of a function.

LLVM does not keep the sums of a tile in registers when the tile is written as loops over arrays, so each sum
would be read from memory and written to it for every term. Here the instructions are given instead. LLVM
divides the vectors into ones of the processor at hand, and joins multiplication and addition where it can.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import Any, ParamSpec, TypeVar

from distgraph.kernels._jit import Loop

P = ParamSpec("P")
R = TypeVar("R")

LANES = 16
"""Numbers of a vector: one of 512 bits, or two of 256."""

TILE_ROWS = 6
"""Vectors of sums of a tile: with 256 bits they take 12 of 16 registers (Goto and van de Geijn, Anatomy of
High-Performance Matrix Multiplication, section 6)."""

_ALIGNMENT = 4  # bytes: rows may begin anywhere


class Tile(Loop[P, R]):
    """A function whose calls in compiled loops become instructions; the function itself shows their meaning.

    Operands in compiled loops are C-contiguous float32 arrays, and integers. Nothing checks that the tile
    lies inside of them.
    """

    def __init__(self, function: Callable[P, R], emit: Callable[..., Any]) -> None:
        super().__init__(function)
        self._emit = emit

    def _made(self) -> Callable[P, R]:
        none, emit = import_module("numba.core.types").void, self._emit

        def typed(context: Any, *operands: Any) -> Any:
            return none(*operands), emit

        typed.__name__ = typed.__qualname__ = self._function.__name__
        parameters = signature(self._function).parameters.values()
        first = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD)
        vars(typed)["__signature__"] = Signature([first, *parameters])  # Numba binds operands by it
        made: Callable[P, R] = import_module("numba.extending").intrinsic(typed)
        return made


def emitted_by(emit: Callable[..., Any]) -> Callable[[Callable[P, R]], Tile[P, R]]:
    """Decorate a function with the code generator of its tile, as of `numba.extending.intrinsic`."""
    return lambda function: Tile(function, emit)


class _Emitter:
    """Addresses and vectors of float32 in the code of one tile."""

    def __init__(self, context: Any, builder: Any, kinds: Any, operands: Any) -> None:
        self.ir = import_module("llvmlite.ir")
        self.builder, self.operands = builder, operands
        self.integer, self.index = self.ir.IntType(64), self.ir.IntType(32)
        self.vector = self.ir.VectorType(self.ir.FloatType(), LANES)
        self.arrays = {
            i: context.make_array(kind)(context, builder, operands[i])
            for i, kind in enumerate(kinds.args)
            if hasattr(kind, "ndim")
        }

    def length(self, operand: int, dim: int) -> Any:
        """The length of a dim of an array."""
        return self.builder.extract_value(self.arrays[operand].shape, dim)

    def address(self, operand: int, position: Any, *, vector: bool = False) -> Any:
        """Where the element at a position of a flat array lies, or the vector that begins there."""
        pointer = self.builder.gep(self.arrays[operand].data, [position])
        return self.builder.bitcast(pointer, self.vector.as_pointer()) if vector else pointer

    def plus(self, value: Any, number: int) -> Any:
        """An integer and a constant."""
        return self.builder.add(value, self.integer(number))

    def shuffled(self, a: Any, b: Any, lanes: list[int]) -> Any:
        """The vector of these lanes of two vectors, those of the second from `LANES` on."""
        mask = self.ir.Constant(self.ir.VectorType(self.index, LANES), lanes)
        return self.builder.shuffle_vector(a, b, mask)

    def repeated(self, number: Any) -> Any:
        """The vector of one number."""
        nothing = self.ir.Constant(self.vector, self.ir.Undefined)
        first = self.builder.insert_element(nothing, number, self.index(0))
        return self.shuffled(first, nothing, [0] * LANES)


def _emit_products(context: Any, builder: Any, kinds: Any, operands: Any) -> Any:
    """The code of `add_products`: a loop over the terms between loads and stores of the sums."""
    emitter, flags = _Emitter(context, builder, kinds, operands), ("contract",)
    terms, zero = emitter.length(4, 0), emitter.integer(0)
    numbers = [emitter.plus(operands[2], row) for row in range(TILE_ROWS)]
    starts = [emitter.address(0, builder.load(emitter.address(1, number))) for number in numbers]
    before, body = builder.basic_block, builder.append_basic_block("terms")
    after = builder.append_basic_block("sums")
    none = emitter.ir.Constant(emitter.vector, [0.0] * LANES)
    builder.cbranch(builder.icmp_signed("<", zero, terms), body, after)
    builder.position_at_end(body)
    term, sums = builder.phi(emitter.integer), [builder.phi(emitter.vector) for _ in starts]
    tap = builder.load(emitter.address(3, term))
    place = emitter.address(4, builder.mul(term, emitter.integer(LANES)), vector=True)
    weights, totals = builder.load(place, align=_ALIGNMENT), []
    for start, total in zip(starts, sums, strict=True):
        number = emitter.repeated(builder.load(builder.gep(start, [tap])))
        totals.append(builder.fadd(total, builder.fmul(number, weights, flags=flags), flags=flags))
    following = emitter.plus(term, 1)
    phis = [(term, zero, following), *((s, none, t) for s, t in zip(sums, totals, strict=True))]
    for phi, first, later in phis:
        phi.add_incoming(first, before)
        phi.add_incoming(later, body)
    builder.cbranch(builder.icmp_signed("<", following, terms), body, after)
    builder.position_at_end(after)
    results = [builder.phi(emitter.vector) for _ in totals]
    for result, total in zip(results, totals, strict=True):
        result.add_incoming(none, before)
        result.add_incoming(total, body)
    for result, number in zip(results, numbers, strict=True):
        place = emitter.address(5, builder.mul(number, emitter.integer(LANES)), vector=True)
        builder.store(builder.fadd(builder.load(place, align=_ALIGNMENT), result), place, align=_ALIGNMENT)
    return context.get_dummy_value()


@emitted_by(_emit_products)
def add_products(x: Any, starts: Any, first: int, taps: Any, weights: Any, sums: Any) -> None:
    """sums[i] += sum over k of x[starts[i] + taps[k]] * weights[k], for `TILE_ROWS` rows i from ``first`` on.

    Args:
        x: float32 vector.
        starts, taps: int64 vectors, [at least first + TILE_ROWS] and [k].
        weights, sums: float32 [k, LANES] and [rows of starts, LANES].
    """
    for i in range(first, first + TILE_ROWS):
        sums[i] += x[starts[i] + taps] @ weights


def _emit_transposition(context: Any, builder: Any, kinds: Any, operands: Any) -> Any:
    """The code of `transpose_tile`: pairs of vectors exchange half of their lanes, with 1, 2, 4 and 8 lanes
    between those that are exchanged."""
    emitter = _Emitter(context, builder, kinds, operands)
    _, row, column, _ = operands

    def address(operand: int, down: Any, across: Any) -> Any:
        line = builder.mul(down, emitter.length(operand, 1))
        return emitter.address(operand, builder.add(line, across), vector=True)

    vectors = [builder.load(address(0, emitter.plus(row, i), column), align=_ALIGNMENT) for i in range(LANES)]
    apart = 1
    while apart < LANES:
        low = [lane if not lane & apart else LANES + lane - apart for lane in range(LANES)]
        high = [lane + apart if not lane & apart else LANES + lane for lane in range(LANES)]
        for i in (i for i in range(LANES) if not i & apart):
            pair = vectors[i], vectors[i + apart]
            vectors[i], vectors[i + apart] = (emitter.shuffled(*pair, lanes) for lanes in (low, high))
        apart *= 2
    for i, vector in enumerate(vectors):
        builder.store(vector, address(3, emitter.plus(column, i), row), align=_ALIGNMENT)
    return context.get_dummy_value()


@emitted_by(_emit_transposition)
def transpose_tile(x: Any, row: int, column: int, y: Any) -> None:
    """y[column + j, row + i] = x[row + i, column + j] for i and j below `LANES`; both float32 matrices."""
    y[column : column + LANES, row : row + LANES] = x[row : row + LANES, column : column + LANES].T
