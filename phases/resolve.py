"""From phases to segments: every clock a step, every ramp and cap in place, every rate a number, before step 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from phases.checks import check_bounds, check_lengths, check_phases
from phases.clocks import EpochGoal, TokenGoal, read_clock, resolve_steps
from phases.lr import LrProgram, LrSchedule, first_jump, lr_pieces, lr_scale
from phases.schedule import Phase, Ramp, Schedule, Segment, SourceSupply, cut, joined


class ScheduleError(ValueError):
    """The phases cannot be resolved. `problems` are (path in the config, message) pairs, all that were found."""

    def __init__(self, problems: Sequence[tuple[str, str]]):
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{path}: {message}" for path, message in problems))


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

    `batch_size` and `seq_len` are those of phases that have none of their own. Where a segment begins, the cursor of
    each source that it reads is rounded up to a whole number of its sequences, so that none runs over the end of a
    block: what lies between is passed over. A rate is meant for `batch_size`, as `lr.scale_lr_by_batch` says.

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
    batches = [batch_size if phase.batch_size is None else phase.batch_size for phase in phases]
    lengths = [seq_len if phase.seq_len is None else phase.seq_len for phase in phases]
    longest = max([seq_len, *lengths])
    problems = check_phases(phases, list(supplies)) + check_lengths(phases, seq_len)
    problems += check_bounds(supplies, total_steps, max([batch_size, *batches]), longest)
    problems += _check_past(past, total_steps, longest)
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
        clocks.append(read(f"{path}.until", read_clock, phase.until, supplies, total_steps, sizes_to_come))
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
        goal, end = (clock, total_steps) if isinstance(clock, EpochGoal) else (None, clock)
        if goal and goal.tokens is None:
            resolved = False
            break
        batch, length = batches[i], lengths[i]
        if isinstance(clock, TokenGoal):
            end = clock.step(segments, batch * length)
        mixture = _normalised(phase.mixture)
        weight_sum = sum(phase.mixture.values())
        if abs(weight_sum - 1) > 1e-6:
            shares = ", ".join(f"{n} {w:.4g}" for n, w in mixture.items())
            warnings.append(f"phase {phase.name}: proportions add up to {weight_sum:.6g}, normalised to {shares}")
        ramp = _ramp(before, ramp_steps, phase.ramp_shape, supplies)
        of_phase = {"rope_theta": phase.rope_theta, "lr_scale": lr_scale(lr, batch, batch_size)}
        segment = Segment(start, end, phase.name, mixture, ramp, (), cursors, batch, length, **of_phase).aligned()
        try:
            _check_end(path, start, end, total_steps, last)
            if i == first and under_way:
                segment = _going_on(path, segment, under_way, segments, goal, supplies, warnings)
                start = under_way[0].start
            if i == first and going_on is not None and going_on.phase == phase.name:
                of_phase["lr_scale"] = lr_scale(lr, going_on.batch_size, batch_size)
                segment, going_on = replace(going_on, cursors=_of(going_on.cursors, names), **of_phase).aligned(), None
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


def _normalised(mixture: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(mixture.values())
    return {name: weight / total for name, weight in mixture.items() if weight > 0}


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


def _check_past(past, total_steps, longest) -> list[tuple[str, str]]:
    """Problems of a past that cannot stand before what is declared now."""
    if not past:
        return []
    problems, end = [], past[-1].end
    if end > total_steps:
        message = f"the run would end at step {total_steps}, but its schedule stands already up to step {end}"
        problems.append(("train.steps", message))
    if uneven := [segment for segment in past if longest % segment.seq_len]:
        stands = f"but steps {uneven[0].start} to {uneven[0].end} stand with sequences of {uneven[0].seq_len}"
        problems.append(("train.seq_len", f"got a longest sequence of {longest}, {stands}; restore it"))
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
        if isinstance(clock, EpochGoal):
            return clock.tokens is None or drawn[clock.source] < clock.tokens
        if isinstance(clock, TokenGoal):
            return clock.tokens > Schedule(tuple(past)).tokens(end)
        return clock > end

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

    Its ramp goes on where it stood. Where the phase as it is declared gives the very data that there are, it goes on
    as it would have: in the same order, and without the sources that were exhausted by then.
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
        if (cap := supplies[name].cap_tokens) is None:
            continue
        limit = max(cap, segment.cursors[name])
        if at_end[name] > limit:
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
    scales = tuple((segment.start, segment.lr_scale) for segment in segments)

    def past_rate(step):
        return past.unscaled_rate(step)

    pieces = lr_pieces(lr, spans, warmup, decay, program_steps, past_end, past_rate, scales)

    def phase_at(step):
        return next((i, start) for i, (_, start, end) in enumerate(bounds) if step < end)

    jump = None
    if not lr.allow_jump and past_end < segments[-1].end:
        jump = first_jump(pieces, past_end, past_rate, scales)
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
        before, after = (Schedule(tuple(segments)).segment_at(s) for s in (step - 1, step))
        if max(before.lr_scale, after.lr_scale) > 2 * min(before.lr_scale, after.lr_scale):
            message = (
                f"{jumps}, more than 2x: scaled from a batch of {before.batch_size} to {after.batch_size} "
                "(optim.scale_lr_by_batch); change the batch in smaller steps, give the phase an lr with rewarm_steps, "
                "or set optim.allow_jump: true"
            )
            raise ScheduleError([(f"phases[{place[bounds[i][0]]}].batch_size", message)])
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
    last = bounds[-1][0]
    if lr.schedule == "wsd" and decay and all(program for _, end, program in spans if end > segments[-1].end - decay):
        what = f"the last phase has a learning rate of its own (phases[{place[last]}].lr)"
        mending = "" if program_steps[-1][1] else ", which does not decay; give it decay_steps"
        warnings.append(f"optim.decay_steps does nothing: {what}{mending}")
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
        given = schedule.given(start, end)
        for name in sorted({n for s in schedule.segments if s.phase == phase for n in s.mean_mixture()}):
            if not given[name]:
                warnings.append(f"phase {phase}: {name} has a positive proportion but gets no sequence")
    return warnings
