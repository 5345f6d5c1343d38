"""The learning rate of a whole schedule: assigns its pieces to the segments and checks them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from phases.checks import ScheduleError
from phases.clocks import any_steps
from phases.declared import Curriculum, Numbers
from phases.lr import LrPiece, LrSchedule, PhaseSpan, Standing, first_jump, lr_pieces, lr_scale
from phases.schedule import Schedule, Segment


class RateSpan(NamedTuple):
    """The rates of the updates [start, end) are those of `piece`, multiplied by `scale`."""

    start: int
    end: int
    piece: LrPiece
    scale: float


def rate_spans(schedule: Schedule) -> list[RateSpan]:
    """Which piece of the learning rate holds when: in order, without gaps, equal neighbours merged."""
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
    segments: Sequence[Segment], num_past: int, curriculum: Curriculum, numbers: Numbers
) -> tuple[tuple[Segment, ...], list[str]]:
    """The segments with their `lr` and `lr_scale`, and warnings about settings that do nothing.

    The first `num_past` segments have theirs already and keep them. `numbers` are those of the curriculum. Raises
    ScheduleError if the rate jumps, unless `allow_jump` is set, and for inverse_sqrt without a warm-up.
    """
    lr, past = curriculum.lr, segments[:num_past]
    if lr.schedule == "inverse_sqrt" and not numbers.warmup_steps:
        message = "got none, expected at least one: optim.schedule inverse_sqrt is lr * sqrt(warmup_steps / update)"
        raise ScheduleError([("optim.warmup_steps", message)])
    ahead = [replace(s, lr_scale=lr_scale(lr, s.batch_size, curriculum.batch_size)) for s in segments[num_past:]]
    segments = [*past, *ahead]
    declared = {d.phase.name: d for d in numbers.phases}
    spans = []
    for name, start, end in Schedule(tuple(segments)).phase_bounds:
        if name in declared:
            d = declared[name]
            spans.append(PhaseSpan(start, end, d.phase.lr, d.rewarm_steps, d.decay_steps, d.path))
        else:
            spans.append(PhaseSpan(start, end))
    standing = Standing(
        past_end=past[-1].end if past else 0,
        past_rate=Schedule(tuple(past)).unscaled_rate,
        scales=tuple((segment.start, segment.lr_scale) for segment in segments),
    )
    pieces = lr_pieces(lr, spans, numbers.warmup_steps, numbers.decay_steps, standing)
    if not lr.allow_jump and standing.past_end < segments[-1].end:
        _check_jump(pieces, standing, segments, spans)

    out = list(past)
    for segment in ahead:
        inside = [piece for piece in pieces if piece.start < segment.end]
        first = max(i for i, piece in enumerate(inside) if piece.start <= segment.start)
        out.append(replace(segment, lr=tuple(inside[first:])))
    return tuple(out), _without_effect(pieces, spans, lr, numbers)


def _span_at(spans: Sequence[PhaseSpan], step: int) -> PhaseSpan:
    return next(span for span in spans if step < span.end)


def _check_jump(
    pieces: Sequence[LrPiece], standing: Standing, segments: Sequence[Segment], spans: Sequence[PhaseSpan]
) -> None:
    """Raise ScheduleError for the first jump of the rate, with the path of the setting that fixes it."""
    jump = first_jump(pieces, standing)
    if jump is None:
        return
    step, rate_before, rate = jump
    span = _span_at(spans, step)
    jumps = f"the learning rate jumps from {rate_before:.3g} to {rate:.3g} at step {step}"
    before, after = (Schedule(tuple(segments)).segment_at(s) for s in (step - 1, step))
    scaled = max(before.lr_scale, after.lr_scale) > 2 * min(before.lr_scale, after.lr_scale)
    follows_optim = span.path is not None and span.program is None
    if step == standing.past_end and (step > span.start or (follows_optim and not scaled)):
        where = "optim.allow_jump"
        decaying = step > 1 and standing.past_rate(step - 2) > standing.past_rate(step - 1)
        earlier = "resume from a step before its decay, " if decaying else ""
        phase = "start a phase there with" if step > span.start else "give the phase that begins there"
        message = (
            f"{jumps}, where the fixed part of the schedule ends: more than 2x; {phase} its own lr "
            f"(rewarm_steps, peak), set optim.allow_jump: true, {earlier}or restore what the rate depends on "
            "(train.steps, optim, the phase's lr)"
        )
    elif scaled:
        where = "optim.allow_jump" if span.path is None else f"{span.path}.batch_size"
        message = (
            f"{jumps}, more than 2x: scaled from a batch of {before.batch_size} to {after.batch_size} "
            "(optim.scale_lr_by_batch); change the batch in smaller steps, give the phase an lr with rewarm_steps, "
            "or set optim.allow_jump: true"
        )
    else:
        where = "optim.allow_jump" if span.program is None else f"{span.path}.lr.peak"
        message = (
            f"{jumps}, more than 2x outside a decay or a re-warming of at least 2 updates; give the phase "
            "rewarm_steps or another peak, or set optim.allow_jump: true"
        )
    raise ScheduleError([(where, message)])


def _without_effect(
    pieces: Sequence[LrPiece], spans: Sequence[PhaseSpan], lr: LrSchedule, numbers: Numbers
) -> list[str]:
    """A warning for each setting of the learning rate that does nothing."""
    warnings, decay_steps, last = [], numbers.decay_steps, spans[-1]
    decays_itself = last.program is not None and last.decay_steps > 0
    if lr.schedule == "wsd" and decay_steps == 0 and not decays_itself and any(span.program is None for span in spans):
        fix = "set optim.decay_steps, such as 20%, or optim.schedule: constant"
        warnings.append(f"schedule wsd with decay_steps 0 never decays, and min_lr_ratio is not used; {fix}")
    if lr.schedule != "wsd" and any_steps(lr.decay_steps):
        how = "never decays" if lr.schedule == "constant" else "decays all the way from the warm-up to the end"
        warnings.append(f"optim.decay_steps does nothing: optim.schedule {lr.schedule} {how}")
    if numbers.warmup_steps and spans[0].program is not None:
        warnings.append(
            "optim.warmup_steps does nothing: the first phase has a learning rate of its own (phases[0].lr)"
        )
    in_decay = [span for span in spans if span.end > last.end - decay_steps]
    if lr.schedule == "wsd" and decay_steps and all(span.program for span in in_decay):
        what = f"the last phase has a learning rate of its own ({last.path}.lr)"
        fix = "" if last.decay_steps else ", which does not decay; give it decay_steps"
        warnings.append(f"optim.decay_steps does nothing: {what}{fix}")
    for piece in pieces:
        path = _span_at(spans, piece.start).path
        if piece.warmup and piece.first == piece.last and path is not None:
            where = f"{path}.lr"
            does = "does nothing: the phase already starts at its peak rate"
            warnings.append(f"{where}.rewarm_steps {does}; set {where}.peak")
    return warnings
