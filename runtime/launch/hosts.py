"""The hosts of a job: from `--hosts a:4,b:4`, from a hostfile, or from what a batch system has set.

A host list is a sequence of slots, in which a host may be named more than once: `a,b,a,b` are the slots a, b,
a and b. Batch systems name their hosts in these variables:

    Slurm                    SLURM_JOB_NODELIST with SLURM_TASKS_PER_NODE (or SLURM_JOB_CPUS_PER_NODE)
    PBS, Torque              PBS_NODEFILE, one line a slot
    Open MPI, Kubernetes     OMPI_MCA_orte_default_hostfile, HYDRA_HOST_FILE: the MPI operator sets them
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from distgraph.errors import RuntimeFault

HOSTFILE_VARIABLES: Final = ("PBS_NODEFILE", "OMPI_MCA_orte_default_hostfile", "HYDRA_HOST_FILE")
_MOST_SLOTS: Final = 1 << 16
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.%]+\]")  # the latter an IPv6 address
_SLURM_PART: Final = re.compile(r"([^,\[\]]*)(?:\[([0-9,-]+)\])?([^,\[\]]*)")
_SLURM_COUNT: Final = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


@dataclass(frozen=True, slots=True)
class Host:
    """A host and the number of ranks that may run there."""

    name: str
    slots: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Hosts from a list such as "a:4,b:4"; one slot where no number is given.

    Raises:
        RuntimeFault: the list is malformed or empty.

    Example:
        >>> parse_hosts("a:2,b")
        (Host(name='a', slots=2), Host(name='b', slots=1))
    """
    parts = [part.strip() for part in text.split(",")]
    return _limited([_host(*_name_and_slots(part), "--hosts", part) for part in parts], "--hosts")


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Hosts from a file with a host a line: `a`, `a:4` (MPICH) or `a slots=4` (Open MPI); `#` comments.

    Raises:
        RuntimeFault: the file cannot be read, is malformed or names no host; the message has file and line.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RuntimeFault(f"hostfile {path} cannot be read: {error}; give the path of a text file") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, count = _name_and_slots(words[0])
        for word in words[1:]:
            key, _, value = word.partition("=")
            count = value if key == "slots" else count
        hosts.append(_host(name, count, f"{path}:{number}", line.strip()))
    return _limited(hosts, str(path))


def hosts_from_environment(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Hosts that a batch system has given to this job; empty where there is none.

    Raises:
        RuntimeFault: what it has set is malformed.
    """
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    if nodes:
        tasks = environ.get("SLURM_TASKS_PER_NODE") or environ.get("SLURM_JOB_CPUS_PER_NODE") or "1"
        return _slurm_hosts(nodes, tasks)
    path = next((environ[name] for name in HOSTFILE_VARIABLES if environ.get(name)), "")
    return read_hostfile(path) if path else ()


def merged(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Every host once, with all of its slots, in the order in which they are first named."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())


def short_name(name: str) -> str:
    """The name of a host without its domain; an address as it is."""
    return name if re.fullmatch(r"[0-9.]+|\[.*\]", name) else name.partition(".")[0]


def _name_and_slots(word: str) -> tuple[str, str]:
    """The parts of "a:4"; one slot for "a", and for an IPv6 address in brackets."""
    name, separator, count = word.rpartition(":")
    return (name, count) if separator and not word.endswith("]") else (word, "1")


def _host(name: str, count: str, where: str, text: str) -> Host:
    if not _NAME.fullmatch(name) or not count.isdecimal() or not 0 < int(count) <= _MOST_SLOTS:
        raise RuntimeFault(f"{where}: expected a host and its slots such as a:4, got {text!r}")
    return Host(name, int(count))


def _limited(hosts: list[Host], where: str) -> tuple[Host, ...]:
    if not hosts or sum(host.slots for host in hosts) > _MOST_SLOTS:
        raise RuntimeFault(f"{where}: expected 1 to {_MOST_SLOTS} slots, got {len(hosts)} hosts")
    return tuple(hosts)


def _slurm_hosts(nodes: str, tasks: str) -> tuple[Host, ...]:
    """Hosts of Slurm, such as "n[01-03,7],login" with slots such as "4(x3),2"."""
    where, names = "SLURM_JOB_NODELIST", []
    for part in re.split(r",(?![^\[]*\])", nodes):
        match = _SLURM_PART.fullmatch(part.strip())
        if match is None:
            raise RuntimeFault(f"{where}: expected a list such as n[01-04,7], got {nodes!r}")
        names += [match[1] + number + match[3] for number in _numbers(match[2], where, nodes)]
    slots: list[int] = []
    for part in tasks.split(","):
        match = _SLURM_COUNT.fullmatch(part.strip())
        if match is None:
            raise RuntimeFault(f"SLURM_TASKS_PER_NODE: expected numbers such as 4(x2),3, got {tasks!r}")
        slots += itertools.repeat(int(match[1]), min(int(match[2] or 1), _MOST_SLOTS))
    if len(slots) == 1:
        slots *= len(names)
    if len(slots) != len(names):
        raise RuntimeFault(
            f"SLURM_TASKS_PER_NODE: {tasks!r} is for {len(slots)} nodes but {where} has {len(names)}; they "
            "belong to different jobs"
        )
    pairs = zip(names, slots, strict=True)
    return _limited([_host(name, str(count), where, name) for name, count in pairs], where)


def _numbers(text: str | None, where: str, nodes: str) -> list[str]:
    """The numbers of "01-03,7", with their leading zeros; one empty text where there are none."""
    if text is None:
        return [""]
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not first.isdecimal() or not last.isdecimal() or not 0 <= int(last) - int(first) < _MOST_SLOTS:
            raise RuntimeFault(f"{where}: expected a list such as n[01-04,7], got {nodes!r}")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
