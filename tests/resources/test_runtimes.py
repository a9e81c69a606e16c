from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from support.paths import ROOT

from distgraph.errors import ResourceError
from distgraph.resources.runtimes.load_runtime import (
    default_runtime,
    load_runtime,
    parse_runtime,
    shipped_runtimes,
)
from distgraph.resources.runtimes.runtime_model import RuntimeModel

FILE = """
name: mine
about: a runtime
memory: {context: 2 GiB}
sources:
  memory.context: {kind: guess, about: "what it takes here"}
"""


def test_every_shipped_runtime_is_read():
    names = {"distgraph_cpu", "distgraph_gpu", "torch", "jax", "megatron", "deepspeed", "xla"}
    assert names == set(shipped_runtimes())
    for name in shipped_runtimes():
        model = load_runtime(name)
        assert model.name == name
        assert model.sources


def test_a_file_of_the_user_is_read(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(FILE)
    model = load_runtime(path)
    assert model.memory.context == 2 * 2**30
    assert model.memory.available(16 * 2**30) == 14 * 2**30
    assert model.sources["memory.context"].kind == "guess"


def test_the_default_is_distgraph_on_the_type_of_device():
    assert default_runtime("cpu").memory.kernels
    for kind in ("gpu", "tpu", "xpu"):
        model = default_runtime(kind)
        assert not model.memory.kernels
        assert model.memory.available(1e9) == 1e9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FILE.replace("2 GiB", "2"), r"mine.yaml: memory.context: expected a size"),
        (FILE.replace("context: 2 GiB", "context: 2 GiB, usable: 0.9"), "an entry memory.usable"),
        (FILE.replace("memory.context:", "memory.usable:"), "an entry memory.context"),
        (FILE + '  host.op: {kind: guess, about: "no value"}', "the path of a field that is given"),
        (FILE.replace("guess", "fitted"), "held_out with a fitted value"),
        (FILE.replace("guess", "guess, held_out: x"), "held_out with a fitted value"),
        (FILE.replace("guess", "rumour"), "sources.*kind: expected"),
        (FILE.replace("context", "contexts"), "contexts"),
        ("name: mine", "about"),
        ("[]", "mine.yaml"),
        ("name: [", "not YAML"),
    ],
)
def test_mistakes_are_named(text: str, words: str):
    with pytest.raises(ResourceError, match=words):
        parse_runtime(text, "mine.yaml")


def test_an_unknown_runtime_is_refused():
    with pytest.raises(ResourceError, match="nowhere: neither a file nor a runtime; shipped are deepspeed"):
        load_runtime("nowhere")


def test_the_page_describes_every_runtime_and_every_field():
    page = (ROOT / "docs" / "planning" / "runtimes.md").read_text()
    names = {*shipped_runtimes(), "sources"}
    for group in fields(RuntimeModel):
        if is_dataclass(group.default):
            names |= {f"{group.name}.{each.name}" for each in fields(group.default)}
    assert {name for name in names if f"`{name}`" not in page} == set()
