"""The schedule of a config, resolved from its phases and, for a resumed run, from the part that is fixed already."""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

from curriculum.config import Config
from curriculum.errors import InputError
from curriculum.model.presets import HOW
from curriculum.schema.adaptation import with_replay
from phases.batches import num_micro_steps
from phases.checks import ScheduleError
from phases.declared import Curriculum
from phases.lr import LrSchedule
from phases.resolve import resolve
from phases.schedule import SETTINGS, Schedule, Segment, SourceSupply, cut


def declaration(config: Config) -> dict[str, Any]:
    """What a config declares about the schedule, as plain JSON; a run's ledger keeps it."""
    whole = config.to_json()
    return {
        "seed": config.seed,
        "train": {key: whole["train"][key] for key in ("steps", "batch_size", "seq_len")},
        "optim": {field.name: whole["optim"][field.name] for field in fields(LrSchedule)},
        "sources": {n: {key: s[key] for key in ("max_epochs", "on_exhaust")} for n, s in whole["sources"].items()},
        "adaptation": {"replay": whole["adaptation"]["replay"]},
        "phases": [{key: value for key, value in p.items() if key != "grad_accum"} for p in whole["phases"]],
        "evalsets": {"sets": sorted(whole["evalsets"]["sets"])},
    }


def training_settings(config: Config) -> dict[str, dict[str, Any]]:
    """A config's settings for training and judging, without the schedule, by section; each eval set has its own."""
    whole, scheduled = config.to_json(), declaration(config)
    of_model = {} if whole["model"] is None else {key: whole["model"][key] for key in HOW}
    rest = {
        section: {key: value for key, value in whole[section].items() if key not in scheduled[section]}
        for section in ("train", "optim")
    }
    judged = {key: whole["evalsets"][key] for key in ("every", "regression", "gold")}
    sets = {"primary": whole["evalsets"]["primary"]}
    sets |= {f"sets.{name}": evalset for name, evalset in whole["evalsets"]["sets"].items()}
    of_sets = {f"evalsets.{name}": {key: s[key] for key in ("every", "tolerance")} for name, s in sets.items()}
    micro_steps = {f"{p.name}.grad_accum": p.grad_accum for p in config.phases if p.grad_accum is not None}
    return {
        **rest,
        "phases": micro_steps,
        "model": of_model,
        "averages": whole["averages"],
        "evalsets": judged,
        **of_sets,
    }


class Planned(NamedTuple):
    """A whole schedule, the part of it that is frozen, and the epochs (tokens by source) that it was resolved for."""

    schedule: Schedule
    past: tuple[Segment, ...]
    epochs: Mapping[str, int]


@dataclass(frozen=True)
class Past:
    """The part of a run's schedule that is fixed, whatever its config says.

    segments: frozen; the config decides what follows them.
    rates_from: the step from which the config decides the rates of `segments` too; None: they are frozen as well.
    settled: as in `Curriculum`.
    planned: set if the config declares the same schedule as before. It is used as it is, if the epochs are the same.
    seed: of the order in which the sources are read; None: the config's.
    sources: the ledger's entry of each source, including those that the config dropped.
    going_on: a segment with data of its own (a raised share, a rollback) that continues where `segments` end.
    before_raised: (step, past before it) of each share that was raised, oldest first.
    """

    segments: tuple[Segment, ...] = ()
    settled: Mapping[str, int] = field(default_factory=dict)
    planned: Planned | None = None
    seed: int | None = None
    sources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    going_on: Segment | None = None
    before_raised: tuple[tuple[int, Past], ...] = ()
    rates_from: int | None = None

    @property
    def end(self) -> int:
        return self.segments[-1].end if self.segments else 0


NO_PAST = Past()  # of a run that begins


def resolve_schedule(
    config: Config, tokens_per_epoch: Mapping[str, int | None], past: Past = NO_PAST, going_on: Segment | None = None
) -> Schedule:
    """Resolve the config's phases, with replay mixed in, into segments.

    `tokens_per_epoch` is by source, None for one that is not prepared. `past` is kept; what follows it is up to the
    phases, except for `going_on`, as in `resolve`. Raises InputError.
    """
    message = (
        f"too few training tokens, expected at least the run's longest sequence ({config.longest_seq_len}) plus the "
        "token after it; add text or shorten the sequences"
    )
    phases = with_replay(config.phases, config.adaptation.replay)
    problems = [
        (f"sources.{name}", message)
        for name, num_tokens in tokens_per_epoch.items()
        if num_tokens == 0 and any(p.mixture.get(name) for p in phases)
    ]
    if problems:
        raise config.error(problems)
    return _resolve(config, tokens_per_epoch, past, going_on=going_on)


def continued_schedule(config: Config, tokens_per_epoch: Mapping[str, int], past: Past) -> tuple[Schedule, Past]:
    """(schedule, past) of a resumed run: as they were planned if nothing changed, else resolved anew."""
    planned, past = past.planned, replace(past, planned=None)
    if planned is not None and planned.epochs == tokens_per_epoch:
        warnings = ()
        with suppress(InputError):  # what stands need not resolve again
            warnings = continued_schedule(config, tokens_per_epoch, past)[0].warnings
        return replace(planned.schedule, warnings=warnings), replace(past, segments=planned.past)
    segment, past = past.going_on, replace(past, going_on=None)
    schedule = resolve_schedule(config, tokens_per_epoch, past)
    past = replace(past, segments=cut(schedule.segments, past.end), rates_from=None)
    if segment is None or schedule.total_steps <= past.end or schedule.segment_at(past.end).phase != segment.phase:
        return schedule, past
    whole = resolve_schedule(config, tokens_per_epoch, past, segment)  # extended to the end of its phase
    return whole, replace(past, segments=cut(whole.segments, whole.phase_end(segment.phase)))


def check_schedule(config: Config, past: Past = NO_PAST) -> None:
    """Raise InputError with every problem of the phases and rates that can be found without the sources' sizes."""
    _resolve(config, dict.fromkeys(config.sources), past, sizes_to_come=True)


def curriculum_of(config: Config, epochs: Mapping[str, int | None], past: Past) -> Curriculum:
    """The curriculum that a config's schedule is resolved from, with replay mixed in; `epochs` are tokens by source."""
    return Curriculum(
        with_replay(config.phases, config.adaptation.replay),
        {n: SourceSupply(epochs[n], s.max_epochs, s.on_exhaust) for n, s in config.sources.items()},
        config.optim,
        total_steps=config.train.steps,
        batch_size=config.train.batch_size,
        seq_len=config.train.seq_len,
        settled=past.settled,
    )


def _resolve(
    config: Config,
    epochs: Mapping[str, int | None],
    past: Past,
    *,
    sizes_to_come: bool = False,
    going_on: Segment | None = None,
) -> Schedule | None:
    """As `resolve`, but raises InputError. Returns None only with `sizes_to_come`; `epochs` are tokens by source."""
    try:
        curriculum = curriculum_of(config, epochs, past)
        fixed = {"past": past.segments, "rates_from": past.rates_from, "going_on": going_on}
        return resolve(curriculum, **fixed, sizes_to_come=sizes_to_come)
    except ScheduleError as error:
        raise config.error(error.problems) from None


def mean_steps(config: Config, start: int, end: int, total_steps: int) -> list[int]:
    """Steps of the checkpoints, oldest first, that are averaged at the end of a phase from step `start` to `end`.

    Only those due by `checkpoint.every` or at the run's end count, so that a run that was stopped in between has the
    same mean.
    """
    if config.averages.phase_mean is None:
        return []
    every = config.checkpoint.every
    planned = [*range((start // every + 1) * every, end + 1, every)]
    if end == total_steps and end % every:
        planned.append(end)
    return planned[-config.averages.phase_mean :]


def num_due(ends: Set[int], every: int, after: int) -> int:
    """How many evals or checkpoints are due after step `after`, which is not beyond the last of `ends`.

    They are due at each multiple of `every` up to the last of `ends`, and at each of `ends`: the phase ends for evals,
    the run's end for checkpoints.
    """
    between = sum(end > after and end % every > 0 for end in ends)
    return max(ends) // every - after // every + between


def constant_tokens_per_step(schedule: Schedule) -> int | None:
    """Token slots of an update, None if segments differ in it."""
    sizes = step_sizes(schedule)
    return sizes[0]["tokens_per_step"] if len(sizes) == 1 else None


def describe_phases(schedule: Schedule, config: Config) -> tuple[dict[str, Any], ...]:
    """Each phase as the record keeps it: its bounds, the mixture after its ramp, the ramp, and its first shape.

    A `rope_theta` of None is the model's own. `lr_scale` multiplies every learning rate of the phase. A phase whose
    shape was edited midway has `reshaped`, {step, ...} of each later shape. One whose mixture or ramp changes midway,
    as when a source is exhausted or by an edit, has `remixed`: {step, mixture} of each change, and `ramp_end`, the step
    from which the mixture holds, if that is later.
    """
    phases = []
    for name, start, end in schedule.phase_bounds:
        own = [s for s in schedule.segments if start <= s.start < end]
        segment = own[0]
        ramp_steps = 0 if segment.ramp is None else segment.ramp.steps
        bounds = {"name": name, "start": start, "end": end, "tokens": schedule.tokens(end) - schedule.tokens(start)}
        shapes = [(s.start, shape_of(s, config)) for s in own]
        reshaped = [{"step": at, **now} for (_, was), (at, now) in pairwise(shapes) if now != was]
        phase = {**bounds, "mixture": segment.mixture, "ramp_steps": ramp_steps, **shapes[0][1]}
        turns = ((_mixture_from(s.start, was), _mixture_from(s.start, s)) for was, s in pairwise(own))
        remixed = [now for was, now in turns if now != was]
        phases.append(phase | ({"reshaped": reshaped} if reshaped else {}) | ({"remixed": remixed} if remixed else {}))
    return tuple(phases)


def _mixture_from(step: int, segment: Segment) -> dict[str, Any]:
    """An entry of `remixed`: the mixture that a segment has, or goes on to, from `step` on."""
    ramp_end = segment.ramp_end
    ahead = {"ramp_end": ramp_end} if ramp_end is not None and ramp_end > step else {}
    return {"step": step, "mixture": segment.mixture, **ahead}


def shape_of(segment: Segment, config: Config) -> dict[str, Any]:
    """The shape of a segment's updates, and the other settings of their computation that a phase may set."""
    return {
        "batch_size": segment.batch_size,
        "seq_len": segment.seq_len,
        "grad_accum": num_micro_steps(config.grad_accum_of(segment.phase), segment.batch_size),
        **{key: getattr(segment, key) for key in SETTINGS},
    }


def step_sizes(schedule: Schedule) -> list[dict[str, int]]:
    """{start, end, tokens_per_step} of each maximal stretch of updates of one size, in order."""
    sizes: list[dict[str, int]] = []
    for segment in schedule.segments:
        tokens_per_step = segment.batch_size * segment.seq_len
        if sizes and sizes[-1]["tokens_per_step"] == tokens_per_step:
            sizes[-1]["end"] = segment.end
        else:
            sizes.append({"start": segment.start, "end": segment.end, "tokens_per_step": tokens_per_step})
    return sizes
