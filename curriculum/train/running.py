"""A run under way: its parts, its directory, and how far it has come."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from curriculum.disk.append import how_to_make_room, is_disk_error
from curriculum.errors import InputError
from curriculum.record.events import Record
from curriculum.run_directory import RunDirectory
from curriculum.train.checkpoints.best import BestCheckpoints
from curriculum.train.checkpoints.folder import Checkpoints, SaveFailed, cannot_be_saved, gone
from curriculum.train.clock import TrainClock
from curriculum.train.history import History
from curriculum.train.processes.together import count, from_first
from curriculum.train.results import Results
from curriculum.train.resuming import ledger
from curriculum.train.setup import Setup
from curriculum.train.signals import Stopped, StopSignals
from curriculum.train.step import TrainState
from evalsets.gold import GoldState, kept_steps


@dataclass
class Running:
    """The parts of a run under way; `state` and `history` are as of its newest update."""

    setup: Setup
    directory: RunDirectory
    record: Record
    checkpoints: Checkpoints
    best: BestCheckpoints
    state: TrainState
    history: History
    stop: StopSignals  # ends an eval and a running gate
    clock: TrainClock = field(default_factory=TrainClock)
    results: Results = field(init=False)
    # From before the newest gold decision, whose checkpoint may still be being saved.
    gold_before: GoldState = field(default_factory=GoldState)
    why_not_saved: str = ""  # the reason of the last save that failed,
    mending: str = ""  # and what the user can do about it

    def __post_init__(self):
        self.results = Results(self.directory)

    def offsets(self) -> dict[str, int]:
        """Flush record and eval results to disk; the length of each file of the record. Raises OSError."""

        def on_disk() -> dict[str, int]:
            self.results.flush()
            return self.record.offsets()

        return from_first(on_disk)

    def check_there(self) -> None:
        """Raise InputError if the run's directory was moved or removed: nothing may take its place."""
        if not from_first(lambda: self.directory.has_config):
            raise gone(self.directory.path)

    def save_in(self, checkpoints: Checkpoints, done: int, offsets: Mapping[str, int]) -> None:
        """Start saving the run after `done` updates; `offsets` are the lengths of its record.

        Raises InputError as `check_there` does.
        """
        self.check_there()
        entry = ledger.entry(self.setup, done, self.history, offsets, self.record.elapsed_s)
        checkpoints.save(self.state, entry, self.history.watch.baselines())

    def keep(self, done: int, folders: Iterable[Checkpoints], offsets: Mapping[str, int] | None = None) -> None:
        """Save the run after `done` updates in folders other than `checkpoints/`.

        `offsets`: the length of the record that belongs to the step's own checkpoint, if it has one, whose save has
        just been started. Continuing from any of these copies then gives the same record; in a single process they are
        hard links of it.
        """
        for checkpoints in folders:
            with self.clock.paused(self.state):
                self.settle(done, checkpoints)
                try:
                    if done in from_first(checkpoints.steps):  # a copy of this step from before an eval set was added
                        checkpoints.delete(done)
                    if offsets is not None and count() == 1:
                        checkpoints.save_as(self.checkpoints)
                    else:
                        self.save_in(checkpoints, done, offsets or self.offsets())
                    if checkpoints is self.best.kept:
                        self.best.note_keeping(done, self.history.gold)
                except OSError as error:
                    self.save_failed(done, error, f"{checkpoints.directory.name}/{done}")

    def settle(self, done: int, *of: Checkpoints, wait: bool = True) -> None:
        """Wait until the saves under way in the folders `of` (default: all) are on disk, and record those that failed.

        Without `wait`, only handle saves that have already ended. Several processes may notice that at different
        steps, so each then only checks for a failed save, which ends the run.
        """
        for checkpoints in of or (self.checkpoints, *self.best.places):
            try:
                if not wait and count() > 1:
                    checkpoints.check()
                elif wait or checkpoints.settled:
                    checkpoints.wait()
            except SaveFailed as failure:
                self.save_failed(done, failure, failure.path)

    def drop_golds(self) -> None:
        """Delete replaced golds that no remaining checkpoint needs."""
        self.best.drop_all_but(kept_steps(self.history.gold) | kept_steps(self.gold_before))

    def save_failed(self, done: int, error: OSError, path: str) -> None:
        """Record that the disk refused the checkpoint at `path`, relative to the run. Raises any other `error`.

        Raises InputError if the run has several processes: the others would go on to save.
        A gold that could not be saved is linked from `checkpoints/` if its step is there, and nothing is recorded.
        Otherwise the gold before it stands again.
        """
        if not is_disk_error(error):
            raise error
        if count() > 1:
            raise cannot_be_saved(self.directory.path / path, error)
        place, step = path.split("/")
        if place == "gold" and int(step) in kept_steps(self.history.gold) and not self._link_gold(done, int(step)):
            before = self.gold_before
            gold = replace(self.history.gold, gold=before.gold, pending=before.pending)
            self.history = replace(self.history, gold=gold)
        elif place == "gold" and int(step) in from_first(self.best.gold.steps):
            return
        self.why_not_saved, self.mending = error.strerror, how_to_make_room(error)
        every, total = self.setup.config.checkpoint.every, self.setup.course.total_steps
        after = done if int(step) < done else done + 1
        planned = min(-(-after // every) * every, total)
        self.record.event(
            "checkpoint_failed",
            done,
            path=path,
            why=error.strerror,
            last_good_step=self._last_good(),
            next_try_step=planned if planned >= after else None,
        )

    def _link_gold(self, done: int, step: int) -> bool:
        """Hard-link the gold of `step` from that step's own checkpoint; returns whether that worked."""
        self.settle(done, self.checkpoints)
        if step not in from_first(self.checkpoints.steps):
            return False
        try:
            from_first(lambda: self.best.gold.adopt(self.checkpoints.directory / str(step)))
        except OSError:
            return False
        return True

    def stopped(self, signal_number: int, done: int) -> Stopped:
        """What ends a run that a signal stopped after `done` updates."""
        last = self._last_good()
        return Stopped(signal_number, done, last, "" if last == done else self.why_not_saved or "it is gone")

    def _last_good(self) -> int | None:
        """The step that --resume latest begins from: a gold or a kept copy only if nothing is in checkpoints/."""
        own = from_first(self.checkpoints.steps)
        return max(own or [step for place in self.best.places for step in from_first(place.steps)], default=None)

    def check_saved(self, done: int) -> None:
        """Raise InputError if the run ends after `done` updates without the checkpoint of that step."""
        if done not in from_first(self.checkpoints.steps):
            last = self._last_good()
            good = (
                "there is no good one: the run starts over" if last is None else f"the last good one is of step {last}"
            )
            why, mending = f"could not be saved: {self.why_not_saved}", f"{self.mending} and "
            if not self.why_not_saved:
                why, mending = "is missing, although no save failed", ""
            raise InputError(
                f"{self.checkpoints.directory / str(done)}: the last checkpoint {why}; {good}; {mending}continue with "
                "--resume latest"
            )
