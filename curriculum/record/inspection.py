"""What the record of a run says of it: its course so far as plain data, and that as lines of text.

Reads a run in progress. Without jax and without numpy: to look at a run must be quick.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from curriculum.record.console import program
from curriculum.record.events import AVERAGES, METRICS, eval_sets, number
from curriculum.run import Run, checkpoint_steps, read_json

_PRIMARY = "primary"  # what `val` of the record is called in the config and in the files of windows
_BASELINES = {"start": "start", "phase_start": "phase start", "best": "best"}
_TAIL_BYTES = 1 << 16  # more than a metrics row has


class EvalPoint(NamedTuple):
    """One set at one eval. NaN and infinities are floats here; `bpb` and `sem` are None where there is none."""

    step: int
    tokens: int
    phase: str
    loss: float
    bpb: float | None
    sem: float | None


def eval_points(events: Iterable[Mapping[str, Any]]) -> dict[str, list[EvalPoint]]:
    """Every eval of every set, `val` the primary one; those with an average of the parameters as `<set>@<average>`."""
    points: dict[str, list[EvalPoint]] = {}
    for event in events:
        if event["event"] != "eval":
            continue
        measured = [("", event), *((f"@{average}", event[average]) for average in AVERAGES if average in event)]
        for suffix, fields in measured:
            for name, (loss, bpb) in eval_sets(fields).items():
                sem = number(fields.get("val_sem" if name == "val" else f"eval_{name}_sem"))
                stamp = (event["step"], event["tokens_processed"], event["phase"])
                points.setdefault(name + suffix, []).append(EvalPoint(*stamp, number(loss), number(bpb), sem))
    return points


def evalset_facts(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Documents, windows, tokens, bytes and content hash of each set, by its name in the record.

    From `training_start`, and for sets that were added later from the `resume` events.
    """
    facts = {}
    for event in events:
        for name, of_set in event.get("evalsets", {}).items():
            facts["val" if name == _PRIMARY else name] = of_set
    return facts


def standing_regressions(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The offenders of `eval_regression` events that have not recovered, each with its `phase`.

    Alarms against the start of a phase end with it.
    """
    standing: dict[tuple[str, str], dict[str, Any]] = {}
    phase = None
    for event in events:
        match event["event"]:
            case "eval":
                phase = event["phase"] if phase is None else phase
            case "phase_switch":
                phase = event["new_phase"]
            case "eval_regression":
                for o in event["offenders"]:
                    standing[o["set"], o["baseline"]] = {**o, "phase": event["phase"]}
            case "eval_recovered":
                for o in event["offenders"]:
                    standing.pop((o["set"], o["baseline"]), None)
    return [o for o in standing.values() if o["baseline"] != "phase_start" or o["phase"] == phase]


def last_detectable(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The smallest rise in nats per token that each set can detect, as the last eval that knew it says."""
    found: dict[str, float] = {}
    for event in events:
        known = event.get("detectable", {}) if event["event"] == "eval" else {}
        found |= {name: nats for name, value in known.items() if (nats := number(value)) is not None}
    return found


def consumption(run: Run) -> list[dict[str, Any]]:
    """What each phase that has begun has read: {phase, start, step, tokens, epochs}, in order.

    `tokens` are of the phase alone up to `step`, by source; `epochs` since the run's start. The record knows them where
    a phase ends, and `training_state.json` at the last checkpoint: of the phase that is running, `step` is that one.
    """
    sizes = {name: source.get("tokens_per_epoch") for name, source in run.start["sources"].items()}
    starts = {phase["name"]: phase["start"] for phase in run.plan["phases"]}
    marks = [(e["from_phase"], e["step"], e["consumed"]) for e in run.events if e["event"] == "phase_switch"]
    last_step = run.events[-1]["step"]
    path = run.directory.path / "training_state.json"
    if path.exists():
        state = read_json(path)
        # After a resume from an older step the file may speak of a future that was set aside.
        if (marks[-1][1] if marks else 0) < state["step"] <= last_step:
            marks.append((state["phase"], state["step"], state["tokens_drawn"]))
    rows, before = [], {}
    for phase, step, drawn in marks:
        tokens = {name: n - before.get(name, 0) for name, n in drawn.items() if n > before.get(name, 0)}
        epochs = {name: n / sizes[name] for name, n in drawn.items() if n and sizes.get(name)}
        row = {"phase": phase, "start": starts.get(phase), "step": step, "tokens": tokens, "epochs": epochs}
        rows.append(row)
        before = drawn
    return rows


def inspect_run(run: Run) -> dict[str, Any]:
    """Everything that `curriculum inspect` shows, as plain data (NaN and infinities as floats).

    Raises InputError while the record is empty.
    """
    start, plan, events = run.start, run.plan, run.events
    path = run.directory.path
    row = _last_row(path / METRICS)
    last = events[-1]
    step = max(last["step"], row["step"] if row else 0)
    phases = plan["phases"]
    current = next((p["name"] for p in phases if step < p["end"]), phases[-1]["name"])
    read = {entry["phase"]: entry for entry in consumption(run)}
    gold = next((e for e in reversed(events) if e["event"] == "gold_checkpoint"), None)
    detectable = last_detectable(events)
    points = eval_points(events)
    evals = {}
    for name, of_set in points.items():
        best = min(of_set, key=lambda p: (p.loss != p.loss, p.loss))
        evals[name] = {
            **of_set[-1]._asdict(),
            "first": of_set[0].loss,
            "best": best.loss,
            "best_step": best.step,
            "num_evals": len(of_set),
            "detectable": detectable.get(name),
        }
    return {
        "name": start["config"]["name"],
        "path": str(path),
        "model": start["model"],
        "devices": next(e["devices"] for e in reversed(events) if e["event"] in ("training_start", "resume")),
        "progress": {
            "step": step,
            "total_steps": plan["total_steps"],
            "phase": current,
            "finished": run.complete is not None,
            "tokens": step * plan["tokens_per_step"],
            "elapsed_s": last["elapsed_s"],
            "started_at": start["timestamp"],
            "last_event_at": last["timestamp"],
            "num_resumes": sum(e["event"] == "resume" for e in events),
        },
        "phases": [
            {
                **phase,
                "done": step >= phase["end"],
                "counted_at_step": read[phase["name"]]["step"] if phase["name"] in read else None,
                "tokens": read.get(phase["name"], {}).get("tokens", {}),
                "epochs": read.get(phase["name"], {}).get("epochs", {}),
            }
            for phase in phases
        ],
        "lineage": {"init_from": start.get("lineage"), "branched_from": run.branched_from},
        "gold": None if gold is None else {key: gold[key] for key in ("step", "metric", "value", "path")},
        "regressions": standing_regressions(events),
        "evals": evals,
        "checkpoints": {name: checkpoint_steps(path / name) for name in ("checkpoints", "gold", "kept")},
        "commands": _commands(run),
    }


def _commands(run: Run) -> dict[str, str]:
    """What to type next, by what it does."""
    path, me = run.directory.path, program("curriculum")
    own = shlex.quote(str(path))
    commands = {}
    if (path / "config.yaml").exists():
        train = f"{me} train {shlex.quote(str(path / 'config.yaml'))} --run-dir {own} --resume latest"
        if run.complete is None:
            commands["go on"] = train
        else:
            commands["train longer"] = f"{train} --set train.steps=MORE"
    commands["report"] = f"{me} report {own} -o {shlex.quote(path.name + '.html')}"
    commands["compare"] = f"{me} compare {own} OTHER_RUN"
    commands["export"] = f"{me} export {own} --format safetensors -o {shlex.quote(path.name + '-export')}"
    return commands


def _last_row(path: Path) -> dict[str, Any] | None:
    """The last complete row of metrics.jsonl, without reading the rest."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    return json.loads(lines[-1]) if lines else None


def text(facts: Mapping[str, Any]) -> list[str]:
    """What `inspect_run` gave, as lines of text."""
    model, progress = facts["model"], facts["progress"]
    share = 100 * progress["step"] / progress["total_steps"]
    state = "finished" if progress["finished"] else f"in phase {progress['phase']}, not finished"
    shape = ", ".join(f"{key} {value}" for key, value in model.items() if key != "num_parameters")
    devices = facts["devices"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in devices["mesh"].items())
    resumed = f", resumed {progress['num_resumes']} times" if progress["num_resumes"] else ""
    lines = [
        f"{facts['name']}  ({facts['path']})",
        f"  progress    step {progress['step']:,} of {progress['total_steps']:,} ({share:.1f} %), {state}; "
        f"{progress['tokens']:,} tokens",
        f"  time        begun {progress['started_at']}, last event {progress['last_event_at']}, "
        f"trained for {duration(progress['elapsed_s'])}{resumed}",
        f"  model       {model['num_parameters']:,} parameters" + (f": {shape}" if shape else ""),
        f"  devices     {devices['num']} x {devices['kind']}, mesh {mesh}",
        *(f"  lineage     {line}" for line in lineage_lines(facts["lineage"])),
        "",
        *_phase_lines(facts["phases"]),
        "",
        *_eval_lines(facts["evals"]),
    ]
    for o in facts["regressions"]:
        lines.append(f"  regressed   {offender(o)}")
    if not facts["regressions"]:
        lines.append("  regressed   none stands")
    gold = facts["gold"]
    if gold:
        where = f"{facts['path']}/{gold['path']}"
        lines.append(f"  gold        step {gold['step']:,}: {gold['metric']} {loss(gold['value'])}  ({where})")
    else:
        lines.append("  gold        none")
    for name, steps in facts["checkpoints"].items():
        if steps or name == "checkpoints":
            lines.append(f"  {name:<11} {', '.join(map(str, steps)) or 'none'}")
    lines += ["", *(f"  {what:<12}  {command}" for what, command in facts["commands"].items())]
    return lines


def lineage_lines(lineage: Mapping[str, Any]) -> list[str]:
    """Where a run's parameters come from, a line a generation."""
    lines = []
    if branch := lineage["branched_from"]:
        lines.append(f"branched from {branch['run']} at step {branch['step']:,}")
    base = lineage["init_from"]
    while base:
        what = "parameters and optimizer state" if base.get("keep_optimizer") else "parameters"
        step = "" if base.get("step") is None else f", step {base['step']:,}"
        where, name = base.get("init_from"), base.get("run")
        named = where if where and name in (None, where) else f"{where} ({name})" if where else name
        lines.append(f"{what} from {named}{step}")
        base = base.get("lineage")
    return lines


def offender(o: Mapping[str, Any]) -> str:
    """One set against one baseline that it is worse than, in words and numbers."""
    interval = o.get("interval") or (None, None)
    return (
        f"{o['set']} {loss(o['baseline_loss'])} → {loss(o['loss'])} ({signed(o['delta'])}, 95 % "
        f"{signed(interval[0])} to {signed(interval[1])}) against its {_BASELINES.get(o['baseline'], o['baseline'])} "
        f"at step {o['baseline_step']:,}, since step {o['first_step']:,}"
    )


def _phase_lines(phases: list[dict[str, Any]]) -> list[str]:
    rows = [("phase", "steps", "", "mixture", "tokens read", "epochs so far")]
    for phase in phases:
        done = "done" if phase["done"] else ""
        if not phase["done"] and phase["counted_at_step"] is not None:
            done = f"at {phase['counted_at_step']:,}"
        ramp = f" (ramp {phase['ramp_steps']:,})" if phase["ramp_steps"] else ""
        mixture = ", ".join(f"{name} {share:.4g}" for name, share in phase["mixture"].items() if share)
        tokens = ", ".join(f"{name} {tokens:,}" for name, tokens in phase["tokens"].items())
        epochs = ", ".join(f"{name} {share:.3g}" for name, share in phase["epochs"].items())
        rows.append((phase["name"], f"{phase['start']:,} to {phase['end']:,}{ramp}", done, mixture, tokens, epochs))
    return columns(rows, right=())


def _eval_lines(evals: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if not evals:
        return ["  no eval yet"]
    rows = [("eval set", "step", "loss", "± sem", "bpb", "first", "best", "at step", "detects")]
    for name, e in evals.items():
        detects = "" if e["detectable"] is None else f"{e['detectable']:.4f}"
        best = (loss(e["best"]), f"{e['best_step']:,}")
        rows.append((name, f"{e['step']:,}", loss(e["loss"]), loss(e["sem"]), loss(e["bpb"]), loss(e["first"]), *best))
        rows[-1] += (detects,)
    return columns(rows, right=range(1, 9))


def columns(rows: list[tuple[str, ...]], right: Iterable[int]) -> list[str]:
    """Rows of equal length as lines with aligned columns; those in `right` end at the same place."""
    right = set(right)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def loss(value: Any) -> str:
    """Nats or bits in four decimals; `-` for what there is not."""
    as_float = number(value)
    return "-" if as_float is None else f"{as_float:.4f}"


def signed(value: Any) -> str:
    """A difference in four decimals, its sign always shown."""
    as_float = number(value)
    return "-" if as_float is None else f"{as_float:+.4f}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
