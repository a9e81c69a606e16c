"""The comparison of the search with a simple rival: settings are complete, and a small one runs."""

from __future__ import annotations

import math

from benchmarks import search_quality

SMALL = {
    "name": "small",
    "model": {"kind": "GPT", "hidden": 64, "layers": 2, "heads": 4, "sequence": 32, "vocabulary": 128},
    "batch": 4,
    "machines": [["V100", 2, 2, "nvlink", "10 Gbit/s", 1]],
    "best_known": 1.0,
    "held_out": False,
}


def test_every_setting_has_a_model_and_a_cluster() -> None:
    descriptions = search_quality.settings()
    problems = [search_quality.setting(description) for description in descriptions.values()]
    assert [problem.name for problem in problems] == list(descriptions)
    assert sum(problem.held_out for problem in problems) == 14
    assert len(problems) == 25
    assert all(problem.best_known or problem.held_out for problem in problems)
    assert {name: len(search_quality.setting(descriptions[name]).cluster.devices) for name in (
        "moe_8v_p3", "mixed_4a4v", "gpt39b12_64", "t5_12a_slow", "llama8k_512a"
    )} == {
        "moe_8v_p3": 8, "mixed_4a4v": 8, "gpt39b12_64": 64, "t5_12a_slow": 12, "llama8k_512a": 512
    }  # fmt: skip
    tokens = ((512,), "i32")
    assert {name: dict(search_quality.setting(descriptions[name]).request.fields) for name in (
        "vit_16h", "t5_8v_tight"
    )} == {
        "vit_16h": {"batch.0": ((3, 224, 224), "bf16"), "batch.1": ((), "i32")},
        "t5_8v_tight": {"batch.0": tokens, "batch.1": tokens, "batch.2": tokens},
    }  # fmt: skip


def test_a_small_setting_is_compared_with_the_rival() -> None:
    shared = next(iter(search_quality.settings().values()))
    row = search_quality.compared(search_quality.setting({**shared, **SMALL}), math.inf, 4.0)
    ours, rival = row["ours"], row["rival"]
    assert rival["forecasts"] > 2
    assert row["best_known"] == min(1.0, rival["step"])
    assert math.isclose(row["behind"], ours["step"] / row["best_known"] - 1)


def test_the_summary_tells_the_mean_and_the_worst_of_all_settings() -> None:
    rows = [{"name": "a", "behind": 0.03}, {"name": "b", "behind": -0.01}, {"name": "c", "behind": None}]
    assert search_quality.summary(rows) == "2 settings: mean 1.0% behind, at most 3.0% (a); ahead in 1"
    assert search_quality.summary(rows[2:]) == "1 settings, of none of them a best step is known"
