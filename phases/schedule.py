"""Phases as declared, segments as resolved, and the resolution of every clock, ramp and cap before step 0."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np

from phases.lr import LrPiece, LrProgram, LrSchedule, first_jump, learning_rate, lr_pieces
from phases.mixture import Quotas

OnExhaust = Literal["error", "stop", "renormalise", "repeat"]


@dataclass(frozen=True)
class Phase:
    """A named span of optimizer steps with one mixture, or a ramp into it."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "use_attribute_docstrings": True}

    name: str
    """Letters, digits, `_` and `-`; unique in the run."""
    until: int | str
    """Exclusive end: a step, `40%` of train.steps, `1.5B tokens`, `2 epochs of SOURCE`, or `end` (last phase only)."""
    mixture: dict[str, float]
    """Source to proportion, counted in sequences; any scale, normalised to 1."""
    ramp_steps: int | str = 0
    """Steps from the mixture before to this one, or a share of the run such as `5%`."""
    ramp_shape: Literal["linear", "cosine"] = "linear"
    """Course of the ramp; step k of n (from 0) has moved (k + 1) / n of the way, through a half cosine if `cosine`."""
    lr: LrProgram | None = None
    """The phase's own learning rate."""


@dataclass(frozen=True)
class SourceSupply:
    """What the schedule needs to know of a source; `num_tokens` is one epoch, None while it is not prepared."""

    num_tokens: int | None = None
    max_epochs: float | None = None
    on_exhaust: OnExhaust = "error"


@dataclass(frozen=True)
class Ramp:
    """The way from one mixture into a segment's own. `steps_done` were taken before the segment began."""

    from_mixture: dict[str, float]
    steps: int
    shape: Literal["linear", "cosine"] = "linear"
    steps_done: int = 0

    @property
    def progress(self) -> np.ndarray:
        """How far each of the segment's own ramp steps has moved, in (0, 1]."""
        moved = np.arange(self.steps_done + 1, self.steps + 1) / self.steps
        return moved if self.shape == "linear" else 0.5 - 0.5 * np.cos(np.pi * moved)


@dataclass(frozen=True)
class Segment:
    """Steps [start, end) of one phase, resolved: all that the data order and the learning rate depend on.

    `cursors` are how far each source was read before `start`, in tokens since the run's start; `skipped` are
    sequences of the segment's own order that are passed over before its first batch.
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
    skipped: int = 0

    @cached_property
    def quotas(self) -> Quotas:
        if self.ramp is None:
            return Quotas(self.mixture)
        return Quotas(self.mixture, self.ramp.from_mixture, self.ramp.progress, self.batch_size)

    def mixture_at(self, step: int) -> dict[str, float]:
        """Proportions during `step`, the update that yields step + 1."""
        if self.ramp is None or (k := step - self.start) >= len(progress := self.ramp.progress):
            return self.mixture
        x, before = float(progress[k]), self.ramp.from_mixture
        names = sorted(before.keys() | self.mixture.keys())
        return {n: (1 - x) * before.get(n, 0.0) + x * self.mixture.get(n, 0.0) for n in names}

    def drawn(self, steps) -> dict[str, np.ndarray]:
        """How far each source is read before each of `steps` in [start, end]: tokens since the run's start."""
        positions = self.skipped + (np.asarray(steps, np.int64) - self.start) * self.batch_size
        counts = self.quotas.counts(positions)
        drawn = {n: np.full(positions.shape, c) for n, c in self.cursors.items()}
        for i, name in enumerate(self.quotas.sources):
            drawn[name] = drawn[name] + counts[..., i] * self.seq_len
        return drawn


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
        starts = [s.start for s in self.segments]
        return self.segments[int(np.searchsorted(starts, step, side="right")) - 1]

    def drawn(self, step: int) -> dict[str, int]:
        """Tokens drawn of each source in the first `step` updates."""
        segment = self.segment_at(max(step - 1, 0))
        return {name: int(tokens) for name, tokens in segment.drawn(step).items()}

    @cached_property
    def lr(self) -> tuple[LrPiece, ...]:
        return tuple(dict.fromkeys(piece for segment in self.segments for piece in segment.lr))

    @cached_property
    def phase_bounds(self) -> tuple[tuple[str, int, int], ...]:
        """(phase, start, end) of each phase, in order."""
        bounds: dict[str, tuple[int, int]] = {}
        for s in self.segments:
            bounds[s.phase] = (bounds.get(s.phase, (s.start, 0))[0], s.end)
        return tuple((name, start, end) for name, (start, end) in bounds.items())


def segments_to_json(segments: Sequence[Segment]) -> list[dict]:
    """Plain JSON; `segments_from_json` gives equal segments back."""
    return [asdict(segment) for segment in segments]


def segments_from_json(rows: Sequence[Mapping]) -> tuple[Segment, ...]:
    return tuple(
        Segment(
            **{
                **row,
                "ramp": row["ramp"] and Ramp(**row["ramp"]),
                "lr": tuple(LrPiece(**piece) for piece in row["lr"]),
            }
        )
        for row in rows
    )


def first_difference(old: Sequence[Segment], new: Sequence[Segment], until: int) -> int | None:
    """The first update before `until` whose data or learning rate two schedules disagree on, or None."""
    for step in sorted({s.start for s in (*old, *new) if s.start < until}):
        order = [replace(Schedule(tuple(s)).segment_at(step), end=0, lr=()) for s in (old, new)]
        if order[0] != order[1]:
            until = step  # a learning rate may still differ before
            break
    else:
        step = None
    rates = [learning_rate(Schedule(tuple(s)).lr, np.arange(until)) for s in (old, new)]
    unequal = np.flatnonzero(rates[0] != rates[1])
    return int(unequal[0]) if len(unequal) else step


class ScheduleError(ValueError):
    """The phases cannot be resolved. `problems` are (path in the config, message) pairs, all that were found."""

    def __init__(self, problems: Sequence[tuple[str, str]]):
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{path}: {message}" for path, message in problems))


_NAME = re.compile(r"[A-Za-z0-9_-]+")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)\s*([KMBT]?)\s*tokens?", re.IGNORECASE)
_EPOCHS = re.compile(r"(\d+(?:\.\d+)?)\s*epochs? of (\S+)")
_MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def resolve_steps(value: int | str, total_steps: int) -> int:
    """A number of steps, given as such or as a percentage of the run (rounded up). ValueError if it is neither."""
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"got {value}, expected 0 or more steps")
        return value
    if match := _PERCENT.fullmatch(value.strip()):
        return math.ceil(Fraction(match[1]) * total_steps / 100)
    raise ValueError(f"got {value!r}, expected a number of steps or a percentage of train.steps such as '5%'")


def check_phases(phases: Sequence[Phase], sources: Sequence[str]) -> list[tuple[str, str]]:
    """What is wrong with the phases on their own, before any step is resolved: (path, message) pairs."""
    problems: list[tuple[str, str]] = []
    if not phases:
        problems.append(("phases", "got none, expected at least one phase"))
    seen: dict[str, int] = {}
    for i, phase in enumerate(phases):
        path = f"phases[{i}]"
        if not _NAME.fullmatch(phase.name):
            problems.append((f"{path}.name", f"got {phase.name!r}, expected letters, digits, '_' and '-'"))
        elif phase.name in seen:
            problems.append((f"{path}.name", f"{phase.name!r} is already the name of phases[{seen[phase.name]}]"))
        seen.setdefault(phase.name, i)
        for name, weight in phase.mixture.items():
            where = f"{path}.mixture.{name}"
            if name not in sources:
                close = difflib.get_close_matches(name, sources, 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                problems.append((where, f"no such source{hint} (sources: {', '.join(sorted(sources))})"))
            if not (math.isfinite(weight) and weight >= 0):
                problems.append((where, f"got {weight}, expected a proportion of 0 or more"))
        if all(w == 0 for w in phase.mixture.values()):
            problems.append((f"{path}.mixture", "got no positive proportion, expected at least one"))
        if phase.until == "end" and i < len(phases) - 1:
            problems.append((f"{path}.until", "'end' is for the last phase only"))
        if i == 0 and phase.ramp_steps not in (0, "0%"):
            problems.append((f"{path}.ramp_steps", "the first phase has no mixture before it to ramp from"))
        if program := phase.lr:
            if program.peak is not None and not (math.isfinite(program.peak) and program.peak > 0):
                problems.append((f"{path}.lr.peak", f"got {program.peak}, expected a positive learning rate"))
            if not 0 <= program.decay_to_ratio <= 1:
                got = program.decay_to_ratio
                problems.append((f"{path}.lr.decay_to_ratio", f"got {got}, expected 0 to 1"))
    return problems


def resolve(
    phases: Sequence[Phase],
    supplies: Mapping[str, SourceSupply],
    lr: LrSchedule,
    *,
    total_steps: int,
    batch_size: int,
    seq_len: int,
) -> Schedule:
    """Turn phases into segments: every clock a step, every ramp and cap in place, every rate a number.

    Raises ScheduleError with all problems that can be told apart.
    """
    problems = check_phases(phases, list(supplies))
    if problems:
        raise ScheduleError(problems)
    warnings: list[str] = []
    segments: list[Segment] = []
    cursors = dict.fromkeys(supplies, 0)
    start, before, stopped = 0, {}, False
    for i, phase in enumerate(phases):
        if stopped:
            warnings.append(f"phase {phase.name} is never reached: the run stops at step {start}")
            continue
        path = f"phases[{i}]"
        mixture = _normalised(phase.mixture)
        weight_sum = sum(phase.mixture.values())
        if abs(weight_sum - 1) > 1e-6:
            shares = ", ".join(f"{n} {w:.4g}" for n, w in mixture.items())
            warnings.append(f"phase {phase.name}: proportions add up to {weight_sum:.6g}, normalised to {shares}")
        try:
            ramp_steps = resolve_steps(phase.ramp_steps, total_steps)
        except ValueError as error:
            raise ScheduleError([(f"{path}.ramp_steps", str(error))]) from None
        ramp = Ramp(before, ramp_steps, phase.ramp_shape) if ramp_steps else None
        segment = Segment(start, total_steps, phase.name, mixture, ramp, (), cursors, batch_size, seq_len)
        end = _until(path, phase, segment, supplies, total_steps, last=i == len(phases) - 1)
        if ramp_steps > end - start:
            got = f"got {ramp_steps} steps for a phase of {end - start} (steps {start} to {end})"
            raise ScheduleError([(f"{path}.ramp_steps", f"{got}, expected at most its length")])
        segment = replace(segment, end=end)
        while (exhausted := _first_exhausted(segment, supplies)) is not None:
            step, name = exhausted
            supply = supplies[name]
            if supply.on_exhaust == "error":
                message = (
                    f"step {step} (phase {phase.name}) would read more than {supply.max_epochs:g} epochs of {name} "
                    f"({supply.num_tokens:,} tokens an epoch); shorten the phase, lower its proportion, raise "
                    "max_epochs, or set on_exhaust to stop, renormalise or repeat"
                )
                raise ScheduleError([(f"sources.{name}.max_epochs", message)])
            if step > segment.start:
                segments.append(replace(segment, end=step))
            if supply.on_exhaust == "stop":
                warnings.append(f"the run stops at step {step}: {name} has no more than {supply.max_epochs:g} epochs")
                stopped, end = True, step
                break
            warnings.append(f"from step {step} on, phase {phase.name} goes on without {name}: it is exhausted")
            segment = _without(segment, name, step, path)
        else:
            segments.append(segment)
        if not segments:
            raise ScheduleError(
                [("phases", "a source is exhausted before the first step: nothing is left to train on")]
            )
        last = segments[-1]
        cursors = {name: int(tokens) for name, tokens in last.drawn(last.end).items()}
        before = last.mixture_at(last.end - 1)
        if not stopped:
            before = segment.mixture_at(end - 1)
        start = end
    schedule = Schedule(_with_rates(segments, phases, lr, total_steps), tuple(warnings))
    return replace(schedule, warnings=schedule.warnings + _given_nothing(schedule))


def _normalised(mixture: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(mixture.values())
    return {name: weight / total for name, weight in mixture.items() if weight > 0}


def _until(path, phase, segment, supplies, total_steps, *, last) -> int:
    """The exclusive end of a phase as a step."""

    def fail(message):
        raise ScheduleError([(f"{path}.until", message)])

    tokens_per_step = segment.batch_size * segment.seq_len
    until = phase.until.strip() if isinstance(phase.until, str) else phase.until
    if until == "end":
        end = total_steps
    elif isinstance(until, int):
        end = until
    elif match := _PERCENT.fullmatch(until):
        end = math.ceil(Fraction(match[1]) * total_steps / 100)
    elif match := _TOKENS.fullmatch(until):
        end = math.ceil(Fraction(match[1]) * _MULTIPLES[match[2].upper()] / tokens_per_step)
    elif match := _EPOCHS.fullmatch(until):
        name = match[2]
        if name not in supplies:
            close = difflib.get_close_matches(name, list(supplies), 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            fail(f"got {until!r}: no such source{hint} (sources: {', '.join(sorted(supplies))})")
        if supplies[name].num_tokens is None:
            fail(f"{until!r} needs the size of {name}, which is not prepared yet; run `curriculum prepare` first")
        goal = Fraction(match[1]) * supplies[name].num_tokens
        end = _first_step(segment, lambda steps: segment.drawn(steps)[name] >= math.ceil(goal))
        if end is None:
            fail(f"{until!r} is not reached before the run's end at step {total_steps}")
    else:
        fail(
            f"got {until!r}, expected a step, a percentage ('40%'), tokens ('1.5B tokens'), "
            "epochs ('2 epochs of law') or 'end'"
        )
    if end <= segment.start:
        fail(f"ends at step {end} but starts at step {segment.start}; ends must increase from phase to phase")
    if end > total_steps:
        fail(f"ends at step {end}, after the run's end at step {total_steps} (train.steps)")
    if last and end < total_steps:
        fail(f"the last phase ends at step {end}, before the run's end at step {total_steps}; use 'end'")
    return end


def _first_step(segment: Segment, reached) -> int | None:
    """The first step in (start, end] at which a condition that stays true once it is true holds, by bisection."""
    if not reached(segment.end):
        return None
    low, high = segment.start, segment.end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _first_exhausted(segment: Segment, supplies) -> tuple[int, str] | None:
    """(update, source) of the first batch that would exceed a source's max_epochs, or None."""
    found = []
    at_end = segment.drawn(segment.end)
    for name in segment.quotas.sources:
        supply = supplies[name]
        if supply.max_epochs is None or supply.num_tokens is None or supply.on_exhaust == "repeat":
            continue
        limit = int(Fraction(supply.max_epochs) * supply.num_tokens)
        if at_end[name] > limit and at_end[name] > segment.cursors[name]:
            step = _first_step(segment, lambda steps, n=name, m=limit: segment.drawn(steps)[n] > m)
            found.append((step - 1, name))
    return min(found) if found else None


def _without(segment: Segment, name: str, step: int, path: str) -> Segment:
    """The rest of a segment from `step` on, with one source taken out of both ends of its mixture."""
    mixture = {n: w for n, w in segment.mixture.items() if n != name}
    if not mixture:
        message = f"{name} is exhausted at step {step} and nothing else is in the mixture"
        raise ScheduleError([(f"{path}.mixture", f"{message}; add a source or shorten the phase")])
    ramp = segment.ramp
    if ramp is not None:
        done = ramp.steps_done + step - segment.start
        from_mixture = {n: w for n, w in ramp.from_mixture.items() if n != name}
        over = done >= ramp.steps or not from_mixture
        ramp = None if over else replace(ramp, from_mixture=_normalised(from_mixture), steps_done=done)
    cursors = {n: int(tokens) for n, tokens in segment.drawn(step).items()}
    return replace(segment, start=step, mixture=_normalised(mixture), ramp=ramp, cursors=cursors)


def _with_rates(segments, phases, lr: LrSchedule, total_steps) -> tuple[Segment, ...]:
    """The segments with the learning-rate pieces that reach into them."""
    end = segments[-1].end
    by_name = {phase.name: (i, phase) for i, phase in enumerate(phases)}
    problems = []

    def steps(path, value):
        try:
            return resolve_steps(value, total_steps)
        except ValueError as error:
            problems.append((path, str(error)))
            return 0

    warmup = steps("optim.warmup_steps", lr.warmup_steps)
    decay = steps("optim.decay_steps", lr.decay_steps) if lr.schedule == "wsd" else 0
    if warmup + decay > end:
        problems.append(
            (
                "optim.warmup_steps",
                f"warm-up ({warmup}) and decay ({decay}) steps are more than the run's {end}",
            )
        )
    bounds, program_steps = [], []
    for name, first, last in Schedule(tuple(segments)).phase_bounds:
        i, phase = by_name[name]
        bounds.append((first, last, phase.lr))
        program = phase.lr or LrProgram()
        rewarm = steps(f"phases[{i}].lr.rewarm_steps", program.rewarm_steps)
        down = steps(f"phases[{i}].lr.decay_steps", program.decay_steps)
        if rewarm + down > last - first:
            got = f"rewarm_steps ({rewarm}) and decay_steps ({down}) are more than the phase's {last - first} steps"
            problems.append((f"phases[{i}].lr", got))
        program_steps.append((rewarm, down))
    if problems:
        raise ScheduleError(problems)
    pieces = lr_pieces(lr, bounds, warmup, decay, program_steps)
    if not lr.allow_jump and (jump := first_jump(pieces)):
        step, rate_before, rate = jump
        i = by_name[Schedule(tuple(segments)).segment_at(step).phase][0]
        message = (
            f"the learning rate jumps from {rate_before:.3g} to {rate:.3g} at step {step}, more than 2x; "
            "give the phase rewarm_steps or another peak, or set optim.allow_jump: true"
        )
        raise ScheduleError([(f"phases[{i}].lr", message)])
    out = []
    for segment in segments:
        inside = [p for p in pieces if p.start < segment.end]
        first = max(i for i, p in enumerate(inside) if p.start <= segment.start)
        out.append(replace(segment, lr=tuple(inside[first:])))
    return tuple(out)


def _given_nothing(schedule: Schedule) -> tuple[str, ...]:
    """A warning for each source of a positive weight that gets no sequence in its phase."""
    warnings = []
    for phase, start, end in schedule.phase_bounds:
        before, after = schedule.drawn(start), schedule.drawn(end)
        asked = {n for s in schedule.segments if s.phase == phase for n in s.quotas.sources}
        for name in sorted(asked):
            if after[name] == before[name]:
                warnings.append(f"phase {phase}: {name} has a positive proportion but gets no sequence")
    return tuple(warnings)
