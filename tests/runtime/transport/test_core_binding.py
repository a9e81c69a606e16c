"""Limits of control groups, read from folders such as Linux shows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from distgraph.runtime.transport import core_binding
from distgraph.runtime.transport.core_binding import CoreBinding, Waiting, cpu_quota, quota_period


def system(folder: Path, process: str, files: dict[str, str]) -> tuple[Path, Path]:
    mount = folder / "cgroup"
    for name, text in files.items():
        path = mount / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    groups = folder / "groups_of_process"
    groups.write_text(process)
    return groups, mount


@pytest.mark.parametrize(
    ("process", "files", "group", "cores"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, "", math.inf),
        ("0::/job\n", {"job/cpu.max": "150000 100000"}, "job", 1.5),
        ("0::/job/rank\n", {"job/cpu.max": "50000 100000", "job/rank/cpu.max": "max 100000"}, "job", 0.5),
        (
            "3:memory:/x\n2:cpu,cpuacct:/x\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "5000", "cpu,cpuacct/x/cpu.cfs_period_us": "10000"},
            "cpu,cpuacct/x",
            0.5,
        ),
        ("2:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "10000"}, "", math.inf),
        ("2:cpu:/gone\n", {}, "", math.inf),
    ],
)
def test_quota(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    process: str,
    files: dict[str, str],
    group: str,
    cores: float,
) -> None:
    groups, mount = system(tmp_path, process, files)
    monkeypatch.setattr(core_binding, "_PROCESS", groups)
    monkeypatch.setattr(core_binding, "_MOUNT", mount)
    assert cpu_quota() == (str(mount / group) if group else "", cores)


class Ranks:
    """Ranks of a machine of two cores, whose quotas are given; the answers to the two calls of allgather."""

    def __init__(self, quotas: list[tuple[str, float]]) -> None:
        self.answers = [[{0, 1}] * len(quotas), quotas]

    def Get_rank(self) -> int:
        return 0

    def allgather(self, own: object) -> list[object]:
        return self.answers.pop(0)


@pytest.mark.parametrize(
    ("quotas", "share"),
    [
        ([("", math.inf)], 1.0),
        ([("", math.inf)] * 4, 2.0),
        ([("a", 0.5)], 2.0),
        ([("a", 1.0)] * 2, 2.0),
        ([("a", 1.0), ("b", 1.0)], 1.0),
        ([("a", 1.0), ("", math.inf)], 1.0),
    ],
)
def test_ranks_a_core_count_what_groups_grant(quotas: list[tuple[str, float]], share: float) -> None:
    assert CoreBinding(Ranks(quotas)).share == share


def test_period_of_a_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu.cfs_period_us").write_text("10000\n")
    assert quota_period(str(tmp_path)) == 0.01
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert quota_period(str(tmp_path)) == 0.1
    assert quota_period(str(tmp_path / "none")) == 0.0


@pytest.mark.parametrize(
    ("quotas", "polling", "naps"),
    [
        ([("", math.inf)], 0.02, (1e-4, 1e-4)),
        ([("", math.inf)] * 4, 0.001, (1e-4, 1e-4)),
        ([("a", 0.5)], 0.0001, (1e-4, 2.5e-4)),
        ([("a", 1.0), ("b", 1.0)], 0.02, (1e-4, 1e-4)),
    ],
)
def test_waiting_ranks_leave_a_quota_to_others(
    quotas: list[tuple[str, float]], polling: float, naps: tuple[float, float]
) -> None:
    """A quota counts polling, so that ranks sleep earlier, and longer the longer they wait."""
    waiting = Waiting.of(CoreBinding(Ranks(quotas)))
    assert waiting.polling_seconds == polling
    assert (waiting.polls_per_nap < 16) == (len(set(naps)) > 1)
    assert (waiting.nap_seconds(0.001), waiting.nap_seconds(1.0)) == naps
