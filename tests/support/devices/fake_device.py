"""Arrays, streams and events of the stand-in for CuPy: NumPy underneath, with the manners of a GPU.

* An array of the device does not mix with one of the host, and does not turn into one by itself.
* Everything happens on the current stream, which is the calling thread's; it happens at once, but who reads
  what another stream wrote (or writes what it reads) without having waited for it is told that this is a
  race.
* What makes the host wait is counted: `float(x)`, `x.item()`, blocking copies, `synchronize`.
* While a stream is captured nothing happens; see `fake_capture`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.special
from support.devices.fake_capture import FUNCTIONS_THAT_WRITE, METHODS_THAT_WRITE, WAITS, Captured, Captures

_VIEWS_NEED_ARRAYS = (
    "broadcast_to", "moveaxis", "transpose", "expand_dims", "swapaxes", "squeeze", "reshape", "ravel", "flip",
)  # fmt: skip
_HOST_ONLY = ("ctypes", "__array_interface__", "__array_struct__", "__buffer__", "tofile", "tobytes")
_TAKES_HOST = ("asarray", "array")


class Stream:
    """Work in order; `clock` says how much of the other streams came before what it is given next."""

    numbers = itertools.count(1)

    def __init__(self, hardware: Hardware, *, non_blocking: bool = False, null: bool = False) -> None:
        self.hardware, self.null, self.non_blocking = hardware, null, non_blocking
        self.ptr = 0 if null else next(Stream.numbers)
        self.clock: dict[int, int] = {}

    @property
    def now(self) -> int:
        return self.clock.get(self.ptr, 0)

    def __enter__(self) -> Stream:
        self.hardware.streams().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.hardware.streams().pop()

    def begin_capture(self) -> None:
        self.hardware.captures.begin(self.hardware, self)

    def end_capture(self) -> Captured:
        return self.hardware.captures.end(self)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event(self.hardware)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        assert event.recorded
        self.hardware.captures.refuse("wait for another stream")
        for stream, tick in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), tick)

    def synchronize(self) -> None:
        self.hardware.captures.refuse("cudaStreamSynchronize")
        self.hardware.wait_on_host(self.clock)


class Event:
    def __init__(self, hardware: Hardware, disable_timing: bool = False) -> None:
        self.hardware, self.recorded = hardware, False
        self.clock: dict[int, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.hardware.stream
        self.clock, self.recorded = dict(stream.clock), True

    @property
    def done(self) -> bool:
        self.hardware.captures.refuse("cudaEventQuery")
        self.hardware.learn(self.clock)
        return True

    def synchronize(self) -> None:
        self.hardware.captures.refuse("cudaEventSynchronize")
        self.hardware.wait_on_host(self.clock)


class Hardware:
    """What the threads of a process see of its GPUs.

    Attributes:
        strict: whether computing on the default stream is a mistake.
        waits: how often the host has waited for the device.
        names: of the namespace that were used.
        captures: graphs that were captured, and their launches.
    """

    def __init__(self, devices: int, strict: bool = False) -> None:
        self.devices, self.strict, self.waits = devices, strict, 0
        self.names: set[str] = set()
        self.captures = Captures()
        self._lock, self._local = threading.Lock(), threading.local()
        self._null = Stream(self, null=True)
        self._known: dict[int, int] = {}  # what the host has waited for
        self._memory: dict[int, tuple[np.ndarray[Any, Any], list[tuple[int, int, int, int, bool]]]] = {}

    def streams(self) -> list[Stream]:
        if not hasattr(self._local, "streams"):
            self._local.streams = []
        found: list[Stream] = self._local.streams
        return found

    @property
    def stream(self) -> Stream:
        return self.streams()[-1] if self.streams() else self._null

    def learn(self, clock: dict[int, int]) -> None:
        with self._lock:
            for stream, tick in clock.items():
                self._known[stream] = max(self._known.get(stream, 0), tick)

    def wait_on_host(self, clock: dict[int, int]) -> None:
        self.learn(clock)
        with self._lock:
            self.waits += 1

    def touch(self, array: np.ndarray[Any, Any], *, write: bool) -> None:
        """Note that the current stream reads or writes an array."""
        stream = self.stream
        self.captures.refuse("work that is done at once")
        if stream.null:
            assert not self.strict, "computed on the default stream: outside of Device.working()"
            return
        if not array.size:
            return
        low, high = np.lib.array_utils.byte_bounds(array)
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        stream.clock[stream.ptr] = tick = stream.now + 1
        with self._lock:
            _, accesses = self._memory.setdefault(id(owner), (owner, []))
            for begin, end, other, at, wrote in accesses:
                seen = max(stream.clock.get(other, 0), self._known.get(other, 0))
                if begin < high and low < end and (write or wrote) and seen < at:
                    raise AssertionError(
                        f"race: stream {stream.ptr} {'writes' if write else 'reads'} what stream {other} "
                        f"{'wrote' if wrote else 'reads'} without having waited for it"
                    )
            same = (stream.ptr, False)
            accesses[:] = [
                a for a in accesses if not (low <= a[0] and a[1] <= high and (write or a[2:5:2] == same))
            ]
            accesses.append((low, high, stream.ptr, tick, write))


def namespace(hardware: Hardware) -> tuple[type, Any]:  # noqa: C901 - the array class needs its hardware
    """The class of device arrays, and what stands for the module `cupy` as far as arrays go."""
    captures = hardware.captures

    class DeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
        __array_priority__ = 100

        def __init__(self, host: Any) -> None:
            self.host = np.asarray(host)

        def __array__(self, *_: object, **__: object) -> Any:
            raise TypeError("Implicit conversion to a NumPy array is not allowed.")

        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
            captures.refuse_library(ufunc.__name__)
            return call(getattr(ufunc, method), inputs, kwargs)

        def __getattr__(self, name: str) -> Any:
            if name in _HOST_ONLY or name.startswith("__"):
                raise AttributeError(f"a device array has no {name}")
            found = getattr(self.host, name)
            if name in METHODS_THAT_WRITE:
                return lambda *args, **kwargs: captures.work(
                    hardware.stream, lambda: call(found, args, kwargs, self.host)
                )
            if callable(found):
                captures.refuse_library(name)
                if name in WAITS:
                    captures.refuse(name)
                return lambda *args, **kwargs: call(found, args, kwargs, self.host)
            return DeviceArray(found) if isinstance(found, np.ndarray) else found

        def __getitem__(self, key: Any) -> Any:
            keys = key if isinstance(key, tuple) else (key,)
            if any(isinstance(k, DeviceArray) for k in keys):
                if any(k.dtype == bool for k in keys if isinstance(k, DeviceArray)):
                    captures.refuse("choice of elements by a mask")
                return call(lambda host, *at: host[at], (self, *keys), {})
            return DeviceArray(
                self.host[keys if Ellipsis in keys else (*keys, ...)]
            )  # a view, also of one element

        def __setitem__(self, key: Any, value: Any) -> None:
            def run() -> None:
                number, at = plain(value), plain(key)
                hardware.touch(np.asarray(self.host[at]), write=True)
                self.host[at] = number

            captures.work(hardware.stream, run)

        def __len__(self) -> int:
            return len(self.host)

        def __float__(self) -> float:
            return float(self.get())

        def __int__(self) -> int:
            return int(self.get())

        def __bool__(self) -> bool:
            return bool(self.get())

        def item(self) -> Any:
            return self.get().item()

        @property
        def data(self) -> Any:
            return SimpleNamespace(ptr=self.host.ctypes.data)

        def set(self, host: Any, stream: Any = None) -> None:
            captures.refuse("copy from the host")
            assert type(host) is np.ndarray
            assert (host.shape, host.dtype) == (self.shape, self.dtype)
            assert self.flags.c_contiguous
            with stream or hardware.stream:
                hardware.touch(self.host, write=True)
            self.host[...] = host

        def get(self, stream: Any = None, out: Any = None, blocking: bool = True) -> Any:
            captures.refuse("copy to the host")
            stream = stream or hardware.stream
            with stream:
                hardware.touch(self.host, write=False)
            if blocking:
                stream.synchronize()
            if out is None:
                return self.host.copy()
            assert (out.shape, out.dtype) == (self.shape, self.dtype)
            np.copyto(out, self.host)
            return out

    def plain(value: Any, write: bool = False) -> Any:
        """Without the device, as an argument."""
        if isinstance(value, DeviceArray):
            hardware.touch(value.host, write=write)
            return value.host
        if isinstance(value, np.ndarray):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        if isinstance(value, (list, tuple)):
            return type(value)(plain(v, write) for v in value)
        return value

    def finished(result: Any, known: tuple[Any, ...] = ()) -> Any:
        if isinstance(result, tuple):
            return tuple(finished(r, known) for r in result)
        if not isinstance(result, (np.ndarray, np.generic)):
            return result
        made = np.asarray(result)
        if made.base is None:
            hardware.touch(made, write=True)
        return DeviceArray(made)

    def host_of(value: Any) -> Any:
        """As `plain`, without an access by the device."""
        if isinstance(value, (list, tuple)):
            return type(value)(map(host_of, value))
        return value.host if isinstance(value, DeviceArray) else value

    def captured(function: Callable[..., Any], args: Any, kwargs: Any, known: tuple[Any, ...]) -> Any:
        """`call` while a stream is captured."""
        target = kwargs.get("out")
        target = target[0] if isinstance(target, tuple) and len(target) == 1 else target
        if target is not None:
            captures.work(hardware.stream, lambda: call(function, args, dict(kwargs), *known))
            return target
        hosts = [host_of(a) for a in args], {name: host_of(value) for name, value in kwargs.items()}
        result = captures.recorded(
            hardware.stream,
            lambda: function(*hosts[0], **hosts[1]),
            lambda: call(function, args, dict(kwargs), *known),
            tuple(x for x in (*hosts[0], *known) if isinstance(x, np.ndarray)),
        )
        if isinstance(result, tuple):
            return tuple(map(DeviceArray, result))
        return DeviceArray(result) if isinstance(result, (np.ndarray, np.generic)) else result

    def call(function: Callable[..., Any], args: Any, kwargs: Any, *known: Any) -> Any:
        if captures.current is not None:
            return captured(function, args, kwargs, known)
        out = kwargs.pop("out", None)
        args = [plain(a) for a in args]
        kwargs = {name: plain(value) for name, value in kwargs.items()}
        for each in known:
            hardware.touch(each, write=False)
        if out is None:
            return finished(function(*args, **kwargs), known)
        target = out[0] if isinstance(out, tuple) and len(out) == 1 else out
        function(*args, **kwargs, out=plain(target, write=True))
        return target

    def copyto(dst: Any, src: Any, casting: Any = "same_kind", where: Any = None) -> None:
        assert where is None or isinstance(where, DeviceArray)

        def run() -> None:
            mask = True if where is None else plain(where)
            np.copyto(plain(dst, write=True), plain(src), casting=casting, where=mask)

        captures.work(hardware.stream, run)

    def scatter_add(target: Any, at: Any, values: Any) -> None:
        captures.work(hardware.stream, lambda: np.add.at(plain(target, write=True), plain(at), plain(values)))

    class Namespace:
        ndarray = DeviceArray
        __version__ = "14.2.0"

        def __getattr__(self, name: str) -> Any:
            hardware.names.add(name)
            captures.refuse_library(name)
            if name in WAITS:
                captures.refuse(name)
            found = getattr(np, name)
            if isinstance(found, type) or not callable(found):
                return found

            def function(*args: Any, **kwargs: Any) -> Any:
                if name in _VIEWS_NEED_ARRAYS and not isinstance(args[0], DeviceArray):
                    raise TypeError(f"{name}: expected a device array, got {type(args[0]).__name__}")
                if name in FUNCTIONS_THAT_WRITE:
                    return captures.work(hardware.stream, lambda: call(found, args, kwargs))
                return call(found, args, kwargs)

            return function

    space: Any = Namespace()

    def asarray(host: Any, dtype: Any = None) -> Any:
        if isinstance(host, DeviceArray):
            return DeviceArray(host.host) if dtype in (None, host.dtype) else host.astype(dtype)
        captures.refuse("copy from the host")
        return finished(np.array(host, dtype, order="C"))

    space.copyto, space.scatter_add, space.call = copyto, scatter_add, call
    space.asarray = space.array = asarray
    space.lib = SimpleNamespace(
        stride_tricks=SimpleNamespace(
            as_strided=lambda x, shape, strides: DeviceArray(
                np.lib.stride_tricks.as_strided(x.host, shape, strides)
            )
        )
    )
    space.work = lambda run: captures.work(hardware.stream, run)
    space.is_capturing = lambda: captures.current is not None
    space.asnumpy = lambda array, stream=None, out=None, blocking=True: array.get(stream, out, blocking)
    return DeviceArray, space


def elementwise(space: Any) -> type:  # noqa: C901 - a small function for each kernel
    """`cupy.ElementwiseKernel` for the kernels of `cuda.elementwise_kernel`, written once more in NumPy."""
    golden = 0x9E3779B97F4A7C15

    def bits(key: Any, offsets: Any, run: int, size: int) -> Any:
        i = np.arange(size)
        z = np.uint64(key) + (offsets[i // run] + (i % run).astype(np.uint64)) * np.uint64(golden)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        return z

    def dropout(x: Any, key: Any, offsets: Any, run: int, threshold: int, scale: Any) -> Any:
        kept = bits(key, offsets, run, x.size).reshape(x.shape) >> np.uint64(32) >= np.uint64(threshold)
        return np.where(kept, x * scale, 0).astype(x.dtype)

    def adam(p: Any, g: Any, m: Any, v: Any, *numbers: Any) -> Any:
        b1, b2, size, root, eps, coupled, keep = numbers
        d = g + coupled * p
        a, b = b1 * m + (1 - b1) * d, b2 * v + (1 - b2) * d * d
        return keep * p - size * a / (np.sqrt(b) * root + eps), a, b

    def tanh_sigmoid(x: Any) -> Any:
        return 1 / (1 + np.exp(-1.5957691216057308 * (x + 0.044715 * x**3)))

    def cdf(x: Any) -> Any:
        return 0.5 * (1 + scipy.special.erf(x * 0.7071067811865476))

    table: dict[str, Callable[..., Any]] = {
        "random_bits": bits,
        "dropout": dropout,
        "adam": adam,
        "relu_grad": lambda x, dy: np.where(x > 0, dy, 0),
        "tanh_grad": lambda y, dy: dy * (1 - y * y),
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "gelu": lambda x: x * cdf(x),
        "gelu_grad": lambda x, dy: dy * (cdf(x) + x * 0.3989422804014327 * np.exp(-0.5 * x * x)),
        "gelu_tanh": lambda x: x * tanh_sigmoid(x),
        "gelu_tanh_grad": lambda x, dy: dy * (
            (s := tanh_sigmoid(x)) + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
        ),
    }  # fmt: skip

    class ElementwiseKernel:
        def __init__(self, inputs: str, results: str, body: str, name: str, preamble: str = "") -> None:
            self.function = table[name.removeprefix("distgraph_")]
            self.inputs, self.results = inputs.count(",") + 1, results.count(",") + 1

        def __call__(self, *arrays: Any, **options: Any) -> Any:
            if len(arrays) > self.inputs:
                space.work(lambda: self.run(*arrays, **options))
                return arrays[self.inputs] if self.results == 1 else arrays[self.inputs :]
            if space.is_capturing():
                return space.call(self.function, arrays, options)
            return self.run(*arrays, **options)

        def run(self, *arrays: Any, **options: Any) -> Any:
            inputs = [a.host if isinstance(a, space.ndarray) else a for a in arrays[: self.inputs]]
            for a in arrays[: self.inputs]:
                assert not isinstance(a, np.ndarray)
            with np.errstate(over="ignore"):
                made = self.function(*inputs, **options)
            made = made if isinstance(made, tuple) else (made,)
            if len(arrays) > self.inputs:
                for target, value in zip(arrays[self.inputs :], made, strict=True):
                    target[...] = space.asarray(np.asarray(value, target.dtype))
                return arrays[self.inputs] if len(made) == 1 else arrays[self.inputs :]
            results = tuple(space.asarray(value) for value in map(np.asarray, made))
            return results[0] if len(results) == 1 else results

    return ElementwiseKernel
