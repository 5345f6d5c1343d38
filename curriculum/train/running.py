"""A run under way: what it is made of, where it is kept, and how far it has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from curriculum.record.events import Record
from curriculum.run import RunDirectory
from curriculum.train import ledger
from curriculum.train.best import BestCheckpoints
from curriculum.train.checkpoint import Checkpoints
from curriculum.train.clock import TrainClock
from curriculum.train.setup import Setup
from curriculum.train.step import TrainState


@dataclass
class Running:
    """The parts of a run that goes on; `state` and `history` are as of its newest update."""

    setup: Setup
    directory: RunDirectory
    record: Record
    checkpoints: Checkpoints
    best: BestCheckpoints
    state: TrainState
    history: ledger.History
    keep_in: list[Checkpoints] = field(default_factory=list)  # beside `checkpoints`, what this step goes to
    clock: TrainClock = field(default_factory=TrainClock)

    def save_in(self, checkpoints: Checkpoints, done: int, offsets: Mapping[str, int]) -> None:
        """Start saving the run as it is after `done` updates, its record being as long as `offsets` say."""
        entry = ledger.entry(self.setup, done, self.history, offsets, self.record.elapsed_s)
        checkpoints.save(self.state, entry, self.history.watch.baselines())

    def wait_for_saves(self) -> None:
        """Return once every save that is under way is whole."""
        self.checkpoints.wait()
        self.best.wait()

    def keep(self, done: int, offsets: Mapping[str, int]) -> None:
        """Save what the verdicts after `done` updates asked to keep. After the step's own checkpoint, if it has one, so
        that going on from either gives one record."""
        for checkpoints in self.keep_in:
            with self.clock.paused(self.state):
                if done in checkpoints.steps():  # of this very step, before a set was added
                    checkpoints.delete(done)
                self.save_in(checkpoints, done, offsets)
        self.keep_in = []
