"""Figures of the MeshSlice paper under every combination of what its text leaves open.

    python -m benchmarks.support.mesh2d.mesh2d_combinations

The text states the prices of both axes, 5 us a step, launches of 13 and 26 us, that messages run fully under
products and along both axes at once, and that every rival is compared. It does not state

    whether the simulated torus has these prices along each axis, exchanged, or one of them along both: chips
        and links are simulated, the prices are fitted on a ring of real chips
    which matrix Wang's algorithm has as a ring in each product
    whether the rivals run on their own best mesh or on that of MeshSlice
    whether each of the 16 products of the mean runs on its own best mesh
    whether Collective, and Wang's algorithm, keep what they gather whole for the backward products
    whether a SendRecv inside of a ring has a start of its own, or only the step

All combinations are computed, none is chosen: what no combination reaches has another cause.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.support.mesh2d.mesh2d_assumptions import PAPER, Assumptions, figures, flat

OPEN: tuple[dict[str, dict[str, Any]], ...] = (
    {
        "": {},
        "exchanged": {"exchanged": True},
        "columns twice": {"columns": True},
        "rows twice": {"rows": True},
    },
    {
        "": {},
        "ring along rows": {"ring": "rows"},
        "along columns": {"ring": "cols"},
        "of more": {"ring": "more"},
    },
    {"": {}, "one mesh": {"shared_mesh": True}},
    {"": {}, "16 meshes": {"own_mesh": True}},
    {"": {}, "Collective keeps": {"kept": ("collective",)}, "both keep": {"kept": ("collective", "wang")}},
    {"": {}, "sends in 5 us": {"send_launch": 5e-6}},
)
"""Name of an answer -> what it replaces; the first of each is that of the benchmark."""
NEAR = 5.0
"""Points by which a figure may differ from the paper."""


def combinations() -> Iterator[tuple[str, Assumptions]]:
    """All combinations of the answers, the one of the benchmark first."""
    for chosen in itertools.product(*(each.items() for each in OPEN)):
        name = ", ".join(name for name, _ in chosen if name)
        yield (
            name or "none",
            replace(Assumptions(), **{k: v for _, fields in chosen for k, v in fields.items()}),
        )


def run() -> dict[str, Any]:
    """The least and the most of each figure, and the combinations nearest to the paper."""
    rows = {name: flat(figures(assumed)) for name, assumed in combinations()}
    paper = flat(PAPER)
    away = {name: {key: abs(row[key] - paper[key]) for key in paper} for name, row in rows.items()}
    near = {name: sum(each <= NEAR for each in distances.values()) for name, distances in away.items()}
    return {
        "count": len(rows),
        "range": {
            key: {
                "paper": paper[key],
                "here": rows["none"][key],
                "least": min(row[key] for row in rows.values()),
                "most": max(row[key] for row in rows.values()),
                "near": sum(distances[key] <= NEAR for distances in away.values()),
            }
            for key in paper
        },
        "most_within_5_points": [
            {"name": name, "within": near[name], "figures": rows[name]}
            for name in sorted(rows, key=lambda name: (-near[name], max(away[name].values())))[:5]
        ],
    }


def main() -> None:
    """Print the ranges and the nearest combinations."""
    result = run()
    print(f"{result['count']} combinations")
    for key, row in result["range"].items():
        print(f"{key:32s}" + "".join(f"  {name} {value:7.1f}" for name, value in row.items()))
    for each in result["most_within_5_points"]:
        numbers = "  ".join(f"{value:.1f}" for value in each["figures"].values())
        print(f"{each['within']} of {len(result['range'])}: {each['name']}: {numbers}")


if __name__ == "__main__":
    main()
