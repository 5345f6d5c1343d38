"""Turns phases into segments before step 0: clocks become steps, ramps and caps are applied, rates become numbers."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from phases.caps import MOST_TOLD, ends_at_cap, phase_segments
from phases.checks import ScheduleError, check_bounds, check_lengths, check_phases
from phases.clocks import TokenGoal, reached
from phases.declared import Curriculum, Declared, read_numbers
from phases.mixture import normalised
from phases.rates import with_rates
from phases.schedule import NOT_DATA, Ramp, Schedule, Segment, SourceSupply, cut, joined


def resolve(
    curriculum: Curriculum,
    *,
    past: Sequence[Segment] = (),
    rates_from: int | None = None,
    going_on: Segment | None = None,
    sizes_to_come: bool = False,
) -> Schedule | None:
    """Turn phases into segments: clocks become steps, ramps and caps are applied, rates become numbers.

    When a new order of data begins, the cursor of each source that it reads is rounded up to a whole number of
    sequences, so that no sequence crosses the end of a block. The tokens in between are passed over.

    A source of unknown size is never exhausted, and an `until` in its epochs is a problem. With `sizes_to_come` it is
    none: everything that needs no size is checked, the phases from that one on stay unresolved, and None is returned.
    The same holds after a phase that reads a source of unknown size that may stop the run: the run may end there, and
    the learning rates depend on its end.

    `past` are segments that are fixed: their data and rates stay, and the phases decide what follows. From `rates_from`
    on, if that is a step of the past, only its data stay, and the rates are as declared now. If the last phase
    of the past is declared to end later, it goes on; otherwise the next one begins. A phase that goes on keeps its
    order of data if the phase as declared now would have had the same order. Otherwise a new order begins, with the
    declared mixture, and the ramp continues where it was. Caps and clocks count the past too, including its sources
    that are no longer declared. `going_on` replaces the segment that follows the past, up to the end of its phase.

    Raises ScheduleError with every problem that can be found without fixing another first.
    """
    supplies, total_steps = curriculum.supplies, curriculum.total_steps
    numbers, unread = read_numbers(curriculum, sizes_to_come)
    largest = max([curriculum.batch_size, *(declared.batch_size for declared in numbers.phases)])
    longest = max([curriculum.seq_len, *(declared.seq_len for declared in numbers.phases)])
    problems = [
        *check_phases(curriculum.phases, supplies),
        *check_lengths(curriculum.phases, curriculum.seq_len),
        *check_bounds(supplies, total_steps, largest, longest),
        *_check_past(past, total_steps, longest),
        *unread,
    ]
    if problems:
        raise ScheduleError(problems)

    gone = {name for s in past for name in s.quotas.sources} - supplies.keys()
    names = [*supplies, *sorted(gone)]
    segments = [replace(s, cursors=_cursors_of(s.cursors, names)) for s in past]
    warnings: list[str] = []
    first = _first_ahead(segments, numbers.phases, curriculum, warnings) if past else 0
    ahead = numbers.phases[first:]
    if going_on is not None:
        if not ahead or ahead[0].phase.name != going_on.phase:
            message = f"phase {going_on.phase} is not declared to continue at step {going_on.start}"
            raise ScheduleError([("phases", message)])
        going_on = replace(going_on, cursors=_cursors_of(going_on.cursors, names))
    complete = _add_phases(ahead, segments, going_on, curriculum, sizes_to_come, problems, warnings)

    warmup, decay = numbers.warmup_steps, numbers.decay_steps
    most = segments[-1].end if complete else total_steps
    if warmup + decay > most:
        got = f"warm-up ({warmup}) and decay ({decay}) steps are more than the run's {most}"
        problems.append(("optim.decay_steps" if decay > warmup else "optim.warmup_steps", f"{got}; shorten them"))
    if problems:
        raise ScheduleError(problems)
    if not complete:
        return None
    fixed, free = segments[: len(past)], segments[len(past) :]
    until = past[-1].end if past else 0
    until = until if rates_from is None else min(until, rates_from)
    rated = cut(fixed, until)
    to_rate = [s if s.start >= until else s.continued(until) for s in fixed if s.end > until]
    segments, lr_warnings = with_rates([*rated, *to_rate, *free], len(rated), curriculum, numbers)
    schedule = Schedule(segments)
    of_phases = [_told(_odd_sums(ahead, free)), _told(_never_read(schedule, fixed))]
    return replace(schedule, warnings=(*of_phases[0], *warnings, *lr_warnings, *of_phases[1]))


def _may_stop_anywhere(supply: SourceSupply) -> bool:
    """Whether the source stops the run at a step that is unknown until its size is."""
    return supply.num_tokens is None and supply.max_epochs is not None and supply.on_exhaust == "stop"


def _add_phases(
    phases: Sequence[Declared],
    segments: list[Segment],
    going_on: Segment | None,
    curriculum: Curriculum,
    sizes_to_come: bool,
    problems: list[tuple[str, str]],
    warnings: list[str],
) -> bool:
    """Append the phases' segments, problems and warnings; False if a phase cannot be resolved, or not yet."""
    stopped = False
    for declared in phases:
        if stopped:
            name, step = declared.phase.name, segments[-1].end
            warnings.append(f"phase {name} is never reached: the run stops at step {step}")
            continue
        if declared.goal and declared.goal.tokens is None:
            return False
        try:
            inside, stopped = _phase(declared, segments, going_on, curriculum, problems, warnings)
        except ScheduleError as error:
            problems += error.problems
            return False
        segments += inside
        if sizes_to_come and any(_may_stop_anywhere(curriculum.supplies[n]) for s in inside for n in s.quotas.sources):
            return False
    return True


def _phase(
    declared: Declared,
    before: Sequence[Segment],
    going_on: Segment | None,
    curriculum: Curriculum,
    problems: list[tuple[str, str]],
    warnings: list[str],
) -> tuple[list[Segment], bool]:
    """The segments of a phase that follow the segments `before`, and whether the run stops with the last of them.

    `going_on` is as in `resolve`; it may belong to another phase. Appends to `warnings`, and to `problems` if the
    phase's ramp or learning rate needs more steps than it has. Raises ScheduleError if the phase cannot be resolved.
    """
    path, clock, goal = declared.path, declared.clock, declared.goal
    supplies, total_steps = curriculum.supplies, curriculum.total_steps
    start = before[-1].end if before else 0
    if isinstance(clock, TokenGoal):
        end = clock.step(before, declared.batch_size * declared.seq_len)
    else:
        end = total_steps if goal else clock
    new = segment = _new_segment(declared, before, end, supplies)
    _check_end(declared, start, end, total_steps)
    if under_way := [s for s in before if s.phase == declared.phase.name]:
        start = under_way[0].start
        segment = _phase_under_way(declared, segment, under_way, before, supplies, warnings)
    if going_on is not None and going_on.phase == declared.phase.name:
        segment = replace(going_on, **{key: getattr(new, key) for key in NOT_DATA})
    if segment is None:
        inside, stopped = [], True
    else:
        inside, stopped = phase_segments(declared, replace(segment, end=end, lr=()), supplies, warnings)
    if goal and not stopped:
        end = inside[-1].end
        _check_end(declared, start, end, total_steps)
    if declared.ramp_steps > end - start:
        got = f"got {declared.ramp_steps} steps for a phase of {end - start} (steps {start} to {end})"
        problems.append((f"{path}.ramp_steps", f"{got}, expected at most its length"))
    rewarm, decay = declared.rewarm_steps, declared.decay_steps
    if inside and rewarm + decay > (num_steps := inside[-1].end - start):
        got = f"rewarm_steps ({rewarm}) and decay_steps ({decay}) are more than the phase's {num_steps} steps"
        longer = "rewarm_steps" if rewarm > decay else "decay_steps"
        problems.append((f"{path}.lr.{longer}", f"{got}; shorten them"))
    return inside, stopped


def _new_segment(
    declared: Declared, before: Sequence[Segment], end: int, supplies: Mapping[str, SourceSupply]
) -> Segment:
    """The segment of a phase as declared, beginning where the segments `before` end."""
    phase = declared.phase
    start, cursors, found = 0, dict.fromkeys(supplies, 0), {}
    if before:
        start = before[-1].end
        cursors, found = before[-1].cursors_at(start), before[-1].mixture_at(start - 1)
    resolved = ("lr", "batch_size", "seq_len")
    as_declared = {key: getattr(phase, key) for key in NOT_DATA if key not in resolved and hasattr(phase, key)}
    ramp_steps = min(declared.ramp_steps, end)  # a longer one is an error, and its table may not fit in memory
    return Segment(
        start,
        end,
        phase.name,
        normalised(phase.mixture),
        ramp=_ramp(found, ramp_steps, phase.ramp_shape, supplies),
        lr=(),
        cursors=cursors,
        batch_size=declared.batch_size,
        seq_len=declared.seq_len,
        **as_declared,
    )


def _cursors_of(cursors: Mapping[str, int], sources: Iterable[str]) -> dict[str, int]:
    """The cursors of `sources`; 0 for a source that is new."""
    return {name: cursors.get(name, 0) for name in sources}


def _ramp(before: Mapping[str, float], steps: int, shape: str, sources: Iterable[str]) -> Ramp | None:
    """The ramp from the mixture `before`, reduced to `sources`; None if it has no steps or nothing to start from."""
    if any(name not in sources for name in before):
        before = normalised({name: share for name, share in before.items() if name in sources})
    return Ramp(before, steps, shape) if steps and before else None


def _check_end(declared: Declared, start: int, end: int, total_steps: int) -> None:
    if end <= start:
        message = f"ends at step {end} but starts at step {start}; ends must increase from phase to phase"
    elif end > total_steps:
        message = f"ends at step {end}, after the run's end at step {total_steps} (train.steps)"
    elif declared.is_last and end < total_steps:
        message = f"the last phase ends at step {end}, before the run's end at step {total_steps}; use 'end'"
    else:
        return
    raise ScheduleError([(f"{declared.path}.until", message)])


def _check_past(past, total_steps, longest) -> Iterator[tuple[str, str]]:
    if not past:
        return
    if (end := past[-1].end) > total_steps:
        message = f"got {total_steps}, but the run's schedule is already fixed up to step {end}; set at least {end}"
        yield "train.steps", message
    if uneven := [segment for segment in past if longest % segment.seq_len]:
        fixed = f"steps {uneven[0].start} to {uneven[0].end} are fixed with sequences of {uneven[0].seq_len}"
        got = f"got a longest sequence of {longest}, but {fixed}, which must divide it"
        yield "train.seq_len", f"{got}; restore it"


def _first_ahead(
    past: Sequence[Segment], phases: Sequence[Declared], curriculum: Curriculum, warnings: list[str]
) -> int:
    """Index of the phase that owns the first step after the past. Appends to `warnings`.

    The last phase of the past goes on if it is declared to end later. Otherwise the next one begins: the first phase
    declared after the past's phases that ends later. Raises ScheduleError if there is none although the run goes on, or
    if a later phase has the name of one that is trained already.
    """
    supplies, total_steps = curriculum.supplies, curriculum.total_steps
    schedule = Schedule(tuple(past))
    end = schedule.total_steps
    trained = [name for name, _, _ in schedule.phase_bounds]
    names = [declared.phase.name for declared in phases]

    def lasts(i):
        """Whether a phase is declared to end after the past."""
        goal = phases[i].goal
        if goal and names[i] == trained[-1] and ends_at_cap(goal, past[-1], supplies):
            return False
        return not reached(phases[i].clock, schedule, end)

    first = max((names.index(name) + 1 for name in trained if name in names), default=0)
    if goes_on := trained[-1] in names and lasts(names.index(trained[-1])):
        first = names.index(trained[-1])
    else:
        while first < len(names) and not lasts(first):
            first += 1
    for name in names[:first]:
        if name not in trained:
            fixed = f"by step {end}, up to which the schedule is already fixed"
            warnings.append(f"phase {name} is never trained: it would end {fixed}")
    again = [i for i in range(first + goes_on, len(names)) if names[i] in trained]
    if again:
        message = f"{names[again[0]]!r} was already trained, before step {end}; give this phase another name"
        raise ScheduleError([(f"phases[{again[0]}].name", message)])
    if first == len(names) and end < total_steps:
        if lasts(first - 1):  # as where a phase was renamed while under way, and has its former name again
            fix = "give this phase another name"
            if trained[-1] not in names:
                fix += f", or name it {trained[-1]!r} to go on with that phase"
            message = f"{names[first - 1]!r} was trained before {trained[-1]!r}, which ends at step {end}; {fix}"
            raise ScheduleError([(f"phases[{first - 1}].name", message)])
        message = (
            f"no phase after the trained ones lasts beyond step {end}, up to which the schedule is fixed; add one, or "
            "let the last one end with 'end'"
        )
        raise ScheduleError([(f"phases[{first - 1}].until", message)])
    return first


def _phase_under_way(
    declared: Declared,
    segment: Segment,
    under_way: Sequence[Segment],
    past: Sequence[Segment],
    supplies: Mapping[str, SourceSupply],
    warnings: list[str],
) -> Segment | None:
    """The segment with which a phase goes on after its segments `under_way`; None if the run stops there.

    `segment` is the rest of the phase as declared now; its ramp continues where it was. If the phase as declared would
    have had the data of `under_way`, their order of data goes on, without the sources exhausted by then.
    """
    under_way = joined(under_way)
    begun, ramp = under_way[0].start, segment.ramp
    if ramp is not None and begun > 0:
        before = Schedule(tuple(past)).segment_at(begun - 1).mixture_at(begun - 1)
        ramp = _ramp(before, ramp.steps, ramp.shape, supplies)

    def as_declared(start, cursors):
        if ramp is None or begun == 0 or start - begun >= ramp.steps:
            return replace(segment, start=start, cursors=cursors, ramp=None)
        return replace(segment, start=start, cursors=cursors, ramp=replace(ramp, steps_done=start - begun))

    for i, now in enumerate(under_way):  # an edit may have begun another order in the phase
        told: list[str] = []
        try:
            inside, _ = phase_segments(declared, as_declared(now.start, now.cursors), supplies, told)
        except ScheduleError:
            continue  # it is raised again when the rest is resolved
        if joined(cut(inside, segment.start)) == under_way[i:]:
            if inside[-1].end == segment.start:
                warnings += told
                return None
            return Schedule(tuple(inside)).segment_at(segment.start).continued(segment.start)
    return as_declared(segment.start, segment.cursors)


def _odd_sums(ahead: Sequence[Declared], segments: Sequence[Segment]) -> list[tuple[str, str]]:
    """(phase, warning) for each phase whose proportions are neither shares, nor percentages, nor all 1."""
    found, reached = [], {segment.phase for segment in segments}
    for phase in (declared.phase for declared in ahead if declared.phase.name in reached):
        weight_sum = sum(phase.mixture.values())
        known_sum = any(math.isclose(weight_sum, whole, rel_tol=1e-6) for whole in (1, 100))
        if not known_sum and set(phase.mixture.values()) != {1}:  # all 1 plainly means equal parts
            shares = [f"{name} {share:.4g}" for name, share in normalised(phase.mixture).items()]
            told = ", ".join([*shares[:MOST_TOLD], *(["..."] if len(shares) > MOST_TOLD else [])])
            found.append((phase.name, f"proportions add up to {weight_sum:.6g}, normalised to {told}"))
    return found


def _never_read(schedule: Schedule, past: Sequence[Segment]) -> list[tuple[str, str]]:
    """(phase, warning) for each phase that is not over and has a source with a positive share but no sequence."""
    found, over = [], past[-1].end if past else 0
    shared: dict[str, set[str]] = {}
    for segment in schedule.segments:
        if segment.end > over:
            shared.setdefault(segment.phase, set()).update(segment.mean_mixture())
    for phase, start, end in schedule.phase_bounds:
        read = schedule.read(start, end)
        if unread := [name for name in sorted(shared.get(phase, ())) if not read[name]]:
            have, get = ("has", "gets") if len(unread) == 1 else ("have", "get")
            left = len(unread) - MOST_TOLD
            names = ", ".join(unread[:MOST_TOLD]) + (f" and {left} more" if left > 0 else "")
            found.append((phase, f"{names} {have} a positive proportion but {get} no sequence"))
    return found


def _told(of_phases: Sequence[tuple[str, str]]) -> list[str]:
    """A warning for each phase; if there are many, one warning that tells the first and counts the others."""
    if len(of_phases) <= MOST_TOLD:
        return [f"phase {phase}: {what}" for phase, what in of_phases]
    (phase, what), *others = of_phases
    named = ", ".join(name for name, _ in others[: MOST_TOLD - 1])
    return [f"phase {phase}: {what}; the same applies to {len(others)} more phases: {named}, ..."]
