"""The facts of `inspect_run` as lines of text; the report and the model card write some of them alike."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from curriculum.record.events import number
from curriculum.record.queries import shapes_of
from curriculum.record.sentences import rise, sample_lines, what_changed
from curriculum.record.wording import (
    columns,
    duration,
    epochs_text,
    few_documents,
    largest,
    listed,
    loss,
    mesh_text,
    metric_texts,
    metric_titles,
    percent_done,
    signed,
    size_text,
    smallest_rise,
    unseen,
)

_MOST_OFFENDERS = 12  # a line each
_MOST_PHASES = 24  # a line each: those around the one under way


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
        *_set_lines(facts),
    ]
    if progress["skipped"] and progress["skips_are_few"]:
        lines.append(f"  training      {progress['skipped']}")
    lines += [f"  trouble       {line}" for line in troubles(progress)]
    lines += _checkpoint_lines(facts)
    lines += [f"  damaged       {problem}" for problem in facts["problems"]]
    lines.append("")
    for what, command in facts["commands"].items():
        lines.append(f"  {what:<14}{command}")
        if what == "train longer" and facts["longer_needs_jump"]:
            lines.append(f"{'':16}(the rate has decayed by then; continuing at its peak needs optim.allow_jump: true)")
    return lines


def _set_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """What has to be known about single eval sets, above all which of them got worse."""
    evals = facts["evals"]
    if few := [name for name, e in evals.items() if e["few_documents"] and "@" not in name]:
        yield f"  few documents {few_documents(few)}"
    if gone := [name for name, e in evals.items() if not e["still_measured"] and "@" not in name]:
        yield f"  left out      {listed(gone)}: no longer measured"
    standing = by_eval(facts["regressions"])
    num_more = len(standing) - _MOST_OFFENDERS
    if num_more > 0:
        standing = sorted(standing, key=rise, reverse=True)[:_MOST_OFFENDERS]
    for pair in standing:
        yield f"  regressed     {offender(pair, what_changed(pair))}"
    if num_more > 0:
        yield f"  regressed     and {num_more} more"
    said = least_seen(facts)
    if said or not standing:
        none = "no other now" if standing else "none now"
        yield f"  regressed     {none}" + (f" ({said})" if said else "")
    if warned := [name for name, e in evals.items() if e["warned"]]:
        risen = "risen more than chance usually explains, but too little for an alarm"
        yield f"  maybe worse   {', '.join(warned)}: {risen}"


def _checkpoint_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    gold = facts["gold"]
    if gold:
        state = ", missing" if gold["missing"] else ", being saved" if gold["saving"] else ""
        where = f"{facts['path']}/{gold['path']}{state}"
        yield f"  gold          step {gold['step']:,}: {gold['metric']} {loss(gold['value'])}  ({where})"
    else:
        yield "  gold          none"
    for name, steps in facts["checkpoints"].items():
        if steps or name == "checkpoints":
            place = name if name == "checkpoints" else f"in {name}"
            yield f"  {place:<14}{', '.join(map(str, steps)) or 'none'}"
    if num_bytes := facts["superseded_bytes"]:
        where = f"{facts['path']}/superseded, set aside by resumes and rollbacks: may be deleted"
        yield f"  superseded    {size_text(num_bytes)} in {where}"


def state_text(progress: Mapping[str, Any]) -> str:
    """Whether a run is finished, being trained, diverged, stopped by an alarm or just not finished.

    Unless finished, with its phase.
    """
    if progress["finished"]:
        asked = progress["ended_early_of"]
        why = f" early, of {asked:,} steps asked for: a source with on_exhaust: stop is used up" if asked else ""
        return f"finished{why}"
    state = "diverged" if progress["diverged"] else "stopped by an alarm" if progress["stopped"] else "not finished"
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
    shape = ", ".join(
        f"{key} {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in model.items()
        if key not in sizes
    )
    trained = f", {model['num_trained']:,} of them trained" if "num_trained" in model else ""
    return f"{model['num_parameters']:,} parameters{trained}" + (f": {shape}" if shape else "")


def troubles(progress: Mapping[str, Any]) -> list[str]:
    """What went wrong in training, a line each.

    That is many skipped updates, rollbacks, checkpoints not saved, an alarm that ended it, divergence.
    """
    rollbacks = progress["num_rollbacks"]
    rolled_back = f"rolled back {'once' if rollbacks == 1 else f'{rollbacks} times'}" if rollbacks else None
    skipped = None if progress["skips_are_few"] else progress["skipped"]
    stopped = f"regression.action: stop: {progress['stopped']['verdict']}" if progress["stopped"] else None
    return [line for line in (skipped, rolled_back, progress["unsaved"], stopped, progress["diverged"]) if line]


def lineage_lines(lineage: Mapping[str, Any]) -> list[str]:
    """Where a run's parameters come from, one line per generation."""
    lines = []
    branch = lineage["branched_from"]
    while branch:
        lines.append(f"branched from {branch['run']} at step {branch['step']:,}")
        branch = branch["branched_from"]
    base = lineage["init_from"]
    while base:
        what = "parameters and optimizer state" if base["keep_optimizer"] else "parameters"
        step = "" if base.get("step") is None else f", step {base['step']:,}"
        where, name = base["init_from"], base.get("run")
        named = where if name in (None, where) else f"{where} ({name})"
        lines.append(f"{what} from {named}{step}")
        base = base["lineage"]
    return lines


def by_eval(offenders: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge the offenders of one set that are compared with the same eval, which may be several of its baselines.

    `baseline` becomes text that names all of them.
    """
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for o in offenders:
        found.setdefault(tuple(o.get(key) for key in ("set", "step", "baseline_step", "first_step")), []).append(o)
    return [{**same[0], "baseline": listed([o["baseline"].replace("_", " ") for o in same])} for same in found.values()]


def offender(o: Mapping[str, Any], changed: Sequence[str] = ()) -> str:
    """One result of `by_eval` as text: a set, the eval that it is worse than, and what `changed` since then.

    A standing alarm also has the step at which the rise was measured, and the set's last loss if that is newer.
    """
    delta, interval = number(o["delta"]), o["interval"]
    risen = f" ({signed(delta)}, 95 % {signed(interval[0])} to {signed(interval[1])})"
    if delta is not None and not math.isfinite(delta):  # the losses show it
        risen = ""
    measured = f" at step {o['step']:,}" if "step" in o else ""
    since = f" (since then: {', '.join(changed)})" if changed else ""
    now = o.get("now")
    later = f"; now {loss(now['loss'])} at step {now['step']:,}" if now and now["step"] > o["step"] else ""
    alarm = f", alarm since step {o['first_step']:,}" if "first_step" in o else ""
    return (
        f"{o['set']} {loss(o['baseline_loss'])} → {loss(o['loss'])}{measured}{risen} against its "
        f"{o['baseline']} at step {o['baseline_step']:,}{since}{alarm}{later}"
    )


def offender_in(event: Mapping[str, Any], o: Mapping[str, Any], changed: Sequence[str] = ()) -> str:
    """`offender` as a line under its event, without the steps that are the event's own."""
    own = [key for key in ("step", "first_step") if o.get(key) == event["step"]]
    return offender({key: value for key, value in o.items() if key not in own}, changed)


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
    header = ("eval set", "step", *metric_titles(), "first", "best", "at step", "detects", "text")
    rows = [header]
    for name, e in evals.items():
        detects = "" if e["detectable"] is None else smallest_rise(e["detectable"])
        past = (loss(e["first"]), loss(e["best"]), f"{e['best_step']:,}")
        rows.append((name, f"{e['step']:,}", *metric_texts(e), *past, detects, e["text"] or ""))
    return columns(rows, right=range(1, len(header) - 1))


def least_seen(facts: Mapping[str, Any]) -> str | None:
    """The least sensitive eval set without an alarm, and which rises it would miss.

    None if each of them would show a rise of twice its tolerance.
    """
    evals, worse = facts["evals"], {o["set"] for o in facts["regressions"]}

    def hidden(name: str) -> tuple[bool, float]:
        detectable, tolerance = evals[name]["detectable"], evals[name]["tolerance"]
        return evals[name]["sem"] is None, math.inf if detectable is None else detectable - 2 * tolerance

    judged = [name for name, e in evals.items() if e["still_measured"] and "@" not in name and name not in worse]
    if not judged:
        return None
    name = max(judged, key=hidden)
    said = unseen(*(evals[name][key] for key in ("detectable", "tolerance", "sem")))
    return said and f"{name}: {said}"


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
