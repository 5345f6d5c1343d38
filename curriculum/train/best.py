"""Whole checkpoints outside the newest ones: `gold/`, the best of the run and its candidates, and `kept/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from curriculum.manifest import damage
from curriculum.run import RunDirectory, checkpoint_steps, read_ledger
from curriculum.train.checkpoint import Checkpoints
from curriculum.train.processes import from_first, is_first
from evalsets.gold import GoldState, kept_steps


def lost_golds(directory: RunDirectory, step: int, saved: Mapping[str, Any]) -> dict[int, str]:
    """The golds that the ledger of the checkpoint of `step` speaks of and that are gone or damaged: step to why."""
    lost = {}
    for spoken_of in sorted(_golds_of(saved) - {step}):
        folders = [place / str(spoken_of) for place in (directory.gold, directory.checkpoints)]
        whys = [damage(folder) if folder.is_dir() else "is gone" for folder in folders]
        if None not in whys:
            lost[spoken_of] = whys[0]
    return lost


def _golds_of(saved: Mapping[str, Any]) -> set[int]:
    """The steps whose golds a ledger needs."""
    return kept_steps(GoldState.from_json(saved["history"]["gold"]))


class BestCheckpoints:
    """What `gold/` and `kept/` hold of a run that begins, or goes on from step `resumed`.

    A gold that was replaced stays as long as a checkpoint that may be resumed still speaks of it, so that going back
    to that one loses nothing. What came after the resumed step is moved to `superseded/`, as it will come again.
    """

    def __init__(self, directory: RunDirectory, resumed: int | None):
        last = -1 if resumed is None else resumed
        self._directory = directory
        self.gold = Checkpoints(directory.gold, keep=None)
        self.kept = Checkpoints(directory.kept, keep=None)  # what `regression.action: checkpoint` keeps
        self._spoken_of = {}
        if not is_first():
            return
        self._spoken_of = {
            step: _golds_of(read_ledger(directory.checkpoints / str(step)))
            for step in checkpoint_steps(directory.checkpoints)
            if step <= last
        }
        self.gold.set_aside_after(last)
        for step in self._spoken_of.get(last, set()) & set(self.gold.steps()):
            if damage(directory.gold / str(step)):
                self.gold.set_aside(step)
        for step in sorted(self._spoken_of.get(last, set()) - set(self.gold.steps())):
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

    def spoken_of(self, step: int, state: GoldState) -> None:
        """A checkpoint of `step` is being saved whose ledger holds `state`."""
        self._spoken_of[step] = kept_steps(state)

    def drop_all_but(self, steps: set[int]) -> None:
        """Drop the golds that are neither among `steps` nor spoken of by a checkpoint that a resume may find.

        As the disk has it: while the newest is on its way there, the one before may be all that a kill leaves.
        """
        for step in from_first(lambda: self._not_needed(steps)):
            self.gold.delete(step)

    def _not_needed(self, steps: set[int]) -> list[int]:
        there = {*checkpoint_steps(self._directory.checkpoints), max(self._spoken_of, default=None)}
        self._spoken_of = {step: golds for step, golds in self._spoken_of.items() if step in there}
        return [step for step in self.gold.steps() if step not in steps.union(*self._spoken_of.values())]
