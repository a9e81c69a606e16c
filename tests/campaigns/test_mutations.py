"""The short form of tests/campaigns/mutations.py, and that it tells what it looks for."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.paths import CAMPAIGNS

from distgraph.errors import GraphError


@pytest.fixture(scope="module")
def campaign() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutations", CAMPAIGNS / "mutations.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_damaged_files_are_refused_by_name_or_say_what_is_in_them(campaign: ModuleType) -> None:
    found = campaign.run(128, 7)
    assert found["failures"] == []
    assert {"cluster", "paddle", "plan", "graph", "timeline", "measurements", "cache"} <= {*found["ends"]}


def test_the_campaign_finds_raw_errors_silence_and_errors_without_a_name(
    campaign: ModuleType, tmp_path: Path
) -> None:
    def sample(read: object) -> object:
        return campaign.Sample("x", "x.json", '{"a": 1}', read)

    def silent(path: Path) -> str:
        return json.loads(path.read_text()) and "the same"

    def raw(path: Path) -> int:
        return 1 // json.loads(path.read_text())["a"]

    def unnamed(path: Path) -> None:
        raise GraphError("something is wrong")

    data = b'{"a": 0}'
    assert campaign.trial(sample(silent), data, tmp_path)[0] == "silent"
    assert campaign.trial(sample(raw), data, tmp_path)[0] == "raw"
    assert campaign.trial(sample(unnamed), data, tmp_path)[0] == "unnamed"
    assert campaign.trial(sample(lambda path: path.read_text()), data, tmp_path)[0] == "read"


def test_a_default_taken_out_together_with_a_changed_note_is_no_silence(
    campaign: ModuleType, tmp_path: Path
) -> None:
    """One network card is the default number; notes are for people."""
    sample = next(each for each in campaign.samples() if each.file == "mixed_a100_v100.yaml")
    changed = sample.text.replace("nics:\n      count: 1\n", "nics:\n", 1).replace("2 x DGX", "3 x DGX", 1)
    assert changed.count("count: 1\n") == sample.text.count("count: 1\n") - 1
    assert campaign.trial(sample, changed.encode(), tmp_path)[0] == "read"
    assert campaign.trial(sample, changed.replace("count: 2", "count: 3", 1).encode(), tmp_path)[0] == "read"
