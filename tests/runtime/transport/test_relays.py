"""Who passes on the messages of a group that is spread over machines."""

from __future__ import annotations

import itertools

from distgraph.runtime.transport.mpi_collectives import Relays


def crossing(group: tuple[int, ...], machine_of: list[int]) -> int:
    """Parts that leave the machine of rank 0 in one all_gather of equal parts."""
    made = {rank: Relays.of(group, rank, machine_of) for rank in group}
    relays = [each for each in made.values() if each is not None]
    assert len(relays) == len(group)
    here = next(members for members in relays[0].machines if 0 in members)
    return sum(1 for rank in here for peer in made[rank].peers if peer not in here)  # type: ignore[union-attr]


def test_a_part_crosses_the_network_once() -> None:
    assert crossing((0, 1, 2, 3), [0, 0, 1, 1]) == 2
    assert crossing((0, 1, 2, 3, 4), [0, 0, 0, 1, 1]) == 3
    assert crossing((0, 1, 2, 3, 4, 5), [0, 1, 2, 0, 1, 2]) == 4


def test_both_ends_agree_on_who_passes_a_part_on() -> None:
    for machine_of in itertools.product(range(3), repeat=5):
        group = tuple(range(5))
        made = {rank: Relays.of(group, rank, machine_of) for rank in group}
        if None in made.values():
            assert set(made.values()) == {None}
            assert len(set(machine_of)) in (1, 5)
            continue
        for rank, relays in made.items():
            assert relays is not None
            for peer in relays.peers:
                of_peer = made[peer]
                assert of_peer is not None
                assert peer == rank or rank in of_peer.served[peer]
            handled = sorted(other for ranks in relays.served.values() for other in ranks)
            assert handled == [other for other in group if other not in relays.here]
