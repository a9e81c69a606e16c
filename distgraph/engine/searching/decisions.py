"""Why a plan is as it is: what else was forecast, and how much slower it was.

*In:* the best program and all that were forecast. *Out:* `Decision`s of a plan. *Invariant:* a runner-up is a
program that was built, and its seconds are its forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distgraph.engine.searching.proposal import Realized
from distgraph.plan import Decision


def decisions(best: Realized, forecasts: Sequence[Realized]) -> dict[str, Decision]:
    """Choices of the whole program, each with the best program in which it was taken otherwise."""
    found = {}
    for name, of in _CHOICES.items():
        chosen = of(best)
        others = [other for other in forecasts if other.fits and of(other) != chosen]
        runner_up = min(others, key=lambda other: other.seconds, default=None)
        if runner_up is None:
            found[name] = Decision(chosen=chosen, note="nothing else that fits was forecast")
            continue
        found[name] = Decision(
            chosen=chosen,
            runner_up=of(runner_up),
            runner_up_seconds=runner_up.seconds,
            note=f"the runner-up is the best program of the search that differs in this: {runner_up.origin}",
        )
    return found


def _stages(found: Realized) -> str:
    if found.proposal is None:
        return "one on " + ", ".join(map(str, dict.fromkeys(found.build.lowered.meshes)))
    return "; ".join(map(str, found.proposal.stages))


def _recompute(found: Realized) -> str:
    count = len(found.traced.recompute)
    return f"{count} of {len(found.traced.layers)} layers"


_CHOICES: dict[str, Callable[[Realized], str]] = {
    "micro_batches": lambda found: str(found.traced.graph.micro_batches),
    "stages": _stages,
    "recompute": _recompute,
    "schedule": lambda found: found.build.policy,
}
