"""What a run is and how far it has come, as plain data: what `inspect` shows.

The run may still be training. Imports neither jax nor numpy, so that looking at a run is quick.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from curriculum.disk.lock import trained_by
from curriculum.errors import InputError
from curriculum.find_checkpoint import checkpoint_steps, read_ledger
from curriculum.record.commands import MORE_EPOCHS, MORE_STEPS, branch_command, program, resume_command
from curriculum.record.events import TAKEN_UP, check_ends, config_name, last_gold, last_row
from curriculum.record.queries import (
    consumption,
    documents_are_few,
    eval_points,
    evalset_facts,
    last_detectable,
    longer_from,
    measured_sets,
    planned_tokens,
    standing_regressions,
    stopping_alarm,
    warned_sets,
)
from curriculum.record.sentences import new_offenders, sets_of_alarm, skipped_counts, skipped_line, verdict
from curriculum.run import Run, load_run
from curriculum.run_directory import step_folders


def inspect_run(run: Run | str | os.PathLike) -> dict[str, Any]:
    """Everything that `curriculum inspect` shows, as plain data (NaN and infinities as floats).

    `run`: one that is loaded, or its directory. `problems` names files that only describe the run but cannot be
    read, whose facts are left out, and a record that is too short for the newest checkpoint to be resumed. Raises
    InputError while the record is empty.
    """
    run = run if isinstance(run, Run) else load_run(run)
    plan, path = run.plan, run.directory.path
    progress, alarm = standing(run)
    step, trainer = progress["step"], progress["trained_by"]
    read, problems = {}, []
    try:
        read = {entry["phase"]: entry for entry in consumption(run)}
    except InputError as error:
        problems += error.problems
    checkpoints = {place.name: checkpoint_steps(place) for place in run.directory.places}
    steps = checkpoints["checkpoints"]
    if steps and trainer is None:
        try:
            check_ends(path, read_ledger(run.directory.checkpoints / str(steps[-1]))["offsets"])
        except InputError as error:
            problems += error.problems
        except (KeyError, TypeError):
            problems.append(f"{run.directory.checkpoints / str(steps[-1])}: its ledger cannot be read")
    longer = longer_from(plan, {step for place in checkpoints.values() for step in place})
    newest_first = run.events[::-1]
    turns = [event for event in run.events if event["event"] in (*TAKEN_UP, "schedule_edit")]  # few, for every phase
    return {
        "name": run.name,
        "path": str(path),
        "model": run.start["model"],
        "devices": next(event["devices"] for event in newest_first if event["event"] in TAKEN_UP),
        "progress": progress,
        "phases": [
            {
                **phase,
                "done": step >= phase["end"],
                "edits": edits_of(turns, phase),
                "counted_at_step": read.get(phase["name"], {}).get("step"),
                "tokens": read.get(phase["name"], {}).get("tokens", {}),
                "epochs": read.get(phase["name"], {}).get("epochs", {}),
            }
            for phase in plan["phases"]
        ],
        "lineage": {"init_from": run.start["lineage"], "branched_from": run.branched_from},
        "gold": _gold(run, trainer),
        "regressions": standing_regressions(run.events),
        "evals": _evals(run),
        "samples": next((_samples(event) for event in newest_first if event["event"] == "generation"), None),
        "checkpoints": checkpoints,
        "superseded_bytes": _disk_bytes(run.directory.superseded),
        "commands": _commands(run, checkpoints, longer, alarm),
        "longer_needs_jump": bool(run.complete and steps) and longer is None,
        "problems": problems,
    }


def standing(run: Run) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """The `progress` of `inspect_run`, and the alarm that ended the run, if any."""
    events, phases = run.events, run.plan["phases"]
    row, trainer = last_row(run.directory.path), trained_by(run.directory.path)
    step = max(*(event["step"] for event in events), row["step"] if row else 0)
    alarm = stopping_alarm(events, step) if trainer is None else None
    progress = {
        "step": step,
        "total_steps": run.plan["total_steps"],
        "phase": next((phase["name"] for phase in phases if step < phase["end"]), phases[-1]["name"]),
        "finished": run.complete is not None,
        "ended_early_of": ended_early_of(run),
        "trained_by": trainer,
        "tokens": planned_tokens(run.plan, step),
        "elapsed_s": events[-1]["elapsed_s"],
        "started_at": run.start["timestamp"],
        "last_event_at": events[-1]["timestamp"],
        "newest_row": row and {key: row.get(key) for key in ("step", "loss", "lr", "tokens_per_sec")},
        "skipped": skipped_line(row, {}) if row else None,
        "skips_are_few": bool(row) and _few_skips(row),
        # Not a count: if the run went back to one checkpoint twice, the record keeps the second rollback only.
        "num_rollbacks": max((event["number"] for event in events if event["event"] == "rollback"), default=0),
        "unsaved": _unsaved(events),
        "stopped": alarm and _stopped(alarm),
        "diverged": run.diverged and verdict(run.diverged),
        "num_resumes": sum(event["event"] == "resume" and not event.get("begins_branch") for event in events),
    }
    return progress, alarm


def _stopped(alarm: Mapping[str, Any]) -> dict[str, Any]:
    return {"step": alarm["step"], "sets": sets_of_alarm(alarm), "verdict": verdict(alarm)}


def _samples(event: Mapping[str, Any]) -> dict[str, Any]:
    return {"step": event["step"], "samples": event["samples"]}


def _gold(run: Run, trainer: str | None) -> dict[str, Any] | None:
    """The gold that the record names. While a run trains, the folder of its gold may still be being saved."""
    gold = last_gold(run.events)
    if gold is None:
        return None
    is_there = gold["step"] in step_folders(run.directory.gold)
    return {
        **{key: gold[key] for key in ("step", "metric", "value", "path")},
        "missing": not is_there and trainer is None,
        "saving": not is_there and trainer is not None,
    }


def _evals(run: Run) -> dict[str, dict[str, Any]]:
    """By set, evals of averages included: its last eval, first and best loss, and the rise that its alarm detects."""
    detectable, measured, warned = last_detectable(run.events), measured_sets(run.events), warned_sets(run.events)
    evals, about = {}, evalset_facts(run.events)
    for name, of_set in eval_points(run.events).items():
        best = min(of_set, key=lambda p: (p.loss != p.loss, p.loss))
        evals[name] = {
            **vars(of_set[-1]),
            "first": of_set[0].loss,
            "best": best.loss,
            "best_step": best.step,
            "num_evals": len(of_set),
            "detectable": detectable.get(name),
            "tolerance": tolerance_of(run, name),
            "text": _origin_of(run, name),
            "warned": name in warned and name.partition("@")[0] in measured,
            "still_measured": name.partition("@")[0] in measured,
            "few_documents": bool(of_text := about.get(name.partition("@")[0])) and documents_are_few(of_text),
        }
    return evals


def tolerance_of(run: Run, name: str) -> float:
    """Nats per token by which an eval set may rise before it counts as worse, by the last config."""
    own = (declared_set(run, name) or {}).get("tolerance")
    return run.resolved["evalsets"]["regression"]["tolerance"] if own is None else own


def declared_set(run: Run, name: str) -> dict[str, Any] | None:
    """What the last config says of an eval set, by its name in the record; None if it does not have the set."""
    sets, key = run.resolved["evalsets"], config_name(name.partition("@")[0])
    return sets["primary"] if key == "primary" else sets["sets"].get(key)


def _origin_of(run: Run, name: str) -> str | None:
    """Where the text of an eval set comes from; None if the last config does not have the set."""
    described = declared_set(run, name)
    if described is None:
        return None
    if source := described.get("held_out_of"):
        return f"held out of {source}"
    return described.get("path") or f"hf:{described.get('hf')}"


def _unsaved(events: Sequence[Mapping[str, Any]]) -> str | None:
    """The last checkpoint that could not be written, and how many others there are; None if one was written since."""
    failed = {e["path"]: e["why"] for e in events if e["event"] == "checkpoint_failed"}
    saved = (i for i, e in enumerate(events) if e["event"] == "checkpoint" and e["path"] not in failed)
    since = [e["path"] for e in events[max(saved, default=0) :] if e["event"] == "checkpoint_failed"]
    if not since:
        return None
    *others, path = dict.fromkeys(since)
    more = f" and {len(others)} more were" if others else " was"
    return f"{path}{more} not saved: {failed[path]}"


def _disk_bytes(folder: Path) -> int:
    """Total size of the files below a folder; a file with several hard links counts once."""
    sizes = {}
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                stat = os.lstat(os.path.join(path, name))
            except FileNotFoundError:  # deleted just now
                continue
            sizes[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(sizes.values())


def edits_of(events: Iterable[Mapping[str, Any]], phase: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The changes of mixture within a phase, in order: {step, kind, mixture}. Of edits at one step the last counts.

    A mixture that a ramp leads to has `ramp_end`, the step from which it holds. `phase` is from the last plan. Changes
    that no event tells, as when a source is exhausted, have the kind "planned". The plan's are left out from the first
    replay edit on, which raised a share without the plan knowing of it.
    """
    edits, raised = {}, math.inf
    for e in events:
        if e["event"] in TAKEN_UP:
            raised = math.inf
        if e["event"] == "schedule_edit" and phase["start"] < e["step"] < phase["end"]:
            if e["mixture_before"] != e["mixture_after"]:
                edits[e["step"]] = {"step": e["step"], "kind": e["kind"], "mixture": e["mixture_after"]}
            if e["kind"] == "replay":
                raised = min(raised, e["step"])
    planned = {t["step"]: {"kind": "planned", **t} for t in phase.get("remixed", ()) if t["step"] < raised}
    for step in planned.keys() & edits.keys():  # an event has the mixture of its own step, which may be amid a ramp
        edits[step] = {**planned[step], "kind": edits[step]["kind"]}
    return [edit for _, edit in sorted((planned | edits).items())]


def _commands(
    run: Run, checkpoints: Mapping[str, Sequence[int]], longer: int | None, alarm: Mapping[str, Any] | None
) -> dict[str, str]:
    """Commands to type next, keyed by what they do.

    `checkpoints`: steps by place. `longer`: that from which a complete run can be trained for longer, None if none can.
    `alarm`: the one that ended the run, if any.
    """
    path, me = run.directory.path, program("curriculum")
    typed_path = shlex.quote(str(path))
    own = _own_of(run)
    commands = {}
    if run.diverged and (good := run.diverged["last_good_step"]):
        commands["go on"] = branch_command(path, run.store_dir, good, **own)
    elif run.directory.own_config.exists() and not run.diverged:
        go_on = partial(resume_command, run.directory.own_config, path, run.store_dir, **own)
        if run.complete:
            step = "latest" if longer in (None, *checkpoints["checkpoints"][-1:]) else str(longer)
            commands["train longer"] = go_on(step, MORE_EPOCHS if ended_early_of(run) else MORE_STEPS)
        else:
            commands["go on"] = go_on()
    if alarm and (back := way_back(run, alarm)):
        commands["go back"] = back
    commands["report"] = f"{me} report {typed_path} -o {shlex.quote(path.name + '.html')}"
    commands["compare"] = f"{me} compare {typed_path} OTHER_RUN"
    format_name = "safetensors" if own["own_model"] else "hf"
    if any(checkpoints.values()):
        commands["export"] = f"{me} export {typed_path} --format {format_name} -o {shlex.quote(path.name + '-export')}"
    return commands


def way_back(run: Run, alarm: Mapping[str, Any]) -> str | None:
    """The command that branches off from the last checkpoint before the rises of an alarm, or else before some of them.

    None if there is no such checkpoint.
    """
    before: dict[str, int] = {}  # by set, the newest eval that it is worse than
    for pair in new_offenders(alarm)[0]:
        before[pair["set"]] = max(before.get(pair["set"], 0), pair["baseline_step"])
    steps = [step for place in run.directory.places for step in checkpoint_steps(place)]
    earlier = [[step for step in steps if step <= newest] for newest in sorted(before.values())]
    at = max(next(filter(None, earlier), ()), default=None)
    return None if at is None else branch_command(run.directory.path, run.store_dir, at, **_own_of(run))


def _own_of(run: Run) -> dict[str, Any]:
    """What of the user's own no command knows."""
    return {"own_model": run.resolved["model"] is None, "own_optimizer": run.own_optimizer}


def _few_skips(row: Mapping[str, Any]) -> bool:
    """Whether no more updates were skipped than of many a healthy run: outliers alone, 3 or one of a hundred."""
    counts = skipped_counts(row)
    outliers = counts.get("skipped_outliers", 0)
    return counts.get("skipped_updates") == outliers and outliers <= max(3, row["step"] / 100)


def ended_early_of(run: Run) -> int | None:
    """The steps that were asked for, if an exhausted source ended the run before; else None."""
    complete = run.complete
    return complete["train_steps"] if complete and complete["train_steps"] > complete["total_steps"] else None
