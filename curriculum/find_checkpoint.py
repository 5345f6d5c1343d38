"""Finding a run's checkpoint or mean by what the user calls it, and reading its ledger."""

import json
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

from curriculum.disk.append import tell
from curriculum.disk.lock import trained_by
from curriculum.disk.manifest import damage
from curriculum.errors import InputError
from curriculum.record.events import EVENTS, last_gold, read_events
from curriculum.run import absent
from curriculum.run_directory import RunDirectory, names_in, read_json, step_folders

CHECKPOINT_ITEMS = ("params", "train", "ledger", "baselines")  # folders that a whole checkpoint has
MEAN_SIDECAR = "mean.json"  # beside the arrays of a phase's mean


def find_checkpoint(
    directory: RunDirectory,
    wanted: str | int | None = None,
    *,
    option: str = "--step",
    part: str | tuple[str, ...] = "",
) -> tuple[int, Path]:
    """(step, folder) of the checkpoint `wanted`, verified: "latest", "gold" or a step.

    None means the gold checkpoint, or the latest if the record names no gold or is missing. "latest" is the newest in
    `checkpoints/`. A step is looked for there first, then in `gold/` and `kept/`. `option` is the option that gave
    `wanted`, for messages. `part` is the part of the checkpoint that will be read, as for `damage`; only that part is
    verified.

    While a run trains, its gold may still be being saved. The gold before it is then used, and stderr says so.

    Raises InputError that lists the existing steps if there is no such checkpoint, if the gold that the record names is
    gone, or if there is a gold but no line in the record; and one that lists the undamaged steps if the checkpoint is
    damaged.
    """
    given = "" if wanted is None else f"{option} {wanted}: "
    if wanted not in (None, "latest", "gold") and not is_step(wanted):
        raise InputError(f"{given}expected 'latest', 'gold' or the step of a checkpoint")
    # Before the folders are listed: a gold's line comes before its checkpoint has its name.
    has_record = (directory.path / EVENTS).exists()
    events = read_events(directory.path) if wanted in (None, "gold") and has_record else None
    found = {folder.name: list(step_folders(folder)) for folder in directory.places}
    there = _listed(found)
    if not there and not (directory.has_config or directory.holds_run()):
        expected = f"expected a directory made by `curriculum train`{absent(directory.path)}"
        raise InputError(f"{directory.path}: holds no run; {expected}")
    if not there:
        what = "yet; train it up to its first save (checkpoint.every)"
        if saved := saved_steps(directory):
            what = f"any more, though its record has some up to step {saved[-1]}; if they were moved, or their disk is "
            what += "away, put them back"
        raise InputError(f"{directory.path}: has no checkpoint {what}")
    if wanted in (None, "gold"):
        gold = _gold_step(directory, events, found["gold"], there, option)
        if gold is not None:
            return gold, undamaged(directory.gold / str(gold), given, part)
        if wanted == "gold":
            raise InputError(f"{given}{directory.path} has no gold checkpoint; available: {there}")
    if wanted in (None, "latest"):
        if not found["checkpoints"]:
            raise InputError(f"{option} latest: {directory.checkpoints} is empty; available: {there}")
        newest = found["checkpoints"][-1]
        return newest, undamaged(directory.checkpoints / str(newest), given, part)
    folders = [directory.path / name / str(int(wanted)) for name, steps in found.items() if int(wanted) in steps]
    if not folders:
        raise InputError(f"{given}{directory.path} has no checkpoint of that step; available: {there}")
    whole = next((folder for folder in folders if damage(folder, part) is None), None)
    return int(wanted), whole or undamaged(folders[0], given, part)


def _gold_step(
    directory: RunDirectory, events: list[dict[str, Any]] | None, saved: list[int], there: str, option: str
) -> int | None:
    """The step of the gold that the record names, None if it names none; `saved` are the steps in `gold/`.

    `events` is None if there is no record. Raises InputError as `find_checkpoint` does; `there` lists what there is.
    """
    if events == [] and saved:
        raise InputError(
            f"{directory.path / EVENTS}: has no complete line to say which checkpoint is the gold one; restore it from "
            f"a copy, or give a step (available: {there})"
        )
    named = last_gold(events or [])
    if named is None:
        return None
    if named["step"] in saved:
        return named["step"]
    missing = directory.gold / str(named["step"])
    if trained_by(directory.path):
        before = [e["step"] for e in events if e["event"] == "gold_checkpoint" and e["step"] in saved]
        told = f"gold/{before[-1]}, the one before it, is used" if before else "there is none before it"
        tell(f"{missing}: is being saved; {told}")
        return before[-1] if before else None
    raise InputError(
        f"{missing}: is gone, but the record names it as the gold checkpoint: give {option} latest or another step "
        f"(available: {there}), restore it from a copy, or, if the run was killed while it was being saved, resume the "
        "run, which saves it again"
    )


def mean_of_phase(folder: Path, phase: str) -> tuple[int, Path]:
    """(last step of the phase, folder of the arrays) of a phase's mean. Raises InputError if missing or damaged."""
    if phase not in (there := {path.parent.name: path for path in folder.glob(f"*/{MEAN_SIDECAR}")}):
        names = ", ".join(sorted(there)) or "none"
        raise InputError(
            f"{folder}: no mean of phase {phase!r}; available: {names} (averages.phase_mean makes one at the end of a "
            "phase with two checkpoints or more)"
        )
    if why := damage(folder / phase):
        raise InputError(f"{folder / phase}: is damaged: {why}; restore it from a copy, or use a checkpoint")
    return json.loads(there[phase].read_text())["end"], folder / phase / "params"


def is_step(given: object) -> bool:
    """Whether something is a number that a step can be, or its text; `int` makes it one."""
    if isinstance(given, str):
        return given.isascii() and given.isdecimal() and len(given) < 20
    return isinstance(given, Integral) and not isinstance(given, bool) and given >= 0


def undamaged(checkpoint: Path, given: str = "", part: str | tuple[str, ...] = "") -> Path:
    """`checkpoint` itself, if it verifies. Otherwise raises InputError that lists the steps that do.

    `given` begins the message: how the user named the checkpoint. `part` is as for `damage`.
    """
    if (why := damage(checkpoint, part)) is None:
        return checkpoint
    check_there(checkpoint)
    places = RunDirectory(checkpoint.parents[1]).places
    whole = {
        place.name: [step for step, folder in step_folders(place).items() if damage(folder, part) is None]
        for place in places
    }
    raise InputError(
        f"{given}{checkpoint}: is damaged: {why}; restore it from a copy, or use another step (those that verify: "
        f"{_listed(whole) or 'none'})"
    )


class CheckpointGone(InputError):
    """A checkpoint that was found is gone: a training run deleted it."""


def check_there(checkpoint: Path) -> None:
    """Raise CheckpointGone if a checkpoint that was found is no longer there: it is not damaged."""
    if not checkpoint.exists():
        place = checkpoint.parent
        there = ", ".join(map(str, step_folders(place))) or "nothing"
        raise CheckpointGone(
            f"{checkpoint}: is gone: a training run keeps only its newest checkpoints (checkpoint.keep) and "
            "their golds; try again, or wait for the run to end; if none trains here, it was moved, or its disk is "
            f"away: {place} now holds {there}{_as_recorded(RunDirectory(place.parent))}; put it back, or take another "
            "step"
        )


def saved_steps(directory: RunDirectory) -> list[int]:
    """Steps whose checkpoints were whole, by the run's record; the newest may not have been. None if it is broken."""
    try:
        events = read_events(directory.path)
    except InputError:
        return []
    failed = {event["path"] for event in events if event["event"] == "checkpoint_failed"}
    saved = [event for event in events if event["event"] == "checkpoint"]
    over = bool(events) and events[-1]["event"] == "training_complete"  # it waits for the last one
    return [event["step"] for event in (saved if over else saved[:-1]) if event["path"] not in failed]


def _as_recorded(directory: RunDirectory) -> str:
    steps = saved_steps(directory)
    return f", and the newest in the record is {steps[-1]}" if steps else ""


def checkpoint_steps(place: Path) -> list[int]:
    """Steps of the checkpoints in a folder that have all CHECKPOINT_ITEMS, ascending; files in them may be damaged."""
    return [step for step, folder in step_folders(place).items() if set(CHECKPOINT_ITEMS) <= set(names_in(folder))]


def read_ledger(checkpoint: Path) -> dict[str, Any]:
    """The ledger in a checkpoint's folder. Raises CheckpointGone, and InputError if it cannot be read."""
    try:
        return read_json(checkpoint / "ledger" / "metadata")
    except InputError:
        check_there(checkpoint)
        raise


def architecture_at(ledger: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The architecture of a run's parameters after `step` updates, from any ledger of the run that reaches that step.

    It is the run's architecture, as in model.json, with the rope theta of the phase that made these parameters.
    """
    from phases.schedule import Schedule, segments_from_json  # brings numpy, and most views do without

    theta = Schedule(segments_from_json(ledger["segments"])).rope_theta_at(step)
    return ledger["model"] if theta is None else {**ledger["model"], "rope_theta": theta}


def _listed(found: dict[str, list[int]]) -> str:
    """`2, 4; in gold/: 3`."""
    own = ", ".join(map(str, found["checkpoints"]))
    rest = [f"in {folder}/: {', '.join(map(str, found[folder]))}" for folder in ("gold", "kept") if found[folder]]
    return "; ".join(filter(None, [own, *rest]))
