"""The rules of stream capture, as the stand-in for CuPy has them, and what `CudaGraphs` makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.devices import fake_cupy, fake_device

from distgraph.runtime.execute.cuda_graphs import CudaGraphs


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_device.Hardware]:
    """A machine with a GPU, whose present stream is not the default one."""
    hardware = fake_cupy.install(monkeypatch, devices=1)
    import cupy

    with cupy.cuda.Stream():
        yield hardware


def test_a_capture_computes_nothing_and_a_launch_everything(gpu: fake_device.Hardware) -> None:
    import cupy

    x, y = cupy.asarray(np.arange(4.0)), cupy.asarray(np.zeros(4))

    def work() -> None:
        shifted = cupy.where(x > 1, x + 1, 0.0)  # an array of the pool
        shifted *= 2
        cupy.add(shifted.reshape(2, 2)[::-1], y.reshape(2, 2), out=y.reshape(2, 2))
        y[:1] = cupy.exp(x)[:1]

    graphs = CudaGraphs(cupy.cuda)
    graph = graphs.capture(work)
    assert y.host.tolist() == [0, 0, 0, 0]
    graph.launch()
    assert y.host.tolist() == [1, 8, 0, 0]
    x.set(np.array([0.0, 0.0, 9.0, 0.0]))
    graph.launch()
    assert y.host.tolist() == [1, 8, 0, 0]
    x.set(np.array([np.log(3), 2.0, 9.0, 0.0]))
    graph.launch()
    np.testing.assert_allclose(y.host, [3, 8, 2 * np.log(3) + 2, 6])
    del graphs  # and with it the memory
    with pytest.raises(AssertionError, match="memory of the graph has been released"):
        graph.launch()


NOT_PERMITTED: dict[str, Callable[[Any, Any], Any]] = {
    "synchronize": lambda cupy, x: cupy.cuda.get_current_stream().synchronize(),
    "event": lambda cupy, x: cupy.cuda.get_current_stream().record().synchronize(),
    "query": lambda cupy, x: cupy.cuda.get_current_stream().record().done,
    "to the host": lambda cupy, x: cupy.asnumpy(x),
    "number": lambda cupy, x: float(x.sum()),
    "truth": lambda cupy, x: bool((x > 0).all()),
    "from the host": lambda cupy, x: cupy.asarray(1.0),
    "set": lambda cupy, x: x.set(np.zeros(3)),
    "mask": lambda cupy, x: x[x > 0],
    "nonzero": lambda cupy, x: cupy.nonzero(x),
    "cublas": lambda cupy, x: x @ x,
}


@pytest.mark.parametrize("name", NOT_PERMITTED)
def test_what_is_not_permitted_ends_the_capture(name: str, gpu: fake_device.Hardware) -> None:
    import cupy

    x, graphs = cupy.asarray(np.ones(3)), CudaGraphs(cupy.cuda)
    kind, text = (
        (NotImplementedError, "cuBLAS") if name == "cublas" else (RuntimeError, "current stream is capturing")
    )
    with pytest.raises(kind, match=text):
        graphs.capture(lambda: NOT_PERMITTED[name](cupy, x))
    assert gpu.captures.current is None
    NOT_PERMITTED[name](cupy, x)  # outside of a capture it is
    graphs.capture(lambda: cupy.add(x, 1, out=x)).launch()  # and the next capture begins anew
    assert x.host.tolist()[0] == (1.0 if name == "set" else 2.0)


def test_work_on_another_stream_is_refused(gpu: fake_device.Hardware) -> None:
    import cupy

    x, other = cupy.asarray(np.ones(3)), cupy.cuda.Stream()

    def work() -> None:
        with other:
            cupy.add(x, 1, out=x)

    with pytest.raises(RuntimeError, match="work on another stream"):
        CudaGraphs(cupy.cuda).capture(work)
    assert x.host.tolist() == [1, 1, 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_of_another_kind_passes(error: type[BaseException], gpu: fake_device.Hardware) -> None:
    import cupy

    x, calls = cupy.asarray(np.zeros(3)), []

    def body(m: int) -> None:
        calls.append(m)
        cupy.add(x, 1, out=x)
        if gpu.captures.current is not None and len(calls) == 2:
            raise error

    part = CudaGraphs(cupy.cuda).part("forward", lambda m: [])
    part(body, 0)
    with pytest.raises(error):
        part(body, 0)
    assert gpu.captures.current is None
    part(body, 0)  # captured
    part(body, 0)
    assert x.host.tolist() == [3, 3, 3]
    assert calls == [0, 0, 0]


def test_each_micro_batch_has_a_graph(gpu: fake_device.Hardware) -> None:
    import cupy

    rings = [cupy.asarray(np.zeros(2)) for _ in range(2)]
    part = CudaGraphs(cupy.cuda).part("forward", lambda m: [])
    for _ in range(3):
        for m in range(4):
            part(lambda m: cupy.add(rings[m % 2], m, out=rings[m % 2]), m)
    assert [ring.host.tolist() for ring in rings] == [[6, 6], [12, 12]]
    assert [graph.launches for graph in gpu.captures.graphs] == [2, 2, 2, 2]
