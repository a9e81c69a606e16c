"""Data sets, order and batches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import distgraph as dg
from distgraph import ops
from distgraph.engine.data import ArraySource, Batch, DataLoader, MapSource, as_source, order
from distgraph.errors import GraphError, RuntimeFault
from distgraph.ir.dtypes import short

X = np.ones((4, 2))
TABLE = np.arange(27.0).reshape(9, 3) ** 2


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 3), st.booleans(), st.data())
def test_every_sample_once_an_epoch(count: int, size: int, epoch: int, drop: bool, draw: Any) -> None:
    if drop and size > count:
        return
    source = as_source((np.arange(count),))
    start = draw.draw(st.integers(0, count))
    loader = DataLoader(source, size, shuffle=True, drop_last=drop, seed=4, epoch=epoch, start=start)
    batches = list(loader)
    assert len(batches) == len(loader)
    rows = np.concatenate([b.rows for b in batches]) if batches else np.zeros(0, int)
    left = (count - start) // size * size if drop else count - start
    np.testing.assert_array_equal(rows, order(count, 4, epoch, True)[start : start + left])
    assert all(len(b) == size for b in batches[:-1])


def test_order_is_a_permutation_that_depends_on_seed_and_epoch() -> None:
    orders = [tuple(order(50, seed, epoch, True)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert all(sorted(rows) == list(range(50)) for rows in orders)
    np.testing.assert_array_equal(order(5, 0, 3, shuffle=False), np.arange(5))


def test_consecutive_rows_are_a_view_and_others_a_copy() -> None:
    x = np.arange(20.0).reshape(10, 2)
    source = as_source(x)
    assert np.shares_memory(source.load(np.arange(3, 7))["batch.0"], x)
    picked = source.load(np.array([7, 3, 4]))["batch.0"]
    np.testing.assert_array_equal(picked, x[[7, 3, 4]])
    assert source.load(np.zeros(0, int))["batch.0"].shape == (0, 2)


class ByOne:
    def __len__(self) -> int:
        return 9

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"x": np.full(3, row, "f4") if row < 9 else None, "y": int(row)}


class ByMany(ByOne):
    def __getitem__(self, row: int) -> dict[str, Any]:
        raise AssertionError("several samples at a time are faster")

    def __getitems__(self, rows: list[int]) -> Any:
        return [(np.full(3, row, "f4"), row) for row in rows]


class Centred(ByOne):
    """Its samples are rows minus their mean, in words that an array of indices would also get through."""

    def __getitem__(self, row: int) -> Any:
        sample = TABLE[row]
        return sample - sample.mean(), row


@pytest.mark.parametrize("dataset", [ByOne(), ByMany(), [(np.full(3, i, "f4"), i) for i in range(9)]])
def test_map_style(dataset: Any) -> None:
    batch = Batch(as_source(dataset), np.array([4, 8, 1]))
    first, second = batch.block(1, 3).values()
    np.testing.assert_array_equal(first, [[8] * 3, [1] * 3])
    np.testing.assert_array_equal(second, [8, 1])
    assert first.dtype == np.float32
    assert [shape for shape, _ in batch.fields().values()] == [(3,), ()]


@pytest.mark.parametrize(
    "samples",
    [
        [([1.0, 2.0], 0), ([3.0, 4.0], 1)],
        ((np.ones(2), 0), (np.ones(2), np.int64(1))),
        [{"x": np.ones(2), "y": 0}, {"x": [1, 2], "y": 1}],
        [[1.0, 2.0], [3.0, 4.0]],
        [1.0, np.float64(2.0)],
    ],
)
def test_samples_in_a_list_are_a_data_set(samples: Any) -> None:
    assert isinstance(as_source(samples), MapSource)


def test_blocks_are_loaded_once() -> None:
    loads = []

    class Counting(ByMany):
        def __getitems__(self, rows: list[int]) -> Any:
            loads.append(rows)
            return super().__getitems__(rows)

    batch = Batch(as_source(Counting()), np.arange(6))
    for _ in range(3):
        batch.block(2, 5)
    assert loads.count([2, 3, 4]) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (({"x": np.ones((4, 2))}, np.ones(4)), "data is a tuple of dicts and arrays, .* pass one dict"),
        (
            ((np.ones((4, 2)), np.ones(4)), np.ones(4)),
            r"tuples and arrays, .* such as \(x, z, labels\)",
        ),
        (([[1.0], [2.0]], [0, 1]), "data is a tuple of lists, .* pass arrays, such as np.asarray"),
        (((X, X), (np.ones(4),)), r"is a tuple of tuples, .* such as \(x, z, labels\) for a model of two"),
        ([(X, X), (np.ones(4), X)], r"is a list of tuples, which would be one sample each but samples have"),
        ([[X, X], np.ones(4)], r"is a list of lists and arrays, .* such as \(x, z, labels\)"),
        ([{"x": X}, {"y": X}], "is a list of dicts, .* pass one dict with all fields"),
        ([X.tolist(), [0, 1, 0, 1]], r"is a list of lists, .* pass arrays, such as np.asarray\(x\)"),
        ((X, [0, 1, 0, 1]), r"is a tuple of lists and arrays, .* pass arrays, such as np.asarray\(x\)"),
        (None, "data is None"),
        (iter([1, 2]), "is a list_iterator, which has no length"),
        ("text", "is a str"),
        ({}, "no field"),
        ({"x": [1, 2]}, "field x is a list but must be an array"),
        ((np.ones(3), np.ones(4)), "batch.0 has 3, batch.1 has 4"),
        (np.ones(()), "has no dim"),
        (np.array(["a", "b"]), "dtype.* is not supported"),
        ([], "empty"),
    ],
)
def test_refused(data: Any, message: str) -> None:
    with pytest.raises(RuntimeFault, match=message):
        as_source(data)


class ForeignArray:
    """As a tensor of PyTorch: its dtype is none of NumPy."""

    def __init__(self, dtype: str, place: str = "cpu", requires_grad: bool = False) -> None:
        kind = type("dtype", (), {"__repr__": lambda _: dtype, "__module__": "foreign"})
        self.shape, self.dtype, self.requires_grad = (4, 2), kind(), requires_grad
        self.device = type("device", (), {"type": place})()

    def __getitem__(self, rows: Any) -> Any: ...

    def numpy(self) -> Any: ...


@pytest.mark.parametrize(
    ("array", "dtype", "way"),
    [
        (ForeignArray("foreign.float64"), "foreign.float64", r"\.numpy\(\)"),
        (ForeignArray("foreign.bfloat16"), "foreign.bfloat16", r"\.float\(\)\.numpy\(\)"),
        (ForeignArray("f", "cuda", True), "f", r"\.detach\(\)\.cpu\(\)\.numpy\(\)"),
    ],
)
def test_arrays_of_another_library_are_refused_with_the_way_out(array: Any, dtype: str, way: str) -> None:
    message = rf"batch\.1 is a \w+\.ForeignArray of {dtype} but must be an array .*; convert it with {way}$"
    with pytest.raises(RuntimeFault, match=message):
        as_source((X, array))
    with pytest.raises(GraphError, match=f"dtype {dtype} is not supported; use one of f64"):
        short(array.dtype)


def test_a_data_set_that_is_shorter_than_it_says() -> None:
    class Short(list[Any]):
        def __len__(self) -> int:
            return 3

    source = as_source(Short([(np.ones(2), 0), (np.ones(2), 1)]))
    with pytest.raises(
        RuntimeFault, match="data set Short has 3 samples by its __len__ but fails at index 2"
    ):
        source.load(np.array([1, 2]))


@pytest.mark.parametrize(("length", "reason"), [(2.5, "'float' object cannot"), (-1, "should return >= 0")])
def test_a_length_that_is_no_number_of_samples_is_refused(length: Any, reason: str) -> None:
    class Half(ByOne):
        def __len__(self) -> int:
            return length  # type: ignore[no-any-return]

    message = (
        f"__len__ of data set Half gives no number of samples: .*{reason}.*; return an integer of at least"
    )
    with pytest.raises(RuntimeFault, match=message):
        as_source(Half())


def test_an_error_of_a_data_set_names_it_and_the_index() -> None:
    class Files(ByOne):
        def __getitem__(self, row: int) -> dict[str, Any]:
            if row == 4:
                raise OSError("file is damaged")
            return super().__getitem__(int(row))

    with pytest.raises(OSError, match="file is damaged") as raised:
        as_source(Files()).load(np.array([1, 4]))
    assert raised.value.__notes__ == ["data set Files raised this at index 4"]


def test_a_data_set_gets_one_index_at_a_time() -> None:
    source = as_source(Centred())
    loaded = source.load(np.array([4, 1, 2]))["batch.0"]
    np.testing.assert_array_equal(loaded, [TABLE[i] - TABLE[i].mean() for i in (4, 1, 2)])


@pytest.mark.parametrize("returned", [[1.0], np.ones((2, 3)), None])
def test_several_samples_are_a_list_of_as_many(returned: Any) -> None:
    class Fewer(ByMany):
        def __getitems__(self, rows: list[int]) -> Any:
            return returned

    message = "__getitems__ of data set Fewer returned .* but was asked for 2 samples; return a list"
    with pytest.raises(RuntimeFault, match=message):
        as_source(Fewer()).load(np.array([1, 2]))


def test_a_data_set_of_several_that_is_shorter_than_it_says() -> None:
    class Short(ByMany):
        def __getitems__(self, rows: list[int]) -> Any:
            return [(X[row], 0) for row in rows]

    message = r"data set Short has 9 samples by its __len__ but fails at the indices 1, 8, 2, 3, \.\.\.: "
    with pytest.raises(RuntimeFault, match=message):
        as_source(Short()).load(np.array([1, 8, 2, 3, 0]))


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_refused_batch_sizes(size: Any) -> None:
    with pytest.raises(RuntimeFault, match=f"batch_size is {size}"):
        DataLoader(as_source(np.ones(4)), size)


def test_dropping_everything_is_refused() -> None:
    with pytest.raises(RuntimeFault, match="data has 4 samples but batch_size is 5 and drop_last is set"):
        DataLoader(as_source(np.ones(4)), 5, drop_last=True)


def test_sources_pass_through() -> None:
    source = as_source(np.ones(4))
    assert as_source(source) is source
    assert isinstance(source, ArraySource)
    assert isinstance(as_source(ByOne()), MapSource)


def test_nested_outputs_are_predicted_by_path() -> None:
    x, mesh = np.random.default_rng(0).normal(size=(8, 6)), dg.ProcessMesh.grid(dp=2)
    expected = {"heads.0": x + 1, "heads.1.low": x[:, :2], "y": 2 * x}
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp", micro_batches=2)
    engine = dg.Engine(
        lambda x: {"heads": [x + 1, {"low": x[:, :2]}], "y": 2 * x, "none": None}, strategy=strategy
    )
    outputs = engine.predict(x, batch_size=4)
    engine.close()
    assert list(outputs) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(outputs[name], array)
    assert list(dg.Engine(lambda x: (x, (x, [x]))).predict(x)) == ["output0", "output1.0", "output1.1.0"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: {"x": x, "names": {"a": "text"}}, "names.a of the model is 'text' but must be a tensor"),
        (lambda x: {x}, "output of the model is a set but must be a tensor"),
        (lambda x: {"a.b": x, "a": {"b": x}}, "model returned two outputs named 'a.b'; rename one"),
        (lambda x: {"a": [None]}, "model returned a dict without a tensor but must return one or more"),
    ],
)
def test_outputs_that_are_no_tensors_are_refused(output: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        dg.Engine(output).predict(X)


@pytest.mark.parametrize("micro", [1, 2])
def test_outputs_without_a_row_for_each_sample_are_predicted_at_once(micro: int) -> None:
    x = np.random.default_rng(0).normal(size=(23, 6))
    whole = dg.Engine(lambda x: (x, ops.mean(x, 0), x.T @ x)).predict(x)
    np.testing.assert_allclose(whole["output1"], x.mean(0))
    np.testing.assert_allclose(whole["output2"], x.T @ x)
    tokens = dg.Engine(lambda x: ops.reshape(x, (-1, 3)), strategy=dg.Strategy(micro_batches=micro))
    np.testing.assert_array_equal(tokens.predict(x, batch_size=10), x.reshape(-1, 3))  # two rows a sample
    number = dg.Engine(ops.mean, strategy=dg.Strategy(micro_batches=micro))
    with pytest.warns(UserWarning, match="predict returns a number for every 10 samples, which depends on"):
        assert number.predict(x[:20], batch_size=20 if micro == 2 else 10).shape == (2,)
    for output in (lambda x: ops.mean(x, 0), lambda x: x.T, lambda x: (x, x.T @ x)):
        cut = dg.Engine(output, strategy=dg.Strategy(micro_batches=micro))
        with pytest.raises(GraphError, match=r"not rows for each of them, but predict joins the rows of 2"):
            cut.predict(x if micro == 1 else x[:20], batch_size=10 if micro == 1 else 20)


@pytest.mark.parametrize("ranks", [1, 2])
def test_numbers_that_numpy_refuses_are_named_with_rank_and_op(ranks: int) -> None:
    strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=ranks), batch_axis="dp")
    engine = dg.Engine(lambda x: x ** (x - 3), strategy=strategy)
    with pytest.raises(RuntimeFault, match=r"rank [01] forward.*, op %\d+ power .*: Integers to negative"):
        engine.predict(np.arange(4, dtype="i4"))


@pytest.mark.parametrize(
    "fields",
    [("x", "target", "weight"), ("weight", "x", "target"), ("x", "y", "weight"), ("x", "weight", "y")],
)
def test_labels_are_given_by_name(fields: tuple[str, ...]) -> None:
    """What no argument of the loss names is the remaining argument."""

    def loss(output: Any, target: Any, weight: Any) -> Any:
        return (weight * (output - target) ** 2).mean()

    numbers = {"x": 0.0, "target": 1.0, "y": 1.0, "weight": 5.0}
    batch = {name: np.full((4, 2), numbers[name], "f4") for name in fields}
    logs = dg.Engine(lambda x: 1.0 * x, loss, metrics={"same": loss}).evaluate(batch, batch_size=4)
    assert logs["loss"] == logs["same"] == 5.0


def scaled(output: Any, labels: Any, *, scale: Any = 1.0) -> Any:
    return ((output - labels) ** 2).mean() * scale


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, labels, *_: scaled(output, labels),
        lambda output, labels, **_: scaled(output, labels),
        lambda output, *rest: scaled(output, rest[0]),
        lambda *given: scaled(*given[:2]),
        functools.wraps(lambda output, labels, mask: 0)(lambda *given: scaled(given[0], given[1])),
    ],
    ids=["rest", "named rest", "all", "everything", "wrapped"],
)
def test_losses_that_take_any_labels(loss: Any) -> None:
    batch = {
        name: np.full((4, 2), float(number), "f4") for number, name in enumerate(("x", "labels", "mask"))
    }
    assert dg.Engine(lambda x: 1.0 * x, loss).evaluate(batch, batch_size=4)["loss"] == 1.0


@pytest.mark.parametrize("loss", [scaled, functools.partial(scaled, scale=2.0)])
def test_a_label_is_no_option_of_a_loss_but_by_name(loss: Any) -> None:
    fields = {name: np.ones((4, 2), "f4") for name in ("x", "labels", "mask")}
    with pytest.raises(GraphError, match=r"loss takes .* 2 targets; give it these"):
        dg.Engine(lambda x: 1.0 * x, loss).evaluate(fields, batch_size=4)
