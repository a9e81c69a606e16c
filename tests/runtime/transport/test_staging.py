"""Messages between ranks with and without a device: every operation, and the lives of the host buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.devices import collective_cases as cases
from support.devices import fake_cupy
from support.devices.delayed import Delayed
from support.devices.on_device import OnDevice
from support.devices.own_memory import Copies, namespace
from support.programs.rank_threads import run_ranks

from distgraph.errors import RuntimeFault
from distgraph.runtime.transport.cuda_copies import CudaCopies
from distgraph.runtime.transport.inprocess import InProcessTransport, connect
from distgraph.runtime.transport.staging import StagedTransport

PLAIN = [case for case in cases.PLAIN if case is not cases.refusals_case]
KINDS = ("host", "streams", "own")


def mixed(control: InProcessTransport) -> Any:
    """Ranks 0, 3, ... without a device, ranks 1, 4, ... with streams, ranks 2, 5, ... without."""
    kind = KINDS[control.rank % 3]
    if kind == "host":
        return control
    if kind == "streams":
        cupy, _ = fake_cupy.make(fake_cupy.Network(), 1)
        return OnDevice(StagedTransport(control, CudaCopies(cupy, np.empty)), cupy)
    return OnDevice(StagedTransport(control, Copies()), namespace())


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.__name__)
def test_plain(case: Callable[[Any], None], size: int) -> None:
    run_ranks(size, lambda control: case(mixed(control)))


@pytest.mark.parametrize("case", cases.TYPED, ids=lambda case: case.__name__)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "bool"])
def test_moving(case: Callable[[Any, str], None], dtype: str) -> None:
    run_ranks(3, lambda control: case(mixed(control), dtype))


@pytest.mark.parametrize("case", cases.REDUCING, ids=lambda case: case.__name__)
@pytest.mark.parametrize(("dtype", "op"), [("float32", "sum"), ("bfloat16", "sum"), ("bool", "min")])
def test_reducing(case: Callable[[Any, str, str], None], dtype: str, op: str) -> None:
    run_ranks(3, lambda control: case(mixed(control), dtype, op))


def test_groups_that_the_direct_transport_reaches_use_it() -> None:
    used: list[str] = []

    class Direct:
        def all_reduce(self, buffer: Any, op: str, group: Any) -> str:
            used.append(f"all_reduce {group}")
            return "direct"

        def send(self, buffer: Any, dest: int, tag: int) -> str:
            used.append(f"send {dest}")
            return "direct"

    xp = namespace()
    direct: Any = Direct()
    control = connect(3)[0]
    staged = StagedTransport(control, Copies(), direct, {0, 1}.issuperset)
    assert staged.all_reduce(xp.zeros(2), "sum", (0, 1)) == staged.send(xp.zeros(2), 1, 0) == "direct"
    assert staged.all_reduce(xp.zeros(2), "sum", (0, 2)) != "direct"
    assert used == ["all_reduce (0, 1)", "send 1"]


class Held(Copies):
    """Copies to the device that end when they are told to; each buffer keeps its first byte until then."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[np.ndarray[Any, Any]] = []
        self.ended = False

    def host_buffer(self, nbytes: int) -> np.ndarray[Any, Any]:
        self.made.append(super().host_buffer(nbytes))
        return self.made[-1]

    def write(self, host: np.ndarray[Any, Any], block: Any) -> Callable[[], bool]:
        super().write(host, block)
        return lambda: self.ended


def test_a_buffer_is_used_again_only_when_its_copy_has_ended() -> None:
    xp, copies = namespace(), Held()
    staged = StagedTransport(connect(1)[0], copies)

    def reduce() -> None:
        staged.all_reduce(xp.zeros(4), "sum", (0,)).wait()

    reduce()
    reduce()
    assert len(copies.made) == 2  # the first is still being copied to the device
    copies.ended = True
    for _ in range(3):
        reduce()
    assert len(copies.made) == 2


def test_a_buffer_that_is_sent_lives_until_it_was_received() -> None:
    """The host transport reads what it sends as late as it may, after the device has new numbers."""
    xp = namespace()

    def program(control: InProcessTransport) -> list[float]:
        if control.rank == 1:
            received = [np.zeros(3) for _ in range(4)]
            for tag, buffer in enumerate(received):
                control.recv(buffer, 0, tag).wait()
            return [float(buffer[0]) for buffer in received]
        copies: Any = Held()
        staged = StagedTransport(Delayed(control), copies)
        block, requests = xp.zeros(3), []
        for tag in range(4):
            block[...] = float(tag)
            requests.append(staged.send(block, 1, tag))
        block[...] = np.nan
        for request in requests:
            request.wait()
        staged.send(block[:0], 0, 9)
        assert len(copies.made) == 4
        return []

    assert run_ranks(2, program)[1] == [0.0, 1.0, 2.0, 3.0]


def test_a_device_that_never_ends_its_work_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Copies):
        def read(self, block: Any, host: np.ndarray[Any, Any]) -> Callable[[], bool]:
            return lambda: False

    monkeypatch.setenv("DISTGRAPH_TIMEOUT", "0.2")
    staged = StagedTransport(connect(2)[0], Stuck())
    with pytest.raises(RuntimeFault, match=r"rank 0: send waited 0.2 s for the device .*DISTGRAPH_TIMEOUT"):
        staged.send(namespace().zeros(2), 1, 0)
