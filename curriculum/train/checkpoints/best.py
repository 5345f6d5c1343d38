"""Whole checkpoints outside the newest ones: `gold/`, the best of the run and its candidates, and `kept/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from curriculum.manifest import damage
from curriculum.run import RunDirectory, checkpoint_steps, read_ledger
from curriculum.train.checkpoints.folder import Checkpoints
from curriculum.train.processes.together import from_first, is_first
from evalsets.gold import GoldState, kept_steps


def lost_golds(directory: RunDirectory, step: int, saved: Mapping[str, Any]) -> dict[int, str]:
    """The golds that the ledger of the checkpoint of `step` needs and that are gone or damaged: step to why."""
    lost = {}
    for gold in sorted(_golds_of(saved) - {step}):
        folders = [place / str(gold) for place in (directory.gold, directory.checkpoints)]
        whys = [damage(folder) if folder.is_dir() else "is gone" for folder in folders]
        if None not in whys:
            lost[gold] = whys[0]
    return lost


def _golds_of(saved: Mapping[str, Any]) -> set[int]:
    """The steps whose golds a ledger needs."""
    return kept_steps(GoldState.from_json(saved["history"]["gold"]))


class BestCheckpoints:
    """What `gold/` and `kept/` hold of a run that begins, or goes on from step `resumed`.

    A gold that was replaced stays as long as the ledger of a checkpoint that may be resumed still needs it, so that
    going back to that one loses nothing. What came after the resumed step is moved to `superseded/`, as it will come
    again.
    """

    def __init__(self, directory: RunDirectory, resumed: int | None):
        last = -1 if resumed is None else resumed
        self._directory = directory
        self.gold = Checkpoints(directory.gold, keep=None)
        self.kept = Checkpoints(directory.kept, keep=None)  # what `regression.action: checkpoint` keeps
        self._needed_by: dict[int, set[int]] = {}  # the golds that a ledger needs, by the step of its checkpoint
        if not is_first():
            return
        self._needed_by = {
            step: _golds_of(read_ledger(directory.checkpoints / str(step)))
            for step in checkpoint_steps(directory.checkpoints)
            if step <= last
        }
        needed = self._needed_by.get(last, set())
        self.gold.set_aside_after(last)
        for step in needed & set(self.gold.steps()):
            if damage(directory.gold / str(step)):
                self.gold.set_aside(step)
        for step in sorted(needed - set(self.gold.steps())):
            if step in checkpoint_steps(directory.checkpoints) and damage(directory.checkpoints / str(step)) is None:
                self.gold.adopt(directory.checkpoints / str(step))  # a kill came between the two
        self.kept.set_aside_after(last)

    def __enter__(self) -> BestCheckpoints:
        return self

    def __exit__(self, *_: object) -> None:
        for place in self.places:
            place.close()

    @property
    def places(self) -> tuple[Checkpoints, Checkpoints]:
        return self.gold, self.kept

    def gold_folder(self, step: int) -> Path:
        return self._directory.gold / str(step)

    def note_saving(self, step: int, state: GoldState) -> None:
        """Note that a checkpoint of `step` is being saved, with `state` in its ledger."""
        self._needed_by[step] = kept_steps(state)

    def drop_all_but(self, steps: set[int]) -> None:
        """Drop the golds that are neither among `steps` nor needed by a checkpoint that a resume may find.

        That is every one that is on the disk now, as a kill may leave no other, and the one that is being saved.
        """
        for step in from_first(lambda: self._not_needed(steps)):
            self.gold.delete(step)

    def _not_needed(self, steps: set[int]) -> list[int]:
        there = {*checkpoint_steps(self._directory.checkpoints), max(self._needed_by, default=None)}
        self._needed_by = {step: golds for step, golds in self._needed_by.items() if step in there}
        return [step for step in self.gold.steps() if step not in steps.union(*self._needed_by.values())]
