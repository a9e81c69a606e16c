"""What adaptation leaves for the next starts of an elastic job, in the folder of the job; standard library.

`callbacks.Adapt` writes it on rank 0 before it lets the job start again; rank 0 of the next start reads it
and shares it with the others. The launcher reads it for its message, and gives the plan up when other ranks
run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

ADAPTED: Final = "adapted"
"""File by which rank 0 says that the ranks have stopped to start again with another plan."""
_STATE: Final = "adaptation.json"


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The adaptation of a job.

    Attributes:
        number: starts that it has caused.
        most: limit of these.
        step: after which the last of them came.
        ranks: processes of the job that the plan is for.
        slowdowns: device -> slowdown for which the plan was made (`adaptive/measured_speeds.py`).
        plan: text of the plan; "" where it is given up.
        text: what has changed and what is done, for messages.
        file: path of the file of the last proposal, and the digest of its plan; empty where there is none.
        given_up: why the plan and the slowdowns hold no longer; "" while they do.
    """

    number: int = 0
    most: int = 0
    step: int = 0
    ranks: int = 0
    slowdowns: Mapping[int, float] = field(default_factory=dict)
    plan: str = ""
    text: str = ""
    file: tuple[str, str] = ("", "")
    given_up: str = ""

    def write(self, folder: Path) -> None:
        """Write it to the folder of the job, whole. Raises OSError."""
        draft = folder / f"{_STATE}.draft"
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(folder / _STATE)

    @classmethod
    def read(cls, folder: Path) -> Adaptation | None:
        """What an earlier start of the job has written; None where it has written nothing."""
        try:
            content = json.loads((folder / _STATE).read_text())
        except FileNotFoundError:
            return None
        content["slowdowns"] = {int(device): factor for device, factor in content["slowdowns"].items()}
        content["file"] = tuple(content["file"])
        return cls(**content)


def give_up_adaptation(folder: Path, reason: str) -> bool:
    """Note that the plan holds no longer, because other ranks run. Returns whether there was one."""
    adaptation = Adaptation.read(folder)
    if adaptation is None:
        return False
    replace(adaptation, plan="", slowdowns={}, given_up=reason).write(folder)
    return bool(adaptation.plan)
