"""Which checkpoint a run goes on from."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from curriculum.manifest import damage
from curriculum.run import RunDirectory, find_checkpoint, read_ledger, step_folders
from curriculum.train.processes.together import from_first


class Resumed(NamedTuple):
    """The checkpoint that a run goes on from; it verified."""

    step: int
    folder: Path
    ledger: dict[str, Any]


def to_resume(directory: RunDirectory, resume: str | int | None) -> Resumed | None:
    """What `resume` means of a run, None where the run begins. Raises InputError for a checkpoint that is not there.

    "latest" is the newest of `checkpoints/` that verifies; where none does, the newest of `gold/` and `kept/`.
    """
    if resume is None:
        return None
    if resume == "latest":
        newest = newest_whole(directory)
        return newest and Resumed(*newest, read_ledger(newest[1]))
    step, folder = find_checkpoint(directory, resume, option="--resume")
    own = directory.checkpoints / str(step)  # where a step is looked for first
    if resume == "gold" and own.is_dir() and damage(own) is None:  # its record is the one of an unbroken run
        folder = own
    return Resumed(step, folder, read_ledger(folder))


def newest_whole(directory: RunDirectory, up_to: float = math.inf) -> tuple[int, Path] | None:
    """(step, folder) of the newest checkpoint that verifies, of those up to a step: of `checkpoints/`, or where it has
    none of `gold/` and `kept/`."""
    for places in ((directory.checkpoints,), (directory.gold, directory.kept)):
        found = [step_folder for place in places for step_folder in step_folders(place).items()]
        for step, folder in sorted(found, reverse=True):
            if step <= up_to and damage(folder) is None:
                return step, folder
    return None


def resumed_by_first(find: Callable[[], Resumed | None]) -> Resumed | None:
    """What process 0 finds, in every process."""

    def found() -> list[Any] | None:
        resumed = find()
        return resumed and [resumed.step, str(resumed.folder), resumed.ledger]

    told = from_first(found)
    return told and Resumed(told[0], Path(told[1]), told[2])
