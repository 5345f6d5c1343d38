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
    clock: TrainClock = field(default_factory=TrainClock)

    def save_in(self, checkpoints: Checkpoints, done: int, offsets: Mapping[str, int]) -> None:
        """Start saving the run as it is after `done` updates, its record being as long as `offsets` say."""
        entry = ledger.entry(self.setup, done, self.history, offsets, self.record.elapsed_s)
        checkpoints.save(self.state, entry, self.history.watch.baselines())
