"""Phases as the config declares them, and the segments that `phases.resolve` makes of them.

A source's cursor is the run's position in that source, in tokens since the run's start: those that updates have read
and those that were passed over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from phases.lr import LrPiece, LrProgram, learning_rate, shaped
from phases.mixture import Quotas

OnExhaust = Literal["error", "stop", "renormalise", "repeat"]


@dataclass(frozen=True)
class Phase:
    """A named span of optimizer steps with one mixture, or a ramp into it."""

    name: str
    """Letters (a-z, A-Z), digits, `_` and `-`; unique in the run."""
    until: int | str
    """Exclusive end: a step, `40%` of train.steps, `1.5B tokens`, `2 epochs of SOURCE`, or `end` (last phase only)."""
    mixture: dict[str, float]
    """Proportion of each source in sequences; on any scale, such as shares of 1 or percentages, normalised to 1."""
    ramp_steps: int | str = 0
    """Steps over which the previous mixture changes to this one, or a share of the run such as `5%`."""
    ramp_shape: Literal["linear", "cosine"] = "linear"
    """Shape of the ramp; step k of n (from 0) has moved (k + 1) / n of the way, through a half cosine if `cosine`."""
    lr: LrProgram | None = None
    """The phase's own learning rate."""
    seq_len: int | None = None
    """Tokens per sequence in this phase, a divisor of the run's longest; by default train.seq_len."""
    batch_size: int | None = None
    """Sequences per update in this phase, over all micro-steps and devices; by default train.batch_size."""
    grad_accum: int | None = None
    """Micro-steps per update in this phase; changes no data. By default train.grad_accum."""
    rope_theta: float | None = None
    """Base of rope in this phase, such as a larger one for long sequences; by default the model's."""


@dataclass(frozen=True)
class SourceSupply:
    """What the schedule needs to know about a source; `num_tokens` is one epoch, None until the source is prepared."""

    num_tokens: int | None = None
    max_epochs: float | None = None
    on_exhaust: OnExhaust = "error"

    @property
    def cap_tokens(self) -> int | None:
        """The highest cursor that the source may reach in the run; None if it has no limit or no known size."""
        if self.max_epochs is None or self.num_tokens is None or self.on_exhaust == "repeat":
            return None
        # From the decimal digits: the float 0.7 is slightly below 7/10, which would take a token off the cap.
        return int(Fraction(str(self.max_epochs)) * self.num_tokens)

    @property
    def cap_text(self) -> str:
        """`max_epochs` in words."""
        return f"{self.max_epochs:g} epoch{'' if self.max_epochs == 1 else 's'}"


@dataclass(frozen=True)
class Ramp:
    """A gradual change from `from_mixture` to the segment's own mixture, over `steps` updates.

    `steps_done` of them were taken before the segment's order of data began. If sources were removed during the ramp,
    both mixtures are normalised without them, and `mass_ratio` is the share left in the segment's mixture over the
    share left in `from_mixture`. It adjusts `progress` so that the other sources keep their ratios to each other.
    """

    from_mixture: dict[str, float]
    steps: int
    shape: Literal["linear", "cosine"] = "linear"
    steps_done: int = 0
    mass_ratio: float = 1.0

    def __hash__(self) -> int:
        mixture = frozenset(self.from_mixture.items())
        return hash((mixture, self.steps, self.shape, self.steps_done, self.mass_ratio))

    @property
    def progress(self) -> np.ndarray:
        """Fraction of the way from `from_mixture` at each ramp step after the `steps_done`, in (0, 1]."""
        moved = shaped(np.arange(self.steps_done + 1, self.steps + 1) / self.steps, self.shape)
        if self.mass_ratio == 1.0:
            return moved
        return moved * self.mass_ratio / (1 - moved + moved * self.mass_ratio)


# Quotas are cached, as a segment is made again and again; of 500 sources each takes 300 kB, and more with a ramp.
@lru_cache(maxsize=128)
def _quotas(mixture: frozenset[tuple[str, float]], ramp: Ramp | None, batch_size: int) -> Quotas:
    return Quotas(dict(mixture), ramp.from_mixture, ramp.progress, batch_size) if ramp else Quotas(dict(mixture))


# Fields of a segment that its data do not depend on, with the values that stand in for them when only the data matter.
# All other fields are compared to decide whether an order of data goes on: editing one of those begins a new order.
NOT_DATA: dict[str, Any] = {"lr": (), "rope_theta": None, "lr_scale": 1.0}
SETTINGS = {key: default for key, default in NOT_DATA.items() if key != "lr"}  # those that the record has of a phase


@dataclass(frozen=True)
class Segment:
    """Steps [start, end) of one phase, resolved: all that the data order and the learning rate depend on.

    `cursors` are the sources' cursors where the segment's order of data begins. The segment's first batch begins with
    sequence `first_sequence` of that order: earlier ones were read by another segment or are passed over. Ramp steps,
    too, count from the beginning of the order. `rope_theta` None is the model's own. The rates of `lr` are multiplied
    by `lr_scale`.
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
        return _quotas(frozenset(self.mixture.items()), self.ramp, self.batch_size if self.ramp else 0)

    def mixture_at(self, step: int) -> dict[str, float]:
        """Proportions during `step`, the update that yields step + 1."""
        if self.ramp is None or (k := self._in_order(step)) >= len(progress := self.ramp.progress):
            return self.mixture
        return self._moved(float(progress[k]))

    def mean_mixture(self) -> dict[str, float]:
        """Mean proportion of each source over the segment's steps; sources whose mean is 0 are left out."""
        if self.ramp is None:
            return self.mixture
        length = self.end - self.start
        progress = self.ramp.progress[self._in_order(self.start) : self._in_order(self.end)]
        mean = (float(progress.sum()) + length - len(progress)) / length
        return {name: share for name, share in self._moved(mean).items() if share > 0}

    def _in_order(self, step: int) -> int:
        """Steps of the segment's order of data before `step`, including those before the segment's start."""
        return self.first_sequence // self.batch_size + step - self.start

    def _moved(self, x: float) -> dict[str, float]:
        before, after = self.ramp.from_mixture, self.mixture
        return {n: (1 - x) * before.get(n, 0.0) + x * after.get(n, 0.0) for n in sorted(before.keys() | after.keys())}

    def position(self, step):
        """The position in the segment's order of data at which the batch of `step`, or of each of an array, begins."""
        return self.first_sequence + (step - self.start) * self.batch_size

    def cursor_over(self, name: str, steps: np.ndarray) -> np.ndarray:
        """The cursor of a source before each of `steps`, from `start` on; the order continues beyond `end`."""
        return self.cursors[name] + self.quotas.count(name, self.position(steps)) * self.seq_len

    def read_by(self, step: int) -> dict[str, int]:
        """Tokens that the segment's updates before `step` read of each of its sources."""
        before, after = self.cursors_at(self.start), self.cursors_at(step)
        return {name: after[name] - before[name] for name in self.quotas.sources}

    @cached_property
    def read_whole(self) -> dict[str, int]:
        """`read_by` of all its updates."""
        return self.read_by(self.end)

    def ramp_steps_done(self, step: int) -> int:
        """Ramp steps taken before `step`. The segment must have a ramp."""
        return self.ramp.steps_done + self._in_order(step)

    @property
    def ramp_end(self) -> int | None:
        """The first step at the segment's own mixture, perhaps after its end. None without a ramp."""
        return None if self.ramp is None else self.start + self.ramp.steps - self.ramp_steps_done(self.start)

    def aligned(self) -> Segment:
        """This segment with the cursor of each source that it reads rounded up to a whole number of sequences."""
        mixtures = [self.mixture, *([self.ramp.from_mixture] if self.ramp else [])]
        read = {name for mixture in mixtures for name, share in mixture.items() if share > 0}
        return replace(self, cursors={n: c + (-c % self.seq_len if n in read else 0) for n, c in self.cursors.items()})

    def rest(self, step: int) -> Segment:
        """The part from `step` on as a new order of data: its quotas start afresh, its ramp goes on where it was."""
        if self._in_order(step) == 0:
            return self
        ramp = self.ramp
        if ramp is not None:
            done = self.ramp_steps_done(step)
            ramp = replace(ramp, steps_done=done) if done < ramp.steps else None
        return replace(self, start=step, ramp=ramp, cursors=self.cursors_at(step), first_sequence=0)

    def continued(self, step: int) -> Segment:
        """The part from `step` on, in the same order of data: it reads exactly what this segment would."""
        return replace(self, start=step, first_sequence=self.position(step))

    def cursors_at(self, step: int) -> dict[str, int]:
        """The cursor of each source before `step`, from `start` on; the order continues beyond `end`."""
        return dict(self._cursors_at_end) if step == self.end else self._cursors_at(step)

    @cached_property
    def _cursors_at_end(self) -> dict[str, int]:
        return self._cursors_at(self.end)

    def _cursors_at(self, step: int) -> dict[str, int]:
        position = self.position(step)
        if position == 0:
            return dict(self.cursors)
        counts = zip(self.quotas.sources, self.quotas.counts(position).tolist(), strict=True)
        return self.cursors | {name: self.cursors[name] + count * self.seq_len for name, count in counts}


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
        """The rope theta of the phase that trained the parameters after `step` updates; None is the model's own.

        It is None at step 0, before any phase has trained them. Evals, samples and exports of these parameters use it.
        """
        return self.segment_at(step - 1).rope_theta if step else None

    def cursors_at(self, step: int) -> dict[str, int]:
        """The cursor of each source after `step` updates: tokens read and passed over since the run's start."""
        return self.segment_at(max(step - 1, 0)).cursors_at(step)

    def read(self, start: int, end: int) -> dict[str, int]:
        """Tokens of each source read by the updates [start, end), without those a switch or rollback passes over."""
        before, after = self._read_up_to(start), self._read_up_to(end)
        return {name: after[name] - before[name] for name in after}

    def _read_up_to(self, step: int) -> dict[str, int]:
        if step >= self.total_steps:
            return self._read_before[-1]
        i = bisect_right(self._starts, step) - 1
        before = self._read_before[i]
        if step == self._starts[i]:
            return before
        return before | {name: before[name] + tokens for name, tokens in self.segments[i].read_by(step).items()}

    @cached_property
    def _read_before(self) -> list[dict[str, int]]:
        """Tokens of each source read before each segment and, last, by all; every checkpoint asks for them."""
        read = [dict.fromkeys(self.segments[0].cursors, 0)]
        for segment in self.segments:
            read.append(read[-1] | {name: read[-1][name] + tokens for name, tokens in segment.read_whole.items()})
        return read

    def passed_over(self, step: int) -> dict[str, int]:
        """Tokens of each source passed over at `step`, if a new order of data begins there with a whole sequence."""
        before, after = self.segment_at(step - 1), self.segment_at(step)
        if step == 0 or after.start != step:
            return {}
        cursors = before.cursors_at(step)
        return {n: c - cursors[n] for n, c in after.cursors.items() if c > cursors[n]}

    def tokens(self, step: int) -> int:
        """Token slots of the first `step` updates."""
        step = min(max(step, 0), self.total_steps)
        i = bisect_right(self._starts, step) - 1
        segment = self.segments[i]
        return self._tokens_before[i] + (step - segment.start) * segment.batch_size * segment.seq_len

    @cached_property
    def _tokens_before(self) -> list[int]:
        """Token slots before each segment; every event and metrics row asks for them."""
        slots = ((s.end - s.start) * s.batch_size * s.seq_len for s in self.segments)
        return list(accumulate(slots, initial=0))

    def shares(self, step: int) -> dict[str, float]:
        """The proportions of update `step` that are above 0."""
        return {name: share for name, share in self.segment_at(step).mixture_at(step).items() if share > 0}

    def rates(self, steps) -> np.ndarray:
        """Learning rate (float64) of each update in `steps`, an integer or an array; includes the `lr_scale`."""
        steps = np.asarray(steps, np.int64)
        index = np.searchsorted(self._starts, steps, side="right") - 1
        rates = np.empty(steps.shape, np.float64)
        for i in set(index.ravel().tolist()):  # np.unique would import numpy.ma: 4 % of a plan
            rates[index == i] = learning_rate(self.segments[i].lr, steps[index == i]) * self.segments[i].lr_scale
        return rates

    def unscaled_rate(self, step: int) -> float:
        """The learning rate of update `step` without the `lr_scale` of its segment."""
        return float(learning_rate(self.segment_at(step).lr, step))

    @cached_property
    def phase_bounds(self) -> tuple[tuple[str, int, int], ...]:
        """(phase, start, end) of each phase, in order."""
        bounds: dict[str, tuple[int, int]] = {}
        for s in self.segments:
            bounds[s.phase] = (bounds.get(s.phase, (s.start, 0))[0], s.end)
        return tuple((name, start, end) for name, (start, end) in bounds.items())

    def phases_after(self, step: int) -> set[str]:
        """The phases that have updates from `step` on."""
        return {name for name, _, end in self.phase_bounds if end > step}

    def phase_end(self, phase: str) -> int:
        return next(end for name, _, end in self.phase_bounds if name == phase)

    @cached_property
    def phase_ends(self) -> frozenset[int]:
        """The steps at which a phase ends, including the run's end."""
        return frozenset(end for _, _, end in self.phase_bounds)


def segments_to_json(segments: Sequence[Segment]) -> list[dict]:
    """The segments as plain JSON for `segments_from_json`. The rows share what they hold with the segments."""
    return [
        {**_fields_of(s), "ramp": s.ramp and _fields_of(s.ramp), "lr": [_fields_of(piece) for piece in s.lr]}
        for s in segments
    ]


def _fields_of(record: Any) -> dict[str, Any]:
    """`asdict` without copies of what the fields hold, which would take most of the time of a ledger's entry."""
    return {f.name: getattr(record, f.name) for f in fields(record)}


def segments_from_json(rows: Sequence[Mapping]) -> tuple[Segment, ...]:
    segments = []
    for row in rows:
        parts = {"ramp": row["ramp"] and Ramp(**row["ramp"]), "lr": tuple(LrPiece(**piece) for piece in row["lr"])}
        segments.append(Segment(**{**row, **parts}))
    return tuple(segments)


def cut(segments: Sequence[Segment], step: int) -> tuple[Segment, ...]:
    """The segments before `step`; the one that owns `step` ends there and keeps only the rate pieces begun by then."""
    return tuple(
        s if s.end <= step else replace(s, end=step, lr=tuple(p for p in s.lr if p.start < step))
        for s in segments
        if s.start < step
    )


def joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The same data in the fewest segments: those that continue an order are merged, the fields in NOT_DATA reset."""
    out: list[Segment] = []
    for segment in segments:
        segment = replace(segment, **NOT_DATA)
        if out and replace(out[-1].continued(segment.start), end=segment.end) == segment:
            out[-1] = replace(out[-1], end=segment.end)
        else:
            out.append(segment)
    return tuple(out)
