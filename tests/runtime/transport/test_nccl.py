"""The logic of the NCCL transport on a stand-in for CuPy, with and without shared devices.

The same cases on real hardware are in `tests/gpu`.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.devices import collective_cases as cases
from support.devices import fake_cupy
from support.devices.on_device import OnDevice
from support.programs.rank_threads import run_ranks

from distgraph.errors import RuntimeFault
from distgraph.runtime.transport import nccl
from distgraph.runtime.transport.cuda_copies import CudaCopies
from distgraph.runtime.transport.inprocess import InProcessTransport, connect
from distgraph.runtime.transport.staging import StagedTransport

PLAIN = [case for case in cases.PLAIN if case is not cases.refusals_case]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> fake_cupy.Network:
    return install(monkeypatch, devices=4)


def install(monkeypatch: pytest.MonkeyPatch, devices: int) -> fake_cupy.Network:
    network = fake_cupy.Network()
    monkeypatch.setattr(nccl, "_load_cupy", lambda: fake_cupy.make(network, devices))
    return network


def prepared(control: InProcessTransport) -> OnDevice:
    direct = nccl.NcclTransport(control, limit=100)
    pairs = [p for p in itertools.permutations(range(control.size), 2) if control.rank in p]
    direct.prepare([g for g in cases.groups(control.size) if control.rank in g], pairs)
    copies = CudaCopies(direct.cupy, np.empty)
    return OnDevice(StagedTransport(control, copies, direct, direct.reaches), direct.cupy)


@pytest.mark.parametrize(("size", "devices"), [(1, 1), (2, 2), (3, 3), (4, 4), (2, 1), (3, 2)])
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.__name__)
def test_plain(case: Callable[[Any], None], size: int, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, devices)
    run_ranks(size, lambda control: case(prepared(control)))


@pytest.mark.parametrize(("size", "devices"), [(1, 1), (3, 3), (3, 2)])
@pytest.mark.parametrize("case", cases.TYPED, ids=lambda case: case.__name__)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_moving(
    case: Callable[[Any, str], None], dtype: str, size: int, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, devices)
    run_ranks(size, lambda control: case(prepared(control), dtype))


@pytest.mark.parametrize(("size", "devices"), [(1, 1), (3, 3), (3, 2)])
@pytest.mark.parametrize("case", cases.REDUCING, ids=lambda case: case.__name__)
@pytest.mark.parametrize(
    ("dtype", "op"), [("float32", "sum"), ("int64", "prod"), ("bfloat16", "max"), ("bool", "min")]
)
def test_reducing(
    case: Callable[[Any, str, str], None],
    dtype: str,
    op: str,
    size: int,
    devices: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, devices)
    run_ranks(size, lambda control: case(prepared(control), dtype, op))


def test_even_shards_take_the_native_collectives(network: fake_cupy.Network) -> None:
    def program(control: InProcessTransport) -> None:
        transport, group = prepared(control), tuple(range(control.size))
        transport.all_gather(np.zeros(2), np.zeros(6), [2, 2, 2], group).wait()
        transport.reduce_scatter(np.zeros(6), np.zeros(2), [2, 2, 2], "sum", group).wait()

    run_ranks(3, program)
    assert {"allGather", "reduceScatter"} <= set(network.calls)
    assert "reduce" not in network.calls


def test_messages_may_be_posted_in_any_order_of_tags(network: fake_cupy.Network) -> None:
    def program(control: InProcessTransport) -> list[float]:
        transport = prepared(control)
        if control.rank == 0:
            for tag in (5, 3):
                transport.send(np.full(2, float(tag)), 1, tag).wait()
            return []
        buffers = [np.zeros(2), np.zeros(2)]
        requests = [transport.recv(buffer, 0, tag) for buffer, tag in zip(buffers, (3, 5), strict=True)]
        for request in requests:
            request.wait()
        return [float(buffer[0]) for buffer in buffers]

    assert run_ranks(2, program)[1] == [3.0, 5.0]


def test_what_was_not_prepared_is_refused(network: fake_cupy.Network) -> None:
    def program(control: InProcessTransport) -> None:
        direct = nccl.NcclTransport(control)
        transport = OnDevice(direct, direct.cupy)
        with pytest.raises(
            RuntimeFault, match=r"group \(0, 1\) has no NCCL communicator; name it in prepare"
        ):
            transport.all_reduce(np.zeros(2), "sum", (0, 1))
        with pytest.raises(RuntimeFault, match="name it in prepare"):
            transport.send(np.zeros(2), 1 - control.rank, 0)

    run_ranks(2, program)


def test_without_cupy_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeFault, match=r"CuPy with NCCL cannot be loaded .*; install it with"):
        nccl.NcclTransport(connect(1)[0])


def test_both_ends_of_a_wire_find_the_same_one() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change between any two steps of the interpreter
    try:
        for _ in range(300):
            network, found, start = fake_cupy.Network(), [], threading.Barrier(2)

            def look(network: Any = network, found: list[Any] = found, start: Any = start) -> None:
                start.wait()
                found.append(network.wire(0, 0, 1))

            threads = [threading.Thread(target=look) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert found[0] is found[1]
    finally:
        sys.setswitchinterval(interval)
