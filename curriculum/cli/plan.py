"""`curriculum plan`."""

from dataclasses import fields
from itertools import groupby
from typing import Any

import click

from curriculum.cli.importing import importing
from curriculum.cli.options import FOLDER, config_options, print_json
from curriculum.config import load_config
from curriculum.errors import InputError
from curriculum.model.memory import MemoryEstimate
from curriculum.plan import Plan, plan
from curriculum.record.events import record_name
from curriculum.record.queries import beginning
from curriculum.record.sentences import shape_text, shape_title, verdict
from curriculum.record.wording import columns, size_text
from curriculum.train.resuming.remembered import config_going_on
from phases.schedule import SETTINGS

MAX_NAMED = 8  # more eval sets are counted, not named


@click.command()
@config_options()
@click.option(
    "--resume",
    metavar="latest|gold|STEP",
    help="Plan how the run would continue from this checkpoint with CONFIG, and show what the edit changes.",
)
@click.option("--run-dir", type=FOLDER, help="With --resume: the run; runs/<name> by default.")
@click.option("--accept-past", is_flag=True, help="With --resume: plan what train --accept-past would do.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(config_path, changes, store_dir, resume, run_dir, accept_past, as_json):
    """Show what each phase reads and when, before training.

    Uses only what is prepared already: the epochs of other sources are unknown. With --resume it shows what `train`
    with the same options would do to a run, which may be training; the run is not changed.
    """
    if resume is None:
        if run_dir is not None or accept_past:
            given = "--accept-past" if run_dir is None else "--run-dir"
            raise InputError(f"{given}: has no effect on the plan of a new run; give --resume, or leave it out")
        resolved = plan(load_config(config_path, **changes), store_dir=store_dir)
    else:
        with importing():
            from curriculum.plan_resumed import plan_resumed

        config, run_dir, unused = config_going_on(config_path, run_dir, changes)
        for line in unused:
            click.echo(line, err=True)
        resolved = plan_resumed(config, run_dir, resume, accept_past=accept_past, store_dir=store_dir)
    if as_json:
        print_json(resolved.to_json())
    else:
        click.echo("\n".join(table(resolved)))


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{share:.2%}"


def table(p: Plan) -> list[str]:
    unknown = f"unknown ({'model is null' if p.custom_model else 'the tokenizer is not prepared'})"
    several = len({_shape(stretch) for stretch in _stretches(p)}) > 1
    no_memory = unknown if p.num_parameters is None else "unknown for an optimizer of your own"
    lines = [
        f"{p.name}: {_tokens(p)}",
        *([] if p.begins_from is None else [beginning(p.begins_from)]),
        *([] if p.resumes is None else _going_on(p)),
        f"parameters: {unknown if p.num_parameters is None else format(p.num_parameters, ',')}"
        + ("" if p.num_trained == p.num_parameters else f", {p.num_trained:,} of them trained"),
        f"memory per device (estimate): {no_memory if p.memory is None else _memory(p.memory, several)}",
        f"evals: {_evals(p.evals)}",
        f"checkpoints: {_checkpoints(p.checkpoints)}",
        "",
    ]
    if several:
        lines += [*_shapes(p), ""]
    lines += _rows(p)
    last_step, last_rate = p.rates[-1]
    lines += ["", f"last update (step {last_step:,}): learning rate {last_rate:.3g}"]
    if p.packing_mode == "best_fit":
        full = (f"{name} {_percent(details.get('utilization'))}" for name, details in p.sources.items())
        lines.append(f"packing best_fit: slots that hold text: {', '.join(full)}")
    scored = [f"{name} {_percent(d['scored_share'])}" for name, d in p.sources.items() if "scored_share" in d]
    if scored:
        lines.append(f"conversations: tokens that are scored: {', '.join(scored)}")
    for place in p.passed_over:
        tokens = ", ".join(f"{name} {count:,}" for name, count in place["tokens"].items())
        where = f"step {place['step']:,}, where phase {place['phase']} begins with whole sequences of its own"
        lines.append(f"passed over at {where}: {tokens} tokens")
    lines += [f"warning: {warning}" for warning in p.warnings]
    return lines


def _rows(p: Plan) -> list[str]:
    rates, ramps = dict(p.rates), {phase["name"]: _ramps(phase) for phase in p.phases}
    rows = [("phase", "steps", "lr at start", "source", "asked", "given", "tokens", "epochs so far", "first repeat")]
    for name, of_phase in groupby(p.rows, key=lambda row: row.phase):
        for i, row in enumerate(of_phase):
            steps = f"{row.start:,} to {row.end:,}{ramps[name]}{_trained(p, row.start, row.end)}"
            first = (name, steps, f"{rates[row.start]:.3g}") if i == 0 else ("", "", "")
            shares = f"{row.share_asked:.2%}", f"{row.share_given:.2%}"
            epochs = "?" if row.epochs_so_far is None else f"{row.epochs_so_far:.3f}"
            repeat = "" if row.first_repeat_step is None else f"step {row.first_repeat_step:,}"
            rows.append((*first, row.source, *shares, f"{row.tokens:,}", epochs, repeat))
    return columns(rows, right=(2, 4, 5, 6, 7, 8), indent="")


def _ramps(phase: dict[str, Any]) -> str:
    ramps = [f"ramp {phase['ramp_steps']:,}"] if phase["ramp_steps"] else []
    edited = (turn for turn in phase.get("remixed", ()) if "ramp_end" in turn)
    ramps += [f"from step {turn['step']:,} a ramp to step {turn['ramp_end']:,}" for turn in edited]
    return f" ({', '.join(ramps)})" if ramps else ""


def _going_on(p: Plan) -> list[str]:
    run, step, lr, edit = (p.resumes[key] for key in ("run", "step", "lr", "edit"))
    if p.resumes["complete"] and lr is None:
        return [f"{run} is finished: {step:,} of {p.total_steps:,} steps; nothing is left to train"]
    what = (
        "the config changes nothing that is trained or judged"
        if edit is None
        else verdict({"event": "schedule_edit", "step": step, **edit})
    )
    if lr is None:
        return [f"{run} ends at step {step:,}", what]
    return [f"{run} continues at step {step:,}, with a learning rate of {lr:.3g}", what]


def _evals(evals: dict[str, Any]) -> str:
    num, sets, tokens = (evals[key] for key in ("num", "sets", "tokens"))
    if num == 0:
        return "none ahead"
    names = ", ".join(record_name(name) for name in sets) if len(sets) <= MAX_NAMED else f"{len(sets)} sets"
    return f"{num:,} of {names}" + ("" if tokens is None else f": up to {tokens:,} tokens in all")


def _checkpoints(checkpoints: dict[str, Any]) -> str:
    num, keep, size = (checkpoints[key] for key in ("num", "keep", "bytes"))
    if num == 0:
        return "none ahead"
    kept = "the newest is kept" if keep == 1 else f"the newest {keep} are kept"
    return f"{num:,}" + ("" if size is None else f" of {size_text(size)} each") + f", {kept}"


def _trained(p: Plan, start: int, end: int) -> str:
    step = 0 if p.resumes is None else p.resumes["step"]
    if step <= start:
        return ""
    return ", trained" if step >= end else f", trained to {step:,}"


def _tokens(p: Plan) -> str:
    if p.tokens_per_step is not None:
        return f"{p.total_steps:,} steps x {p.tokens_per_step:,} tokens = {p.total_tokens:,} tokens"
    per_step = [stretch["batch_size"] * stretch["seq_len"] for stretch in _stretches(p)]
    return f"{p.total_steps:,} steps of {min(per_step):,} to {max(per_step):,} tokens = {p.total_tokens:,} tokens"


def _shape(phase: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(phase[key] for key in ("batch_size", "seq_len", "grad_accum", *SETTINGS))


def _stretches(p: Plan) -> list[dict[str, Any]]:
    """The phases, with one whose shape was edited midway cut into stretches of one shape."""
    stretches = []
    for phase in p.phases:
        turns = phase.get("reshaped", [])
        ends = [turn["step"] for turn in turns] + [phase["end"]]
        stretches.append({**phase, "end": ends[0]})
        for turn, end in zip(turns, ends[1:], strict=True):
            name = f"{phase['name']} from step {turn['step']:,}"
            stretches.append({**turn, "name": name, "start": turn["step"], "end": end})
    return stretches


def _shapes(p: Plan) -> list[str]:
    """A table of the shapes of the phases' updates, without columns in which all phases have the default."""
    defaults = {"micro-steps": "1"} | {shape_title(key): shape_text(key, default) for key, default in SETTINGS.items()}
    rows = [("phase", "rows x tokens", "tokens a step", "micro-steps", "tokens", *map(shape_title, SETTINGS))]
    for stretch in _stretches(p):
        batch_size, seq_len, grad_accum, *settings = _shape(stretch)
        per_step, steps = batch_size * seq_len, stretch["end"] - stretch["start"]
        size = f"{batch_size:,} x {seq_len:,}", f"{per_step:,}", f"{grad_accum:,}", f"{steps * per_step:,}"
        rows.append((stretch["name"], *size, *map(shape_text, SETTINGS, settings)))
    kept = [i for i, title in enumerate(rows[0]) if any(row[i] != defaults.get(title) for row in rows[1:])]
    return columns([tuple(row[i] for i in kept) for row in rows], right=range(1, len(kept)), indent="")


def _memory(memory: dict[str, Any], several: bool) -> str:
    """The memory estimate as text, parts that round to 0 as "other"; of `several` shapes it names the phase."""
    phase = f" of phase {memory['phase']}" if several else ""
    total = memory["total"]
    unit, unit_bytes = ("GB", 10**9) if total >= 10**10 else ("MB", 10**6)
    digits = 1 if total < 100 * unit_bytes else 0
    titles = {"params": "parameters"}
    sizes = {titles.get(part.name, part.name): memory[part.name] for part in fields(MemoryEstimate)}
    smallest_bytes = unit_bytes / 10**digits / 2
    shown = {name: size for name, size in sizes.items() if size > smallest_bytes}
    other = sum(sizes.values()) - sum(shown.values())
    if other > smallest_bytes:
        shown["other"] = other
    parts = " + ".join(f"{name} {size / unit_bytes:,.{digits}f}" for name, size in shown.items())
    size = f"micro-step of {memory['rows']:,} rows x {memory['seq_len']:,}{phase}"
    free_axis = f" (mesh.{memory['free_axis']}: -1 counted as 1)" if memory["free_axis"] else ""
    alike = 0.9 < memory["on_gpu"] / total < 1.1
    on_gpu = "" if alike else f"; {memory['on_gpu'] / unit_bytes:,.{digits}f} on an NVIDIA GPU"
    return f"{total / unit_bytes:,.{digits}f} {unit} = {parts}, {size}{on_gpu}{free_axis}"
