"""From phases to segments: every clock a step, every ramp and cap in place, every rate a number, before step 0."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from phases.lr import LrProgram, LrSchedule, first_jump, lr_pieces
from phases.schedule import Phase, Ramp, Schedule, Segment, SourceSupply, cut, joined


class ScheduleError(ValueError):
    """The phases cannot be resolved. `problems` are (path in the config, message) pairs, all that were found."""

    def __init__(self, problems: Sequence[tuple[str, str]]):
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{path}: {message}" for path, message in problems))


_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NUMBER = r"(\d{1,18}(?:\.\d{1,18})?)"
_PERCENT = re.compile(_NUMBER + r"\s*%")
_TOKENS = re.compile(_NUMBER + r"\s*([KMBT]?)\s*tokens?", re.IGNORECASE)
_EPOCHS = re.compile(_NUMBER + r"\s*epochs? of (\S+)")
_MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# Positions are int64 in units of 2**-20 sequences (phases/mixture.py), cursors int64 in tokens.
_MOST_SEQUENCES, _MOST_TOKENS = 2**42, 2**62


def resolve_steps(value: int | str, total_steps: int) -> int:
    """A number of steps, given as such or as a percentage of the run (rounded up). ValueError if it is neither."""
    if isinstance(value, int):
        if not 0 <= value <= _MOST_SEQUENCES:
            raise ValueError(f"got {_short(value)}, expected 0 or more steps, and at most 2**42")
        return value
    if match := _PERCENT.fullmatch(value.strip()):
        return math.ceil(Fraction(match[1]) * total_steps / 100)
    raise ValueError(f"got {_short(value)}, expected a number of steps or a percentage of train.steps such as '5%'")


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
                problems.append((where, _no_such_source(name, sources)))
            if not (math.isfinite(weight) and weight >= 0):
                problems.append((where, f"got {weight}, expected a proportion of 0 or more"))
        if all(w == 0 for w in phase.mixture.values()):
            problems.append((f"{path}.mixture", "got no positive proportion, expected at least one"))
        elif all(map(math.isfinite, phase.mixture.values())) and math.isinf(sum(phase.mixture.values())):
            message = "the proportions add up to more than a float holds; write them on a smaller scale"
            problems.append((f"{path}.mixture", message))
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


def _no_such_source(name: str, sources: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sources, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"no such source{hint} (sources: {', '.join(sorted(sources))})"


def resolve(
    phases: Sequence[Phase],
    supplies: Mapping[str, SourceSupply],
    lr: LrSchedule,
    *,
    total_steps: int,
    batch_size: int,
    seq_len: int,
    sizes_to_come: bool = False,
    past: Sequence[Segment] = (),
    settled: Mapping[str, int] | None = None,
    going_on: Segment | None = None,
) -> Schedule | None:
    """Turn phases into segments: every clock a step, every ramp and cap in place, every rate a number.

    A source of unknown size is never exhausted. A clock in epochs of one is a problem, but with `sizes_to_come` the
    phases from there on are left unresolved: all that needs no size is checked, and None is returned.

    `past` is frozen: what lies before its end comes from it as it stands, data and rates, and what follows from the
    phases. The last phase of the past goes on, if it is declared to end later; else the next one begins. Where the
    phases give the very data of the past, it goes on with its order, so that all of the data are the phases' own; else
    in a new segment, by the declared mixture and with its ramp where it stood. Caps and clocks count what the past has
    read, of sources that are declared no more as well. `settled` are the steps that shares of the run came to before
    `total_steps` changed, of what has begun: `optim.warmup_steps`, `PHASE.ramp_steps`, `PHASE.lr.rewarm_steps`.
    `going_on` is the segment that follows where it is to be another; its end is the phase's.
    Raises ScheduleError with all problems that can be told apart.
    """
    problems = check_phases(phases, list(supplies)) + _check_bounds(supplies, total_steps, batch_size, seq_len)
    problems += _check_past(past, total_steps, seq_len)
    settled = settled or {}

    def read(path, reader, *arguments):
        try:
            return reader(*arguments)
        except ValueError as error:
            problems.append((path, str(error)))
            return 0

    def begun(path, key, value):
        return settled[key] if key in settled else read(path, resolve_steps, value, total_steps)

    warmup = begun("optim.warmup_steps", "optim.warmup_steps", lr.warmup_steps)
    decay = read("optim.decay_steps", resolve_steps, lr.decay_steps, total_steps)
    decay = decay if lr.schedule == "wsd" else 0
    clocks, ramps, programs = [], [], []
    for i, phase in enumerate(phases):
        path, program = f"phases[{i}]", phase.lr or LrProgram()
        until = phase.until, supplies, total_steps, batch_size * seq_len, sizes_to_come, past
        clocks.append(read(f"{path}.until", _clock, *until))
        ramps.append(begun(f"{path}.ramp_steps", f"{phase.name}.ramp_steps", phase.ramp_steps))
        rewarm = begun(f"{path}.lr.rewarm_steps", f"{phase.name}.lr.rewarm_steps", program.rewarm_steps)
        programs.append((rewarm, read(f"{path}.lr.decay_steps", resolve_steps, program.decay_steps, total_steps)))
    if problems:
        raise ScheduleError(problems)

    gone = {name for s in past for name in s.quotas.sources} - supplies.keys()
    names = [*supplies, *sorted(gone)]
    segments = [replace(s, cursors=_of(s.cursors, names)) for s in past]
    warnings: list[str] = []
    start, cursors, before, stopped, resolved = 0, dict.fromkeys(names, 0), {}, False, True
    first, under_way = 0, None
    if past:
        start, cursors = past[-1].end, segments[-1].drawn_at(past[-1].end)
        before = past[-1].mixture_at(start - 1)
        first, under_way = _phase_after(segments, phases, clocks, total_steps, warnings)
    for i, (phase, clock, ramp_steps) in enumerate(zip(phases, clocks, ramps, strict=True)):
        if i < first:
            continue
        if stopped:
            warnings.append(f"phase {phase.name} is never reached: the run stops at step {start}")
            continue
        path, last = f"phases[{i}]", i == len(phases) - 1
        goal, end = (None, clock) if isinstance(clock, int) else (clock, total_steps)
        if goal and goal.tokens is None:
            resolved = False
            break
        mixture = _normalised(phase.mixture)
        weight_sum = sum(phase.mixture.values())
        if abs(weight_sum - 1) > 1e-6:
            shares = ", ".join(f"{n} {w:.4g}" for n, w in mixture.items())
            warnings.append(f"phase {phase.name}: proportions add up to {weight_sum:.6g}, normalised to {shares}")
        ramp = _ramp(before, ramp_steps, phase.ramp_shape, supplies)
        segment = Segment(start, end, phase.name, mixture, ramp, (), cursors, batch_size, seq_len)
        try:
            _check_end(path, start, end, total_steps, last)
            if i == first and under_way:
                segment = _going_on(path, segment, under_way, segments, goal, supplies, warnings)
                start = under_way[0].start
            if i == first and going_on is not None and going_on.phase == phase.name:
                segment, going_on = replace(going_on, cursors=_of(going_on.cursors, names)), None
            if segment is None:
                inside, stopped = [], True
            else:
                segment = replace(segment, end=end, lr=())
                inside, stopped = _phase_segments(path, segment, goal, supplies, warnings)
            if goal and not stopped:
                end = inside[-1].end
                _check_end(path, start, end, total_steps, last)
        except ScheduleError as error:
            problems += error.problems
            resolved = False
            break
        if ramp_steps > end - start:
            got = f"got {ramp_steps} steps for a phase of {end - start} (steps {start} to {end})"
            problems.append((f"{path}.ramp_steps", f"{got}, expected at most its length"))
        segments += inside
        if not segments:
            problems.append(("phases", "a source is exhausted before the first step: nothing is left to train on"))
            resolved = False
            break
        end = segments[-1].end
        rewarm, down = programs[i]
        if inside and rewarm + down > end - start:
            got = f"rewarm_steps ({rewarm}) and decay_steps ({down}) are more than the phase's {end - start} steps"
            problems.append((f"{path}.lr", f"{got}; shorten them"))
        start, cursors, before = end, segments[-1].drawn_at(end), segments[-1].mixture_at(end - 1)

    if going_on is not None and not problems:
        message = f"phase {going_on.phase} is not declared to go on at step {going_on.start}"
        problems.append(("phases", message))
    num_steps = start if resolved else total_steps
    if warmup + decay > num_steps:
        got = f"warm-up ({warmup}) and decay ({decay}) steps are more than the run's {num_steps}"
        problems.append(("optim.warmup_steps", f"{got}; shorten them"))
    if problems:
        raise ScheduleError(problems)
    if not resolved:
        return None
    segments, lr_warnings = _with_rates(segments, phases, lr, warmup, decay, programs, len(past))
    schedule = Schedule(segments)
    return replace(schedule, warnings=(*warnings, *lr_warnings, *_given_nothing(schedule)))


def _of(cursors: Mapping[str, int], sources: Iterable[str]) -> dict[str, int]:
    """Cursors of these sources, 0 of one that has come."""
    return {name: cursors.get(name, 0) for name in sources}


def _ramp(before: Mapping[str, float], steps: int, shape: str, sources: Iterable[str]) -> Ramp | None:
    """The way from a mixture, of which only these sources are there still; None where it has no steps or no start."""
    if any(name not in sources for name in before):
        before = _normalised({name: share for name, share in before.items() if name in sources})
    return Ramp(before, steps, shape) if steps and before else None


def _short(value: int | str) -> str:
    """What was got, for a message, whatever its length."""
    if isinstance(value, int):
        return str(value) if abs(value) < 10**30 else "a number of more than 30 digits"
    return repr(value if len(value) <= 60 else value[:60] + "...")


def _normalised(mixture: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(mixture.values())
    return {name: weight / total for name, weight in mixture.items() if weight > 0}


def _check_bounds(supplies, total_steps, batch_size, seq_len) -> list[tuple[str, str]]:
    """Problems of numbers that the arithmetic cannot hold."""
    problems = []
    sequences = total_steps * batch_size
    if sequences > _MOST_SEQUENCES or sequences * seq_len > _MOST_TOKENS:
        got = f"got {_short(total_steps)}, with batch_size and seq_len {_short(sequences * seq_len)} tokens"
        most = "at most 2**42 sequences and 2**62 tokens in a run"
        problems.append(("train.steps", f"{got}, expected {most}; lower one of the three"))
    for name, supply in supplies.items():
        if supply.max_epochs is not None and not 0 < supply.max_epochs < math.inf:
            got = f"got {supply.max_epochs}, expected a finite number above 0"
            problems.append((f"sources.{name}.max_epochs", f"{got}; leave it out for no cap"))
    return problems


class _Goal(NamedTuple):
    """A clock in epochs: reached once `tokens` of `source` are read since the run's start; None: size unknown."""

    source: str
    tokens: int | None
    text: str


def _clock(until: int | str, supplies, total_steps, tokens_per_step, sizes_to_come, past) -> int | _Goal:
    """The exclusive end of a phase: a step, or what has to be read for it. ValueError if it is no clock."""
    if isinstance(until, int):
        if abs(until) > _MOST_TOKENS:
            raise ValueError(f"got {_short(until)}, expected a step of the run")
        return until
    until = until.strip()
    if until == "end":
        return total_steps
    if match := _PERCENT.fullmatch(until):
        return math.ceil(Fraction(match[1]) * total_steps / 100)
    if match := _TOKENS.fullmatch(until):
        tokens = Fraction(match[1]) * _MULTIPLES[match[2].upper()]
        start = 0
        for segment in past:  # they may have had other batches
            if tokens <= (segment.end - segment.start) * segment.batch_size * segment.seq_len:
                return start + math.ceil(tokens / (segment.batch_size * segment.seq_len))
            tokens -= (segment.end - segment.start) * segment.batch_size * segment.seq_len
            start = segment.end
        return start + math.ceil(tokens / tokens_per_step)
    if match := _EPOCHS.fullmatch(until):
        epochs, name = match.groups()
        if name not in supplies:
            raise ValueError(f"got {_short(until)}: {_no_such_source(name, supplies)}")
        size = supplies[name].num_tokens
        if size is None and not sizes_to_come:
            raise ValueError(
                f"{until!r} needs the size of {name}, which is not prepared yet; run `curriculum prepare` first"
            )
        return _Goal(name, None if size is None else math.ceil(Fraction(epochs) * size), until)
    raise ValueError(
        f"got {_short(until)}, expected a step, a percentage ('40%'), tokens ('1.5B tokens'), "
        "epochs ('2 epochs of law') or 'end'"
    )


def clock_step(until: int | str, total_steps: int, past: Sequence[Segment]) -> int | None:
    """The step that `until` means in a run of such a past; None for a clock in epochs and for what is none."""
    try:
        clock = _clock(until, {}, total_steps, 1, True, past)
    except ValueError:
        return None
    return clock if isinstance(clock, int) else None


def _check_end(path, start, end, total_steps, last) -> None:
    """Raise ScheduleError where a phase that starts at `start` cannot end at `end`."""
    if end <= start:
        message = f"ends at step {end} but starts at step {start}; ends must increase from phase to phase"
    elif end > total_steps:
        message = f"ends at step {end}, after the run's end at step {total_steps} (train.steps)"
    elif last and end < total_steps:
        message = f"the last phase ends at step {end}, before the run's end at step {total_steps}; use 'end'"
    else:
        return
    raise ScheduleError([(f"{path}.until", message)])


def _phase_segments(path, segment, goal, supplies, warnings) -> tuple[list[Segment], bool]:
    """The segments of a phase that begins as `segment` and lasts until its end, or until `goal` is reached before.

    A source at its cap ends a segment, and with on_exhaust `stop` the run: the second value is then True.
    """

    def fail(key, message):
        raise ScheduleError([(key, message)])

    if goal and segment.cursors[goal.source] >= goal.tokens:
        message = f"{goal.text!r} is reached before step {segment.start}, where the phase starts"
        fail(f"{path}.until", f"{message}; ends must increase from phase to phase")
    segments: list[Segment] = []
    while True:
        step, name = _first_exhausted(segment, supplies) or (segment.end, None)
        if goal:
            end = _first_step(segment, step, lambda s, now=segment: now.drawn(s)[goal.source] >= goal.tokens)
            if end is not None:
                return [*segments, replace(segment, end=end)], False
            if name is None:
                fail(f"{path}.until", f"{goal.text!r} is not reached before the run's end at step {segment.end}")
        if name is None:
            return [*segments, segment], False
        supply = supplies[name]
        if supply.on_exhaust == "error":
            message = (
                f"step {step} (phase {segment.phase}) would read more than {supply.max_epochs:g} epochs of {name} "
                f"({supply.num_tokens:,} tokens an epoch); shorten the phase, lower its proportion, raise "
                "max_epochs, or set on_exhaust to stop, renormalise or repeat"
            )
            fail(f"sources.{name}.max_epochs", message)
        if step > segment.start:
            segments.append(replace(segment, end=step))
        if supply.on_exhaust == "stop":
            warnings.append(f"the run stops at step {step}: {name} has no more than {supply.max_epochs:g} epochs")
            return segments, True
        if goal and name == goal.source:
            message = f"{goal.text!r} is never reached: {name} is exhausted at step {step}"
            fail(f"{path}.until", f"{message}, after max_epochs {supply.max_epochs:g}; ask for fewer or raise it")
        warnings.append(f"from step {step} on, phase {segment.phase} goes on without {name}: it is exhausted")
        segment = _without(segment, name, step, path)


def _check_past(past, total_steps, seq_len) -> list[tuple[str, str]]:
    """Problems of a past that cannot stand before what is declared now."""
    if not past:
        return []
    problems, end = [], past[-1].end
    if end > total_steps:
        message = f"the run would end at step {total_steps}, but its schedule stands already up to step {end}"
        problems.append(("train.steps", message))
    if seq_len != past[-1].seq_len:
        got = f"got {seq_len}, but up to step {end} the schedule stands with {past[-1].seq_len}; restore it"
        problems.append(("train.seq_len", got))
    return problems


def _phase_after(past, phases, clocks, total_steps, warnings) -> tuple[int, list[Segment] | None]:
    """(index of the phase at the past's end, its segments so far if it goes on there).

    The last phase of the past goes on if it is declared to end later. Else the next one begins: the first that is
    declared after the past's phases and ends later.
    """
    end, drawn = past[-1].end, past[-1].drawn_at(past[-1].end)
    trained = [name for name, _, _ in Schedule(tuple(past)).phase_bounds]
    names = [phase.name for phase in phases]

    def lasts(i):
        clock = clocks[i]
        if isinstance(clock, int):
            return clock > end
        return clock.tokens is None or drawn[clock.source] < clock.tokens

    first, under_way = max((names.index(name) + 1 for name in trained if name in names), default=0), None
    if trained[-1] in names and lasts(i := names.index(trained[-1])):
        first, under_way = i, [s for s in past if s.phase == trained[-1]]
    else:
        while first < len(names) and not lasts(first):
            first += 1
    for name in names[:first]:
        if name not in trained:
            warnings.append(f"phase {name} is never trained: it would lie before step {end}, which stands already")
    again = [i for i in range(first + (under_way is not None), len(names)) if names[i] in trained]
    if again:
        message = f"{names[again[0]]!r} is trained already, before step {end}; give a phase after it another name"
        raise ScheduleError([(f"phases[{again[0]}].name", message)])
    if first == len(names) and end < total_steps:
        message = (
            f"no phase after those that are trained lasts beyond step {end}, up to which the schedule stands; add one, "
            "or let the last one end with 'end'"
        )
        raise ScheduleError([(f"phases[{first - 1}].until", message)])
    return first, under_way


def _going_on(path, segment, under_way, past, goal, supplies, warnings) -> Segment | None:
    """`segment`, where a phase goes on that has the segments `under_way` so far; None where the run stops there.

    Its ramp goes on where it stood. Where the phase as it is declared gives the very segments that there are, it goes
    on as it would have: in the same order, and without the sources that were exhausted by then.
    """
    under_way = joined(under_way)
    begun, ramp = under_way[0].start, segment.ramp
    if ramp is not None and begun > 0:
        before = Schedule(tuple(past)).segment_at(begun - 1).mixture_at(begun - 1)
        ramp = _ramp(before, ramp.steps, ramp.shape, supplies)

    def declared(start, cursors):
        if ramp is None or begun == 0 or start - begun >= ramp.steps:
            return replace(segment, start=start, cursors=cursors, ramp=None)
        return replace(segment, start=start, cursors=cursors, ramp=replace(ramp, steps_done=start - begun))

    for i, now in enumerate(under_way):  # it may have been cut and gone on before
        told: list[str] = []
        try:
            inside, _ = _phase_segments(path, declared(now.start, now.cursors), goal, supplies, told)
        except ScheduleError:
            continue  # whatever is wrong ahead will be met again
        if joined(cut(inside, segment.start)) == under_way[i:]:
            if inside[-1].end == segment.start:
                warnings += told
                return None
            return Schedule(tuple(inside)).segment_at(segment.start).going_on(segment.start)
    return declared(segment.start, segment.cursors)


def _first_step(segment: Segment, end: int, reached) -> int | None:
    """The first step in (start, end] at which a condition that stays true once it is true holds, by bisection."""
    low, high = segment.start, end
    if low == high or not reached(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _first_exhausted(segment: Segment, supplies) -> tuple[int, str] | None:
    """(update, source) of the first batch that would exceed a source's max_epochs, or None."""
    found = []
    at_end = segment.drawn_at(segment.end)
    for name in segment.quotas.sources:
        supply = supplies[name]
        if supply.max_epochs is None or supply.num_tokens is None or supply.on_exhaust == "repeat":
            continue
        # By way of its digits: the float 0.7 lies below 7/10, which would take a token off the cap.
        limit = int(Fraction(str(supply.max_epochs)) * supply.num_tokens)
        if at_end[name] > max(limit, segment.cursors[name]):
            over = _first_step(segment, segment.end, lambda s, n=name, most=limit: segment.drawn(s)[n] > most)
            found.append((over - 1, name))
    return min(found, default=None)


def _without(segment: Segment, name: str, step: int, path: str) -> Segment:
    """The rest of a segment from `step` on, with one source taken out of both ends of its mixture."""
    mixture = {n: w for n, w in segment.mixture.items() if n != name}
    if not mixture:
        message = f"{name} is exhausted at step {step} and nothing else is in the mixture"
        raise ScheduleError([(f"{path}.mixture", f"{message}; add a source or shorten the phase")])
    ramp = segment.ramp
    if ramp is not None:
        done = segment.ramp_steps_done(step)
        from_mixture = {n: w for n, w in ramp.from_mixture.items() if n != name}
        left = math.fsum(from_mixture.values())
        if done >= ramp.steps or left == 0:
            ramp = None
        else:
            ratio = ramp.mass_ratio * math.fsum(mixture.values()) / left
            ramp = replace(ramp, from_mixture=_normalised(from_mixture), steps_done=done, mass_ratio=ratio)
    cursors = segment.drawn_at(step)
    return replace(segment, start=step, mixture=_normalised(mixture), ramp=ramp, cursors=cursors, skipped=0)


def _with_rates(
    segments, phases, lr: LrSchedule, warmup, decay, programs, num_past
) -> tuple[tuple[Segment, ...], list[str]]:
    """The segments with the learning-rate pieces that reach into them, and warnings of what does nothing.

    The first `num_past` have theirs already. A phase that only they know of has no program.
    """
    place = {phase.name: i for i, phase in enumerate(phases)}
    bounds = Schedule(tuple(segments)).phase_bounds
    spans = [(start, end, phases[place[name]].lr if name in place else None) for name, start, end in bounds]
    program_steps = [programs[place[name]] if name in place else (0, 0) for name, _, _ in bounds]
    past, past_end = Schedule(tuple(segments[:num_past])), segments[num_past - 1].end if num_past else 0

    def past_rate(step):
        return float(past.rates(step))

    pieces = lr_pieces(lr, spans, warmup, decay, program_steps, past_end, past_rate)

    def phase_at(step):
        return next((i, start) for i, (_, start, end) in enumerate(bounds) if step < end)

    jump = None
    if not lr.allow_jump and past_end < segments[-1].end:
        jump = first_jump(pieces, past_end, past_rate)
    if jump:
        step, rate_before, rate = jump
        i, phase_start = phase_at(step)
        jumps = f"the learning rate jumps from {rate_before:.3g} to {rate:.3g} at step {step}"
        if step == past_end > phase_start:
            message = (
                f"{jumps}, up to which the schedule stands: more than 2x; let a phase begin there with an lr of its "
                "own (rewarm_steps, peak), set optim.allow_jump: true, or restore what the rate depends on "
                "(train.steps, optim, the phase's lr)"
            )
            raise ScheduleError([("optim.allow_jump", message)])
        message = (
            f"{jumps}, more than 2x and not over a re-warming of at least 2 updates or a decay; give the phase "
            "rewarm_steps or another peak, or set optim.allow_jump: true"
        )
        raise ScheduleError([(f"phases[{place[bounds[i][0]]}].lr.peak", message)])
    warnings = []
    if lr.schedule == "wsd" and decay == 0 and any(program is None for _, _, program in spans):
        mending = "set optim.decay_steps, such as 20%, or optim.schedule: constant"
        warnings.append(f"schedule wsd with decay_steps 0 never decays, and min_lr_ratio is not used; {mending}")
    if warmup and spans[0][2] is not None:
        warnings.append(
            "optim.warmup_steps does nothing: the first phase has a learning rate of its own (phases[0].lr)"
        )
    for piece in pieces:
        if piece.warmup and piece.first == piece.last and (name := bounds[phase_at(piece.start)[0]][0]) in place:
            where = f"phases[{place[name]}].lr"
            warnings.append(f"{where}.rewarm_steps does nothing: the rate found is the peak; set {where}.peak")
    out = list(segments[:num_past])
    for segment in segments[num_past:]:
        inside = [p for p in pieces if p.start < segment.end]
        first = max(i for i, p in enumerate(inside) if p.start <= segment.start)
        out.append(replace(segment, lr=tuple(inside[first:])))
    return tuple(out), warnings


def _given_nothing(schedule: Schedule) -> list[str]:
    """A warning for each source that has a share in a step of a phase but gets no sequence in it."""
    warnings = []
    for phase, start, end in schedule.phase_bounds:
        before, after = schedule.drawn(start), schedule.drawn(end)
        for name in sorted({n for s in schedule.segments if s.phase == phase for n in s.mean_mixture()}):
            if after[name] == before[name]:
                warnings.append(f"phase {phase}: {name} has a positive proportion but gets no sequence")
    return warnings
