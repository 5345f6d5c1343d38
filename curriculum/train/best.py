"""Whole checkpoints outside the newest ones: `gold/`, the best of the run and its candidates, and `kept/`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from curriculum.errors import InputError
from curriculum.run import RunDirectory, checkpoint_steps, read_ledger
from curriculum.train.checkpoint import Checkpoints
from evalsets.gold import GoldState, kept_steps


def check_golds(directory: RunDirectory, step: int, saved: Mapping[str, Any]) -> None:
    """Raise InputError where a gold is gone that the ledger of the checkpoint of `step` speaks of."""
    spoken_of = kept_steps(GoldState.from_json(saved["history"]["gold"])) - {step}
    there = {*checkpoint_steps(directory.gold), *checkpoint_steps(directory.checkpoints)}
    if gone := spoken_of - there:
        raise InputError(
            f"{directory.gold / str(min(gone))}: is gone, but the checkpoint of step {step} speaks of it; put it back "
            "from a copy, or resume from another step"
        )


class BestCheckpoints:
    """What `gold/` and `kept/` hold of a run that begins, or goes on from step `resumed`.

    A gold that was replaced stays as long as a checkpoint that may be resumed still speaks of it, so that going back
    to that one loses nothing. What came after the resumed step is moved to `superseded/`, as it will come again.
    """

    def __init__(self, directory: RunDirectory, resumed: int | None):
        last = -1 if resumed is None else resumed
        self._directory = directory
        self._spoken_of = {
            step: kept_steps(GoldState.from_json(read_ledger(directory.checkpoints / str(step))["history"]["gold"]))
            for step in checkpoint_steps(directory.checkpoints)
            if step <= last
        }
        self.gold = Checkpoints(directory.gold, keep=None)
        self.gold.set_aside_after(last)
        for step in sorted(self._spoken_of.get(last, set()) - set(self.gold.steps())):
            self.gold.adopt(directory.checkpoints / str(step))  # a kill came between the two
        if directory.kept.exists():
            self.kept.set_aside_after(last)

    def __enter__(self) -> BestCheckpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.gold.close()
        if "kept" in self.__dict__:
            self.kept.close()

    @cached_property
    def kept(self) -> Checkpoints:
        """What `regression.action: checkpoint` keeps; the folder is made by the first of them."""
        return Checkpoints(self._directory.kept, keep=None)

    def wait(self) -> None:
        """Return once every save has reached the disk."""
        self.gold.wait()
        if "kept" in self.__dict__:
            self.kept.wait()

    def gold_folder(self, step: int) -> Path:
        return self._directory.gold / str(step)

    def before_saving(self, step: int) -> None:
        """A checkpoint of `step` is about to be saved: the golds that its ledger names must be whole before it is.

        The gold of `step` itself is saved after it: a resume takes that from the checkpoint.
        """
        self.gold.wait()

    def spoken_of(self, step: int, state: GoldState) -> None:
        """A checkpoint of `step` is being saved whose ledger holds `state`."""
        self._spoken_of[step] = kept_steps(state)

    def drop_all_but(self, steps: set[int]) -> None:
        """Drop the golds that are neither among `steps` nor spoken of by a checkpoint that a resume may find.

        As the disk has it: while the newest is on its way there, the one before may be all that a kill leaves.
        """
        there = {*checkpoint_steps(self._directory.checkpoints), max(self._spoken_of, default=None)}
        self._spoken_of = {step: golds for step, golds in self._spoken_of.items() if step in there}
        for step in self.gold.steps():
            if step not in steps.union(*self._spoken_of.values()):
                self.gold.delete(step)
