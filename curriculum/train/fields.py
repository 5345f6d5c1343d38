"""The fields of every event, of metrics rows and of the training state, as plain data from the parts of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from curriculum.model.model import count, num_parameters
from curriculum.plan_warnings import evalset_warnings
from curriculum.record.events import eval_key, record_name
from curriculum.record.sentences import rise, sets_of_alarm
from curriculum.scheduling import constant_tokens_per_step, describe_phases, shape_of, step_sizes
from curriculum.train.checkpoints.best import BadGolds
from curriculum.train.clock import TrainClock, peak_memory_gb
from curriculum.train.history import History
from curriculum.train.mesh import describe_devices
from curriculum.train.resuming.going_back import Rollback
from curriculum.train.setup import Setup, software
from curriculum.train.step import TrainState, read_window
from curriculum.train.watch import Evaluated
from evalsets.metrics import WindowResults, clusters, summarise
from evalsets.regressions import WARNED
from evalsets.summary import RECORDED, Summary
from phases.rates import rate_spans
from phases.schedule import Schedule

# Of the point where a run branched off: the trunk, its step, a name of its own, and the same of the trunk or None.
_BRANCH_POINT = ("run", "step", "id", "branched_from")


class Before(NamedTuple):
    """What the record told before it was cut back.

    That is the step of its last row, the `software` of the newest start, and the `eval_regression` that had stopped the
    run. Each is None if there was none, or nothing that can be read tells it.
    """

    trained_to: int | None = None
    software: dict[str, str] | None = None
    alarm: Mapping[str, Any] | None = None


def training_start(setup: Setup) -> dict[str, Any]:
    return {
        "config": setup.config.to_json(),
        "model": {**setup.model.architecture, **_sizes(setup)},
        "devices": describe_devices(setup.mesh),
        "plan": derived(setup),
        "software": software(),
        "lineage": setup.lineage,
        "sources": setup.corpus.details,
        "evalsets": _evalsets(setup),
        "warnings": [*setup.warnings(), *evalset_warnings(setup.corpus.evalsets.values())],
    }


def resumption(
    setup: Setup,
    state: TrainState,
    step: int | None,
    rollback: Rollback | None,
    damaged: Sequence[Mapping[str, Any]],
    bad: BadGolds,
    edits: Sequence[Mapping[str, Any]],
    begins_branch: bool,
    before: Before,
) -> list[tuple[str, dict[str, Any]]]:
    """The events, as (name, fields), that record how training continues after `step`.

    `before`: what the record told before it was cut back to `step`. A new run, which has neither a step nor a rollback,
    has none.
    """
    if step is None and rollback is None:
        return []
    going_on = {
        **skipped(state),
        "devices": describe_devices(setup.mesh),
        "plan": derived(setup),
        "sources": setup.corpus.details,
        "evalsets": _evalsets(setup),
    }
    if rollback is not None:
        event = "rollback", {**rollback.event, **going_on}
    else:
        gold_lost = [{"step": gold, "why": why} for gold, why, lost in bad if lost]
        now, was, alarm = software(), before.software, before.alarm
        told = {
            "damaged": list(damaged),
            "gold_lost": gold_lost,
            "begins_branch": begins_branch,
            "stopped_by": alarm and {"step": alarm["step"], "sets": sets_of_alarm(alarm)},
            "trained_to": before.trained_to if before.trained_to is not None and before.trained_to > step else None,
            "software_changed": {}
            if was is None
            else {name: [was.get(name), now[name]] for name in now if was.get(name) != now[name]},
        }
        event = "resume", {**going_on, "software": now, **{key: found for key, found in told.items() if found}}
    return [event, *(("schedule_edit", dict(edit)) for edit in edits)]


def skipped(state: TrainState) -> dict[str, int]:
    """Updates skipped since the run's start, and how many of them the guard found bad, by reason."""
    guard = state.guard
    return {
        "skipped_updates": int(state.skipped_updates),
        "skipped_nonfinite": int(guard.num_nonfinite),
        "skipped_outliers": int(guard.num_outliers),
    }


def _evalsets(setup: Setup) -> dict[str, Any]:
    """The size and content hash of each eval set; a resume may have added sets."""
    sizes = {}
    for name, e in setup.corpus.evalsets.items():
        cluster_N, kind = clusters(e.origin_N)
        sizes[name] = {
            "documents": e.num_documents,
            "clusters": len(np.unique(cluster_N)),  # the independent units of its standard error
            "clustered_by": kind,
            "windows": e.num_windows,
            "tokens": e.num_tokens,
            "bytes": e.num_bytes,
            "content_hash": e.content_hash,
        }
    return sizes


def derived(setup: Setup) -> dict[str, Any]:
    schedule, branch = setup.course.schedule, setup.course.branched_from
    return {
        "total_steps": schedule.total_steps,
        "tokens_per_step": constant_tokens_per_step(schedule),
        "step_sizes": step_sizes(schedule),
        **_sizes(setup),
        "phases": list(describe_phases(schedule, setup.config)),
        "learning_rate": [{**span._asdict(), "piece": asdict(span.piece)} for span in rate_spans(schedule)],
        "lineage": setup.lineage,
        **({} if branch is None else {"branched_from": {key: branch[key] for key in _BRANCH_POINT}}),
    }


def _sizes(setup: Setup) -> dict[str, int]:
    """How many parameters the model has; and, if adapters are trained, how many are trained."""
    sizes = {"num_parameters": num_parameters(setup.model)}
    return sizes if setup.states.frozen is None else {**sizes, "num_trained": count(setup.states.like.params)}


def edits_again(setup: Setup, history: History, done: int) -> list[dict[str, Any]]:
    """The `schedule_edit` events due after `done` updates for edits that the schedule already contains.

    At the step where a branch leaves its trunk, that is the branching itself; before it, the edits of the trunk's
    config at this step. After a rollback, these are the edits of the config at this step from before the run went
    back.
    """
    course = setup.course
    if course.branched_from and done == course.branched_from["step"]:
        return [branch_edit(setup)]
    if acts := course.of_trunk(done):
        return [edit for edit in acts["edits"] if edit["kind"] != "replay"]
    return history.edits_before(done)


def branch_edit(setup: Setup) -> dict[str, Any]:
    """The `schedule_edit` event of a branch at the step where it leaves its trunk."""
    schedule, branch = setup.course.schedule, setup.course.branched_from
    phase = schedule.segment_at(branch["step"]).phase
    return {
        "kind": "branch",
        "phase": phase,
        "mixture_before": branch["mixture_before"],
        "mixture_after": schedule.shares(branch["step"]),
        "passed_over": schedule.passed_over(branch["step"]),
        "until": schedule.phase_end(phase),
        "reason": branch["reason"],
        "changes": branch["changes"],
        "warnings": setup.warnings(branch["data_warnings"]),
    }


# Fields of the history that people do not need.
_INTERNAL = ("phase", "watch", "gold", "row_step", "gold_undecided", "eval_left")


def training_state(setup: Setup, step: int, history: History) -> dict[str, Any]:
    """Where the run stands, for people and scripts that watch it. A resume never reads it."""
    course = setup.course
    return {
        "step": step,
        "total_steps": course.total_steps,
        "phase": course.phase_at(step),
        "checkpoint": f"checkpoints/{step}",
        **_consumption(course.schedule, step),
        **{key: value for key, value in history.to_json().items() if key not in _INTERNAL},
        "gold_step": history.gold.gold and history.gold.gold.step,
    }


def eval_event(
    setup: Setup,
    step: int,
    evaluated: Evaluated,
    averaged: Mapping[str, Mapping[str, WindowResults]],
    duration_s: float,
) -> dict[str, Any]:
    """The fields of an `eval` event.

    These are the losses of each set, for the raw parameters and for each average; the smallest rise that each set can
    show; and the sets that are worse or may be, with how far each is above the baseline that it rose most from.
    """
    course = setup.course
    fields: dict[str, Any] = {
        "progress_pct": round(100 * step / course.total_steps, 4),
        "lr": course.rate_at(step),
        "phase": course.phase_at(step),
    }
    fields |= _losses(evaluated.summaries)
    for average, results in averaged.items():
        fields[average] = _losses({name: summarise(result) for name, result in results.items()})
    rises = {name: max(map(rise, pairs)) for name, pairs in evaluated.standing.items()}
    for name in evaluated.warned:
        c = evaluated.comparisons[name]
        rises[name] = float(np.max(c.delta_B[c.states_B == WARNED]))
    found = {
        "detectable": {record_name(name): _rounded(c.detectable) for name, c in evaluated.comparisons.items()},
        "regressed": [record_name(name) for name in evaluated.standing],
        "joined": list(evaluated.joined),
        "warned": [record_name(name) for name in evaluated.warned],
        "rises": {record_name(name): round(nats, 6) for name, nats in rises.items()},
        "notes": list(evaluated.notes),
    }
    fields |= {key: value for key, value in found.items() if value}
    return fields | {"eval_duration_s": round(duration_s, 3)}


def _rounded(nats: Any) -> float | None:
    """Nats per token rounded as in the record; None if not finite."""
    return round(float(nats), 6) if np.isfinite(nats) else None


def _losses(summaries: Mapping[str, Summary]) -> dict[str, float | None]:
    fields: dict[str, float | None] = {}
    for name, summary in summaries.items():
        for metric in RECORDED:
            value = getattr(summary, metric)
            fields[eval_key(record_name(name), metric)] = None if value is None else round(value, 6)
    return fields


def metrics_row(setup: Setup, done: int, row_before: int, state: TrainState, clock: TrainClock) -> dict[str, Any]:
    """The metrics row after `done` updates; `row_before` is the step of the row before it, 0 for the first row."""
    course = setup.course
    mixture = course.mixture_at(done)
    means = read_window(state.window, course.plan.sources)
    filled, scored = means["filled_tokens"], means["scored_tokens"]
    # Token slots per update since the row before. Inexact only if updates of two sizes share a row and some were
    # skipped.
    slots = (course.tokens_at(done) - course.tokens_at(row_before)) / (done - row_before)
    steps, seconds, once = clock.take()  # no steps: of a run that now ends where it had been stopped
    tokens = course.tokens_at(done) - course.tokens_at(done - steps)
    fields = {
        "step": done,
        "loss": means["loss"],
        **{f"loss_{name}": loss for name, loss in means["source_loss"].items()},
        "grad_norm": means["grad_norm"],
        "lr": course.rate_at(done),
        "tokens_seen": course.tokens_at(done),
        "tokens_per_sec": round(tokens / seconds, 1) if steps else None,
        "step_time_s": round(seconds / steps, 6) if steps else None,
        "phase": course.phase_at(done),
        "mixture": {name: mixture.get(name, 0.0) for name in setup.config.sources},
        **skipped(state),
        "packing_mode": setup.config.packing.mode,
        "packing_utilization": None if filled is None else round(filled / slots, 6),
        "scored_share": None if scored is None else round(scored / slots, 6),
        "peak_memory_gb": peak_memory_gb(),
    }
    return fields | once


def phase_switch(setup: Setup, done: int, recorded: str) -> dict[str, Any]:
    """The fields of the `phase_switch` event after `done` updates, 1 or more.

    `recorded`: the current phase according to the record. It matters if the record already has a switch at this step
    but the edited config continues the phase before: then the run switches from `recorded` back to that phase.
    """
    schedule = setup.course.schedule
    before, after = schedule.segment_at(done - 1), schedule.segment_at(done)
    counts, sizes = _consumption(schedule, done), setup.course.plan.tokens_per_epoch
    return {
        "from_phase": recorded if before.phase == after.phase else before.phase,
        "new_phase": after.phase,
        "mixture_before": before.mixture_at(done - 1),
        "mixture_after": after.mixture,
        "ramp_steps": 0 if after.ramp is None else after.ramp.steps,
        "shape_before": shape_of(before, setup.config),
        "shape_after": shape_of(after, setup.config),
        "passed_over": schedule.passed_over(done),
        **counts,
        "epochs": {name: round(n / sizes[name], 6) for name, n in counts["consumed"].items() if sizes.get(name)},
        "lr": float(setup.course.rates[done]),
    }


def _consumption(schedule: Schedule, step: int) -> dict[str, dict[str, int]]:
    """By source: tokens read by the first `step` updates, and tokens consumed, which include those passed over."""
    return {"tokens_drawn": schedule.read(0, step), "consumed": schedule.cursors_at(step)}


def training_complete(
    setup: Setup, history: History, transfer: dict[str, Any], elapsed_s: float, state: TrainState
) -> dict[str, Any]:
    course, gold = setup.course, history.gold.gold
    total_steps, total_tokens = course.total_steps, course.tokens_at(course.total_steps)
    return {
        "started_at": history.started_at,
        "total_elapsed_s": round(elapsed_s, 3),
        "total_steps": total_steps,
        "train_steps": setup.config.train.steps,  # more than total_steps if an exhausted source stopped the run
        "total_tokens": total_tokens,
        "steps_per_sec": round(total_steps / elapsed_s, 3),
        "tokens_per_sec": round(total_tokens / elapsed_s, 1),
        "final_train_loss": history.train_loss,
        "final_val_loss": history.val_loss,
        "best_val_loss": history.best_val_loss,
        "best_val_step": history.best_val_step,
        **skipped(state),
        "gold_step": gold and gold.step,
        "gold_metric": gold and history.gold.metric,
        "gold_value": gold and gold.value,
        "transfer": transfer,
    }
