"""Phases as declared, segments as resolved. `phases.resolve` leads from the ones to the others.

A source's cursor is the place in it that the run has come to, in tokens since the run's start: those that updates read
and those that were passed over.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from phases.lr import LrPiece, LrProgram, learning_rate, shaped
from phases.mixture import Quotas

OnExhaust = Literal["error", "stop", "renormalise", "repeat"]


@dataclass(frozen=True)
class Phase:
    """A named span of optimizer steps with one mixture, or a ramp into it."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    name: str
    """Letters, digits, `_` and `-`; unique in the run."""
    until: int | str
    """Exclusive end: a step, `40%` of train.steps, `1.5B tokens`, `2 epochs of SOURCE`, or `end` (last phase only)."""
    mixture: dict[str, float]
    """Source to proportion, counted in sequences; any scale, such as shares of 1 or percentages, normalised to 1."""
    ramp_steps: int | str = 0
    """Steps from the mixture before to this one, or a share of the run such as `5%`."""
    ramp_shape: Literal["linear", "cosine"] = "linear"
    """Course of the ramp; step k of n (from 0) has moved (k + 1) / n of the way, through a half cosine if `cosine`."""
    lr: LrProgram | None = None
    """The phase's own learning rate."""
    seq_len: int | None = None
    """Tokens per sequence in this phase, a divisor of the run's longest; by default train.seq_len."""
    batch_size: int | None = None
    """Sequences per update in this phase, over all micro-steps and devices; by default train.batch_size."""
    grad_accum: int | None = None
    """Micro-steps per update in this phase; changes no data. By default train.grad_accum."""
    rope_theta: float | None = None
    """Base of the rotary positions in this phase, such as a larger one for long sequences; by default the model's."""


@dataclass(frozen=True)
class SourceSupply:
    """What the schedule needs to know of a source; `num_tokens` is one epoch, None while it is not prepared."""

    num_tokens: int | None = None
    max_epochs: float | None = None
    on_exhaust: OnExhaust = "error"

    @property
    def cap_tokens(self) -> int | None:
        """Most tokens that may be read of the source in the whole run; None where nothing limits them."""
        if self.max_epochs is None or self.num_tokens is None or self.on_exhaust == "repeat":
            return None
        # By way of its digits: the float 0.7 lies below 7/10, which would take a token off the cap.
        return int(Fraction(str(self.max_epochs)) * self.num_tokens)


@dataclass(frozen=True)
class Ramp:
    """The way from one mixture into a segment's own. `steps_done` were taken before the segment began.

    Where sources were taken out on the way, `mass_ratio` is what is left of the segment's mixture over what is left
    of `from_mixture`: between the two ends, each normalised again, the other sources keep the ratios they had.
    """

    from_mixture: dict[str, float]
    steps: int
    shape: Literal["linear", "cosine"] = "linear"
    steps_done: int = 0
    mass_ratio: float = 1.0

    @property
    def progress(self) -> np.ndarray:
        """How far each of the segment's own ramp steps has moved, in (0, 1]."""
        moved = shaped(np.arange(self.steps_done + 1, self.steps + 1) / self.steps, self.shape)
        if self.mass_ratio == 1.0:
            return moved
        return moved * self.mass_ratio / (1 - moved + moved * self.mass_ratio)


# What a segment's data do not depend on, as it is where only they matter. Every other field of a segment is compared
# where it is asked whether an order of data goes on: one that is missing here begins it anew when it is edited.
NOT_DATA: dict[str, Any] = {"lr": (), "lr_scale": 1.0, "rope_theta": None}


@dataclass(frozen=True)
class Segment:
    """Steps [start, end) of one phase, resolved: all that the data order and the learning rate depend on.

    `cursors` are the places in the sources where the segment's order begins, in tokens since the run's start. The first
    batch begins with sequence `first_sequence` of that order: the batches before it were read by another segment or are
    passed over. The ramp's steps count from the beginning of the order too. `rope_theta` is None where it is the
    model's own; the rates of `lr` are multiplied by `lr_scale`.
    """

    start: int
    end: int
    phase: str
    mixture: dict[str, float]
    ramp: Ramp | None
    lr: tuple[LrPiece, ...]
    cursors: dict[str, int]
    batch_size: int
    seq_len: int
    first_sequence: int = 0
    rope_theta: float | None = None
    lr_scale: float = 1.0

    @cached_property
    def quotas(self) -> Quotas:
        if self.ramp is None:
            return Quotas(self.mixture)
        return Quotas(self.mixture, self.ramp.from_mixture, self.ramp.progress, self.batch_size)

    def mixture_at(self, step: int) -> dict[str, float]:
        """Proportions during `step`, the update that yields step + 1."""
        if self.ramp is None or (k := self._in_order(step)) >= len(progress := self.ramp.progress):
            return self.mixture
        return self._moved(float(progress[k]))

    def mean_mixture(self) -> dict[str, float]:
        """Mean proportion of each source over the segment's steps; sources without any are left out."""
        if self.ramp is None:
            return self.mixture
        length = self.end - self.start
        progress = self.ramp.progress[self._in_order(self.start) : self._in_order(self.end)]
        mean = (float(progress.sum()) + length - len(progress)) / length
        return {name: share for name, share in self._moved(mean).items() if share > 0}

    def _in_order(self, step: int) -> int:
        """Steps of the segment's order before `step`, those before the segment's start among them."""
        return self.first_sequence // self.batch_size + step - self.start

    def _moved(self, x: float) -> dict[str, float]:
        before, after = self.ramp.from_mixture, self.mixture
        return {n: (1 - x) * before.get(n, 0.0) + x * after.get(n, 0.0) for n in sorted(before.keys() | after.keys())}

    def cursors_over(self, steps) -> dict[str, np.ndarray]:
        """The place in each source before each of `steps` in [start, end]: tokens since the run's start."""
        positions = self.first_sequence + (np.asarray(steps, np.int64) - self.start) * self.batch_size
        counts = self.quotas.counts(positions)
        cursors = {n: np.full(positions.shape, c) for n, c in self.cursors.items()}
        for i, name in enumerate(self.quotas.sources):
            cursors[name] = cursors[name] + counts[..., i] * self.seq_len
        return cursors

    def read_after(self, before: Mapping[str, int], step: int) -> dict[str, int]:
        """Tokens of each of its sources that are read after `step` updates, `before` of them before the segment."""
        cursors = self.cursors_over([self.start, min(step, self.end)])
        return {n: before[n] + int(cursors[n][1] - cursors[n][0]) for n in self.quotas.sources}

    def ramp_steps_done(self, step: int) -> int:
        """Steps of the ramp that were taken before `step`; the segment has one."""
        return self.ramp.steps_done + self._in_order(step)

    def aligned(self) -> Segment:
        """The same with the cursor of each source that it reads rounded up to a whole number of its sequences."""
        mixtures = [self.mixture, *([self.ramp.from_mixture] if self.ramp else [])]
        read = {name for mixture in mixtures for name, share in mixture.items() if share > 0}
        return replace(self, cursors={n: c + (-c % self.seq_len if n in read else 0) for n, c in self.cursors.items()})

    def rest(self, step: int) -> Segment:
        """From `step` on, as a segment of its own: its quotas begin anew, its ramp goes on where it stood."""
        if self._in_order(step) == 0:
            return self
        ramp = self.ramp
        if ramp is not None:
            done = self.ramp_steps_done(step)
            ramp = replace(ramp, steps_done=done) if done < ramp.steps else None
        return replace(self, start=step, ramp=ramp, cursors=self.cursors_at(step), first_sequence=0)

    def continued(self, step: int) -> Segment:
        """From `step` on, as a segment that gives the very same data: its order goes on."""
        return replace(self, start=step, first_sequence=self.first_sequence + (step - self.start) * self.batch_size)

    def cursors_at(self, step: int) -> dict[str, int]:
        """`cursors_over` one step, as plain numbers."""
        return {name: int(tokens) for name, tokens in self.cursors_over(step).items()}


@dataclass(frozen=True)
class Schedule:
    """The whole run, resolved: segments in order, from step 0 without a gap."""

    segments: tuple[Segment, ...]
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def total_steps(self) -> int:
        return self.segments[-1].end

    def segment_at(self, step: int) -> Segment:
        """The segment that owns update `step`; the last one for the step after the end."""
        return self.segments[bisect_right(self._starts, step) - 1]

    @cached_property
    def _starts(self) -> list[int]:
        return [segment.start for segment in self.segments]

    def rope_theta_at(self, step: int) -> float | None:
        """The rope theta of the phase that made the parameters after `step` updates.

        None: the model's own; at step 0 too, where no phase has made them yet. Evals, samples and exports of these
        parameters use it.
        """
        return self.segment_at(step - 1).rope_theta if step else None

    def cursors_at(self, step: int) -> dict[str, int]:
        """The place in each source after `step` updates: tokens since the run's start, read and passed over."""
        return self.segment_at(max(step - 1, 0)).cursors_at(step)

    def read(self, start: int, end: int) -> dict[str, int]:
        """Tokens of each source that the updates [start, end) read: none that a switch or a rollback passes over."""
        before, after = self._read_up_to(start), self._read_up_to(end)
        return {name: after[name] - before[name] for name in after}

    def _read_up_to(self, step: int) -> dict[str, int]:
        i = max(bisect_left(self._starts, step) - 1, 0)
        return self._read_before[i] | self.segments[i].read_after(self._read_before[i], step)

    @cached_property
    def _read_before(self) -> list[dict[str, int]]:
        """Tokens of each source that were read before each segment; made once, as every checkpoint asks for them."""
        read = [dict.fromkeys(self.segments[0].cursors, 0)]
        for segment in self.segments[:-1]:
            read.append(read[-1] | segment.read_after(read[-1], segment.end))
        return read

    def passed_over(self, step: int) -> dict[str, int]:
        """Tokens of each source passed over at `step`, where an order begins: up to its first whole sequence."""
        before, after = self.segment_at(step - 1), self.segment_at(step)
        if step == 0 or after.start != step:
            return {}
        cursors = before.cursors_at(step)
        return {n: c - cursors[n] for n, c in after.cursors.items() if c > cursors[n]}

    def tokens(self, step: int) -> int:
        """Token slots of the first `step` updates."""
        rows = ((min(s.end, step) - s.start, s.batch_size * s.seq_len) for s in self.segments if s.start < step)
        return sum(num_steps * tokens_per_step for num_steps, tokens_per_step in rows)

    def shares(self, step: int) -> dict[str, float]:
        """The proportions of update `step` that are more than 0."""
        return {name: share for name, share in self.segment_at(step).mixture_at(step).items() if share > 0}

    def rates(self, steps) -> np.ndarray:
        """Learning rate (float64) of each update in `steps`, an integer or an array, by the pieces and the scale of
        the segment that owns it.
        """
        steps = np.asarray(steps, np.int64)
        index = np.searchsorted([s.start for s in self.segments], steps, side="right") - 1
        rates = np.empty(steps.shape, np.float64)
        for i in set(index.ravel().tolist()):  # np.unique would import numpy.ma: 4 % of a plan
            rates[index == i] = learning_rate(self.segments[i].lr, steps[index == i]) * self.segments[i].lr_scale
        return rates

    def unscaled_rate(self, step: int) -> float:
        """The rate of an update before its segment's factor."""
        return float(learning_rate(self.segment_at(step).lr, step))

    @cached_property
    def phase_bounds(self) -> tuple[tuple[str, int, int], ...]:
        """(phase, start, end) of each phase, in order."""
        bounds: dict[str, tuple[int, int]] = {}
        for s in self.segments:
            bounds[s.phase] = (bounds.get(s.phase, (s.start, 0))[0], s.end)
        return tuple((name, start, end) for name, (start, end) in bounds.items())

    def phase_end(self, phase: str) -> int:
        return next(end for name, _, end in self.phase_bounds if name == phase)

    @cached_property
    def phase_ends(self) -> frozenset[int]:
        """The steps at which a phase ends, the run's end among them."""
        return frozenset(end for _, _, end in self.phase_bounds)


def segments_to_json(segments: Sequence[Segment]) -> list[dict]:
    """Plain JSON; `segments_from_json` gives equal segments back. `first_sequence` is `skipped` there."""
    names = {"first_sequence": "skipped"}
    return [{names.get(key, key): value for key, value in asdict(segment).items()} for segment in segments]


def segments_from_json(rows: Sequence[Mapping]) -> tuple[Segment, ...]:
    segments = []
    for row in rows:
        fields = {"first_sequence" if key == "skipped" else key: value for key, value in row.items()}
        fields["ramp"] = row["ramp"] and Ramp(**row["ramp"])
        fields["lr"] = tuple(LrPiece(**piece) for piece in row["lr"])
        segments.append(Segment(**fields))
    return tuple(segments)


def cut(segments: Sequence[Segment], step: int) -> tuple[Segment, ...]:
    """What lies before `step`: the segment that owns it ends there, with the pieces of the rate that it got to."""
    return tuple(
        s if s.end <= step else replace(s, end=step, lr=tuple(p for p in s.lr if p.start < step))
        for s in segments
        if s.start < step
    )


def joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The same data in as few segments as possible: one that only continues the order before it is merged into it.

    The result holds only what the data depend on (NOT_DATA).
    """
    out: list[Segment] = []
    for segment in segments:
        segment = replace(segment, **NOT_DATA)
        if out and replace(out[-1].continued(segment.start), end=segment.end) == segment:
            out[-1] = replace(out[-1], end=segment.end)
        else:
            out.append(segment)
    return tuple(out)
