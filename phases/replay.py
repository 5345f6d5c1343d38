"""Replay: a larger share of one source, from a step to the end of the phase, to counter forgetting."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from phases.checks import ScheduleError
from phases.declared import Curriculum
from phases.resolve import resolve
from phases.schedule import Schedule, Segment, cut

_SMALLEST_SHARE = 0.01  # smaller shares are multiplied as if they were this, so that one of 0 is raised too
_ROUNDING = 1e-12  # error of a share that counts as 0


class ReplayRefused(ValueError):
    """The share is not raised; the message says why, in a sentence."""


@dataclass(frozen=True)
class Replay:
    """An edited schedule, and the part of it that is `past`: frozen up to the end of the phase (`until`).

    `resolve` gives the same schedule from the past again, except if a source stops the run at `until`: from the past
    alone, the phase would go on in a new order of data, whose first update may still be within the cap. The mixtures
    are those of the first update that the edit changes, before and after it.
    """

    schedule: Schedule
    past: tuple[Segment, ...]
    phase: str
    until: int
    mixture_before: dict[str, float]
    mixture_after: dict[str, float]


def raise_share(
    schedule: Schedule,
    curriculum: Curriculum,
    *,
    step: int,
    source: str,
    factor: float,
    max_share: float,
    spared: Collection[str] = (),
) -> Replay:
    """Raise the share of `source` to min(max_share, factor x max(share, 0.01)) from update `step` on.

    The share stays raised to the end of the phase that owns the update, and is never lowered. `spared` sources keep
    their shares; the others give up what is added and keep their proportions to each other. If a ramp is under way, the
    share is raised in both of its mixtures, in each only if the others have enough to give. `curriculum` is the one
    that `schedule` was resolved from.

    Raises ReplayRefused if no more of the source would be read, if the others have not enough to give, or if the edited
    schedule would not resolve (a cap exceeded, an epoch clock missed) or would end the run at another step.
    """
    if source not in curriculum.supplies:
        raise ReplayRefused(f"there is no source {source}")
    if curriculum.supplies[source].num_tokens == 0:
        raise ReplayRefused(f"{source} has no training text")
    if not 0 <= step < schedule.total_steps:
        raise ReplayRefused(f"the run has no update after step {step}")
    old = schedule.segment_at(step)
    rest = old.rest(step)
    rise = _Rise(source, factor, max_share, spared)
    ramp = rest.ramp and replace(rest.ramp, from_mixture=rise.applied(rest.ramp.from_mixture))
    edited = replace(rest, mixture=rise.applied(rest.mixture), ramp=ramp)
    if edited == rest:
        ends = [rest.mixture, *([rest.ramp.from_mixture] if rest.ramp else [])]
        if any(rise.missing(mixture) for mixture in ends):
            worse = ", ".join(sorted(name for name in spared if any(name in mixture for mixture in ends)))
            raise ReplayRefused(f"the added share would come from {worse}, whose sets got worse too")
        share = schedule.shares(step).get(source, 0.0)
        more = f"replay_factor {factor:g} with replay_max_share {max_share:g} gives no more"
        raise ReplayRefused(f"its share is already {share:.4g}; {more}")
    try:
        whole = resolve(curriculum, past=cut(schedule.segments, step), going_on=edited)
    except ScheduleError as error:
        raise ReplayRefused(str(error).replace("\n", "; ")) from None
    if whole.total_steps != schedule.total_steps:
        raise ReplayRefused(f"the run would end at step {whole.total_steps} instead of {schedule.total_steps}")
    until = whole.phase_end(old.phase)
    if whole.cursors_at(until)[source] <= schedule.cursors_at(until)[source]:
        raise ReplayRefused(f"no more of it would be read by step {until}, where the phase ends")
    past = cut(whole.segments, until)
    return Replay(whole, past, old.phase, until, schedule.shares(step), whole.shares(step))


class _Rise(NamedTuple):
    """A rise of the share of `source` in a mixture, as `raise_share` describes it."""

    source: str
    factor: float
    max_share: float
    spared: Collection[str]

    def missing(self, mixture: Mapping[str, float]) -> float:
        """How much of a share is to be added."""
        share = mixture.get(self.source, 0.0)
        return max(0.0, min(self.max_share, self.factor * max(share, _SMALLEST_SHARE)) - share)

    def applied(self, mixture: Mapping[str, float]) -> dict[str, float]:
        """The mixture with the raised share; as it is if the other sources have not enough to give."""
        more = self.missing(mixture)
        givers = {n: weight for n, weight in mixture.items() if n != self.source and n not in self.spared}
        room = math.fsum(givers.values())
        left = room - more
        if more == 0 or left < -_ROUNDING:
            return dict(mixture)
        kept = {name: weight * left / room if left > _ROUNDING else 0.0 for name, weight in givers.items()}
        raised = {**mixture, **kept, self.source: mixture.get(self.source, 0.0) + more}
        return {name: weight for name, weight in raised.items() if weight > 0}
