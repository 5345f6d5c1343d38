"""The segments of one phase: when a source reaches its cap, the phase goes on without it, or the run stops."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from phases.checks import ScheduleError
from phases.clocks import MOST_TOKENS, EpochGoal
from phases.declared import Declared
from phases.mixture import normalised
from phases.schedule import Segment, SourceSupply

MOST_TOLD = 4  # most phases, or sources of a phase, that get a warning each, and most that one names
_PARTS = 64  # that a search cuts its range into: counts at many steps take little longer than at one


def phase_segments(
    declared: Declared, segment: Segment, supplies: Mapping[str, SourceSupply], warnings: list[str]
) -> tuple[list[Segment], bool]:
    """The segments of a phase, and whether the run stops with the last of them.

    The phase begins as `segment` and lasts until that ends or its goal is reached, whichever comes first. When a source
    reaches its cap, the segment ends there, and the source's `on_exhaust` decides what follows. If only the update that
    would reach the goal exceeds the cap of the goal's own source, the phase ends before that update; with `stop`, the
    run does. Appends to `warnings`. Raises ScheduleError if a source with `on_exhaust: error` would exceed its cap, if
    no source is left, or if the goal is not reached.
    """
    goal, phase = declared.goal, segment.phase
    segments: list[Segment] = []
    exhausted: list[tuple[int, str]] = []  # the steps and names of what the phase goes on without
    if goal and segment.aligned().cursors[goal.source] >= goal.tokens:
        message = f"{goal.text!r} is reached before step {segment.start}, where the phase starts"
        raise _wrong_until(declared, f"{message}; ends must increase from phase to phase")
    while True:
        as_found, segment = segment, segment.aligned()
        step, name = _first_exhausted(segment, supplies) or (segment.end, None)
        if goal:
            end = first_above(segment, goal.source, goal.tokens - 1, step)
            if end is not None:
                warnings += _told(phase, exhausted)
                return [*segments, replace(segment, end=end)], False
            if name is None:
                raise _goal_missed(declared, goal, segment, supplies[goal.source])
        if name is None:
            warnings += _told(phase, exhausted)
            return [*segments, segment], False

        supply = supplies[name]
        if step > segment.start:
            segments.append(replace(segment, end=step))
        is_goal = goal is not None and name == goal.source
        over_by_rounding = is_goal and _within_cap(goal, supply)
        if over_by_rounding and segments and supply.on_exhaust != "stop":
            warnings += _told(phase, exhausted)
            return segments, False
        if supply.on_exhaust == "error":
            raise _cap_exceeded(phase, step, name, supply)
        if supply.on_exhaust == "stop":
            if step == 0:
                raise _nothing_to_train_on(name, supply)
            # No update follows that would go on without those that are exhausted at this very step.
            warnings += _told(phase, [(at, other) for at, other in exhausted if at < step])
            why = f"the run stops at step {step}: {name} is limited to {supply.cap_text}"
            if over_by_rounding:
                why += f", and the update that reaches {goal.text!r} would read more; with on_exhaust error or "
                why += "renormalise the phase ends here instead, and the run continues"
            warnings.append(why)
            return segments, True
        if is_goal:
            message = f"{goal.text!r} is never reached: {name} is exhausted at step {step}, after max_epochs "
            raise _wrong_until(declared, f"{message}{supply.max_epochs:g}; ask for fewer epochs or raise it")
        exhausted.append((step, name))
        # Of a source that is taken out before the phase reads it, nothing is passed over.
        segment = _without(as_found if step == segment.start else segment, name, step, declared.path)


def _wrong_until(declared: Declared, message: str) -> ScheduleError:
    return ScheduleError([(f"{declared.path}.until", message)])


def _goal_missed(declared: Declared, goal: EpochGoal, segment: Segment, supply: SourceSupply) -> ScheduleError:
    read = segment.cursors_at(segment.end)[goal.source] / supply.num_tokens
    by_then = f"{math.floor(1000 * read) / 1000:g} by then"  # rounded down: it is less than asked for
    message = f"{goal.text!r} is not reached before the run's end at step {segment.end} ({by_then})"
    return _wrong_until(declared, f"{message}; ask for fewer epochs, raise train.steps or the source's proportion")


def _cap_exceeded(phase: str, step: int, name: str, supply: SourceSupply) -> ScheduleError:
    message = (
        f"step {step} (phase {phase}) would read more than {supply.cap_text} of {name} ({supply.num_tokens:,} tokens "
        "an epoch); shorten the phase, lower its proportion, raise max_epochs, or set on_exhaust to stop, renormalise "
        "or repeat"
    )
    return ScheduleError([(f"sources.{name}.max_epochs", message)])


def _nothing_to_train_on(name: str, supply: SourceSupply) -> ScheduleError:
    message = (
        f"the first update would read more than {supply.cap_text} of {name} ({supply.num_tokens:,} tokens an epoch), "
        "so nothing is left to train on; raise max_epochs, give the source more text, or lower the batch size"
    )
    return ScheduleError([(f"sources.{name}.max_epochs", message)])


def _told(phase: str, exhausted: Sequence[tuple[int, str]]) -> list[str]:
    """Warnings of the (step, source) from which a phase continues without a source; of many, one for all of them."""
    told = [f"from step {step} on, phase {phase} continues without {name}" for step, name in exhausted]
    if len(told) <= MOST_TOLD:
        return [f"{line}, which is exhausted" for line in told]
    named = ", ".join(name for _, name in exhausted[1:MOST_TOLD])
    more = f"{len(told) - 1} more are exhausted in it, the last at step {exhausted[-1][0]}"
    return [f"{told[0]}, which is exhausted; {more}: {named}, ..."]


def ends_at_cap(goal: EpochGoal, segment: Segment, supplies: Mapping[str, SourceSupply]) -> bool:
    """Whether a phase ends with `segment` because its next update would exceed the cap of the goal's source."""
    supply = supplies[goal.source]
    if supply.on_exhaust == "stop" or not _within_cap(goal, supply):
        return False
    return segment.cursors_at(segment.end + 1)[goal.source] > supply.cap_tokens


def _within_cap(goal: EpochGoal, supply: SourceSupply) -> bool:
    """Whether the goal is within the cap, in tokens rounded up and down, which are both None if the size is unknown."""
    return supply.cap_tokens is not None and goal.tokens <= supply.cap_tokens + 1


def _first_exhausted(segment: Segment, supplies: Mapping[str, SourceSupply]) -> tuple[int, str] | None:
    """(update, source) of the first batch that would exceed a cap, or None; of several sources the first by name."""
    caps = {name: supplies[name].cap_tokens for name in segment.quotas.sources}  # by name
    if all(cap is None for cap in caps.values()):
        return None
    room_S = np.array(
        [
            MOST_TOKENS if cap is None else min(max(cap - segment.cursors[name], 0), MOST_TOKENS)
            for name, cap in caps.items()
        ]
    )
    # What this order of data has read of a source by the segment's start stays, be it above a cap that was lowered.
    read_S = segment.quotas.counts(segment.position(segment.start)) * segment.seq_len
    room_S = np.maximum(room_S, read_S)

    def exceeded(steps):  # by step and source
        return segment.quotas.counts(segment.position(steps)) * segment.seq_len > room_S

    over = _first_step(segment, segment.end, lambda steps: exceeded(steps).any(axis=-1))
    return None if over is None else (over - 1, list(caps)[int(exceeded(over).argmax())])


def first_above(segment: Segment, name: str, tokens: int, end: int) -> int | None:
    """The first step in (segment.start, end] with a cursor above `tokens`, which the start's is not; or None."""
    return _first_step(segment, end, lambda steps: segment.cursor_over(name, steps) > tokens)


def _first_step(segment: Segment, end: int, reached: Callable[[np.ndarray], np.ndarray]) -> int | None:
    """The first step in (segment.start, end] at which `reached` holds, or None. Once true, `reached` must stay true."""
    low, high = segment.start, end
    if low == high or not reached(np.array([high]))[0]:
        return None
    while high - low > 1:
        steps = low + (high - low) * np.arange(_PARTS + 1) // _PARTS  # from low to high
        first = int(reached(steps).argmax())
        low, high = int(steps[first - 1]), int(steps[first])
    return high


def _without(segment: Segment, name: str, step: int, path: str) -> Segment:
    """The rest of a segment from `step` on, with one source taken out of both ends of its mixture."""
    mixture = {n: w for n, w in segment.mixture.items() if n != name}
    if not mixture:
        message = f"{name} is exhausted at step {step} and nothing else is in the mixture"
        raise ScheduleError([(f"{path}.mixture", f"{message}; add a source or shorten the phase")])
    rest = segment.rest(step)
    ramp = rest.ramp
    if ramp is not None:
        from_mixture = {n: w for n, w in ramp.from_mixture.items() if n != name}
        left = math.fsum(from_mixture.values())
        if left == 0:
            ramp = None
        else:
            ratio = ramp.mass_ratio * math.fsum(mixture.values()) / left
            ramp = replace(ramp, from_mixture=normalised(from_mixture), mass_ratio=ratio)
    return replace(rest, mixture=normalised(mixture), ramp=ramp)
