"""A checkpoint that a second process writes."""

from __future__ import annotations

from pathlib import Path

from support.files.checkpoint_damage import write

from distgraph.runtime.execute.process_group import InProcessWorld


def save(folder: Path, step: int) -> None:
    world = InProcessWorld(2)
    try:
        write(folder, step, world)
    finally:
        world.close()
