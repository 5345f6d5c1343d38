"""The learning rate of a whole schedule: its pieces given to the segments, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from phases.checks import ScheduleError
from phases.lr import LrPiece, LrProgram, LrSchedule, Standing, first_jump, lr_pieces
from phases.schedule import Phase, Schedule, Segment


class _Span(NamedTuple):
    """The updates [start, end) of a phase, and its program; `path` is where the config declares it.

    A phase that only the past knows of has neither a program nor a path.
    """

    path: str | None
    start: int
    end: int
    program: LrProgram | None
    rewarm_steps: int
    decay_steps: int


class RateSpan(NamedTuple):
    """The rates of the updates [start, end) are those of `piece`, multiplied by `scale`."""

    start: int
    end: int
    piece: LrPiece
    scale: float


def rate_spans(schedule: Schedule) -> list[RateSpan]:
    """Which piece of the learning rate holds when: the longest spans, in order and without a gap."""
    spans: list[RateSpan] = []
    for segment in schedule.segments:
        starts = [min(max(piece.start, segment.start), segment.end) for piece in segment.lr]
        for piece, start, end in zip(segment.lr, starts, [*starts[1:], segment.end], strict=True):
            if start == end:
                continue
            if spans and (spans[-1].piece, spans[-1].scale) == (piece, segment.lr_scale):
                spans[-1] = spans[-1]._replace(end=end)
            else:
                spans.append(RateSpan(start, end, piece, segment.lr_scale))
    return spans


def with_rates(
    segments: Sequence[Segment],
    num_past: int,
    phases: Sequence[Phase],
    lr: LrSchedule,
    warmup_steps: int,
    decay_steps: int,
    program_steps: Sequence[tuple[int, int]],
) -> tuple[tuple[Segment, ...], list[str]]:
    """The segments with the pieces of the learning rate that reach into them, and warnings of what does nothing.

    The first `num_past` segments have their pieces already and keep them. `program_steps` are the (re-warming, decay)
    steps of each phase. Raises ScheduleError for a rate that jumps, unless `allow_jump` is set.
    """
    place = {phase.name: i for i, phase in enumerate(phases)}
    spans = []
    for name, start, end in Schedule(tuple(segments)).phase_bounds:
        if name in place:
            i = place[name]
            spans.append(_Span(f"phases[{i}]", start, end, phases[i].lr, *program_steps[i]))
        else:
            spans.append(_Span(None, start, end, None, 0, 0))
    standing = Standing(
        past_end=segments[num_past - 1].end if num_past else 0,
        past_rate=Schedule(tuple(segments[:num_past])).unscaled_rate,
        scales=tuple((segment.start, segment.lr_scale) for segment in segments),
    )
    pieces = lr_pieces(
        lr,
        [(span.start, span.end, span.program) for span in spans],
        warmup_steps,
        decay_steps,
        [(span.rewarm_steps, span.decay_steps) for span in spans],
        standing,
    )
    if not lr.allow_jump and standing.past_end < segments[-1].end:
        _check_jump(pieces, standing, segments, spans)

    out = list(segments[:num_past])
    for segment in segments[num_past:]:
        inside = [piece for piece in pieces if piece.start < segment.end]
        first = max(i for i, piece in enumerate(inside) if piece.start <= segment.start)
        out.append(replace(segment, lr=tuple(inside[first:])))
    return tuple(out), _without_effect(pieces, lr, warmup_steps, decay_steps, spans)


def _span_at(spans: Sequence[_Span], step: int) -> _Span:
    return next(span for span in spans if step < span.end)


def _check_jump(
    pieces: Sequence[LrPiece], standing: Standing, segments: Sequence[Segment], spans: Sequence[_Span]
) -> None:
    """Raise ScheduleError for the first jump of the rate, at the setting that mends it."""
    jump = first_jump(pieces, standing)
    if jump is None:
        return
    step, rate_before, rate = jump
    span = _span_at(spans, step)
    jumps = f"the learning rate jumps from {rate_before:.3g} to {rate:.3g} at step {step}"
    before, after = (Schedule(tuple(segments)).segment_at(s) for s in (step - 1, step))
    if step == standing.past_end > span.start:
        where = "optim.allow_jump"
        message = (
            f"{jumps}, up to which the schedule stands: more than 2x; let a phase begin there with an lr of its "
            "own (rewarm_steps, peak), set optim.allow_jump: true, or restore what the rate depends on "
            "(train.steps, optim, the phase's lr)"
        )
    elif max(before.lr_scale, after.lr_scale) > 2 * min(before.lr_scale, after.lr_scale):
        where = f"{span.path}.batch_size"
        message = (
            f"{jumps}, more than 2x: scaled from a batch of {before.batch_size} to {after.batch_size} "
            "(optim.scale_lr_by_batch); change the batch in smaller steps, give the phase an lr with rewarm_steps, "
            "or set optim.allow_jump: true"
        )
    else:
        where = f"{span.path}.lr.peak"
        message = (
            f"{jumps}, more than 2x and not over a re-warming of at least 2 updates or a decay; give the phase "
            "rewarm_steps or another peak, or set optim.allow_jump: true"
        )
    raise ScheduleError([(where, message)])


def _without_effect(
    pieces: Sequence[LrPiece], lr: LrSchedule, warmup_steps: int, decay_steps: int, spans: Sequence[_Span]
) -> list[str]:
    """A warning for each setting of the learning rate that does nothing."""
    warnings = []
    if lr.schedule == "wsd" and decay_steps == 0 and any(span.program is None for span in spans):
        mending = "set optim.decay_steps, such as 20%, or optim.schedule: constant"
        warnings.append(f"schedule wsd with decay_steps 0 never decays, and min_lr_ratio is not used; {mending}")
    if warmup_steps and spans[0].program is not None:
        warnings.append(
            "optim.warmup_steps does nothing: the first phase has a learning rate of its own (phases[0].lr)"
        )
    last = spans[-1]
    in_decay = [span for span in spans if span.end > last.end - decay_steps]
    if lr.schedule == "wsd" and decay_steps and all(span.program for span in in_decay):
        what = f"the last phase has a learning rate of its own ({last.path}.lr)"
        mending = "" if last.decay_steps else ", which does not decay; give it decay_steps"
        warnings.append(f"optim.decay_steps does nothing: {what}{mending}")
    for piece in pieces:
        path = _span_at(spans, piece.start).path
        if piece.warmup and piece.first == piece.last and path is not None:
            where = f"{path}.lr"
            warnings.append(f"{where}.rewarm_steps does nothing: the rate found is the peak; set {where}.peak")
    return warnings
