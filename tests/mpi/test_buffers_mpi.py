"""Buffers are used again only when what is sent from them has left, over MPI (`mpiexec -n 4 python -m pytest
-m mpi tests/mpi`): with messages as late as they may be, and with checksums."""

from __future__ import annotations

import pytest
from support.devices.delayed import Delayed
from support.pipelines.forwarding import Case, cases, feeds, params, read_in_backward
from support.programs.partitioned import assert_same, joined, run_rank, run_serial

from distgraph.ir.graph import Graph
from distgraph.passes.complete import complete
from distgraph.runtime.launch.mpi_rank import current_transport
from distgraph.runtime.program.build import build
from distgraph.runtime.transport.mpi import MpiTransport

pytestmark = pytest.mark.mpi
BOUND = 1e-12


@pytest.fixture
def transport() -> MpiTransport:
    found = current_transport()
    assert found is not None
    found.barrier()
    return found


def check(transport: MpiTransport, graph: Graph, completed: Graph, micro: int, policy: str) -> None:
    """A step on all ranks; rank 0 compares it with the serial one."""
    built = build(completed, micro_batches=micro, policy=policy)
    mine = transport.rank in built.ranks
    held = transport.gather_objects(
        run_rank(built, Delayed(transport), feeds(micro), params()) if mine else None
    )
    if held is not None:
        expected, updates = run_serial(graph, feeds(micro), params())
        found, new = joined(built, held)
        assert_same(found, expected, BOUND)
        assert_same({k: [v] for k, v in new.items()}, {k: [v] for k, v in updates.items()}, BOUND)
    transport.barrier()


@pytest.mark.parametrize("checked", ["0", "1"])
@pytest.mark.parametrize("case", [case for case in cases() if case.micro > 2], ids=str)
def test_what_a_stage_passes_on_is_what_it_received(
    case: Case, checked: str, transport: MpiTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.ranks > transport.size:
        pytest.skip(f"needs {case.ranks} ranks")
    monkeypatch.setenv("DISTGRAPH_CHECK", checked)
    check(transport, case.graph(), case.completed(), case.micro, case.policy)


@pytest.mark.parametrize("policy", ["1f1b", "gpipe"])
@pytest.mark.parametrize("sender", [0, None])
def test_no_stage_waits_for_a_receive_that_is_posted_in_the_backward_part(
    sender: int | None, policy: str, transport: MpiTransport
) -> None:
    stages = min(transport.size, 4)
    graph, mesh = read_in_backward(stages, sender, 1)
    check(transport, graph, complete(graph, mesh), 6, policy)
