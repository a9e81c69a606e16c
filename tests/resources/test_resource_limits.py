"""Resource files that are built to exhaust or to mislead: each is a house error with file and place, soon."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from distgraph.errors import ResourceError
from distgraph.resources import load_cluster, load_paddle
from distgraph.resources.load import parse_cluster
from distgraph.serialization.yaml_reader import parse_yaml

BASE: dict[str, Any] = {
    "name": "x",
    "machines": [
        {
            "count": 2,
            "name": "m",
            "devices": {"count": 2, "type": "gpu", "model": "G", "memory": "16 GiB"},
            "inside": {"topology": "full", "bandwidth": "100 GB/s", "latency": "1 us"},
            "nics": {"bandwidth": "10 GB/s", "latency": "5 us", "attach": {"bandwidth": "10 GB/s"}},
        }
    ],
    "network": {"topology": "switch"},
}


def aliases(levels: int, form: str) -> str:
    """Each level stands for nine of the one before."""
    names = "abcdefghijklmn"[: levels + 1]
    lines = [f"a: &a {{k{0}: 1, k1: 2}}"]
    for before, name in itertools.pairwise(names):
        lines.append(f"{name}: &{name} " + form.format(", ".join([f"*{before}"] * 9)))
    return "\n".join(lines)


def merges(count: int) -> str:
    """Each of `count` mappings has the entries of the one before and one more."""
    return "\n".join(
        ["a0: &a0 {k0: 0}", *(f"a{i}: &a{i} {{<<: *a{i - 1}, k{i}: 0}}" for i in range(1, count))]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (aliases(9, "[{}]"), r"x.yaml: has more than 200000 entries"),
        (merges(1000), r"x.yaml:\d+:\d+: not YAML: merge keys copy more than 200000 entries"),
        ("&a [*a]", r"x.yaml: objects and lists are nested more than 64 deep"),
        ("a: " + "[" * 10_000, r"x.yaml:1:67: not YAML: lists and mappings are nested more than 64 deep"),
        ("- " * 10_000, r"x.yaml:1:129: not YAML: lists and mappings are nested more than 64 deep"),
        ("a: 1\nb: 2\na: 3", r"x.yaml:3:1: not YAML: key 'a' is given twice"),
        ("1: 2", r"x.yaml:1:1: not YAML: a key is a text; put it into quotes"),
        ("a: !!python/object/apply:os.system [x]", r"x.yaml:1:4: not YAML: tag .*os.system' means nothing"),
        ("a: !!binary eA==", r"x.yaml:1:4: not YAML: tag 'tag:yaml.org,2002:binary' means nothing"),
        ("a: !!int x", r"x.yaml:1:4: not YAML: 'x' is no int"),
        ("a: " + "9" * 5000, r"x.yaml:1:4: not YAML: '9{60}' is no int"),
        ("a: 0x" + "f" * 3000, r"x.yaml:1:4: not YAML: a number of more than 40 digits"),
        ("a: [1, .nan]", r"x.yaml: a\[1\]: expected a number within 1e\+40, got NaN"),
        ("a: -.inf", r"x.yaml: a: expected a number within 1e\+40, got -Infinity"),
        ("a: \x07", r"x.yaml: not YAML: character '\\x07' at position 3"),
        ('a: "\\0"', r'x.yaml: a: expected a text without NUL .*, got "\\u0000"'),
        ("a: b\n---\na: c", r"x.yaml:2:1: not YAML: but found another document"),
    ],
)
def test_yaml_is_read_within_limits(text: str, message: str) -> None:
    with pytest.raises(ResourceError, match=message):
        parse_yaml(text, "x.yaml")


def test_anchors_merge_keys_and_words_like_dates_are_read() -> None:
    text = "a: &a {b: 1, c: 2}\nd: {<<: *a, c: 3}\ne: [*a, *a]\nf: 2001-99-99\ng: {<<: [*a, {h: 4}]}"
    assert parse_yaml(text, "x.yaml") == {
        "a": {"b": 1, "c": 2},
        "d": {"b": 1, "c": 3},
        "e": [{"b": 1, "c": 2}] * 2,
        "f": "2001-99-99",
        "g": {"b": 1, "c": 2, "h": 4},
    }


def changed(path: str, value: Any) -> str:
    document = copy.deepcopy(BASE)
    *way, last = path.split(".")
    here: Any = document
    for step in way:
        here = here[int(step)] if step.isdecimal() else here.setdefault(step, {})
    here[last] = value
    return yaml.safe_dump(document)


DEVICE = "machines.0.devices"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("machines.0.count", 10**18, r"machines\[0\].count: expected a number up to 65536, got 10{18}"),
        (
            f"{DEVICE}.count",
            65_536,
            r"machines\[0\]: expected at most 65536 devices in all machines together",
        ),
        (f"{DEVICE}.memory", "1e200 GB", r"devices.memory: expected a size .*, from 1e-24 to 1e\+24 byte"),
        (f"{DEVICE}.memory", "9" * 10**5 + " B", r"devices.memory: expected a size such as"),
        (f"{DEVICE}.memory", "1e999999999 B", r"devices.memory: expected a size such as"),
        (f"{DEVICE}.compute.ops", {"gemm": {}}, r"compute.ops.gemm: expected a kind of op such as matmul"),
        (
            f"{DEVICE}.compute.ops",
            {"gelu": {"f31": {"launch": "1 us"}}},
            r"compute.ops.gelu.f31: expected a dtype, one of f64, f32",
        ),
        (
            f"{DEVICE}.compute.ops",
            {"gelu": {"f32": {"bytes": ["1 B", "2 B"], "times": ["1 us", "0 s"]}}},
            r"ops.gelu.f32: expected a time above zero for the largest amount",
        ),
        (
            f"{DEVICE}.compute.ops",
            {"conv": {"f32": {"rates": ["0 s"] * 3}}},
            r"ops.conv.f32: expected rates of which one is above zero",
        ),
        (f"{DEVICE}.compute.memory_efficiency", 1e-300, r"efficiency: expected a number from 1e-06 up"),
        (f"{DEVICE}.compute.error", {"launch": -1}, r"compute.error.launch: expected a number from 0 up"),
        ("network.levels", [{"children": 1}] * 17, r"network.levels: expected at most 16 entries"),
        ("network.shape", [1] * 9, r"network.shape: expected at most 8 entries"),
        ("machines.0.inside.shape", [10**18] * 3, r"inside.shape\[0\]: expected a number up to 65536"),
        (
            "machines.0.inside",
            {"topology": "links", "links": [[0, 1, 10**18]]},
            r"inside: expected links as \[device, device\] or \[device, device, lanes\], of 1 to 1000",
        ),
        (
            "measured",
            [
                {
                    "collective": "send",
                    "machines": 2,
                    "devices_per_machine": 1,
                    "sizes": ["1 B"],
                    "times": ["0 s"],
                }
            ],
            r"measured\[0\]: expected a time above zero for the largest size",
        ),
    ],
)
def test_numbers_of_a_cluster_have_limits(path: str, value: Any, message: str) -> None:
    with pytest.raises(ResourceError, match=f"^x.yaml: .*{message}"):
        parse_cluster(changed(path, value), "x.yaml")


def test_many_machines_are_built_in_linear_time() -> None:
    """Each name was compared with all others."""
    cluster = parse_cluster(changed("machines.0.count", 1 << 12), "x.yaml")
    assert cluster.machines[-1].name == "m4095"


PADDLE: dict[str, Any] = {
    "machines": [
        {
            "hostname": "a",
            "devices": [{"global_id": 0, "type": "GPU", "memory": "32"}, {"global_id": 1, "type": "GPU"}],
            "links": [{"source_global_id": 0, "target_global_id": 1, "bandwidth": 10}],
        }
    ]
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, r"x.json: objects and lists are nested more than 64 deep"),
        (
            '{"machines": [], "machines": []}',
            r'x.json: expected each key once, but "machines"',
        ),
        ("[]", r"x.json: expected a mapping of fields, got \[\]"),
        (("GPU", "ABACUS"), r"x.json: machines\[0\].devices\[0\].type: expected one of 'GPU', 'XPU'"),
        (
            ('"32"', '"inf"'),
            r"devices\[0\].memory: expected a number, not negative, 0 or from .*, got \"inf\"",
        ),
        (('"32"', "1e300"), r"devices\[0\].memory: expected a number"),
        (('"32"', "-1"), r"devices\[0\].memory: expected a number, not negative"),
        (('"32"', "true"), r"devices\[0\].memory: expected a number, got true"),
        (
            ('"global_id": 1', '"global_id": true'),
            r"devices\[1\].global_id: expected a whole number from 0 up",
        ),
        (
            ('"global_id": 1', '"global_id": "1"'),
            r"devices\[1\].global_id: expected a whole number from 0 up",
        ),
        (('"global_id": 1', f'"global_id": {10**30}'), r"devices\[1\].global_id: expected a whole number"),
        (('"bandwidth": 10', '"bandwidth": NaN'), r"links\[0\].bandwidth: expected a number within 1e\+40"),
    ],
)
def test_paddle_files_are_read_within_limits(
    tmp_path: Path, text: str | tuple[str, str], message: str
) -> None:
    path = tmp_path / "x.json"
    path.write_text(text if isinstance(text, str) else json.dumps(PADDLE).replace(*text, 1))
    with pytest.raises(ResourceError, match=message):
        load_paddle(path)


def test_many_devices_of_paddle_are_read_in_linear_time(tmp_path: Path) -> None:
    """Each was looked for in lists of all."""
    document = copy.deepcopy(PADDLE)
    document["machines"][0]["devices"] = [{"global_id": i, "type": "GPU"} for i in range(4_000)]
    (tmp_path / "x.json").write_text(json.dumps(document))
    assert load_paddle(tmp_path / "x.json").devices[-1].origin == "machines[0].devices[3999]"


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "x" * 5000, ""])
def test_odd_paths_are_told(path: str) -> None:
    with pytest.raises(ResourceError, match="neither a file nor a shipped cluster"):
        load_cluster(path)
