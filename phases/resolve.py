"""From phases to segments: every clock a step, every ramp and cap in place, every rate a number, before step 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from phases.caps import phase_segments
from phases.checks import ScheduleError, check_bounds, check_lengths, check_phases
from phases.clocks import EpochGoal, TokenGoal, read_clock, resolve_steps
from phases.lr import LrProgram, LrSchedule, lr_scale
from phases.mixture import normalised
from phases.rates import with_rates
from phases.schedule import Phase, Ramp, Schedule, Segment, SourceSupply, cut, joined


class _Numbers(NamedTuple):
    """What the config gives as a number, a share of the run, tokens or epochs: as steps, so far as these can be told
    before it is known where each phase starts.

    `clocks`, `ramp_steps` and `program_steps`, the (re-warming, decay) steps, are of each phase.
    """

    warmup_steps: int
    decay_steps: int
    clocks: list[int | EpochGoal | TokenGoal]
    ramp_steps: list[int]
    program_steps: list[tuple[int, int]]


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
    each source that it reads is rounded up to a whole number of its sequences, so that no sequence runs over the end
    of a block; the tokens between are passed over. Rates are meant for `batch_size`: see `lr.scale_lr_by_batch`.

    A source of unknown size is never exhausted, and an `until` in epochs of it is a problem. With `sizes_to_come` it
    is none: the phases from there on stay unresolved, all that needs no size is checked, and None is returned.

    `past` is what stands already: its segments are taken over with their data and rates, and the phases say what
    follows. The last phase of the past goes on if it is declared to end later; else the next one begins. A phase that
    goes on continues the past's own order of data where that is the very order that it would have had from its
    beginning; else a new segment begins, by the declared mixture and with the ramp as far as it had come. Caps and
    clocks count what the past has read, also of sources that are no longer declared.

    `settled` are numbers of steps that were given as a share of the run, and keep the value that they had before
    `total_steps` changed because they have begun: `optim.warmup_steps`, `PHASE.ramp_steps`, `PHASE.lr.rewarm_steps`.
    `going_on` takes the place of the segment that follows the past, up to the end of its phase.
    Raises ScheduleError with all problems that can be told apart.
    """
    batches = [batch_size if phase.batch_size is None else phase.batch_size for phase in phases]
    lengths = [seq_len if phase.seq_len is None else phase.seq_len for phase in phases]
    longest = max([seq_len, *lengths])
    problems = check_phases(phases, list(supplies)) + check_lengths(phases, seq_len)
    problems += check_bounds(supplies, total_steps, max([batch_size, *batches]), longest)
    problems += _check_past(past, total_steps, longest)
    numbers, unread = _read_numbers(phases, supplies, lr, total_steps, sizes_to_come, settled or {})
    problems += unread
    if problems:
        raise ScheduleError(problems)

    gone = {name for s in past for name in s.quotas.sources} - supplies.keys()
    names = [*supplies, *sorted(gone)]
    segments = [replace(s, cursors=_cursors_of(s.cursors, names)) for s in past]
    warnings: list[str] = []
    start, cursors, before = 0, dict.fromkeys(names, 0), {}  # where the next phase begins, and the mixture until there
    first, under_way = 0, None  # the phase that follows the past, and its segments so far
    stopped, resolved = False, True  # by a source at its cap; as far as sizes are known
    if past:
        start, cursors = past[-1].end, segments[-1].drawn_at(past[-1].end)
        before = past[-1].mixture_at(start - 1)
        first, under_way = _phase_after(segments, phases, numbers.clocks, total_steps, warnings)
    for i, (phase, clock, ramp_steps) in enumerate(zip(phases, numbers.clocks, numbers.ramp_steps, strict=True)):
        if i < first:
            continue
        if stopped:
            warnings.append(f"phase {phase.name} is never reached: the run stops at step {start}")
            continue
        path, is_last = f"phases[{i}]", i == len(phases) - 1
        goal, end = (clock, total_steps) if isinstance(clock, EpochGoal) else (None, clock)
        if goal and goal.tokens is None:
            resolved = False
            break
        batch, length = batches[i], lengths[i]
        if isinstance(clock, TokenGoal):
            end = clock.step(segments, batch * length)
        mixture = normalised(phase.mixture)
        weight_sum = sum(phase.mixture.values())
        if abs(weight_sum - 1) > 1e-6:
            shares = ", ".join(f"{n} {w:.4g}" for n, w in mixture.items())
            warnings.append(f"phase {phase.name}: proportions add up to {weight_sum:.6g}, normalised to {shares}")
        ramp = _ramp(before, ramp_steps, phase.ramp_shape, supplies)
        of_phase = {"rope_theta": phase.rope_theta, "lr_scale": lr_scale(lr, batch, batch_size)}
        segment = Segment(start, end, phase.name, mixture, ramp, (), cursors, batch, length, **of_phase).aligned()
        try:
            _check_end(path, start, end, total_steps, is_last)
            if i == first and under_way:
                segment = _going_on(path, segment, under_way, segments, goal, supplies, warnings)
                start = under_way[0].start
            if i == first and going_on is not None and going_on.phase == phase.name:
                of_phase["lr_scale"] = lr_scale(lr, going_on.batch_size, batch_size)
                cursors = _cursors_of(going_on.cursors, names)
                segment, going_on = replace(going_on, cursors=cursors, **of_phase).aligned(), None
            if segment is None:
                inside, stopped = [], True
            else:
                segment = replace(segment, end=end, lr=())
                inside, stopped = phase_segments(path, segment, goal, supplies, warnings)
            if goal and not stopped:
                end = inside[-1].end
                _check_end(path, start, end, total_steps, is_last)
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
        rewarm, decay = numbers.program_steps[i]
        if inside and rewarm + decay > end - start:
            got = f"rewarm_steps ({rewarm}) and decay_steps ({decay}) are more than the phase's {end - start} steps"
            problems.append((f"{path}.lr", f"{got}; shorten them"))
        start, cursors, before = end, segments[-1].drawn_at(end), segments[-1].mixture_at(end - 1)

    if going_on is not None and not problems:
        message = f"phase {going_on.phase} is not declared to go on at step {going_on.start}"
        problems.append(("phases", message))
    num_steps = start if resolved else total_steps
    warmup, decay = numbers.warmup_steps, numbers.decay_steps
    if warmup + decay > num_steps:
        got = f"warm-up ({warmup}) and decay ({decay}) steps are more than the run's {num_steps}"
        problems.append(("optim.warmup_steps", f"{got}; shorten them"))
    if problems:
        raise ScheduleError(problems)
    if not resolved:
        return None
    segments, lr_warnings = with_rates(segments, len(past), phases, lr, warmup, decay, numbers.program_steps)
    schedule = Schedule(segments)
    return replace(schedule, warnings=(*warnings, *lr_warnings, *_given_nothing(schedule)))


def _read_numbers(
    phases: Sequence[Phase],
    supplies: Mapping[str, SourceSupply],
    lr: LrSchedule,
    total_steps: int,
    sizes_to_come: bool,
    settled: Mapping[str, int],
) -> tuple[_Numbers, list[tuple[str, str]]]:
    """(the numbers, problems) with 0 in the place of each that cannot be read; arguments as of `resolve`."""
    problems: list[tuple[str, str]] = []

    def read(path, reader, *arguments):
        try:
            return reader(*arguments)
        except ValueError as error:
            problems.append((path, str(error)))
            return 0

    def steps_of(path, value, key=None):
        return settled[key] if key in settled else read(path, resolve_steps, value, total_steps)

    warmup_steps = steps_of("optim.warmup_steps", lr.warmup_steps, key="optim.warmup_steps")
    decay_steps = steps_of("optim.decay_steps", lr.decay_steps)
    clocks, ramp_steps, program_steps = [], [], []
    for i, phase in enumerate(phases):
        path, program = f"phases[{i}]", phase.lr or LrProgram()
        clocks.append(read(f"{path}.until", read_clock, phase.until, supplies, total_steps, sizes_to_come))
        ramp_steps.append(steps_of(f"{path}.ramp_steps", phase.ramp_steps, key=f"{phase.name}.ramp_steps"))
        key = f"{phase.name}.lr.rewarm_steps"
        rewarm_steps = steps_of(f"{path}.lr.rewarm_steps", program.rewarm_steps, key=key)
        program_steps.append((rewarm_steps, steps_of(f"{path}.lr.decay_steps", program.decay_steps)))
    if lr.schedule != "wsd":
        decay_steps = 0
    return _Numbers(warmup_steps, decay_steps, clocks, ramp_steps, program_steps), problems


def _cursors_of(cursors: Mapping[str, int], sources: Iterable[str]) -> dict[str, int]:
    """Cursors of these sources, 0 of one that has come."""
    return {name: cursors.get(name, 0) for name in sources}


def _ramp(before: Mapping[str, float], steps: int, shape: str, sources: Iterable[str]) -> Ramp | None:
    """The way from a mixture, of which only these sources are there still; None where it has no steps or no start."""
    if any(name not in sources for name in before):
        before = normalised({name: share for name, share in before.items() if name in sources})
    return Ramp(before, steps, shape) if steps and before else None


def _check_end(path: str, start: int, end: int, total_steps: int, is_last: bool) -> None:
    """Raise ScheduleError where a phase that starts at `start` cannot end at `end`."""
    if end <= start:
        message = f"ends at step {end} but starts at step {start}; ends must increase from phase to phase"
    elif end > total_steps:
        message = f"ends at step {end}, after the run's end at step {total_steps} (train.steps)"
    elif is_last and end < total_steps:
        message = f"the last phase ends at step {end}, before the run's end at step {total_steps}; use 'end'"
    else:
        return
    raise ScheduleError([(f"{path}.until", message)])


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
    schedule = Schedule(tuple(past))
    end = schedule.total_steps
    drawn, num_tokens = schedule.drawn(end), schedule.tokens(end)
    trained = [name for name, _, _ in schedule.phase_bounds]
    names = [phase.name for phase in phases]

    def lasts(i):
        """Whether a phase is declared to end after the past."""
        clock = clocks[i]
        if isinstance(clock, EpochGoal):
            return clock.tokens is None or drawn[clock.source] < clock.tokens
        if isinstance(clock, TokenGoal):
            return clock.tokens > num_tokens
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
            inside, _ = phase_segments(path, declared(now.start, now.cursors), goal, supplies, told)
        except ScheduleError:
            continue  # whatever is wrong ahead will be met again
        if joined(cut(inside, segment.start)) == under_way[i:]:
            if inside[-1].end == segment.start:
                warnings += told
                return None
            return Schedule(tuple(inside)).segment_at(segment.start).going_on(segment.start)
    return declared(segment.start, segment.cursors)


def _given_nothing(schedule: Schedule) -> list[str]:
    """A warning for each source that has a share in a step of a phase but gets no sequence in it."""
    warnings = []
    for phase, start, end in schedule.phase_bounds:
        given = schedule.given(start, end)
        for name in sorted({n for s in schedule.segments if s.phase == phase for n in s.mean_mixture()}):
            if not given[name]:
                warnings.append(f"phase {phase}: {name} has a positive proportion but gets no sequence")
    return warnings
