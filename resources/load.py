"""Resource files to clusters. The file format is described in docs/resources.md."""

from __future__ import annotations

import dataclasses
import itertools
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from distgraph.errors import ResourceError
from distgraph.resources.build import build_cluster
from distgraph.resources.cluster import Cluster
from distgraph.resources.paddle import load_paddle
from distgraph.resources.schema import check


def shipped_clusters() -> tuple[str, ...]:
    """Names of the resource files that come with distgraph."""
    folder = files("distgraph.resources") / "files"
    return tuple(
        sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    )


def load_cluster(name_or_path: str | os.PathLike[str]) -> Cluster:
    """A cluster from a shipped name ("local"), a YAML resource file, or Paddle's cluster JSON (suffix .json).

    Raises:
        ResourceError: no such file, not YAML, or not a resource file; names the path in the document.
    Example:
        >>> load_cluster("dgx_a100_pod").devices[8].node
        'dgx1/gpu0'
    """
    text = os.fspath(name_or_path)
    if text in shipped_clusters():
        return _load_yaml(
            Path(str(files("distgraph.resources") / "files" / f"{text}.yaml")), f"resources/files/{text}.yaml"
        )
    path = Path(text)
    if not path.is_file():
        raise ResourceError(
            f"{text}: neither a file nor a shipped cluster; shipped are {', '.join(shipped_clusters())}"
        )
    if path.suffix == ".json":
        return load_paddle(path)
    return _load_yaml(path, text)


def local_cluster(ranks: int) -> Cluster:
    """This machine with one CPU device per rank.

    The numbers come from the shipped file `local`, which describes one core per device. More ranks than cores
    share the cores: each device then has that fraction of the FLOP/s and of the memory bandwidth. Memory is
    always shared evenly.

    Raises:
        ResourceError: ranks is below 1.
    """
    if ranks < 1:
        raise ResourceError(f"a local cluster needs at least 1 rank, got {ranks}; ask for one or more")
    local = load_cluster("local")
    first, cores = local.devices[0], os.cpu_count() or 1
    share = min(1.0, cores / ranks)
    memory = sum(device.memory for device in local.devices) / ranks
    bandwidth = None if first.memory_bandwidth is None else first.memory_bandwidth * share
    link, machine = local.links[0], local.machines[0]
    host = local.switches[0].node
    devices = tuple(
        dataclasses.replace(
            first, index=i, local=i, node=f"{machine.name}/cpu{i}", memory=memory, memory_bandwidth=bandwidth,
            peak={dtype: rate * share for dtype, rate in first.peak.items()},
            measured={dtype: rate * share for dtype, rate in first.measured.items()},
        )
        for i in range(ranks)
    )  # fmt: skip
    links = tuple(dataclasses.replace(link, source=device.node, target=host) for device in devices)
    whole = dataclasses.replace(
        machine, devices=tuple(range(ranks)), nic_of=(None,) * ranks, first_link=0, link_count=ranks
    )
    return dataclasses.replace(local, devices=devices, links=links, machines=(whole,))


def read_document(name_or_path: str) -> tuple[dict[str, Any], str]:
    """A shipped or other YAML resource file as it is written, and the comment at its head.

    Raises:
        ResourceError: no such file, no resource file, or Paddle's JSON, which has another form.
    """
    if name_or_path.endswith(".json"):
        raise ResourceError(f"{name_or_path}: only a YAML resource file can be written anew; make it one")
    load_cluster(name_or_path)
    shipped = name_or_path in shipped_clusters()
    folder = Path(str(files("distgraph.resources") / "files"))
    path = folder / f"{name_or_path}.yaml" if shipped else Path(name_or_path)
    text = path.read_text(encoding="utf-8")
    head = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    return yaml.safe_load(text), head


def _load_yaml(path: Path, file: str) -> Cluster:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ResourceError(f"{file}{where}: not YAML: {error.problem}; fix the line") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ResourceError(f"{file}: not YAML: {error}; write it as UTF-8 YAML") from None
    return build_cluster(check(document, file), file)
