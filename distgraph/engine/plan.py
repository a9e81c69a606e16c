"""Plan: what a compiled program does, for people."""

from __future__ import annotations

from dataclasses import dataclass

from distgraph.runtime.build import Build


@dataclass(frozen=True, slots=True)
class Plan:
    """See `Engine.plan`."""

    build: Build
