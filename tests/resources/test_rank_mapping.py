from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array
from support.files.clusters import boxes, cluster_of, machine, single
from support.paths import DATA

from distgraph.errors import InfeasibleError, ResourceError
from distgraph.resources import Cluster, Requirement, load_cluster, map_ranks
from distgraph.resources.mapping_local_search import Problem, SearchState

CASES = json.loads((DATA / "mapper.json").read_text())


def crossing(volume: dict[tuple[int, int], float], cluster: Cluster, devices) -> float:
    machine_of = [cluster.devices[device].machine for device in devices]
    return sum(size for (a, b), size in volume.items() if machine_of[a] != machine_of[b])


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_instances_with_a_known_optimum(case):
    cluster = boxes(case["machine_sizes"])
    volume = {tuple(map(int, pair.split("->"))): float(size) for pair, size in case["volume"].items()}
    mapping = map_ranks(case["n"], volume, cluster)
    assert sorted(set(mapping.devices)) == sorted(mapping.devices)
    assert mapping.cost == crossing(volume, cluster, mapping.devices) == case["optimal_cross"]
    assert mapping.identity_cost == crossing(volume, cluster, range(case["n"])) == case["firstfit_cross"]
    assert mapping.cost <= case["talk_greedy_cross"]
    # The greedy alone, from rank 0, is that of the talk.
    assert mapping.greedy_cost == case["talk_greedy_cross"]


@st.composite
def instances(draw, most: int = 9):
    """Machines of uneven size, at most as many ranks as devices, sparse integer volumes."""
    sizes = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda found: 2 <= sum(found) <= most)
    )
    ranks = draw(st.integers(2, sum(sizes)))
    rank = st.integers(0, ranks - 1)
    volume = draw(st.dictionaries(st.tuples(rank, rank), st.integers(0, 100).map(float), max_size=20))
    return boxes(sizes), ranks, volume


@given(instances(), st.sampled_from(["bytes", "seconds"]))
def test_legal_and_never_worse_than_identity_or_greedy(instance, objective):
    cluster, ranks, volume = instance
    mapping = map_ranks(ranks, volume, cluster, objective=objective)
    assert len(mapping.devices) == ranks == len(set(mapping.devices))
    assert set(mapping.devices) <= set(range(len(cluster.devices)))
    assert mapping.cost <= mapping.identity_cost * (1 + 1e-12)
    if mapping.greedy_cost is not None:
        assert mapping.cost <= mapping.greedy_cost * (1 + 1e-12)
    if objective == "bytes":
        inside = {pair: size for pair, size in volume.items() if pair[0] != pair[1]}
        assert mapping.cost == crossing(inside, cluster, mapping.devices)
        assert mapping.identity_cost == crossing(inside, cluster, range(ranks))


@given(instances(most=6))
def test_small_instances_reach_the_optimum(instance):
    cluster, ranks, volume = instance
    volume = {pair: size for pair, size in volume.items() if pair[0] != pair[1]}
    optimum = min(
        crossing(volume, cluster, devices)
        for devices in itertools.permutations(range(len(cluster.devices)), ranks)
    )
    assert map_ranks(ranks, volume, cluster).cost == optimum


@given(instances())
def test_the_same_question_has_the_same_answer(instance):
    cluster, ranks, volume = instance
    turned = dict(reversed(volume.items()))
    assert map_ranks(ranks, volume, cluster).devices == map_ranks(ranks, turned, cluster).devices


@pytest.mark.parametrize(("machines", "size"), [(4, 8), (12, 5)])
def test_scattered_groups_are_gathered_again(machines, size):
    """Heavy cliques of a machine's size, light traffic between them, ranks shuffled."""
    ranks = machines * size
    order = np.random.default_rng(7).permutation(ranks)
    volume = {}
    for group in range(machines):
        members = order[group * size : (group + 1) * size].tolist()
        volume |= dict.fromkeys(itertools.permutations(members, 2), 100.0)
        volume[members[0], int(order[(group + 1) * size % ranks])] = 1.0
    mapping = map_ranks(ranks, volume, boxes([size] * machines))
    assert mapping.cost == machines
    assert mapping.identity_cost > 100 * machines


def test_seconds_prefers_the_wide_way_where_bytes_see_no_difference():
    """Inside one machine all placements cross nothing; on PCIe pairs the time still differs."""
    cluster = single(4, {"topology": "pcie_pairs", "host_bandwidth": "8 GB/s"})
    volume = {(0, 2): 8e9, (1, 3): 8e9}
    assert map_ranks(4, volume, cluster).cost == 0
    mapping = map_ranks(4, volume, cluster, objective="seconds")
    assert mapping.identity_cost == pytest.approx(2.0)
    assert mapping.cost == pytest.approx(2 * 8e9 / 100e9)
    assert {frozenset(mapping.devices[rank] // 2 for rank in pair) for pair in volume} == {
        frozenset({0}),
        frozenset({1}),
    }


def test_large_clusters_are_priced_by_machine():
    cluster = load_cluster("dgx_a100_pod")
    volume = {(rank, rank + 80): 1e6 for rank in range(80)}
    mapping = map_ranks(160, volume, cluster, objective="seconds")
    assert crossing(volume, cluster, mapping.devices) == 0
    assert mapping.cost == pytest.approx(80 * 1e6 / 230e9)


@given(st.data())
def test_the_saving_of_a_swap_is_what_the_cost_falls_by(data):
    """Both ways of computing it, before and after swaps that change the running state."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    devices = sum(sizes)
    ranks = data.draw(st.integers(2, devices))
    entries = data.draw(st.lists(st.integers(0, 9), min_size=ranks * ranks, max_size=ranks * ranks))
    raw = np.array(entries, dtype=float).reshape(ranks, ranks)
    np.fill_diagonal(raw, 0)
    place_of = np.repeat(np.arange(len(sizes)), sizes)
    apart = np.array([[abs(a - b) + 2.0 for b in range(len(sizes))] for a in range(len(sizes))])
    np.fill_diagonal(apart, 1.0)  # within a place a distance too, as with the seconds of a machine's inside
    problem = Problem(csr_array(raw + raw.T), np.ones((ranks, devices), dtype=bool), place_of, apart)
    state = SearchState(problem, np.arange(ranks))
    dense = np.zeros((devices, devices))
    dense[:ranks, :ranks] = raw + raw.T
    for _ in range(3):
        first, second = data.draw(st.permutations(range(devices)))[:2]
        before = problem.cost(state.result())
        single_saving, saving = state.gains(first)[second], state.all_gains(dense)[first, second]
        moves = state.places[first] != state.places[second]
        state.swap(first, second)
        expected = before - problem.cost(state.result()) if moves else -np.inf
        assert single_saving == saving == pytest.approx(expected)


# Requirements.


def test_ranks_go_to_devices_of_their_type():
    cluster = load_cluster("gpu2_xpu2")
    wanted = [Requirement(type="xpu") if rank % 2 else Requirement(type="gpu") for rank in range(32)]
    volume = {(rank, (rank + 2) % 32): 1.0 for rank in range(32)}  # two rings, one per type
    mapping = map_ranks(32, volume, cluster, wanted)
    assert mapping.identity_cost is None
    assert [cluster.devices[device].type for device in mapping.devices] == ["gpu", "xpu"] * 16
    assert mapping.cost == 4  # each ring over two machines is cut twice


def test_memory_and_flops_are_checked():
    cluster = load_cluster("mixed_a100_v100")  # 16 x 40 GiB and 312 TFLOP/s, then 8 x 16 GiB and 112 TFLOP/s
    big, fast, small = Requirement(memory=30 * 2**30), Requirement(flops=2e14, dtype="f16"), Requirement()
    wanted = [small] * 8 + [big] * 8 + [fast] * 8
    mapping = map_ranks(24, {(0, 1): 1.0}, cluster, wanted)
    assert all(device < 16 for device in mapping.devices[8:])
    assert all(device >= 16 for device in mapping.devices[:8])
    assert mapping.identity_cost is None


def test_traffic_does_not_buy_an_illegal_place():
    cluster = load_cluster("gpu2_xpu2")
    wanted = [Requirement(type="gpu"), Requirement(type="xpu")]
    mapping = map_ranks(2, {(0, 1): 1e12}, cluster, wanted)
    assert mapping.cost == 1e12
    assert [cluster.devices[device].type for device in mapping.devices] == ["gpu", "xpu"]


@given(st.data())
def test_requirements_hold_in_every_answer(data):
    cluster = load_cluster("mixed_a100_v100")
    choices = [
        Requirement(),
        Requirement(memory=20 * 2**30),
        Requirement(type="gpu", flops=1e14, dtype="f16"),
    ]
    wanted = data.draw(st.lists(st.sampled_from(choices), min_size=2, max_size=12))
    rank = st.integers(0, len(wanted) - 1)
    volume = data.draw(st.dictionaries(st.tuples(rank, rank), st.floats(0, 1e9), max_size=30))
    mapping = map_ranks(len(wanted), volume, cluster, wanted)
    for requirement, device in zip(wanted, mapping.devices, strict=True):
        assert cluster.devices[device].memory >= requirement.memory
        assert not requirement.flops or cluster.flops(device, "f16") >= requirement.flops


# Mistakes.


def test_more_ranks_than_devices():
    message = "6 ranks need 6 devices but cluster boxes has 4; use a smaller mesh or another resource file"
    with pytest.raises(ResourceError, match=message):
        map_ranks(6, {}, boxes([2, 2]))


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        (
            Requirement(type="xpu"),
            (
                r"rank 1 needs a xpu device but no device of cluster boxes is that: "
                r"device 0 \(b0/gpu0\) is of type gpu; .*another resource file"
            ),
        ),
        (
            Requirement(memory=20 * 2**30),
            r"rank 1 needs a device with 20 GiB memory but no device .* has 16 GiB memory",
        ),
        (
            Requirement(flops=1.1e13),
            r"needs a device with 11 TFLOP/s in f32 but no .* does 10 TFLOP/s in f32",
        ),
    ],
)
def test_a_rank_that_fits_nowhere(requirement, message):
    with pytest.raises(InfeasibleError, match=message):
        map_ranks(2, {}, boxes([2]), [Requirement(), requirement])


def test_ranks_that_compete_for_too_few_devices():
    wanted = [Requirement(memory=30 * 2**30)] * 9 + [Requirement(flops=2e14, dtype="f16")] * 8
    with pytest.raises(InfeasibleError) as caught:
        map_ranks(17, {}, load_cluster("mixed_a100_v100"), wanted)
    assert str(caught.value) == (
        "17 ranks (rank 0 first) need a device with 30 GiB memory or a device with 200 TFLOP/s in f16 but "
        "cluster mixed_a100_v100 has 16 of them; use fewer such ranks or another resource file"
    )


def test_a_dtype_without_a_number():
    with pytest.raises(ResourceError, match=r"machines\[0\]\.devices\.peak\.bf16: missing, G states f32"):
        map_ranks(2, {}, boxes([2]), Requirement(flops=1.0, dtype="bf16"))


@pytest.mark.parametrize(
    ("ranks", "volume", "fields", "message"),
    [
        (0, {}, {}, "ranks of map_ranks is 0 but must be an integer of at least 1"),
        (2, {(0, 2): 1.0}, {}, r"volume \(0, 2\): ranks go from 0 to 1"),
        (2, {(0, 1): -1.0}, {}, r"volume \(0, 1\): expected bytes, finite and not negative, got -1.0"),
        (2, {(0, 1): float("nan")}, {}, r"volume \(0, 1\): expected bytes, finite and not negative, got nan"),
        (2, {}, {"requirements": [Requirement()]}, "2 ranks but 1 requirements"),
        (
            2,
            {},
            {"objective": "beauty"},
            "objective of map_ranks is 'beauty' but must be",
        ),
    ],
)
def test_questions_that_make_no_sense(ranks, volume, fields, message):
    with pytest.raises(ResourceError, match=message):
        map_ranks(ranks, volume, boxes([2]), **fields)


def test_seconds_needs_bandwidths():
    entries = [machine(1, "a"), machine(1, "b")]
    del entries[0]["nics"]["bandwidth"]
    cluster = cluster_of({"name": "x", "machines": entries, "network": {"topology": "switch"}})
    assert map_ranks(2, {(0, 1): 1.0}, cluster).cost == 1.0
    with pytest.raises(
        ResourceError, match=r"machines\[0\]\.nics\.bandwidth: missing, needed to map ranks by seconds"
    ):
        map_ranks(2, {(0, 1): 1.0}, cluster, objective="seconds")


# The table.


def test_the_table_explains_each_rank():
    volume = {(0, 2): 3 * 2.0**20, (1, 3): 2.0**20, (3, 0): 2.0**10}
    mapping = map_ranks(4, volume, boxes([2, 2]), Requirement(type="gpu", memory=2**30))
    text = mapping.table()
    title, rows = text.splitlines()[0], [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert title.startswith("1 KiB across machines (identity 4.001 MiB, greedy 1 KiB; refined from ")
    assert len(rows) == 4
    assert all("a gpu device with 1 GiB memory" in row for row in rows)
    first = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert first[0] == "0"
    assert first[4:] == ["3 MiB", "1 KiB", "rank 2, 3 MiB, same machine"]
    assert text.isascii()
