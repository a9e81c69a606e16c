"""The three products of a fully connected layer on a two-dimensional mesh, and the dataflow of each.

A product is stored as matrices A, B and C whose block (i, j) is on chip (i, j). Its dataflow says which of
them stays in place (MeshSlice, figure 1):

    OS   C = A B      A is gathered along cols, B along rows               slices along k
    LS   C = A B^T    B is gathered along rows, C is scattered along cols  slices along n
    RS   C = A^T B    A is gathered along cols, C is scattered along rows  slices along m

C is m x n and k is summed over. The forward product of a layer and its two gradients keep the same matrix in
place, and no matrix is transposed between them (MeshSlice, table 1):

    Y stays   Y = OS(X, W)      dX = LS(dY, W)       dW = RS(X, dY)
    X stays   Y = LS(X, W^T)    dX = OS(dY, W^T)     dW^T = RS(dY, X)
    W stays   Y = RS(X^T, W)    dX^T = LS(W, dY)     dW = OS(X^T, dY)

The names are those of the matrices as stored. The transposed form of a product exchanges its operands,
transposes all three matrices, and so exchanges LS and RS: the matrices move along the other axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distgraph.errors import ShardingError
from distgraph.passes.matmul_algorithms.ring_prices import AXES

DATAFLOWS = ("OS", "LS", "RS")
"""Output, left operand or right operand stays in place."""
ROLES = ("forward", "input_gradient", "weight_gradient")
"""The products of a layer."""
Mesh = tuple[int, int]
"""Rows and columns of chips."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A fully connected layer Y = X W.

    Attributes:
        name: for tables and messages.
        samples: B, rows of X and Y: batch * sequence.
        inputs: I, columns of X and rows of W.
        outputs: O, columns of W and Y.

    Raises:
        ShardingError: a size below 1.

    Example:
        >>> dataflow(Layer("up", samples=4096, inputs=1024, outputs=4096))
        'OS'
    """

    name: str
    samples: int
    inputs: int
    outputs: int

    def __post_init__(self) -> None:
        for field in ("samples", "inputs", "outputs"):
            if getattr(self, field) < 1:
                raise ShardingError(
                    f"layer {self.name}: {field} is {getattr(self, field)} but must be a number from 1 up"
                )


@dataclass(frozen=True, slots=True)
class Flow:
    """A matrix that moves along one mesh axis.

    Attributes:
        kind: "all_gather" of an operand, or "reduce_scatter" of the result.
        matrix: its name.
        axis: mesh axis along which it moves.
        elements: of the whole matrix.
    """

    kind: str
    matrix: str
    axis: int
    elements: int

    def shard_bytes(self, mesh: Mesh, item_bytes: int) -> float:
        """Bytes of one chip's block."""
        return self.elements * item_bytes / math.prod(mesh)


@dataclass(frozen=True, slots=True)
class Product:
    """One product of a layer in one dataflow.

    Attributes:
        layer, role: whose product, and which of `ROLES`.
        dataflow: one of `DATAFLOWS`.
        left, right, result: names of the matrices A, B and C as stored.
        m, k, n: C is m x n, k is summed over.

    Example:
        >>> product = products(Layer("up", 4096, 1024, 4096), "OS")[1]
        >>> str(product), product.flows[1].kind, product.flops(16)
        ('dX = LS(dY, W)', 'reduce_scatter', 2147483648.0)
    """

    layer: Layer
    role: str
    dataflow: str
    left: str
    right: str
    result: str
    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.result} = {self.dataflow}({self.left}, {self.right})"

    @property
    def sliced(self) -> str:
        """The index along which slices are cut; both mesh axes split it."""
        return {"OS": "k", "LS": "n", "RS": "m"}[self.dataflow]

    @property
    def split(self) -> tuple[str, str]:
        """The index that only the rows split, and the one that only the columns split."""
        return {"OS": ("m", "n"), "LS": ("m", "k"), "RS": ("k", "n")}[self.dataflow]

    @property
    def flows(self) -> tuple[Flow, Flow]:
        """What moves along mesh axis 0 (rows) and along mesh axis 1 (cols)."""
        left = Flow("all_gather", self.left, 1, self.m * self.k)
        right = Flow("all_gather", self.right, 0, self.k * self.n)
        along = 1 if self.dataflow == "LS" else 0
        result = Flow("reduce_scatter", self.result, along, self.m * self.n)
        return {"OS": (right, left), "LS": (right, result), "RS": (result, left)}[self.dataflow]

    @property
    def transposed(self) -> Product:
        """The same product of transposed matrices: they move along the other axis."""
        return Product(
            self.layer,
            self.role,
            {"OS": "OS", "LS": "RS", "RS": "LS"}[self.dataflow],
            _transposed(self.right),
            _transposed(self.left),
            _transposed(self.result),
            self.n,
            self.k,
            self.m,
        )

    def flops(self, chips: int) -> float:
        """FLOP of one of the chips."""
        return 2 * self.m * self.k * self.n / chips


def _transposed(name: str) -> str:
    return name.removesuffix("^T") if name.endswith("^T") else f"{name}^T"


def dataflow(layer: Layer) -> str:
    """Phase 1 of the tuner: the forward dataflow in which the largest of Y, X and W stays (section 3.2.1).

    Example:
        >>> [dataflow(Layer("", *sizes)) for sizes in ((64, 8, 32), (64, 32, 8), (8, 32, 64))]
        ['OS', 'LS', 'RS']
    """
    if layer.outputs > layer.inputs and layer.samples >= layer.inputs:
        return "OS"
    if layer.inputs >= layer.outputs and layer.samples >= layer.outputs:
        return "LS"
    return "RS"


def products(layer: Layer, forward: str, transposed: bool = False) -> tuple[Product, Product, Product]:
    """The forward product of a layer and the gradients of its input and of its weight.

    Args:
        layer: the layer.
        forward: dataflow of the forward product in the form that is not transposed.
        transposed: whether all three are in their transposed form.

    Raises:
        ShardingError: an unknown dataflow.

    Example:
        >>> print(*products(Layer("up", 64, 8, 32), "LS"), sep="; ")
        Y = LS(X, W^T); dX = OS(dY, W^T); dW^T = RS(dY, X)
        >>> print(*products(Layer("up", 64, 8, 32), "LS", transposed=True), sep="; ")
        Y^T = RS(W, X^T); dX^T = OS(W, dY^T); dW = LS(X^T, dY^T)
    """
    b, i, o = layer.samples, layer.inputs, layer.outputs
    table = {
        "OS": (
            ("OS", ("X", "W", "Y"), b, i, o),
            ("LS", ("dY", "W", "dX"), b, o, i),
            ("RS", ("X", "dY", "dW"), i, b, o),
        ),
        "LS": (
            ("LS", ("X", "W^T", "Y"), b, i, o),
            ("OS", ("dY", "W^T", "dX"), b, o, i),
            ("RS", ("dY", "X", "dW^T"), o, b, i),
        ),
        "RS": (
            ("RS", ("X^T", "W", "Y"), b, i, o),
            ("LS", ("W", "dY", "dX^T"), i, o, b),
            ("OS", ("X^T", "dY", "dW"), i, b, o),
        ),
    }
    if forward not in table:
        raise ShardingError(
            f"layer {layer.name}: unknown dataflow {forward!r}; write one of {', '.join(DATAFLOWS)}"
        )
    of_kind = tuple(
        Product(layer, role, flow, left, right, result, m, k, n)
        for role, (flow, (left, right, result), m, k, n) in zip(ROLES, table[forward], strict=True)
    )
    return tuple(p.transposed for p in of_kind) if transposed else of_kind  # type: ignore[return-value]


def transposed_forms(dataflows: Sequence[str]) -> tuple[bool, ...]:
    """Which layers of a sequence take the transposed form, so that no input is transposed between layers.

    The input of the first layer has its samples along the rows of the mesh. OS and LS keep the orientation of
    their input; RS needs the samples of its input along the columns and leaves them along the rows in Y,
    and the transposed form the other way round. A layer takes the form that is not transposed unless its
    input would have to be transposed for it (MeshSlice, section 3.2.1).

    Example:
        >>> transposed_forms(["OS", "RS", "LS", "RS", "OS"])
        (False, True, True, False, False)
    """
    forms, along_cols = [], False
    for flow in dataflows:
        forms.append(along_cols != (flow == "RS"))
        along_cols ^= flow == "RS"
    return tuple(forms)


def legal_slices(product: Product, mesh: Mesh, block: int = 1) -> tuple[int, ...]:
    """Numbers of slices into which the shards of a product can be cut, ascending; empty if there are none.

    The two indices that are not sliced must be multiples of their mesh axis, and the shards of the sliced
    index along both axes must be multiples of block * slices.

    Example:
        >>> legal_slices(products(Layer("up", 64, 48, 96), "OS")[0], (2, 4), block=2)
        (1, 2, 3, 6)
    """
    if any(getattr(product, name) % size for name, size in zip(product.split, mesh, strict=True)):
        return ()
    length = getattr(product, product.sliced)
    if any(length % (size * block) for size in mesh):
        return ()
    return divisors(math.gcd(*(length // (size * block) for size in mesh)))


def illegal_sizes(product: Product, mesh: Mesh, block: int = 1) -> str | None:
    """Why a mesh cannot compute a product even in one slice, with the nearest legal sizes; None if it can."""
    needs = {name: (size, axis) for name, size, axis in zip(product.split, mesh, AXES, strict=True)}
    needs[product.sliced] = (math.lcm(*mesh) * block, f"rows, cols and block {block}")
    for name, (multiple, cause) in needs.items():
        length = getattr(product, name)
        if length % multiple:
            near = nearest_multiples(length, multiple)
            return (
                f"layer {product.layer.name}: {product}: index {name} is {length} but mesh "
                f"{mesh[0]}x{mesh[1]} needs a multiple of {multiple} ({cause}); "
                f"the nearest legal size is {near}"
            )
    return None


def nearest_multiples(length: int, multiple: int) -> str:
    """The multiples below and above a length that is none, for messages.

    Example:
        >>> nearest_multiples(10, 4), nearest_multiples(3, 4)
        ('8 or 12', '4')
    """
    below = length // multiple * multiple
    return f"{below} or {below + multiple}" if below else f"{multiple}"


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending.

    Example:
        >>> divisors(12)
        (1, 2, 3, 4, 6, 12)
    """
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*low, *(number // d for d in low)}))
