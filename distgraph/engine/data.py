"""Data sets, the order of their samples, and batches of which each rank loads only the rows that it needs.

A data set is a tuple of arrays, a dict of arrays, one array, or anything with `__len__` and `__getitem__` (a
map-style data set). A map-style data set gets one index after the other, never an array of them, which code
written for one sample may take without an error and compute something else from; with `__getitems__` it gets
a list of them. A sample is an array, a tuple or a dict.

The fields of a model with several inputs stand in a row, as in `(x, z, labels)`, or in a dict by the names of
its arguments. A list of samples, such as `[(x0, y0), (x1, y1)]`, is a map-style data set.

The order is a function of seed and epoch only: it does not depend on the mesh or the number of ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import getitem
from typing import Any, Protocol

import numpy as np

from distgraph.errors import GraphError, RuntimeFault, first_of
from distgraph.errors.arguments import array_of, check_count, check_unmasked, shown
from distgraph.ir.dtypes import short, to_numpy
from distgraph.kernels.random import random_key

POSITION = "batch."
"""Fields of a tuple are named "batch.0", "batch.1", ..."""

_LOOKED_AT = 8  # items of a list, to see whether it has fields or samples

Fields = dict[str, Any]
Field = tuple[tuple[int, ...], str]


class Source(Protocol):
    """A data set as the engine sees it."""

    def __len__(self) -> int:
        """Number of samples."""

    def load(self, rows: np.ndarray) -> Fields:
        """Field name -> array with one entry for each of these samples along its first dim."""


@dataclass(frozen=True, slots=True)
class ArraySource:
    """Arrays of one length, by field name."""

    arrays: Fields

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def load(self, rows: np.ndarray) -> Fields:
        """Copies of the rows; a view where they are consecutive."""
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
            return {name: array[rows[0] : rows[-1] + 1] for name, array in self.arrays.items()}
        return {name: array[rows] for name, array in self.arrays.items()}


class MapSource:
    """A map-style data set.

    Args:
        dataset: has `__len__` and `__getitem__`, which gets one index; or `__getitems__` too, which gets a
            list of them and returns as many samples, as in PyTorch.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, rows: np.ndarray) -> Fields:
        """Samples by rows. Raises RuntimeFault when they do not stack, or there is none of an index."""
        indices = [int(row) for row in rows]
        several = getattr(self.dataset, "__getitems__", None)
        if several is None:
            samples = [self._get(partial(getitem, self.dataset), row, [row]) for row in indices]
        else:
            samples = self._get(several, indices, indices)
            if not isinstance(samples, (list, tuple)) or len(samples) != len(indices):
                raise RuntimeFault(
                    f"__getitems__ of {self._name} returned {shown(samples)} but was asked for "
                    f"{len(indices)} samples; return a list with one sample for each index"
                )
        return _stack([_fields(sample) for sample in samples], rows)

    @property
    def _name(self) -> str:
        return f"data set {type(self.dataset).__name__}"

    def _get(self, get: Callable[[Any], Any], index: Any, rows: Sequence[int]) -> Any:
        """What the data set returns for an index. An error of it gets a note that names both.

        Raises:
            RuntimeFault: it has no sample of an index.
        """
        at = f"the indices {first_of(rows)}" if len(rows) > 1 else f"index {first_of(rows)}"
        try:
            return get(index)
        except IndexError as error:
            raise RuntimeFault(
                f"{self._name} has {len(self)} samples by its __len__ but fails at {at}: {error}; correct "
                f"its __getitem__, or its __len__"
            ) from error
        except Exception as error:
            error.add_note(f"{self._name} raised this at {at}")
            raise


def as_source(data: Any) -> Source:
    """Any data set as a `Source`.

    Raises:
        RuntimeFault: it is an iterator or has no length that is a number of samples, is empty, or its
            arrays differ in length.
    """
    if data is None:
        raise RuntimeFault(
            "data is None; pass arrays such as (x, y), a dict of arrays, or a map-style data set"
        )
    if isinstance(data, (ArraySource, MapSource)):
        return data
    if isinstance(data, (tuple, list)) and data and all(_is_array(a) for a in data):
        return _arrays({f"{POSITION}{i}": a for i, a in enumerate(data)})
    if isinstance(data, Mapping):
        return _arrays(dict(data))
    if type(data) in (tuple, list):  # subclasses may have an index of their own
        _check_items(data)
    if _is_array(data):
        return _arrays({f"{POSITION}0": data})
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or isinstance(data, str):
        raise RuntimeFault(
            f"data is a {type(data).__name__}, which has no length or no index; pass arrays such as (x, "
            f"y), a dict of "
            "arrays, or an object with __len__ and __getitem__"
        )
    if _length(data) == 0:
        raise RuntimeFault(f"data ({type(data).__name__}) is empty; there is nothing to do")
    return MapSource(data)


def _length(data: Any) -> int:
    """Number of samples of a data set. Raises RuntimeFault where that is no number of samples."""
    try:
        return len(data)
    except (TypeError, ValueError, OverflowError) as error:
        raise RuntimeFault(
            f"__len__ of data set {type(data).__name__} gives no number of samples: {error}; return an "
            f"integer of at least 0"
        ) from error


def _check_items(data: Sequence[Any]) -> None:
    """Raises RuntimeFault where items of a tuple or list are neither all fields nor all samples."""
    items = data[:_LOOKED_AT]
    nested = [x for x in items if isinstance(x, (tuple, list, Mapping))]
    mixed = bool(nested) and any(map(_is_array, items))
    lists = isinstance(data, tuple) and bool(data) and all(isinstance(x, list) for x in data)
    if not (mixed or lists or (1 < len(items) == len(nested) and not _may_stack(nested[0], nested[1]))):
        return
    first = nested[0]
    words = {"dicts" if isinstance(x, Mapping) else f"{type(x).__name__}s": None for x in nested}
    kinds = " and ".join([*words, *["arrays"] * mixed])
    way = "pass arrays, such as np.asarray(x)"
    if isinstance(first, Mapping):
        way = "pass one dict with all fields, such as the inputs of the model and the labels"
    elif any(map(_is_array, first)):
        way = (
            "pass all fields in a row, such as (x, z, labels) for a model of two inputs, or a dict with the "
            "names of its arguments"
        )
    raise RuntimeFault(
        f"data is a {type(data).__name__} of {kinds}, which would be one sample each but samples have the "
        f"same fields; {way}"
    )


def _may_stack(first: Any, second: Any) -> bool:
    """Whether two samples have fields of the same names and numbers of dims."""
    try:
        one, other = _fields(first), _fields(second)
    except Exception:  # noqa: BLE001 - whatever is wrong with a sample is said where it is loaded
        return True
    return {name: a.ndim for name, a in one.items()} == {name: a.ndim for name, a in other.items()}


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype") and hasattr(x, "__getitem__")


def _arrays(arrays: Fields) -> ArraySource:
    if not arrays:
        raise RuntimeFault("data has no field; pass arrays such as (x, y)")
    for name, array in arrays.items():
        if not _is_array(array):
            raise RuntimeFault(
                f"data field {name} is a {type(array).__name__} but must be an array; use np.asarray"
            )
        if len(array.shape) == 0:
            raise RuntimeFault(f"data field {name} has no dim but the first dim must be the samples")
        _check_dtype(name, array)
    lengths = {name: int(array.shape[0]) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        names = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise RuntimeFault(
            f"data fields differ in their number of samples: {names}; cut them to the same length"
        )
    if 0 in lengths.values():
        raise RuntimeFault("data has 0 samples; there is nothing to do")
    return ArraySource(arrays)


def _check_dtype(name: str, array: Any) -> str:
    check_unmasked(f"data field {name}", array, RuntimeFault)
    try:
        return short(array.dtype)
    except GraphError as error:
        if isinstance(array.dtype, np.dtype):
            message = f"data field {name}: {error}; convert it with np.asarray(..., dtype)"
        else:
            message = f"data field {name} {_foreign(array)}"
        raise RuntimeFault(message) from None


def _foreign(array: Any) -> str:
    """What an array of another library is, such as a tensor of PyTorch, and how to make it one of NumPy."""
    kind, dtype = type(array), str(array.dtype)
    way = "np.asarray(..., dtype)"
    if callable(getattr(array, "numpy", None)):
        steps = (
            ".detach()" * bool(getattr(array, "requires_grad", False)),
            ".cpu()" * (getattr(getattr(array, "device", None), "type", "cpu") != "cpu"),
            ".float()" * dtype.endswith("bfloat16"),  # NumPy has none
            ".numpy()",
        )
        way = "".join(steps)
    library = kind.__module__.partition(".")[0]
    return (
        f"is a {library}.{kind.__name__} of {dtype} but must be an array with a dtype of NumPy; convert it "
        f"with {way}"
    )


def _fields(loaded: Any) -> Fields:
    """A sample of a map-style data set, as arrays by field name."""
    if isinstance(loaded, Mapping):
        named = dict(loaded)
    elif isinstance(loaded, (tuple, list)):
        named = {f"{POSITION}{i}": a for i, a in enumerate(loaded)}
    else:
        named = {f"{POSITION}0": loaded}
    return {name: array_of(f"data field {name}", a, RuntimeFault) for name, a in named.items()}


def _stack(samples: Sequence[Fields], rows: np.ndarray) -> Fields:
    first = samples[0] if samples else {}
    stacked = {}
    for name, array in first.items():
        column = []
        for row, sample in zip(rows, samples, strict=True):
            other = sample.get(name)
            if other is None or other.shape != array.shape or other.dtype != array.dtype:
                actual = "missing" if other is None else f"{other.dtype}{other.shape}"
                raise RuntimeFault(
                    f"field {name} of sample {row} is {actual} but that of sample {rows[0]} is "
                    f"{array.dtype}{array.shape}; "
                    "samples of one batch must agree: pad or crop them"
                )
            column.append(other)
        stacked[name] = np.stack(column)
    return stacked


@dataclass(frozen=True, slots=True)
class Batch:
    """Some samples of a data set, loaded when and where they are needed.

    Attributes:
        source: the data set.
        rows: indices of the samples, in order.
        epoch, position: position in training: number of the epoch, and of samples of the epoch before it.
    """

    source: Source
    rows: np.ndarray
    epoch: int = 0
    position: int = 0
    _loaded: dict[tuple[int, int], Fields] = field(default_factory=dict, repr=False, compare=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.rows)

    def block(self, start: int, stop: int) -> Fields:
        """Samples start..stop of the batch. Ranks of one process that need the same ones load them once."""
        with self._lock:
            if (start, stop) not in self._loaded:
                self._loaded[start, stop] = self.source.load(self.rows[start:stop])
            return self._loaded[start, stop]

    def fields(self) -> dict[str, Field]:
        """Shape of one sample, and dtype, of every field; loads at most one sample."""
        if isinstance(self.source, ArraySource):
            arrays = self.source.arrays
        else:
            arrays = self.block(0, min(1, len(self.rows)))
        return {name: (tuple(a.shape[1:]), _check_dtype(name, a)) for name, a in arrays.items()}


def whole(data: Any) -> Batch:
    """All samples of a data set as one batch; a Batch is returned unchanged."""
    if isinstance(data, Batch):
        return data
    source = as_source(data)
    return Batch(source, np.arange(len(source)))


def stand_ins(batch: Any) -> Any:
    """Shapes and dtypes without data (such as `jax.ShapeDtypeStruct`) as arrays of zeros that take no
    memory."""
    if isinstance(batch, Mapping):
        return {name: stand_ins(each) for name, each in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(stand_ins(each) for each in batch)
    if hasattr(batch, "shape") and hasattr(batch, "dtype") and not hasattr(batch, "__getitem__"):
        return np.broadcast_to(np.zeros((), to_numpy(short(batch.dtype))), tuple(batch.shape))
    return batch


def order(count: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Order of the samples in an epoch.

    Example:
        >>> rows = order(5, seed=0, epoch=1, shuffle=True)
        >>> sorted(rows.tolist()), (rows == order(5, seed=0, epoch=1, shuffle=True)).all().item()
        ([0, 1, 2, 3, 4], True)
    """
    if not shuffle:
        return np.arange(count)
    return np.random.default_rng(random_key(seed, "shuffle", epoch)).permutation(count)


@dataclass(frozen=True, slots=True)
class DataLoader:
    """Batches of an epoch, in order.

    Attributes:
        source: the data set.
        batch_size: samples in a batch, over all ranks.
        shuffle: whether the order changes every epoch.
        drop_last: whether a short batch at the end is left out.
        seed: of the shuffling.
        epoch: number of the epoch.
        start: samples of the epoch to skip.
    """

    source: Source
    batch_size: int
    shuffle: bool = True
    drop_last: bool = False
    seed: int = 0
    epoch: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size, RuntimeFault)
        if self.drop_last and len(self.source) < self.batch_size:
            raise RuntimeFault(
                f"data has {len(self.source)} samples but batch_size is {self.batch_size} and drop_last is "
                f"set, so there "
                "is no batch; use a smaller batch_size"
            )

    @property
    def stop(self) -> int:
        """Number of samples of the epoch that are trained on after the last batch."""
        return min(self.start + len(self) * self.batch_size, len(self.source))

    def __len__(self) -> int:
        remaining = len(self.source) - self.start
        return max(0, remaining // self.batch_size if self.drop_last else -(-remaining // self.batch_size))

    def __iter__(self) -> Iterator[Batch]:
        rows = order(len(self.source), self.seed, self.epoch, self.shuffle)
        for number in range(len(self)):
            first = self.start + number * self.batch_size
            yield Batch(self.source, rows[first : first + self.batch_size], self.epoch, first)
