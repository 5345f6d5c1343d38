"""Rollback: a schedule with a stretch of its data passed over, and from which update on losses are comparable."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np

from phases.schedule import NOT_DATA, Schedule, Segment, SourceSupply, cut, joined


class RollbackRefused(ValueError):
    """The data cannot be passed over; the message says why, in a sentence."""


def pass_over(schedule: Schedule, supplies: Mapping[str, SourceSupply], step: int, num_steps: int) -> Schedule:
    """The schedule with the data of the `num_steps` updates from `step` on passed over.

    From `step` on, each update reads what the update `num_steps` later would have read in the same order of data; the
    last updates of that order read on beyond its old end. So exactly the sequences of `num_steps` updates are passed
    over. The ramp moves with the data, and the orders that follow begin where this one ends now. A change of the batch
    shape always ends an order.

    Phase boundaries, rates, rope thetas and the number of steps stay as they are. `supplies` are those that the
    schedule was resolved from. Raises RollbackRefused if there is no update `step`, if `num_steps` is below 1, or if a
    source would be used beyond its `max_epochs`.
    """
    if not 0 <= step < schedule.total_steps:
        raise RollbackRefused(f"the run has no update {step}")
    if num_steps < 1:
        raise RollbackRefused(f"got {num_steps} steps, expected 1 or more")
    segments = schedule.segments
    first = segments.index(schedule.segment_at(step))
    ends = (i for i in range(first, len(segments) - 1) if not _same_order(segments[i], segments[i + 1]))
    last = next(ends, len(segments) - 1)  # of the order that `step` belongs to
    out = list(cut(segments, step))
    for i in range(first, last + 1):
        begins = max(segments[i].start, step + num_steps)  # the update that would have read the piece's first batch
        if i < last and segments[i].end <= begins:
            continue
        end = segments[i].end if i == last else segments[i].end - num_steps
        out += _rated(segments, replace(segments[i].continued(begins), start=begins - num_steps, end=end))
    cursors: dict[str, int] = {}
    for before, after in pairwise(segments[last:]):
        if not _same_order(before, after):  # always so for the first pair
            cursors = out[-1].cursors_at(after.start)
        out.append(replace(after, cursors=cursors).aligned())
    for segment in out:
        if segment.end > step:
            _check_caps(segment, supplies)
    return Schedule(tuple(out), schedule.warnings)


def _same_order(before: Segment, after: Segment) -> bool:
    """Whether two segments read the same order of data, whatever is passed over between them."""
    anywhere = {"start": 0, "end": 0, "first_sequence": 0, **NOT_DATA}
    return replace(before, **anywhere) == replace(after, **anywhere)


def _rated(segments: tuple[Segment, ...], moved: Segment) -> list[Segment]:
    """`moved` in pieces, each with the NOT_DATA fields (rates, rope theta) of the segment that owns its steps."""
    out: list[Segment] = []
    for owner in (s for s in segments if s.start < moved.end and moved.start < s.end):
        start, end = max(owner.start, moved.start), min(owner.end, moved.end)
        own = {key: getattr(owner, key) for key in NOT_DATA}
        piece = replace(moved.continued(start), end=end, **own)
        if out and all(getattr(out[-1], key) == setting for key, setting in own.items()):
            out[-1] = replace(out[-1], end=end)
        else:
            out.append(piece)
    return out


def _check_caps(segment: Segment, supplies: Mapping[str, SourceSupply]) -> None:
    cursors = segment.cursors_at(segment.end)
    for name in segment.quotas.sources:
        cap = supplies[name].cap_tokens
        if cap is not None and cursors[name] > max(cap, segment.cursors[name]):
            over = f"more than {supplies[name].cap_text} of {name} would be read by step {segment.end}"
            raise RollbackRefused(f"{over}; a higher max_epochs of it leaves room")


def judged_from(schedule: Schedule) -> np.ndarray:
    """For each update, the first one whose loss is comparable with its own: int32 [total_steps].

    That is the last step up to it at which an order of data begins, a ramp ends or the rope theta changes, since each
    of these may raise the loss by itself. Passing over data leaves losses comparable.
    """
    places: list[int] = []
    before: Segment | None = None
    for segment in joined(schedule.segments):
        goes_on = before is not None and _same_order(before, segment)
        if not goes_on:
            places.append(segment.start)
        if segment.ramp is not None:
            was_over = goes_on and before.ramp_end < segment.start
            if not was_over and segment.ramp_end < segment.end:
                places.append(max(segment.ramp_end, segment.start))
        before = segment
    places += [after.start for b, after in pairwise(schedule.segments) if b.rope_theta != after.rope_theta]
    places = sorted(set(places))
    steps = np.arange(schedule.total_steps)
    return np.array(places, np.int32)[np.searchsorted(places, steps, side="right") - 1]
