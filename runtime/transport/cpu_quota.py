"""Limit of processor time that control groups of Linux set for this process, as containers do."""

from __future__ import annotations

import math
from pathlib import Path

_PROCESS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cpu_quota(process: Path = _PROCESS, mount: Path = _MOUNT) -> tuple[str, float]:
    """The control group with the tightest limit, and the limit in cores (seconds of CPU per second).

    Both versions of control groups are read: `cpu.max` of version 2, `cpu.cfs_quota_us` and
    `cpu.cfs_period_us` of version 1, in the group of the process and in all groups around it.

    Args:
        process: file that names the groups of the process, in lines `number:controllers:path`.
        mount: folder in which the control groups are mounted.

    Returns: path of the group's folder and cores; `("", inf)` without a limit.
    """
    tightest = "", math.inf
    for folder, top in _folders(process, mount):
        for group in (folder, *folder.parents):
            cores = _cores(group)
            if cores < tightest[1]:
                tightest = str(group), cores
            if group == top:
                break
    return tightest


def _folders(process: Path, mount: Path) -> list[tuple[Path, Path]]:
    """Folders of the process's groups that may limit processor time, each with the root of its hierarchy."""
    folders = []
    for line in _read(process).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folders.append((mount / path.lstrip("/"), mount))
        elif "cpu" in controllers.split(","):
            root = next((mount / name for name in (controllers, "cpu") if (mount / name).is_dir()), mount)
            folders.append((root / path.lstrip("/"), root))
    return folders


def _cores(group: Path) -> float:
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = (_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if quota in ("", "max") or not period or float(quota) <= 0:
        return math.inf
    return float(quota) / float(period)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no control groups, or another version of them
        return ""
