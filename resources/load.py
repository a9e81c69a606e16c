"""Resource files to clusters. The file format is described in docs/planning/resources.md."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from distgraph.errors import ResourceError
from distgraph.errors.arguments import Count, check_argument, check_takes, checked_arguments
from distgraph.resources.cluster import Cluster
from distgraph.resources.cluster_builder import build_cluster
from distgraph.resources.paddle_cluster_json import load_paddle
from distgraph.serialization.documents import read_text, shown_path
from distgraph.serialization.yaml_reader import MOST_BYTES, parse_yaml


@cache
def shipped_clusters() -> tuple[str, ...]:
    """Names of the resource files that come with distgraph."""
    folder = files("distgraph.resources") / "files"
    return tuple(
        sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    )


_REGISTERED: dict[str, Callable[[], Cluster]] = {}


@checked_arguments(ResourceError)
def register_cluster(name: str, make: Callable[[], Cluster]) -> None:
    """Give a model of a cluster a name, under which `load_cluster` and the engine find it.

    Args:
        name: other than those of the shipped clusters.
        make: makes the cluster, such as by `parse_cluster` from a text that it writes.

    Raises:
        ResourceError: the name is taken, or empty.
    """
    if not name:
        raise ResourceError("register_cluster: name is empty; give the cluster a name")
    if name in _REGISTERED or name in shipped_clusters():
        raise ResourceError(f"cluster {name}: there is one of this name; choose another")
    check_takes("register_cluster", "make", make, 0, ResourceError)
    _REGISTERED[name] = make


@checked_arguments(ResourceError)
def load_cluster(name_or_path: str | os.PathLike[str]) -> Cluster:
    """A cluster from a name, shipped ("local") or registered, a YAML resource file, or Paddle's cluster JSON.

    Raises:
        ResourceError: no such file, not YAML, or not a resource file; names the path in the document.
    Example:
        >>> load_cluster("dgx_a100_pod").devices[8].node
        'dgx1/gpu0'
    """
    text = os.fspath(name_or_path)
    if text in _REGISTERED:
        made = _REGISTERED[text]()
        check_argument(f"cluster {text}", "what make returns", made, Cluster, ResourceError)
        return made
    if text in shipped_clusters():
        return _load_yaml(
            Path(str(files("distgraph.resources") / "files" / f"{text}.yaml")), f"resources/files/{text}.yaml"
        )
    path = Path(text)
    if not _is_there(path):
        raise ResourceError(
            f"{shown_path(text)}: neither a file nor a shipped cluster; shipped are "
            f"{', '.join((*shipped_clusters(), *_REGISTERED))}"
        )
    if path.suffix == ".json":
        return load_paddle(path)
    return _load_yaml(path, text)


@checked_arguments(ResourceError)
def local_cluster(ranks: Count) -> Cluster:
    """This machine with one CPU device per rank.

    The numbers come from the shipped file `local`, which describes one core per device. More ranks than cores
    share the cores: each device then has that fraction of the FLOP/s and of the memory bandwidth. Memory is
    always shared evenly.

    Raises:
        ResourceError: ranks is below 1.
    """
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
    text = read_text(path, ResourceError, MOST_BYTES)
    head = "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    return parse_yaml(text, name_or_path), head


def parse_cluster(text: str, file: str) -> Cluster:
    """A cluster from the text of a YAML resource file.

    Args:
        text: of the file.
        file: its name in messages.

    Raises:
        ResourceError: as `load_cluster`.
    """
    from distgraph.resources.schema import check  # noqa: PLC0415 (loads pydantic)

    return build_cluster(check(parse_yaml(text, file), file), file)


def _is_there(path: Path) -> bool:
    try:
        return path.exists() and not path.is_dir()
    except (OSError, ValueError):  # ValueError: half of a surrogate pair
        return False


def _load_yaml(path: Path, file: str) -> Cluster:
    return parse_cluster(read_text(path, ResourceError, MOST_BYTES), file)
