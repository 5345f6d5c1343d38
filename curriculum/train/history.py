"""What a run remembers, from update to update and from checkpoint to checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from curriculum.train.watch import Evaluated, Watch
from evalsets.evalset import PRIMARY
from evalsets.gold import GoldState
from evalsets.metrics import WindowResults

if TYPE_CHECKING:
    from curriculum.train.setup import Setup


@dataclass(frozen=True)
class History:
    """What a run remembers; saved in every checkpoint."""

    started_at: str
    phase: str  # the phase of the last recorded switch, or the first phase
    watch: Watch = field(default_factory=Watch)
    gold: GoldState = field(default_factory=GoldState)
    eval_sets: dict[str, str] = field(default_factory=dict)  # content hash of every set ever measured
    row_step: int = 0  # of the last metrics row
    train_loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    best_val_step: int | None = None
    # In order, {step: gone back to, first_bad_step, skip_steps, acts: what is repeated on the way, as of `acts_of`}.
    rollbacks: tuple[dict[str, Any], ...] = ()
    # If a signal stopped the gate at this step's eval: the sets that stood regressed then, each with its `Regressed`.
    gold_undecided: dict[str, Any] | None = None
    eval_left: bool = False  # whether a signal ended this step's eval, so that all that follows the update is still due

    @staticmethod
    def begin(setup: Setup) -> History:
        started_at = datetime.now().astimezone().isoformat(timespec="seconds")
        return History(started_at, setup.course.phase_at(0))

    @staticmethod
    def of(saved: Mapping[str, Any], baselines: Mapping[str, np.ndarray]) -> History:
        """Restore from a ledger, and from the baselines of the eval sets in the same checkpoint."""
        history = saved["history"]
        watch = Watch.of(history["watch"], baselines)
        gold = GoldState.from_json(history["gold"])
        return History(**{**history, "watch": watch, "gold": gold, "rollbacks": tuple(history["rollbacks"])})

    def done_before(self, step: int) -> Mapping[str, Any] | None:
        """What the run did after the eval at `step` before a rollback, if that step is now repeated on the same data.

        {action, edits}; the schedule already has the edits. None for any other step.
        """
        # From its first bad update on, the newest rollback passes over data: what older ones say is about other data.
        newest = next((rollback for rollback in reversed(self.rollbacks) if rollback["step"] < step), None)
        if newest is None or step > newest["first_bad_step"]:
            return None
        return newest.get("acts", {}).get(str(step), {"action": None, "edits": []})

    def edits_before(self, step: int) -> list[Mapping[str, Any]]:
        """The config's edits at a step that is repeated after a rollback, also beyond the first bad update."""
        of_steps = [r["acts"].get(str(step)) for r in reversed(self.rollbacks) if r["step"] < step and "acts" in r]
        acts = next(filter(None, of_steps), {"edits": []})
        return [edit for edit in acts["edits"] if edit["kind"] != "replay"]

    def to_json(self) -> dict[str, Any]:
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return own | {"watch": self.watch.to_json(), "gold": self.gold.to_json()}

    def with_eval(self, setup: Setup, step: int, results: Mapping[str, WindowResults]) -> tuple[History, Evaluated]:
        """The history after an eval of some sets, and what the eval found."""
        measured = {name: setup.corpus.evalsets[name].content_hash for name in results}
        watch, evaluated = self.watch.with_eval(setup, step, results)
        history = replace(self, eval_sets={**self.eval_sets, **measured}, watch=watch)
        if PRIMARY not in results:
            return history, evaluated
        loss = evaluated.summaries[PRIMARY].loss
        if math.isfinite(loss) and (self.best_val_loss is None or loss < self.best_val_loss):
            history = replace(history, best_val_loss=loss, best_val_step=step)
        return replace(history, val_loss=loss), evaluated

    def with_phase(self, phase: str, step: int, results: Mapping[str, WindowResults]) -> History:
        """The history after a phase switch; the eval at its step is the new phase's baseline."""
        return replace(self, phase=phase, watch=self.watch.with_phase(step, results))

    def with_row(self, row: Mapping[str, Any]) -> History:
        return replace(self, train_loss=row["loss"], row_step=row["step"])
