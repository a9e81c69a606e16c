"""The tuner of matrix products: its formulas written again by hand, brute force, properties and bad input."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.support.mesh2d.torus_prices import TPU_V4, TorusPrices, checked_seconds
from distgraph.errors import InfeasibleError, ShardingError
from distgraph.passes.matmul_algorithms.layer_products import (
    DATAFLOWS,
    Layer,
    Product,
    dataflow,
    legal_slices,
    products,
    transposed_forms,
)
from distgraph.passes.matmul_algorithms.product_seconds import ALGORITHMS
from distgraph.passes.matmul_algorithms.ring_prices import Ring
from distgraph.passes.matmul_algorithms.tuner import Tuning, tune

FLOPS = 266e12
TWO_AXES = ("meshslice", "collective", "wang", "summa", "cannon")


def transformer_block(hidden: int, samples: int) -> list[Layer]:
    """The four fully connected layers of a transformer block."""
    return [
        Layer("qkv", samples, hidden, 3 * hidden),
        Layer("projection", samples, hidden, hidden),
        Layer("up", samples, hidden, 4 * hidden),
        Layer("down", samples, 4 * hidden, hidden),
    ]


sizes = st.sampled_from([16, 32, 48, 64, 96, 128])
layer_lists = st.lists(st.builds(Layer, st.just("fc"), sizes, sizes, sizes), min_size=1, max_size=3)
uneven_sizes = st.sampled_from([6, 8, 12, 18, 24, 30, 32, 36, 48])  # not all divisible by every mesh
uneven_lists = st.lists(
    st.builds(Layer, st.just("fc"), uneven_sizes, uneven_sizes, uneven_sizes), min_size=1, max_size=2
)
prices = st.builds(
    lambda launch, step, bandwidth: TorusPrices(
        dict(zip(("all_gather", "reduce_scatter", "send_receive"), launch, strict=True)),
        step,
        dict(zip(("all_gather", "reduce_scatter", "send_receive"), bandwidth, strict=True)),
    ),
    st.tuples(*[st.floats(0, 1e-5)] * 3),
    st.floats(0, 1e-6),
    st.tuples(*[st.tuples(*[st.floats(1e7, 1e10)] * 2)] * 3),
)


# -------------------------------------------------------- the model, written again without the package


def naive_ring(table: TorusPrices, kind: str, chips: int, nbytes: float, axis: int) -> float:
    if chips == 1:
        return 0.0
    return table.launch[kind] + (chips - 1) * (table.step + nbytes / table.bandwidth[kind][axis])


Move = tuple[str, int, str, int, int]
"""Kind and elements along the rows, kind and elements along the cols, and the length that is sliced."""


def naive_layer(layer: Layer, on_cols: bool, mesh: tuple[int, int]) -> tuple[list[Move], bool, bool]:
    """The moves of the three products, whether the mesh divides the matrices, and the orientation of Y.

    All is told by the axis of the mesh on which the samples of X lie: the columns, if `on_cols`.
    """
    b, i, o = layer.samples, layer.inputs, layer.outputs
    x, w, y = b * i, i * o, b * o
    gather, scatter = "all_gather", "reduce_scatter"
    first, second = mesh[::-1] if on_cols else mesh  # the axis of the samples of X, and the other one
    if o > i and b >= i:  # Y stays
        moves = [(gather, w, gather, x, i), (gather, w, scatter, x, i), (scatter, w, gather, x, i)]
        divides = b % first == i % second == i % first == o % second == 0
    elif i >= o and b >= o:  # X stays
        moves = [(gather, w, scatter, y, o), (gather, w, gather, y, o), (scatter, w, gather, y, o)]
        divides = b % first == i % second == o % first == o % second == 0
    else:  # W stays: Y moves along the axis of the inputs, X along the axis of the samples
        moves = [(gather, x, scatter, y, b), (scatter, x, gather, y, b), (gather, x, gather, y, b)]
        divides = b % first == i % second == b % second == o % first == 0
    along_rows_first = [m[2:4] + m[:2] + m[4:] if on_cols else m for m in moves]
    return along_rows_first, divides, on_cols != (not (o > i and b >= i) and not (i >= o and b >= o))


def naive_seconds(
    move: Move, mesh: tuple[int, int], slices: int, table: TorusPrices, compute: float
) -> float:
    row_kind, row_area, col_kind, col_area, _ = move
    rows = naive_ring(table, row_kind, mesh[0], 2 * row_area / math.prod(mesh) / slices, 0)
    cols = naive_ring(table, col_kind, mesh[1], 2 * col_area / math.prod(mesh) / slices, 1)
    both_gather = row_kind == col_kind
    ends = max(rows, cols) if both_gather else rows + cols
    return ends + (slices - 1) * max(rows, cols, compute / slices) + compute / slices


def brute_force(layers: list[Layer], chips: int, table: TorusPrices, flops: float, block: int) -> float:
    """The least seconds over all meshes and all combinations of slices; inf where none is legal."""
    best = math.inf
    for mesh in itertools.product(range(2, chips), repeat=2):
        if math.prod(mesh) != chips:
            continue
        on_cols, choices = False, []
        for layer in layers:
            moves, divides, on_cols = naive_layer(layer, on_cols, mesh)
            compute = 2 * layer.samples * layer.inputs * layer.outputs / chips / flops
            for move in moves:
                legal = [
                    s
                    for s in range(1, move[4] + 1)
                    if divides and move[4] % (mesh[0] * block * s) == move[4] % (mesh[1] * block * s) == 0
                ]
                choices.append([naive_seconds(move, mesh, s, table, compute) for s in legal])
        combinations = itertools.product(*choices) if len(layers) == 1 else [map(min, choices)] * all(choices)
        best = min([best, *map(sum, combinations)])
    return best


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(layer_lists, uneven_lists),
    st.sampled_from([4, 6, 8, 12, 16]),
    prices,
    st.floats(1e9, 1e12),
    st.sampled_from([1, 2, 4]),
)
def test_equals_brute_force(
    layers: list[Layer], chips: int, table: TorusPrices, flops: float, block: int
) -> None:
    want = brute_force(layers, chips, table, flops, block)
    if want == math.inf:
        with pytest.raises(InfeasibleError, match="nearest legal size"):
            tune(layers, chips, table, flops, block=block)
        return
    tuning = tune(layers, chips, table, flops, block=block)
    assert tuning.seconds == pytest.approx(want, rel=1e-12)
    again = tune(layers, chips, table, flops, block=block, meshes=[tuning.mesh])
    assert again == tuning


# ------------------------------------------------------------------------------ phase 1 and products


COMPUTE = {"OS": lambda a, b: a @ b, "LS": lambda a, b: a @ b.T, "RS": lambda a, b: a.T @ b}


class TestDataflow:
    @given(layer_lists)
    def test_the_largest_matrix_stays(self, layers: list[Layer]) -> None:
        for layer in layers:
            areas = {
                "OS": layer.samples * layer.outputs,
                "LS": layer.samples * layer.inputs,
                "RS": layer.inputs * layer.outputs,
            }
            assert areas[dataflow(layer)] == max(areas.values())

    @pytest.mark.parametrize(
        ("samples", "inputs", "outputs", "want"),
        [
            (8, 4, 6, "OS"),
            (4, 4, 6, "OS"),  # B >= I
            (3, 4, 6, "RS"),
            (8, 6, 4, "LS"),
            (4, 6, 4, "LS"),  # B >= O
            (3, 6, 4, "RS"),
            (4, 4, 4, "LS"),  # I >= O
        ],
    )
    def test_table_of_the_paper(self, samples: int, inputs: int, outputs: int, want: str) -> None:
        assert dataflow(Layer("fc", samples, inputs, outputs)) == want

    def test_transformer_block(self) -> None:
        many, few = transformer_block(12288, 262144), transformer_block(12288, 2048)
        assert [dataflow(layer) for layer in many] == ["OS", "LS", "OS", "LS"]
        assert [dataflow(layer) for layer in few] == ["RS", "RS", "RS", "RS"]
        assert transposed_forms([dataflow(layer) for layer in few]) == (True, False, True, False)

    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize("flow", DATAFLOWS)
    def test_products_are_the_layer_and_its_gradients(self, flow: str, transposed: bool) -> None:
        generator = np.random.default_rng(0)
        layer = Layer("fc", 5, 3, 4)
        x, w, dy = (generator.normal(size=shape) for shape in ((5, 3), (3, 4), (5, 4)))
        known = {"X": x, "W": w, "dY": dy, "Y": x @ w, "dX": dy @ w.T, "dW": x.T @ dy}

        def stored(name: str) -> np.ndarray:
            return known[name[:-2]].T if name.endswith("^T") else known[name]

        for product in products(layer, flow, transposed):
            left, right = stored(product.left), stored(product.right)
            value = COMPUTE[product.dataflow](left, right)
            np.testing.assert_allclose(value, stored(product.result), rtol=1e-14)
            m, k, n = product.m, product.k, product.n
            assert stored(product.result).shape == (m, n)
            assert left.size == m * k
            assert right.size == k * n
            assert product.transposed.transposed == product

    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize("flow", DATAFLOWS)
    def test_the_same_matrix_stays_in_all_three(self, flow: str, transposed: bool) -> None:
        moving = [
            {each.matrix.strip("d^T"): each.axis for each in product.flows}
            for product in products(Layer("fc", 5, 3, 4), flow, transposed)
        ]
        assert moving[0] == moving[1] == moving[2]
        assert {"OS": "Y", "LS": "X", "RS": "W"}[flow] not in moving[0]
        assert sorted(moving[0].values()) == [0, 1]

    @pytest.mark.parametrize(
        ("flow", "legal", "illegal"),
        [  # X is samples x inputs on mesh 2 x 3, and so on: rows divide one index, columns the other
            ("OS", (2, 6, 3), [(3, 6, 3), (2, 4, 3), (2, 6, 4)]),
            ("LS", (2, 3, 6), [(3, 3, 6), (2, 4, 6), (2, 3, 4)]),
            ("RS", (6, 2, 3), [(4, 2, 3), (6, 3, 3), (6, 2, 4)]),
        ],
    )
    def test_sizes_that_a_mesh_divides(
        self, flow: str, legal: tuple[int, int, int], illegal: list[tuple[int, int, int]]
    ) -> None:
        assert legal_slices(products(Layer("fc", *legal), flow)[0], (2, 3)) == (1,)
        for shape in illegal:
            product = products(Layer("fc", *shape), flow)[0]
            assert legal_slices(product, (2, 3)) == ()
            with pytest.raises(ShardingError, match="nearest legal size"):
                checked_seconds("meshslice", product, (2, 3), 1, TPU_V4, FLOPS)

    @given(st.lists(st.sampled_from(DATAFLOWS), max_size=6))
    def test_no_input_is_transposed_between_layers(self, flows: list[str]) -> None:
        layer, before = Layer("fc", 5, 3, 4), ""
        for flow, transposed in zip(flows, transposed_forms(flows), strict=True):
            forward = products(layer, flow, transposed)[0]
            names = (forward.left, forward.right, forward.result)
            assert ("X" if not before else before.replace("Y", "X")) in names
            before = names[2]

    def test_bytes_and_flop_of_a_chip(self) -> None:
        forward = products(Layer("fc", 64, 16, 32), "OS")[0]
        rows, cols = forward.flows
        # 2 x 4 chips: blocks of X are 32 x 4, those of W 8 x 8
        assert (rows.matrix, rows.axis, rows.shard_bytes((2, 4), 2)) == ("W", 0, 128)
        assert (cols.matrix, cols.axis, cols.shard_bytes((2, 4), 2)) == ("X", 1, 256)
        assert forward.flops(8) == 2 * 32 * 16 * 8


# ------------------------------------------------------------------------------ seconds of a product


class TestProductSeconds:
    layer = Layer("fc", 4096, 1024, 2048)
    table = TorusPrices(
        {"all_gather": 1e-6, "reduce_scatter": 2e-6, "send_receive": 3e-6},
        1e-7,
        {"all_gather": (1e9, 2e9), "reduce_scatter": (3e9, 4e9), "send_receive": (5e9, 6e9)},
    )

    def seconds(
        self, algorithm: str, product: Product, mesh: tuple[int, int] = (2, 4), slices: int = 1
    ) -> float:
        return checked_seconds(algorithm, product, mesh, slices, self.table, 1e12).total

    def test_collective_by_hand(self) -> None:
        forward, input_gradient, weight_gradient = products(self.layer, "OS")
        compute = 2 * 4096 * 1024 * 2048 / 8 / 1e12
        w, x = 1024 * 2048 * 2 / 8, 4096 * 1024 * 2 / 8
        gather_w, gather_x = 1e-6 + 1e-7 + w / 1e9, 1e-6 + 3 * (1e-7 + x / 2e9)
        scatter_w, scatter_x = 2e-6 + 1e-7 + w / 3e9, 2e-6 + 3 * (1e-7 + x / 4e9)
        want = [max(gather_w, gather_x), gather_w + scatter_x, gather_x + scatter_w]
        for product, communication in zip((forward, input_gradient, weight_gradient), want, strict=True):
            assert self.seconds("collective", product) == pytest.approx(communication + compute, rel=1e-12)

    def test_wang_by_hand(self) -> None:
        input_gradient = products(self.layer, "OS")[
            1
        ]  # dX = LS(dY, W): W gathered along 2 rows, dX scattered
        compute = 2 * 4096 * 1024 * 2048 / 8 / 1e12
        w, x = 1024 * 2048 * 2 / 8, 4096 * 1024 * 2 / 8
        ring_rows = 2e-6 + 3 * (1e-7 + x / 4e9) + max(3e-6 + 1e-7 + w / 5e9, compute / 2) + compute / 2
        ring_cols = 1e-6 + 1e-7 + w / 1e9 + 3 * max(3e-6 + 1e-7 + x / 6e9, compute / 4) + compute / 4
        want = pytest.approx(min(ring_rows, ring_cols), rel=1e-12)
        assert self.seconds("wang", input_gradient) == want

    def test_cannon_by_hand(self) -> None:
        weight_gradient = products(self.layer, "OS")[2]  # dW = RS(X, dY): X along cols, dW along rows
        compute = 2 * 4096 * 1024 * 2048 / 16 / 1e12
        w, x = 1024 * 2048 * 2 / 16, 4096 * 1024 * 2 / 16
        shift_w, shift_x = 1e-7 + w / 5e9, 1e-7 + x / 6e9
        skews = 3e-6 + 2 * shift_w + 3e-6 + 2 * shift_x  # at most 2 chips, either way round a ring of 4
        want = skews + 3 * max(3e-6 + shift_w, 3e-6 + shift_x, compute / 4) + compute / 4
        assert self.seconds("cannon", weight_gradient, (4, 4)) == pytest.approx(want, rel=1e-12)

    def test_summa_by_hand(self) -> None:
        forward = products(self.layer, "OS")[0]
        compute = 2 * 4096 * 1024 * 2048 / 8 / 1e12

        def stream(chips: int, nbytes: float, bandwidth: float) -> float:
            return 1e-6 + min((d + chips - 1) * (1e-7 + nbytes / d / bandwidth) for d in range(1, 3000))

        # lcm(2, 4) = 4 panels: one of W is 256 x 512 on a chip, one of X 2048 x 256
        rows, cols = stream(2, 256 * 512 * 2, 1e9), stream(4, 2048 * 256 * 2, 2e9)
        want = max(rows, cols) + 3 * max(rows, cols, compute / 4) + compute / 4
        assert self.seconds("summa", forward) == pytest.approx(want, rel=1e-9)

    def test_one_axis_by_hand(self) -> None:
        roles = products(self.layer, "RS", transposed=True)  # of no meaning to them
        compute = 2 * 4096 * 1024 * 2048 / 4 / 1e12
        w, x = 1024 * 2048 * 2 / 4, 4096 * 1024 * 2 / 4
        for mesh, axis in (((4, 1), 0), ((1, 4), 1)):
            gathers = self.table.bandwidth["all_gather"][axis]
            scatters = self.table.bandwidth["reduce_scatter"][axis]
            parallel = [1e-6 + 3 * (1e-7 + x / gathers)] * 3
            parallel[1] = 2e-6 + 3 * (1e-7 + x / scatters)
            sharded = [1e-6 + 3 * (1e-7 + w / gathers)] * 2 + [2e-6 + 3 * (1e-7 + w / scatters)]
            for product, one, other in zip(roles, parallel, sharded, strict=True):
                tensor_parallel = self.seconds("tensor_parallel", product, mesh)
                assert tensor_parallel == pytest.approx(one + compute, rel=1e-12)
                assert self.seconds("fsdp", product, mesh) == pytest.approx(max(other, compute), rel=1e-12)

    @pytest.mark.parametrize("algorithm", TWO_AXES)
    @pytest.mark.parametrize("flow", DATAFLOWS)
    def test_split_and_bounds(self, algorithm: str, flow: str) -> None:
        for product in products(self.layer, flow):
            seconds = checked_seconds(algorithm, product, (4, 4), 1, self.table, 1e12)
            parts = seconds.communication
            assert seconds.compute == pytest.approx(product.flops(16) / 1e12, rel=1e-12)
            assert min(parts.launch, parts.sync, parts.transfer) > 0
            assert parts.total == parts.launch + parts.sync + parts.transfer
            assert seconds.compute < seconds.total < seconds.compute + parts.total + 1e-12
            assert seconds.exposed == pytest.approx(seconds.total - seconds.compute)

    @pytest.mark.parametrize("flow", DATAFLOWS)
    def test_one_slice_is_collective(self, flow: str) -> None:
        for product in products(self.layer, flow):
            assert self.seconds("meshslice", product) == self.seconds("collective", product)

    @pytest.mark.parametrize("flow", DATAFLOWS)
    def test_without_launch_and_sync_more_slices_are_never_slower(self, flow: str) -> None:
        free = replace(self.table, launch=dict.fromkeys(self.table.launch, 0.0), step=0.0)
        for product in products(self.layer, flow):
            times = [
                checked_seconds("meshslice", product, (2, 4), slices, free, 1e12).total
                for slices in legal_slices(product, (2, 4))
            ]
            assert len(times) > 5
            assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(times))

    @given(
        st.integers(1, 64), st.floats(0, 1e9), st.floats(0, 1e-3), st.floats(0, 1e-3), st.floats(1e6, 1e12)
    )
    def test_ring(self, chips: int, nbytes: float, launch: float, step: float, bandwidth: float) -> None:
        ring = Ring(launch, step, bandwidth)
        seconds = ring.seconds(chips, nbytes).total
        want = 0 if chips == 1 else launch + (chips - 1) * (step + nbytes / bandwidth)
        assert seconds == pytest.approx(want, rel=1e-12)
        assert ring.seconds(chips + 1, nbytes).total >= seconds
        streams = [
            (d + chips - 1) * (step + nbytes / d / bandwidth)
            for d in range(1, 65)
            if chips > 1 and d <= max(1, nbytes)
        ]
        streamed = ring.stream_seconds(chips, nbytes).total
        assert streamed <= launch + min(streams, default=0.0) * (1 + 1e-9)


# ------------------------------------------------------------------------------ the tuner


class TestTune:
    @settings(max_examples=30, deadline=None)
    @given(layer_lists, prices, st.floats(1e9, 1e12))
    def test_better_hardware_is_never_slower(
        self, layers: list[Layer], table: TorusPrices, flops: float
    ) -> None:
        def seconds(table: TorusPrices, flops: float) -> float:
            return tune(layers, 16, table, flops, block=1).seconds

        before = seconds(table, flops) * (1 + 1e-12)
        assert seconds(table, 2 * flops) <= before
        assert seconds(replace(table, step=table.step / 2), flops) <= before
        faster = {kind: (2 * rows, 2 * cols) for kind, (rows, cols) in table.bandwidth.items()}
        assert seconds(replace(table, bandwidth=faster), flops) <= before
        assert tune(layers, 16, table, flops, block=2).seconds >= seconds(table, flops)

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("hidden", [12288, 20480])
    def test_both_models_of_the_paper_on_256_chips(self, hidden: int, algorithm: str) -> None:
        layers = transformer_block(hidden, 128 * 2048)
        tuning = tune(layers, 256, TPU_V4, FLOPS, algorithm=algorithm)
        assert math.prod(tuning.mesh) == 256
        assert len({product.product for layer in tuning.layers for product in layer.products}) == 12
        work = sum(3 * 2 * one.samples * one.inputs * one.outputs for one in layers)
        assert tuning.seconds * tuning.compute_share == pytest.approx(work / 256 / FLOPS, rel=1e-12)
        if algorithm in TWO_AXES:
            best = tune(layers, 256, TPU_V4, FLOPS)
            assert best.seconds <= tuning.seconds

    def test_a_given_dataflow_and_given_meshes(self) -> None:
        layers = transformer_block(12288, 128 * 2048)
        best = tune(layers, 256, TPU_V4, FLOPS)
        stationary_weights = tune(layers, 256, TPU_V4, FLOPS, forward="RS")
        assert {layer.dataflow for layer in stationary_weights.layers} == {"RS"}
        assert stationary_weights.seconds > best.seconds
        shapes = [(rows, 256 // rows) for rows in (2, 4, 8, 16, 32, 64, 128)]
        alone = [tune(layers, 256, TPU_V4, FLOPS, meshes=[shape]) for shape in shapes]
        assert min(alone, key=lambda tuning: tuning.seconds) == best
        assert all(tuning.mesh == shape for tuning, shape in zip(alone, shapes, strict=True))

    def test_prints_a_table(self) -> None:
        tuning = tune(transformer_block(12288, 128 * 2048), 256, TPU_V4, FLOPS)
        lines = str(tuning).splitlines()
        assert lines[0].startswith(f"meshslice on mesh {tuning.mesh[0]}x{tuning.mesh[1]}: ")
        assert len(lines) == 2 + 12
        assert len({len(line) for line in lines[1:]}) == 1
        assert re.match(r"qkv +Y = OS\(X, W\) +\d+ ", lines[2])

    def test_is_a_value(self) -> None:
        layers = [Layer("fc", 64, 64, 64)]
        one, two = (tune(layers, 4, TPU_V4, FLOPS) for _ in range(2))
        assert isinstance(one, Tuning)
        assert one == two
        assert hash(one) == hash(two)
