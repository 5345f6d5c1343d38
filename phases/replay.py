"""Replay: more of one source from a step on to the end of its phase, against what a model forgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from phases.lr import LrSchedule
from phases.resolve import ScheduleError, resolve
from phases.schedule import Phase, Schedule, Segment, SourceSupply, cut

_SMALLEST_SHARE = 0.01  # what the factor works on at least: a source with no share has to get one


class ReplayRefused(ScheduleError):
    """The share is not raised; the message says why, in a sentence."""

    def __init__(self, why: str):
        super().__init__([("phases", why)])

    def __str__(self) -> str:
        return self.problems[0][1]


@dataclass(frozen=True)
class Replay:
    """An edited schedule, and its `past`, frozen to the end of the phase (`until`), that `resolve` makes it of.

    The mixtures are those of update `start` before and after the edit.
    """

    schedule: Schedule
    past: tuple[Segment, ...]
    phase: str
    start: int
    until: int
    mixture_before: dict[str, float]
    mixture_after: dict[str, float]


def raise_share(
    schedule: Schedule,
    phases: Sequence[Phase],
    supplies: Mapping[str, SourceSupply],
    lr: LrSchedule,
    *,
    total_steps: int,
    batch_size: int,
    seq_len: int,
    step: int,
    source: str,
    factor: float,
    max_share: float,
    settled: Mapping[str, int] | None = None,
) -> Replay:
    """Raise the share of `source` to min(max_share, factor x max(share, 0.01)) from update `step` on.

    It lasts to the end of the phase that owns the update; the other sources keep their proportions to each other,
    and both ends of a ramp under way are raised alike. A share is never lowered. The phases, supplies and numbers are
    those that `schedule` was resolved from. Raises ReplayRefused where there is nothing to raise, and where the
    edited schedule would not resolve (a cap exceeded, an epoch clock missed) or would end the run at another step.
    """

    if source not in supplies:
        raise ReplayRefused(f"there is no source {source}")
    if supplies[source].num_tokens == 0:
        raise ReplayRefused(f"{source} has no training text")
    if not 0 <= step < schedule.total_steps:
        raise ReplayRefused(f"the run has no update after step {step}")
    old = schedule.segment_at(step)
    rest = old.rest(step)

    def raised(mixture: Mapping[str, float]) -> dict[str, float]:
        share = mixture.get(source, 0.0)
        target = max(share, min(max_share, factor * max(share, _SMALLEST_SHARE)))
        if target == share:
            return dict(mixture)
        others = {name: weight * (1 - target) / (1 - share) for name, weight in mixture.items() if name != source}
        return {name: weight for name, weight in {**others, source: target}.items() if weight > 0}

    ramp = rest.ramp and replace(rest.ramp, from_mixture=raised(rest.ramp.from_mixture))
    edited = replace(rest, mixture=raised(rest.mixture), ramp=ramp)
    if edited == rest:
        share = schedule.shares(step).get(source, 0.0)
        raise ReplayRefused(f"its share is {share:.4g} already, and {factor:g} times that or {max_share:g} no more")
    numbers = {"total_steps": total_steps, "batch_size": batch_size, "seq_len": seq_len, "settled": settled}
    try:
        whole = resolve(phases, supplies, lr, **numbers, past=cut(schedule.segments, step), going_on=edited)
        until = next((end for name, _, end in whole.phase_bounds if name == old.phase), step)
        past = cut(whole.segments, until)
        resolved = resolve(phases, supplies, lr, **numbers, past=past)
    except ScheduleError as error:
        raise ReplayRefused("; ".join(f"{path}: {message}" for path, message in error.problems)) from None
    if whole.total_steps != schedule.total_steps:
        raise ReplayRefused(f"the run would end at step {whole.total_steps} instead of {schedule.total_steps}")
    if resolved.drawn(until)[source] <= schedule.drawn(until)[source]:
        raise ReplayRefused(f"no more of it would be read up to step {until}, where the phase ends")
    return Replay(resolved, past, old.phase, step, until, schedule.shares(step), resolved.shares(step))
