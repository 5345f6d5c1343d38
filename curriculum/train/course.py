"""The course of a run: what it trains on at each step, and at which learning rate. It can be changed midway."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from curriculum.config import Config
from curriculum.data.corpus import Corpus
from curriculum.scheduling import Past, continued_schedule, curriculum_of
from curriculum.train.device import own_settings
from curriculum.train.feed import Feed
from curriculum.train.mesh import place_batch, rows_here
from curriculum.train.programs import StepShape
from curriculum.train.step import UpdateKnobs
from phases.batches import Batch, DataPlan, Draws
from phases.clocks import in_epochs
from phases.replay import ReplayRefused, raise_share
from phases.rollback import RollbackRefused, judged_from, pass_over
from phases.schedule import Schedule, Segment, cut


class Course:
    """The schedule of a run and all that follows from it.

    schedule: as currently planned.
    past: what the config does not decide. Its segments are fixed (trained, or set by a replay or a rollback); the
        config decides only what follows them. Saved in checkpoints.
    before_raised: (step, schedule, past) for each share that was raised, oldest first: the plan without it, which a
        rollback to before that step returns to. Saved in checkpoints.
    branched_from: what a branch remembers of its trunk (`curriculum.branch`); None for other runs.
    plan: the order in which the sources are read.
    rates: the learning rate by update, float64.
    judged_from: for each update, the first one whose loss is comparable with its own; int32.
    feed: the batches, on the mesh.

    Raises InputError if the config's schedule does not resolve after `past`.
    """

    def __init__(self, config: Config, corpus: Corpus, mesh: Mesh, past: Past, branched_from: Mapping[str, Any] | None):
        self._config, self._corpus, self._mesh = config, corpus, mesh
        self.branched_from = branched_from
        epochs = corpus.tokens_per_epoch
        self.before_raised = [
            (step, *continued_schedule(config, epochs, before)) for step, before in past.before_raised
        ]
        self._follow(*continued_schedule(config, epochs, replace(past, before_raised=())))

    def _follow(self, schedule: Schedule, past: Past) -> None:
        self.schedule, self.past = schedule, past
        seed = self._config.seed if past.seed is None else past.seed
        self.plan = DataPlan(schedule, seed, self._corpus.tokens_per_epoch, self._config.longest_seq_len)
        self.rates = schedule.rates(np.arange(schedule.total_steps))
        self.judged_from = judged_from(schedule)
        self.feed = Feed(self.plan, self._batch)

    @own_settings()  # the feed has a thread of its own
    def _batch(self, step: int, draws: Draws) -> Batch:
        """The batch of update `step`; each process makes only the rows that its devices take."""
        shape = self.shape_at(step)
        batch = self.plan.batch(
            step,
            self._corpus.streams,
            self._corpus.tokenizer.eot,
            shape.A,
            draws,
            mask_boundary_loss=self._config.packing.mask_boundary_loss,
            train_on_eos=self._config.packing.train_on_eos,
            bos=self._corpus.tokenizer.bos,
            rows=rows_here(self._mesh, shape.B),
        )
        return place_batch(self._mesh, batch, shape.B)

    def close(self) -> None:
        """Stop making batches ahead."""
        self.feed.close()

    def knobs(self, step: int) -> UpdateKnobs:
        """The arguments of update `step` besides its batch: its learning rate, entry of `judged_from`, and the seed."""
        lr, judged_from = np.float32(self.rates[step]), np.int32(self.judged_from[step])
        return UpdateKnobs(lr, judged_from, seed=np.uint32(self._config.seed))

    def shape_at(self, step: int) -> StepShape:
        return self._shape_of(self.schedule.segment_at(step))

    def shapes_from(self, step: int) -> list[StepShape]:
        """The distinct shapes of the updates from `step` on, in the order in which they are needed."""
        return list(dict.fromkeys(self._shape_of(s) for s in self.schedule.segments if s.end > step))

    def _shape_of(self, segment: Segment) -> StepShape:
        return StepShape.of(segment, self._config.grad_accum_of(segment.phase))

    @property
    def total_steps(self) -> int:
        """Updates of the run, as currently planned."""
        return self.schedule.total_steps

    @property
    def phase_ends(self) -> frozenset[int]:
        """The steps at which a phase ends, as currently planned; they include the run's end."""
        return self.schedule.phase_ends

    def segment_at(self, done: int) -> Segment:
        """The segment of the newest of `done` updates; at 0, of the first update."""
        return self.schedule.segment_at(_newest(done))

    def phase_at(self, done: int) -> str:
        """The phase of the newest of `done` updates; at 0, of the first update."""
        return self.segment_at(done).phase

    def mixture_at(self, done: int) -> dict[str, float]:
        """The shares of the sources at the newest of `done` updates; at 0, at the first update."""
        return self.segment_at(done).mixture_at(_newest(done))

    def rate_at(self, done: int) -> float:
        """The learning rate of the newest of `done` updates; at 0, of the first update."""
        return float(self.rates[_newest(done)])

    def tokens_at(self, step: int) -> int:
        """Token slots consumed in the first `step` updates."""
        return self.schedule.tokens(step)

    def phase_ends_at(self, step: int) -> frozenset[int]:
        """The phase ends as planned after `step` updates; before a branch leaves its trunk, those of the trunk."""
        of_trunks = self.branched_from["phase_ends"] if self.branched_from else []
        return next((frozenset(ends) for until, ends in of_trunks if step <= until), self.schedule.phase_ends)

    def of_trunk(self, step: int) -> Mapping[str, Any] | None:
        """What a branch's trunk did after `step` updates, before the branch point: {action, edits}; None if nothing.

        action: that of its `eval_regression`; edits: its `schedule_edit` events.
        """
        if self.branched_from is None or step >= self.branched_from["step"]:
            return None
        return self.branched_from["acts"].get(str(step))

    def raise_share(
        self, step: int, source: str, factor: float, max_share: float, spared: Collection[str] = ()
    ) -> dict[str, Any]:
        """Raise the share of a source from update `step` to the end of its phase, as described in `phases.replay`.

        Returns what `schedule_edit` records of it. Raises ReplayRefused if that is not possible, with the schedule
        unchanged.
        """
        if self.branched_from and step < self.branched_from["step"]:
            raise ReplayRefused(f"up to step {self.branched_from['step']} the schedule is the trunk's")
        curriculum = curriculum_of(self._config, self._corpus.tokens_per_epoch, self.past)
        replay = raise_share(
            self.schedule, curriculum, step=step, source=source, factor=factor, max_share=max_share, spared=spared
        )
        self.before_raised.append((step, self.schedule, self.past))
        self._replan(replay.schedule, replay.past)
        return {
            "kind": "replay",
            "phase": replay.phase,
            "mixture_before": replay.mixture_before,
            "mixture_after": replay.mixture_after,
            "until": replay.until,
        }

    def pass_over(self, step: int, num_steps: int, *, back_to: int) -> None:
        """Replan without the data of `num_steps` updates from `step` on, as described in `phases.rollback`.

        A share that was raised after `step` is lowered again: the eval that asked for it will come out differently.
        Raises RollbackRefused if that is not possible, or if the run, which goes back to step `back_to`, would again
        read a source that it has continued without. The schedule is then unchanged.
        """
        supplies = curriculum_of(self._config, self._corpus.tokens_per_epoch, self.past).supplies
        raised_later = [before for before in self.before_raised if before[0] > step]
        _, whole, past = raised_later[0] if raised_later else (step, self.schedule, self.past)
        for segment in whole.segments:
            gone = [name for name in segment.quotas.sources if name not in supplies]
            if gone and segment.end > back_to:
                drawn = f"which updates from step {max(segment.start, back_to)} on draw from"
                raise RollbackRefused(f"{gone[0]}, {drawn}, is gone from the sources; put it back")
        schedule = pass_over(whole, supplies, step, num_steps)
        name, _, phase_end = next(bounds for bounds in schedule.phase_bounds if step < bounds[2])
        until = max(phase_end, past.end)
        settled = dict(past.settled)
        clock = next((phase.until for phase in self._config.phases if phase.name == name), None)
        if clock is not None and in_epochs(clock) and phase_end < schedule.total_steps:
            settled[f"{name}.until"] = phase_end
        self.past = replace(self.past, settled=settled)
        self.before_raised = [before for before in self.before_raised if before[0] <= step]
        self._replan(schedule, cut(schedule.segments, until))

    def _replan(self, schedule: Schedule, past: Sequence[Segment]) -> None:
        """Switch to another schedule of the same sources, dropping batches made ahead."""
        self.feed.close()  # waits, so that no batch mixes two schedules
        self._follow(schedule, replace(self.past, segments=tuple(past)))


def _newest(done: int) -> int:
    """Index of the newest of `done` updates, counted from 0; 0 if there is none yet."""
    return max(done - 1, 0)
