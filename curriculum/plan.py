"""The plan of a run, before anything is trained: who gets what, when, and what to beware of. No jax, no preparing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from curriculum.adaptation import base_lineage, resolved_model, with_replay
from curriculum.config import Config
from curriculum.data.corpus import find_sizes
from curriculum.model.formulation import BY_BACKEND, layers_of
from curriculum.model.memory import memory_estimate
from curriculum.model.presets import (
    HOW,
    ModelConfig,
    model_problems,
    num_adapters,
    num_parameters,
    num_projections,
    num_trained,
    own_rope_theta,
)
from curriculum.run import DEFAULT_STORE_DIR
from curriculum.train.optimizer import MOMENTS, OptimConfig
from phases.lr import LrSchedule
from phases.replay import Replay, raise_share
from phases.resolve import ScheduleError, resolve
from phases.schedule import Schedule, Segment, SourceSupply, cut

# Arrays like a matrix that the compiler for CPUs holds of each at once while muon makes its update orthogonal.
MUON_ARRAYS = 6
# Muennighoff et al. 2023, arXiv:2305.16264: repeating a source up to 4 times is worth nearly as much as fresh data.
MAX_EPOCHS_WORTH_FRESH = 4
FEW_SCORED_TARGETS = 64  # of an update; answers stand together, so that with so few some updates have none
_PARTS = 32  # steps that are looked at together where one is searched for; alone each would take as long


@dataclass(frozen=True)
class PlanRow:
    """One source in one phase. Epochs and the first repeated step are None while the source's size is unknown."""

    phase: str
    source: str
    start: int
    end: int
    share_asked: float
    share_given: float
    tokens: int
    epochs_so_far: float | None
    first_repeat_step: int | None


@dataclass(frozen=True)
class Plan:
    """What `curriculum plan` shows. `rates` are (step, learning rate of that update) at every boundary.

    `tokens_per_step` is None where phases differ in it; `phases` say each its own. `passed_over` tells where a phase
    begins by leaving the rest of a longer sequence unread: {step, phase, tokens by source}.
    `memory` is estimated, in bytes on one device, by part and in total, for the micro-steps of `phase` that need the
    most, of `rows` x `seq_len` tokens there; its `free_axis` names the axis of the mesh whose -1 was taken for 1. It
    and `num_parameters`, with those that are trained, are None while the vocabulary is not known. `begins_from` is the
    lineage of a run that begins from another, or from a folder.
    """

    name: str
    total_steps: int
    tokens_per_step: int | None
    total_tokens: int
    num_parameters: int | None
    num_trained: int | None
    memory: dict[str, Any] | None
    phases: tuple[dict[str, Any], ...]
    rows: tuple[PlanRow, ...]
    rates: tuple[tuple[int, float], ...]
    passed_over: tuple[dict[str, Any], ...]
    packing_mode: str
    sources: dict[str, dict[str, Any]]
    warnings: tuple[str, ...]
    begins_from: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def declaration(config: Config) -> dict[str, Any]:
    """What a config says of the schedule, as plain JSON; a run's ledger keeps it."""
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
    """What a config says of how a run is trained and judged, the schedule apart, by section; a ledger keeps it too."""
    whole, scheduled = config.to_json(), declaration(config)
    of_model = {} if whole["model"] is None else {key: whole["model"][key] for key in HOW}
    rest = {
        section: {key: value for key, value in whole[section].items() if key not in scheduled[section]}
        for section in ("train", "optim")
    }
    judged = {key: whole["evalsets"][key] for key in ("every", "regression", "gold")}
    micro_steps = {f"{p.name}.grad_accum": p.grad_accum for p in config.phases if p.grad_accum is not None}
    return {**rest, "phases": micro_steps, "model": of_model, "averages": whole["averages"], "evalsets": judged}


class Planned(NamedTuple):
    """A whole schedule, the part of it that is frozen, and the epochs (tokens by source) that it was resolved for."""

    schedule: Schedule
    past: tuple[Segment, ...]
    epochs: Mapping[str, int]


@dataclass(frozen=True)
class Past:
    """What stands of a run's schedule, whatever its config says.

    `segments` are frozen: the config decides from their end on. `settled` is as in `resolve`. `planned` is there where
    the config is as it was: the schedule is too, if the epochs are. `seed` is that of the order in which the sources
    are read, None: the config's. `sources` is what the ledger says of each source, those that are gone among them.
    `going_on` is a segment with data of its own (a raised share, a rollback), which goes on where `segments` end.
    """

    segments: tuple[Segment, ...] = ()
    settled: Mapping[str, int] = field(default_factory=dict)
    planned: Planned | None = None
    seed: int | None = None
    sources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    going_on: Segment | None = None

    @property
    def end(self) -> int:
        return self.segments[-1].end if self.segments else 0


def resolve_schedule(
    config: Config,
    tokens_per_epoch: Mapping[str, int | None],
    past: Past | None = None,
    going_on: Segment | None = None,
) -> Schedule:
    """The config's phases, replay mixed in, as segments, for epochs of so many tokens (None: not prepared).

    After a `past` the phases decide from its end on, but for `going_on`, as in `resolve`. Raises InputError.
    """
    past = past or Past()
    message = (
        f"too few training tokens, expected at least one of the run's longest sequences ({config.longest_seq_len}) and "
        "the token after it; add text or shorten the sequences"
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
    """The schedule of a run that goes on, and what of it is frozen: as it was planned, where nothing changed."""
    if past.planned is not None and past.planned.epochs == tokens_per_epoch:
        return past.planned.schedule, replace(past, segments=past.planned.past, planned=None)
    segment, past = past.going_on, replace(past, planned=None, going_on=None)
    schedule = resolve_schedule(config, tokens_per_epoch, past)
    if segment is None or schedule.total_steps <= past.end or schedule.segment_at(past.end).phase != segment.phase:
        return schedule, past
    return kept_order(config, tokens_per_epoch, past, segment)


def kept_order(
    config: Config, tokens_per_epoch: Mapping[str, int], past: Past, segment: Segment
) -> tuple[Schedule, Past]:
    """The schedule where a segment of one's own begins at the past's end, and the past with it, to its phase's end."""
    whole = resolve_schedule(config, tokens_per_epoch, past, segment)
    until = next(end for name, _, end in whole.phase_bounds if name == segment.phase)
    past = replace(past, segments=cut(whole.segments, until))
    return resolve_schedule(config, tokens_per_epoch, past), past


def check_schedule(config: Config, past: Past | None = None) -> None:
    """Raise InputError with every problem of the phases and the learning rate that needs no source's size."""
    _resolve(config, dict.fromkeys(config.sources), past or Past(), sizes_to_come=True)


def replay_schedule(
    config: Config,
    tokens_per_epoch: Mapping[str, int],
    schedule: Schedule,
    past: Past,
    *,
    step: int,
    source: str,
    factor: float,
    max_share: float,
    spared: Collection[str],
) -> Replay:
    """`raise_share` of a schedule of this config after a past. Raises ReplayRefused."""
    edit = {"step": step, "source": source, "factor": factor, "max_share": max_share, "spared": spared}
    return raise_share(schedule, **_declared(config, tokens_per_epoch, past), **edit)


def _declared(config: Config, epochs: Mapping[str, int | None], past: Past) -> dict[str, Any]:
    """What a schedule is resolved from, by the names that `resolve` has for it."""
    return {
        "phases": with_replay(config.phases, config.adaptation.replay),
        "supplies": {n: SourceSupply(epochs[n], s.max_epochs, s.on_exhaust) for n, s in config.sources.items()},
        "lr": config.optim,
        "total_steps": config.train.steps,
        "batch_size": config.train.batch_size,
        "seq_len": config.train.seq_len,
        "settled": past.settled,
    }


def _resolve(
    config: Config,
    epochs: Mapping[str, int | None],
    past: Past,
    *,
    sizes_to_come: bool = False,
    going_on: Segment | None = None,
) -> Schedule | None:
    """The schedule for epochs of so many tokens; None only where sizes are still to come."""
    try:
        declared = _declared(config, epochs, past)
        return resolve(**declared, past=past.segments, sizes_to_come=sizes_to_come, going_on=going_on)
    except ScheduleError as error:
        raise config.error(error.problems) from None


def plan(config: Config, *, store_dir: str | Path = DEFAULT_STORE_DIR) -> Plan:
    """Resolve the whole run from the config and the sizes of what is already prepared. Raises InputError."""
    sizes = find_sizes(config, store_dir)
    epochs_of = sizes.tokens_per_epoch
    schedule = resolve_schedule(config, epochs_of)
    vocab_size = None if config.model is None else sizes.vocab_size
    if vocab_size is not None and (problems := model_problems(config.model, vocab_size)):
        raise config.error((f"model.{key}", message) for key, message in problems)
    model = None if vocab_size is None else resolved_model(config, vocab_size)

    rows, warnings = [], list(schedule.warnings) + list(sizes.warnings)
    for phase, start, end in schedule.phase_bounds:
        given, after = schedule.given(start, end), schedule.drawn(end)
        total = sum(given.values())
        asked = _shares_asked(schedule, phase)
        for name in sorted(asked, key=lambda n: list(config.sources).index(n)):
            size = epochs_of[name]
            rows.append(
                PlanRow(
                    phase=phase,
                    source=name,
                    start=start,
                    end=end,
                    share_asked=asked[name],
                    share_given=given[name] / total,
                    tokens=given[name],
                    epochs_so_far=None if size is None else after[name] / size,
                    first_repeat_step=None if size is None else _first_repeat(schedule, phase, name, size),
                )
            )
    warnings += schedule_warnings(config, schedule, epochs_of)
    warnings += few_scored_targets(schedule, sizes.details)
    unknown = [name for name, size in epochs_of.items() if size is None]
    if unknown:
        warnings.append(f"not prepared yet, so epochs are unknown: {', '.join(unknown)} (run `curriculum prepare`)")
    bounds = [start for _, start, _ in schedule.phase_bounds] + [schedule.total_steps - 1]
    rates = tuple((step, float(schedule.rates(step))) for step in dict.fromkeys(bounds))
    return Plan(
        name=config.name,
        total_steps=schedule.total_steps,
        tokens_per_step=constant_tokens_per_step(schedule),
        total_tokens=schedule.tokens(schedule.total_steps),
        num_parameters=None if model is None else num_parameters(model),
        num_trained=None if model is None else num_trained(model),
        memory=None if model is None else _memory(config, model, schedule),
        phases=describe_phases(schedule, config),
        rows=tuple(rows),
        rates=rates,
        passed_over=tuple(
            {"step": start, "phase": phase, "tokens": tokens}
            for phase, start, _ in schedule.phase_bounds
            if (tokens := schedule.left_out(start))
        ),
        packing_mode=config.packing.mode,
        sources={n: {"tokens_per_epoch": epochs_of[n], **sizes.details.get(n, {})} for n in config.sources},
        warnings=tuple(warnings),
        begins_from=base_lineage(config),
    )


def schedule_warnings(config: Config, schedule: Schedule, epochs_of: Mapping[str, int | None]) -> list[str]:
    """What of a config will do nothing, or more than may be meant, by its schedule; epochs of so many tokens."""
    warnings, drawn = [], schedule.drawn(schedule.total_steps)
    for name, size in epochs_of.items():
        if size is not None and drawn[name] > MAX_EPOCHS_WORTH_FRESH * size:
            warnings.append(
                f"{name} is read {drawn[name] / size:.1f} times; above {MAX_EPOCHS_WORTH_FRESH} epochs repeated "
                "data is worth less and less (93 % of fresh data at 4 epochs, 66 % at 16: arXiv:2305.16264)"
            )
    warnings += _unread(config, schedule)
    warnings += _shapes_that_do_nothing(config)
    last = schedule.lr[-1]
    falls = [p for p in schedule.lr if p.last < p.first and not p.warmup]
    if last.last == last.first and falls and falls[-1].start + falls[-1].steps < schedule.total_steps:
        ended = falls[-1].start + falls[-1].steps
        warnings.append(
            f"the learning rate stops decaying at step {ended}, {schedule.total_steps - ended} steps before the end"
        )
    wanted = config.averages.phase_mean
    for phase, start, end in schedule.phase_bounds if wanted else ():
        found = len(mean_steps(config, start, end, schedule.total_steps))
        if found < 2:
            warnings.append(f"phase {phase} has {found} checkpoint{'' if found == 1 else 's'}: no mean is taken")
        elif found < wanted:
            warnings.append(f"the mean of phase {phase} will be of {found} checkpoints, not {wanted}")
    return warnings


def constant_tokens_per_step(schedule: Schedule) -> int | None:
    """Token slots of an update, None where segments differ in it."""
    found = {segment.batch_size * segment.seq_len for segment in schedule.segments}
    return found.pop() if len(found) == 1 else None


def _shapes_that_do_nothing(config: Config) -> list[str]:
    """Warnings of what phases say of their shape that changes nothing, or more than may be meant."""
    warnings = []
    if config.optim.scale_lr_by_batch and not any(
        phase.batch_size not in (None, config.train.batch_size) for phase in config.phases
    ):
        warnings.append("optim.scale_lr_by_batch does nothing: every phase has train.batch_size")
    own = None if config.model is None else own_rope_theta(config.model)
    for before, after in pairwise(config.phases):
        if before.rope_theta not in (None, own) and after.rope_theta is None:
            warnings.append(
                f"phase {after.name} goes back from a rope_theta of {before.rope_theta:g} to the model's own; to keep "
                f"it, give the phase rope_theta: {before.rope_theta:g}"
            )
    return warnings


def few_scored_targets(schedule: Schedule, details: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A warning for each phase with conversations whose updates have few scored targets.

    `details` are those of a corpus. Of a source that is not prepared, and of text, every slot counts as scored.
    """
    warnings = []
    for phase, start, _ in schedule.phase_bounds:
        shares, segment = _shares_asked(schedule, phase), schedule.segment_at(start)
        tokens_per_step = segment.batch_size * segment.seq_len
        of_slots = {
            name: details.get(name, {}).get("scored_share", 1.0) * (details.get(name, {}).get("utilization") or 1.0)
            for name in shares
        }
        expected = tokens_per_step * sum(share * of_slots[name] for name, share in shares.items())
        if expected < FEW_SCORED_TARGETS and any("scored_share" in details.get(name, {}) for name in shares):
            warnings.append(
                f"updates of phase {phase} have about {expected:.1f} scored targets each, in {tokens_per_step:,} slots;"
                " one that has none is skipped; raise its batch_size or seq_len"
            )
    return warnings


def _unread(config: Config, schedule: Schedule) -> list[str]:
    """A warning for each replay that no phase takes, and for each source that is neither read nor measured."""
    warnings = []
    for name in config.adaptation.replay:
        if all(name in phase.mixture for phase in config.phases):
            warnings.append(f"adaptation.replay.{name} changes nothing: the mixture of every phase names {name} itself")
    measured = {source.held_out_of for source in config.eval_sources.values()}
    given = {name for segment in schedule.segments for name, share in segment.mean_mixture().items() if share > 0}
    for name, drawn in schedule.drawn(schedule.total_steps).items():
        if drawn == 0 and name not in measured | given:
            warnings.append(f"nothing of source {name} is read: no phase gives it a share, and no eval set is of it")
    return warnings


def describe_phases(schedule: Schedule, config: Config) -> tuple[dict[str, Any], ...]:
    """Each phase with its bounds, the mixture it ends in, its ramp and the shape it begins with, as the record keeps
    it. A `rope_theta` of None is the model's own, and of the rates of the phase each is multiplied by `lr_scale`.
    """
    phases = []
    for name, start, end in schedule.phase_bounds:
        segment = schedule.segment_at(start)
        ramp_steps = 0 if segment.ramp is None else segment.ramp.steps
        bounds = {"name": name, "start": start, "end": end, "tokens": schedule.tokens(end) - schedule.tokens(start)}
        phases.append({**bounds, "mixture": segment.mixture, "ramp_steps": ramp_steps, **shape_of(segment, config)})
    return tuple(phases)


def shape_of(segment: Segment, config: Config) -> dict[str, Any]:
    """The shape of a segment's updates, and what else of how they are computed is the phase's."""
    return {
        "batch_size": segment.batch_size,
        "seq_len": segment.seq_len,
        "grad_accum": config.grad_accum_of(segment.phase),
        "rope_theta": segment.rope_theta,
        "lr_scale": segment.lr_scale,
    }


def step_sizes(schedule: Schedule) -> list[dict[str, int]]:
    """{start, end, tokens_per_step} of each longest stretch of updates of one size, in order."""
    sizes: list[dict[str, int]] = []
    for segment in schedule.segments:
        tokens_per_step = segment.batch_size * segment.seq_len
        if sizes and sizes[-1]["tokens_per_step"] == tokens_per_step:
            sizes[-1]["end"] = segment.end
        else:
            sizes.append({"start": segment.start, "end": segment.end, "tokens_per_step": tokens_per_step})
    return sizes


def mean_steps(config: Config, start: int, end: int, total_steps: int) -> list[int]:
    """The checkpoints, oldest first, whose mean is taken at the end of a phase of steps `start` to `end`.

    Only those that the schedule asks for count, so that a run that was stopped in between has the same mean.
    """
    if config.averages.phase_mean is None:
        return []
    every = config.checkpoint.every
    planned = [*range((start // every + 1) * every, end + 1, every)]
    if end == total_steps and end % every:
        planned.append(end)
    return planned[-config.averages.phase_mean :]


def _memory(config: Config, model: ModelConfig, schedule: Schedule) -> dict[str, Any] | None:
    """What the largest update needs of a device's memory, -1 in the mesh taken for 1; None with an optimizer of one's
    own. Layers of `auto` are taken as the backend takes them with which the update needs more.
    """
    moments = _moments_per_parameter(config.optim, model)
    if moments is None:
        return None
    mesh, estimates = config.mesh, []
    model = replace(model, dropout=0.0) if config.train.deterministic else model
    computed = [replace(model, layers=layers) for layers in {layers_of(model, backend) for backend in BY_BACKEND}]
    for segment, model in product(schedule.segments, computed):
        grad_accum = config.grad_accum_of(segment.phase)
        rows = segment.batch_size // grad_accum // mesh.row_shards
        estimate = memory_estimate(
            model,
            rows=rows,
            seq_len=segment.seq_len,
            grad_accum=grad_accum,
            moments_per_parameter=moments,
            ema=config.averages.ema_decay is not None,
            document_mask=config.packing.document_mask,
            state_shards=max(mesh.fsdp, 1) * max(mesh.tensor, 1),
            fsdp=max(mesh.fsdp, 1),
            update_bytes=MUON_ARRAYS
            * 4
            * (num_adapters(model) or num_projections(model))
            * (config.optim.name == "muon"),
        )
        estimates.append({"phase": segment.phase, "rows": rows, "seq_len": segment.seq_len, **estimate.to_json()})
    free_axis = next((axis for axis, size in asdict(mesh).items() if size == -1), None)
    return {**max(estimates, key=lambda estimate: estimate["total"]), "free_axis": free_axis}


def _moments_per_parameter(optim: OptimConfig, model: ModelConfig) -> float | None:
    if optim.name != "muon":
        return MOMENTS.get(optim.name)
    if model.lora is not None:
        return MOMENTS["muon"]  # of the adapters, which are all matrices
    muon_share = num_projections(model) / num_parameters(model)
    if optim.muon.allow_all_2d or (optim.muon.allow_tied_embed and model.tie_embeddings):
        muon_share = 1.0  # but for vectors, and a table of positions
    return muon_share * MOMENTS["muon"] + (1 - muon_share) * MOMENTS[optim.muon.rest]


def _shares_asked(schedule: Schedule, phase: str) -> dict[str, float]:
    """Exact mean proportion of each source over a phase, its ramp included."""
    segments = [s for s in schedule.segments if s.phase == phase]
    num_steps = sum(s.end - s.start for s in segments)
    total: dict[str, float] = {}
    for segment in segments:
        for name, share in segment.mean_mixture().items():
            total[name] = total.get(name, 0.0) + share * (segment.end - segment.start) / num_steps
    return total


def _first_repeat(schedule: Schedule, phase: str, name: str, epoch: int) -> int | None:
    """The first update of a phase that reads something of the source again; None if none does."""
    for segment in (s for s in schedule.segments if s.phase == phase):
        within = max(epoch, segment.cursors[name])
        if segment.drawn(segment.end)[name] <= within:
            continue
        low, high = segment.start, segment.end  # drawn(high) is beyond one epoch; find the first such step
        while high - low > 1:
            steps = low + (high - low) * np.arange(_PARTS + 1) // _PARTS  # from low to high
            first = int((segment.drawn(steps)[name] > within).argmax())
            low, high = int(steps[first - 1]), int(steps[first])
        return high - 1
    return None
