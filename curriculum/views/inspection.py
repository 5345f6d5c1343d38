"""What a run is and how far it has come, as plain data and as lines of text.

The run may still be training. Imports neither jax nor numpy, so that looking at a run is quick.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from curriculum.disk.lock import trained_by
from curriculum.errors import InputError
from curriculum.find_checkpoint import checkpoint_steps
from curriculum.record.console import program, resume_command
from curriculum.record.events import TAKEN_UP, config_name, last_gold, last_row, number
from curriculum.record.queries import (
    consumption,
    documents_are_few,
    eval_points,
    evalset_facts,
    last_detectable,
    longer_from,
    measured_sets,
    planned_tokens,
    shapes_of,
    standing_regressions,
    warned_sets,
)
from curriculum.record.sentences import rise, sample_lines, skipped_line, verdict
from curriculum.record.wording import (
    columns,
    duration,
    epochs_text,
    few_documents,
    largest,
    listed,
    loss,
    mesh_text,
    percent_done,
    signed,
    size_text,
    smallest_rise,
    unseen,
)
from curriculum.run import Run
from curriculum.run_directory import step_folders

_MOST_OFFENDERS = 12  # a line each
_MOST_PHASES = 24  # a line each: those around the one under way


def inspect_run(run: Run) -> dict[str, Any]:
    """Everything that `curriculum inspect` shows, as plain data (NaN and infinities as floats).

    `problems` names files that only describe the run but cannot be read; the facts in them are left out. Raises
    InputError while the record is empty.
    """
    start, plan, events = run.start, run.plan, run.events
    path = run.directory.path
    row = last_row(path)
    last = events[-1]
    step = max(*(event["step"] for event in events), row["step"] if row else 0)
    phases = plan["phases"]
    current = next((p["name"] for p in phases if step < p["end"]), phases[-1]["name"])
    read, problems = {}, []
    try:
        read = {entry["phase"]: entry for entry in consumption(run)}
    except InputError as error:
        problems += error.problems
    gold, trainer = last_gold(events), trained_by(path)
    return {
        "name": run.name,
        "path": str(path),
        "model": start["model"],
        "devices": next(e["devices"] for e in reversed(events) if e["event"] in TAKEN_UP),
        "progress": {
            "step": step,
            "total_steps": plan["total_steps"],
            "phase": current,
            "finished": run.complete is not None,
            "ended_early_of": ended_early_of(run),
            "trained_by": trainer,
            "tokens": planned_tokens(plan, step),
            "elapsed_s": last["elapsed_s"],
            "started_at": start["timestamp"],
            "last_event_at": last["timestamp"],
            "newest_row": row and {key: row.get(key) for key in ("step", "loss", "lr", "tokens_per_sec")},
            "skipped": skipped_line(row, {}) if row else None,
            # Not a count: if the run went back to one checkpoint twice, the record keeps the second rollback only.
            "num_rollbacks": max((e["number"] for e in events if e["event"] == "rollback"), default=0),
            "unsaved": _unsaved(events),
            "diverged": run.diverged and verdict(run.diverged),
            "num_resumes": sum(e["event"] == "resume" and not e.get("begins_branch") for e in events),
        },
        "phases": [
            {
                **phase,
                "done": step >= phase["end"],
                "edits": edits_of(events, phase),
                "counted_at_step": read.get(phase["name"], {}).get("step"),
                "tokens": read.get(phase["name"], {}).get("tokens", {}),
                "epochs": read.get(phase["name"], {}).get("epochs", {}),
            }
            for phase in phases
        ],
        "lineage": {"init_from": start.get("lineage"), "branched_from": run.branched_from},
        "gold": None
        if gold is None
        else {
            **{key: gold[key] for key in ("step", "metric", "value", "path")},
            "missing": (missing := gold["step"] not in step_folders(run.directory.gold)) and not trainer,
            "saving": missing and trainer is not None,
        },
        "regressions": standing_regressions(events),
        "evals": _evals(run),
        "samples": next(
            ({k: e[k] for k in ("step", "samples")} for e in reversed(events) if e["event"] == "generation"), None
        ),
        "checkpoints": {place.name: checkpoint_steps(place) for place in run.directory.places},
        "superseded_bytes": _disk_bytes(run.directory.superseded),
        "commands": _commands(run),
        "longer_needs_jump": _longer_needs_jump(run),
        "problems": problems,
    }


def _evals(run: Run) -> dict[str, dict[str, Any]]:
    """By set, evals of averages included: its last eval, first and best loss, and the rise that its alarm detects."""
    detectable, measured, warned = last_detectable(run.events), measured_sets(run.events), warned_sets(run.events)
    evals, about = {}, evalset_facts(run.events)
    for name, of_set in eval_points(run.events).items():
        best = min(of_set, key=lambda p: (p.loss != p.loss, p.loss))
        evals[name] = {
            **of_set[-1]._asdict(),
            "first": of_set[0].loss,
            "best": best.loss,
            "best_step": best.step,
            "num_evals": len(of_set),
            "detectable": detectable.get(name),
            "tolerance": tolerance_of(run, name),
            "text": text_of(run, name),
            "warned": name in warned and name.partition("@")[0] in measured,
            "still_measured": name.partition("@")[0] in measured,
            "few_documents": documents_are_few(about.get(name.partition("@")[0], {})),
        }
    return evals


def tolerance_of(run: Run, name: str) -> float:
    """Nats per token by which an eval set may rise before it counts as worse, by the last config.

    `name` is the set's name in the record.
    """
    sets, key = run.resolved["evalsets"], config_name(name.partition("@")[0])
    own = (sets["primary"] if key == "primary" else sets["sets"].get(key, {})).get("tolerance")
    return sets["regression"]["tolerance"] if own is None else own


def text_of(run: Run, name: str) -> str | None:
    """Where the text of an eval set comes from; None if the last config does not have the set.

    `name` is the set's name in the record.
    """
    sets, key = run.resolved["evalsets"], config_name(name.partition("@")[0])
    described = sets["primary"] if key == "primary" else sets["sets"].get(key)
    if not described:
        return None
    if source := described.get("held_out_of"):
        return f"held out of {source}"
    return described.get("path") or f"hf:{described.get('hf')}"


def least_seen(facts: Mapping[str, Any]) -> str | None:
    """The least sensitive eval set without an alarm, and which rises it would miss.

    None if each of them would show a rise of twice its tolerance.
    """
    evals, worse = facts["evals"], {o["set"] for o in facts["regressions"]}

    def hidden(name: str) -> float:
        detectable, tolerance = evals[name]["detectable"], evals[name]["tolerance"]
        return math.inf if detectable is None else detectable - 2 * tolerance

    judged = [name for name, e in evals.items() if e["still_measured"] and "@" not in name and name not in worse]
    if not judged:
        return None
    name = max(judged, key=hidden)
    said = unseen(evals[name]["detectable"], evals[name]["tolerance"])
    return said and f"{name}: {said}"


def _unsaved(events: Iterable[Mapping[str, Any]]) -> str | None:
    """The last checkpoint that could not be written, and how many others there are; None if all were written."""
    failed = {e["path"]: e["why"] for e in events if e["event"] == "checkpoint_failed"}
    if not failed:
        return None
    *others, (path, why) = failed.items()
    more = f" and {len(others)} more were" if others else " was"
    return f"{path}{more} not saved: {why}"


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


def mixture_text(phase: Mapping[str, Any], share: Callable[[float], str]) -> str:
    """The mixture of a phase from `inspect_run`, followed by each later one with its step."""
    return "; ".join(_mixtures(phase, share))


def _mixtures(phase: Mapping[str, Any], share: Callable[[float], str]) -> list[str]:
    def text_of(mixture):
        parts = {name: part for name, part in mixture.items() if part}
        return ", ".join(largest(parts, lambda name: f"{name} {share(parts[name])}"))

    lines = [text_of(phase["mixture"])]
    for edit in phase["edits"]:
        ramp = f" (ramp to step {edit['ramp_end']:,})" if "ramp_end" in edit else ""
        lines.append(f"from step {edit['step']:,} {text_of(edit['mixture'])}{ramp}")
    return lines


def _commands(run: Run) -> dict[str, str]:
    """Commands to type next, keyed by what they do."""
    path, me = run.directory.path, program("curriculum")
    own = shlex.quote(str(path))
    own_model = run.resolved["model"] is None
    commands = {}
    if run.diverged and (good := run.diverged["last_good_step"]):
        commands["go on"] = f"{me} branch {own} --at {good} --run-dir NEW --set KEY=VALUE"
    elif (path / "config.yaml").exists() and not run.diverged:
        go_on = partial(resume_command, path / "config.yaml", path, run.store_dir, own_model=own_model)
        if ended_early_of(run):
            more = ", with a higher max_epochs" if own_model else " --set sources.NAME.max_epochs=MORE"
            commands["train longer"] = go_on() + more
        elif run.complete:
            steps = checkpoint_steps(run.directory.checkpoints)
            step = longer_from(run.plan, steps)
            commands["train longer"] = go_on("latest" if step in (None, *steps[-1:]) else str(step), True)
        else:
            commands["go on"] = go_on()
    commands["report"] = f"{me} report {own} -o {shlex.quote(path.name + '.html')}"
    commands["compare"] = f"{me} compare {own} OTHER_RUN"
    format_name = "safetensors" if own_model else "hf"
    if any(checkpoint_steps(place) for place in run.directory.places):
        commands["export"] = f"{me} export {own} --format {format_name} -o {shlex.quote(path.name + '-export')}"
    return commands


def ended_early_of(run: Run) -> int | None:
    """The steps that were asked for, if an exhausted source ended the run before; else None."""
    complete = run.complete or {}
    asked = complete.get("train_steps", 0)
    return asked if asked > complete.get("total_steps", asked) else None


def _longer_needs_jump(run: Run) -> bool:
    """Whether a run can be trained for longer only from checkpoints after the decay of its rate."""
    steps = checkpoint_steps(run.directory.checkpoints)
    return bool(run.complete and steps) and longer_from(run.plan, steps) is None


def text(facts: Mapping[str, Any]) -> list[str]:
    """The facts of `inspect_run` as lines of text."""
    progress = facts["progress"]
    step, total_steps = progress["step"], progress["total_steps"]
    devices = facts["devices"]
    times = "once" if progress["num_resumes"] == 1 else f"{progress['num_resumes']} times"
    resumed = f", resumed {times}" if progress["num_resumes"] else ""
    lines = [
        f"{facts['name']}  ({facts['path']})",
        f"  progress      step {step:,} of {total_steps:,} ({percent_done(step, total_steps, 1)} %), "
        f"{state_text(progress)}; {progress['tokens']:,} tokens",
        f"  time          begun {progress['started_at']}, last event {progress['last_event_at']}, "
        f"trained for {duration(progress['elapsed_s'])}{resumed}",
        *(f"  training      {line}" for line in [_training(progress["newest_row"])] if line),
        f"  model         {model_text(facts['model'])}",
        f"  devices       {devices['num']} x {devices['kind']}, mesh {mesh_text(devices['mesh'])}",
        *(f"  lineage       {line}" for line in lineage_lines(facts["lineage"])),
        "",
        *_phase_lines(facts["phases"]),
        "",
        *_eval_lines(facts["evals"]),
        *(sample_lines(facts["samples"]) if facts["samples"] else ()),
    ]
    if few := [name for name, e in facts["evals"].items() if e["few_documents"] and "@" not in name]:
        lines.append(f"  few documents {few_documents(few)}")
    if gone := [name for name, e in facts["evals"].items() if not e["still_measured"] and "@" not in name]:
        lines.append(f"  left out      {listed(gone)}: no longer measured")
    standing = by_eval(facts["regressions"])
    if (more := len(standing) - _MOST_OFFENDERS) > 0:
        standing = sorted(standing, key=rise, reverse=True)[:_MOST_OFFENDERS]
    lines += [f"  regressed     {offender(o)}" for o in standing]
    lines += [f"  regressed     and {more} more"] if more > 0 else []
    said = least_seen(facts)
    if said or not facts["regressions"]:
        none = "no other now" if facts["regressions"] else "none now"
        lines.append(f"  regressed     {none}" + (f" ({said})" if said else ""))
    if warned := [name for name, e in facts["evals"].items() if e["warned"]]:
        risen = "risen more than chance usually explains, but too little for an alarm"
        lines.append(f"  maybe worse   {', '.join(warned)}: {risen}")
    lines += [f"  trouble       {line}" for line in troubles(progress)]
    gold = facts["gold"]
    if gold:
        state = ", missing" if gold["missing"] else ", being saved" if gold["saving"] else ""
        where = f"{facts['path']}/{gold['path']}{state}"
        lines.append(f"  gold          step {gold['step']:,}: {gold['metric']} {loss(gold['value'])}  ({where})")
    else:
        lines.append("  gold          none")
    for name, steps in facts["checkpoints"].items():
        if steps or name == "checkpoints":
            place = name if name == "checkpoints" else f"in {name}"
            lines.append(f"  {place:<14}{', '.join(map(str, steps)) or 'none'}")
    if num_bytes := facts["superseded_bytes"]:
        where = f"{facts['path']}/superseded, set aside by resumes and rollbacks: may be deleted"
        lines.append(f"  superseded    {size_text(num_bytes)} in {where}")
    lines += [f"  damaged       {problem}" for problem in facts["problems"]]
    lines.append("")
    for what, command in facts["commands"].items():
        lines.append(f"  {what:<14}{command}")
        if what == "train longer" and facts["longer_needs_jump"]:
            lines.append(f"{'':16}(the rate has decayed by then; continuing at its peak needs optim.allow_jump: true)")
    return lines


def state_text(progress: Mapping[str, Any]) -> str:
    """Whether a run is finished, being trained, diverged or just not finished; unless finished, with its phase."""
    if progress["finished"]:
        asked = progress["ended_early_of"]
        why = f" early, of {asked:,} steps asked for: a source with on_exhaust: stop is used up" if asked else ""
        return f"finished{why}"
    state = "diverged" if progress["diverged"] else "not finished"
    if progress["trained_by"]:
        state = f"being trained by {progress['trained_by']}"
    return f"{state}, in phase {progress['phase']}"


def _training(row: Mapping[str, Any] | None) -> str | None:
    """Loss, learning rate and speed from the newest metrics row; None without a row or a loss in it."""
    if row is None or row["loss"] is None:
        return None
    speed = "" if row["tokens_per_sec"] is None else f", {row['tokens_per_sec']:,.0f} tokens/s"
    return f"loss {loss(row['loss'])}, learning rate {row['lr']:.3g}{speed} at step {row['step']:,}"


def model_text(model: Mapping[str, Any]) -> str:
    """A model's number of parameters, how many of them are trained (if not all), and its shape."""
    sizes = ("num_parameters", "num_trained")
    shape = ", ".join(f"{key} {value}" for key, value in model.items() if key not in sizes)
    trained = f", {model['num_trained']:,} of them trained" if "num_trained" in model else ""
    return f"{model['num_parameters']:,} parameters{trained}" + (f": {shape}" if shape else "")


def troubles(progress: Mapping[str, Any]) -> list[str]:
    """What went wrong in training, a line each: skipped updates, rollbacks, checkpoints not saved, divergence."""
    rollbacks = progress["num_rollbacks"]
    rolled_back = f"rolled back {'once' if rollbacks == 1 else f'{rollbacks} times'}" if rollbacks else None
    return [line for line in (progress["skipped"], rolled_back, progress["unsaved"], progress["diverged"]) if line]


def lineage_lines(lineage: Mapping[str, Any]) -> list[str]:
    """Where a run's parameters come from, one line per generation."""
    lines = []
    branch = lineage["branched_from"]
    while branch:
        lines.append(f"branched from {branch['run']} at step {branch['step']:,}")
        branch = branch.get("branched_from")
    base = lineage["init_from"]
    while base:
        what = "parameters and optimizer state" if base.get("keep_optimizer") else "parameters"
        step = "" if base.get("step") is None else f", step {base['step']:,}"
        where, name = base.get("init_from"), base.get("run")
        named = where if where and name in (None, where) else f"{where} ({name})" if where else name
        lines.append(f"{what} from {named}{step}")
        base = base.get("lineage")
    return lines


def by_eval(offenders: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge the offenders of one set that are compared with the same eval, which may be several of its baselines.

    `baseline` becomes text that names all of them.
    """
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for o in offenders:
        found.setdefault(tuple(o.get(key) for key in ("set", "step", "baseline_step", "first_step")), []).append(o)
    return [{**same[0], "baseline": listed([o["baseline"].replace("_", " ") for o in same])} for same in found.values()]


def offender(o: Mapping[str, Any]) -> str:
    """One result of `by_eval` as text: a set, and the eval that it is worse than.

    A standing alarm also has the step at which the rise was measured, and the set's last loss if that is newer.
    """
    delta, interval = number(o["delta"]), o.get("interval") or (None, None)
    risen = f" ({signed(delta)}, 95 % {signed(interval[0])} to {signed(interval[1])})"
    if delta is not None and not math.isfinite(delta):  # the losses show it
        risen = ""
    measured = f" at step {o['step']:,}" if "step" in o else ""
    now = o.get("now")
    later = f"; now {loss(now['loss'])} at step {now['step']:,}" if now and now["step"] > o["step"] else ""
    return (
        f"{o['set']} {loss(o['baseline_loss'])} → {loss(o['loss'])}{measured}{risen} against its "
        f"{o['baseline']} at step {o['baseline_step']:,}, alarm since step {o['first_step']:,}{later}"
    )


def offender_in(event: Mapping[str, Any], o: Mapping[str, Any]) -> str:
    """`offender` as a line under its event, without the step if it is the event's own."""
    return offender({key: value for key, value in o.items() if key != "step" or value != event["step"]})


def _phase_lines(phases: list[dict[str, Any]]) -> list[str]:
    shapes = shapes_of(phases)
    rows = [("phase", "steps", "", "rows x tokens" if any(shapes) else "", "mixture", "tokens read", "epochs used up")]
    under_way = next((i for i, phase in enumerate(phases) if not phase["done"]), len(phases) - 1)
    first = max(0, min(under_way - _MOST_PHASES // 2, len(phases) - _MOST_PHASES))
    last = first + _MOST_PHASES
    if first:
        rows.append((f"... {first} before", f"0 to {phases[first]['start']:,}", "done", *[""] * 4))
    for phase, shape in list(zip(phases, shapes, strict=True))[first:last]:
        done = "done" if phase["done"] else ""
        if not phase["done"] and phase["counted_at_step"] is not None:
            done = f"at {phase['counted_at_step']:,}"
        ramp = f" (ramp {phase['ramp_steps']:,})" if phase["ramp_steps"] else ""
        mixture, *edited = _mixtures(phase, lambda share: f"{share:.4g}")
        read, so_far = phase["tokens"], phase["epochs"]
        tokens = ", ".join(largest(read, lambda name, read=read: f"{name} {read[name]:,}"))
        epochs = ", ".join(largest(so_far, lambda name, so_far=so_far: f"{name} {epochs_text(so_far[name])}"))
        steps = f"{phase['start']:,} to {phase['end']:,}{ramp}"
        rows.append((phase["name"], steps, done, shape, mixture, tokens, epochs))
        rows += [("", "", "", "", later, "", "") for later in edited]
    if left := phases[last:]:
        rows.append((f"... {len(left)} after", f"{left[0]['start']:,} to {left[-1]['end']:,}", *[""] * 5))
    return columns(rows if any(shapes) else [(*row[:3], *row[4:]) for row in rows], right=())


def _eval_lines(evals: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not evals:
        return ["  no eval yet"]
    rows = [("eval set", "step", "loss", "± sem", "bpb", "first", "best", "at step", "detects", "text")]
    for name, e in evals.items():
        detects = "" if e["detectable"] is None else smallest_rise(e["detectable"])
        best = (loss(e["best"]), f"{e['best_step']:,}")
        rows.append((name, f"{e['step']:,}", loss(e["loss"]), loss(e["sem"]), loss(e["bpb"]), loss(e["first"]), *best))
        rows[-1] += (detects, e["text"] or "")
    return columns(rows, right=range(1, 9))
