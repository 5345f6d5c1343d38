"""Which checkpoint a run continues from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from curriculum.disk.manifest import damage
from curriculum.find_checkpoint import find_checkpoint, read_ledger
from curriculum.run_directory import RunDirectory, step_folders
from curriculum.train.processes.together import from_first


class Resumed(NamedTuple):
    """The checkpoint that a run continues from; it has been verified."""

    step: int
    folder: Path
    ledger: dict[str, Any]


def to_resume(directory: RunDirectory, resume: str | int) -> Resumed | None:
    """The checkpoint that `resume` means; None if there is none. Raises InputError if the one asked for is not there.

    "latest" is the newest in `checkpoints/` that verifies or, if none does, the newest in `gold/` and `kept/`.
    """
    if resume == "latest":
        return newest_resumed(directory)
    step, folder = find_checkpoint(directory, resume, option="--resume")
    own = directory.checkpoints / str(step)  # a step is looked for here first
    if resume == "gold" and own.is_dir() and damage(own) is None:  # with it the record becomes that of an unbroken run
        folder = own
    return Resumed(step, folder, read_ledger(folder))


def newest_resumed(directory: RunDirectory, up_to: int | None = None) -> Resumed | None:
    """The newest checkpoint that verifies; None if there is none.

    `gold/` and `kept/` count only if `checkpoints/` has none. But to go back, which is what `up_to` a step is for, all
    count alike: a run that once continued from its gold has that in `checkpoints/` too, and goes back as if it had not.
    """
    own, others = (directory.checkpoints,), (directory.gold, directory.kept)
    for places in (own, others) if up_to is None else ((*others, *own),):
        found = [(step, i, folder) for i, place in enumerate(places) for step, folder in step_folders(place).items()]
        for step, _, folder in sorted(found, reverse=True):
            if (up_to is None or step <= up_to) and damage(folder) is None:
                return Resumed(step, folder, read_ledger(folder))
    return None


def resumed_by_first(find: Callable[[], tuple[Resumed | None, Any]]) -> tuple[Resumed | None, Any]:
    """What `find` returns in process 0, in every process: a checkpoint, and plain JSON beside it."""

    def as_json() -> list[Any]:
        resumed, beside = find()
        return [resumed and [resumed.step, str(resumed.folder), resumed.ledger], beside]

    found, beside = from_first(as_json)
    return found and Resumed(found[0], Path(found[1]), found[2]), beside
