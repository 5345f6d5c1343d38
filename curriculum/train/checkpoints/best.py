"""Whole checkpoints beside the newest ones: `gold/`, the best of the run and its candidates, and `kept/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from curriculum.disk.manifest import damage
from curriculum.find_checkpoint import checkpoint_steps, read_ledger
from curriculum.record.events import read_events_before_damage
from curriculum.run_directory import RunDirectory
from curriculum.train.checkpoints.folder import Checkpoints
from curriculum.train.processes.together import from_first, is_first
from curriculum.train.resuming.resumed import Resumed
from evalsets.gold import GoldState, kept_steps

BadGolds = Sequence[tuple[int, str, bool]]


def bad_golds(directory: RunDirectory, resumed: Resumed) -> BadGolds:
    """(step, why, whether `checkpoints/` has no whole copy either) of what is not whole in `gold/`, but needed there.

    That is by the ledger of a run that is resumed. Each file is read at most once. A gold's second copy is read only if
    the first is not whole, and the checkpoint that the run continues from, which verified, is not read.
    """
    found = []
    for gold in sorted(_golds_of(resumed.ledger)):
        own, other = (place / str(gold) for place in (directory.gold, directory.checkpoints))
        if own != resumed.folder and (why := _damage(own)) is not None:
            found.append((gold, why, gold != resumed.step and _damage(other) is not None))
    return found


def _damage(folder: Path) -> str | None:
    return damage(folder) if folder.is_dir() else "is gone"


def kept_as(step: int) -> str:
    """What an alarm's event says of a step that is kept for good."""
    return f"kept as kept/{step}"


def _was_to_be_kept(directory: RunDirectory, step: int) -> bool:
    events = read_events_before_damage(directory.path)
    alarms = (event for event in events if event["event"] == "eval_regression" and event["step"] == step)
    return any(alarm["action"] == kept_as(step) for alarm in alarms)


def _golds_of(saved: Mapping[str, Any]) -> set[int]:
    """The steps of the golds that a ledger needs."""
    return kept_steps(GoldState.from_json(saved["history"]["gold"]))


class BestCheckpoints:
    """The folders `gold/` and `kept/` of a run that continues from step `last`, -1: it begins; `bad`: its `bad_golds`.

    A replaced gold stays as long as the ledger of a checkpoint that may be resumed, a kept one too, needs it, so that
    going back to that checkpoint loses nothing. What came after step `last` is moved to `superseded/`, as it will be
    made again.
    """

    def __init__(self, directory: RunDirectory, last: int, bad: BadGolds):
        self._directory = directory
        self.gold = Checkpoints(directory.gold, keep=None)
        self.kept = Checkpoints(directory.kept, keep=None)  # what `regression.action: checkpoint` keeps
        self._needed_by: dict[int, set[int]] = {}  # the golds that a ledger needs, by the step of its checkpoint
        self._needed_by_kept: set[int] = set()
        if not is_first():
            return
        self._needed_by = {
            step: _golds_of(read_ledger(directory.checkpoints / str(step)))
            for step in checkpoint_steps(directory.checkpoints)
            if step <= last
        }
        needed = self._needed_by.get(last, set())
        self.gold.set_aside_after(last)
        for step in {step for step, _, _ in bad} & set(self.gold.steps()):
            self.gold.set_aside(step)
        for step in sorted(needed - set(self.gold.steps()) - {step for step, _, lost in bad if lost}):
            self.gold.adopt(directory.checkpoints / str(step))  # a kill came between the saves of the two
        self.kept.set_aside_after(last)
        if last in self._needed_by and _was_to_be_kept(directory, last):
            self.kept.adopt(directory.checkpoints / str(last))  # a kill came between these saves too
        for step in self.kept.steps():
            folder = directory.kept / str(step)
            if damage(folder, "ledger/") is None:
                self._needed_by_kept |= _golds_of(read_ledger(folder)) - {step}

    def __enter__(self) -> BestCheckpoints:
        return self

    def __exit__(self, *_: object) -> None:
        for place in self.places:
            place.close()

    @property
    def places(self) -> tuple[Checkpoints, Checkpoints]:
        return self.gold, self.kept

    def note_saving(self, step: int, state: GoldState) -> None:
        """Note that a checkpoint of `step` is being saved, with `state` in its ledger."""
        self._needed_by[step] = kept_steps(state)

    def note_keeping(self, step: int, state: GoldState) -> None:
        """Note that `step` is being saved in `kept/`, with `state` in its ledger."""
        self._needed_by_kept |= kept_steps(state) - {step}

    def drop_all_but(self, steps: set[int]) -> None:
        """Delete the golds that are neither among `steps` nor needed by a checkpoint that a resume may find.

        A resume may find each checkpoint on disk, as a kill may leave no other, and the one that is being saved.
        """
        for step in from_first(lambda: self._not_needed(steps)):
            self.gold.drop(step)

    def _not_needed(self, steps: set[int]) -> list[int]:
        there = {*checkpoint_steps(self._directory.checkpoints), max(self._needed_by, default=None)}
        self._needed_by = {step: golds for step, golds in self._needed_by.items() if step in there}
        needed = steps.union(self._needed_by_kept, *self._needed_by.values())
        return [step for step in self.gold.steps() if step not in needed]
