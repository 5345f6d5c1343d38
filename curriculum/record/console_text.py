"""The lines of the console that a plan, an eval or a metrics row alone determines."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from curriculum.record.commands import program
from curriculum.record.events import eval_averages, eval_sets, number
from curriculum.record.queries import beginning, shapes_of
from curriculum.record.wording import MOST_NAMED, counted, duration, first_of, largest, loss, percent_done
from evalsets.summary import Recorded

_MANY_NAMES = 20  # sources or eval sets in a line of the header
_MANY_SETS = 12  # with more, the line of an eval would be too long to read


def header(event: dict[str, Any], run_dir: Path) -> Iterator[str]:
    """What is about to be trained, from the `training_start` event."""
    config, plan = event["config"], event["plan"]
    sets = ["val", *config["evalsets"]["sets"]]
    num_parameters, num_trained = (event["model"].get(key) for key in ("num_parameters", "num_trained"))
    trained = "" if num_trained is None else f", {count(num_trained, 10)} of them trained"
    yield f"{config['name']}: {count(num_parameters, 10)} parameters{trained}, {steps(plan['total_steps'])}"
    if event["lineage"]:
        yield f"  {beginning(event['lineage'])}"
    yield f"  run        {run_dir}"
    yield f"  sources    {first_of([*config['sources']], _MANY_NAMES)}"
    yield f"  eval sets  {first_of(sets, _MANY_NAMES)}"
    yield from phase_lines(plan)
    if (wandb := config["logging"]["wandb"]) and wandb["mode"] == "offline":
        folder = shlex.quote(str(run_dir / "wandb"))
        yield f"  wandb      offline, {folder}; later: {program('wandb')} sync {folder}/offline-run-*"
    yield from warnings(event)


def phase_lines(plan: dict[str, Any], step: int = 0, most: int | None = None) -> Iterator[str]:
    """A line for each phase of a plan that has updates from `step` on, with the mixture in force then and later ones.

    At most the first `most`, with a count.
    """
    shapes = shapes_of(plan["phases"])
    ahead = [(phase, shape) for phase, shape in zip(plan["phases"], shapes, strict=True) if phase["end"] > step]
    shown = ahead[:most]
    name_width = max((len(phase["name"]) for phase, _ in shown), default=0)
    step_width = len(str(plan["total_steps"]))
    for phase, shape in shown:
        bounds = f"[{phase['start']:>{step_width}}, {phase['end']:>{step_width}})"
        mixture = "; ".join(_mixtures(phase, step))
        yield f"  phase      {phase['name']:<{name_width}} {bounds} {mixture}{f' | {shape}' if shape else ''}"
    if len(shown) < len(ahead):
        yield f"             and {counted(len(ahead) - len(shown), 'more phase')}"


def _mixtures(phase: dict[str, Any], step: int) -> Iterator[str]:
    """The mixture of a phase at `step`, and each one that an edit or an exhausted source gives it later."""
    turns = phase.get("remixed", [])
    past = [turn for turn in turns if turn["step"] <= step]
    if past:
        yield _mixture(past[-1]["mixture"])
    else:
        ramp = f" (ramp {steps(phase['ramp_steps'])})" if phase["ramp_steps"] else ""
        yield _mixture(phase["mixture"]) + ramp
    for turn in turns[len(past) :]:
        ramp = f" (ramp to step {turn['ramp_end']})" if "ramp_end" in turn else ""
        yield f"from step {turn['step']} {_mixture(turn['mixture'])}{ramp}"


def warnings(event: dict[str, Any]) -> Iterator[str]:
    return (f"  warning    {warning}" for warning in event.get("warnings", []))


def eval_lines(event: dict[str, Any], total_steps: int, seconds_left: float | None) -> Iterator[str]:
    """The two lines of an `eval` event, one for each average, and its notes; sets not measured are left out."""
    yield " | ".join(
        (
            f"step {event['step']}/{total_steps} ({percent_done(event['step'], total_steps, 1)}%)",
            event["timestamp"][11:19],
            duration(event["elapsed_s"]),
            f"ETA {'?' if seconds_left is None else duration(seconds_left)}",
            f"{count(event['tokens_processed'], 10)} tokens",
        )
    )
    regressed, warned = event.get("regressed", []), event.get("warned", [])
    losses = _losses(eval_sets(event), [*regressed, *warned])
    val = [losses.pop("val")] if "val" in losses else []
    standing = {"worse": regressed, "maybe worse": warned}
    rises = {name: number(nats) for name, nats in event.get("rises", {}).items()}
    risen = {name: f"{name} {nats:+.4f}" for name, nats in rises.items()}
    worse = [
        f"{how}: {first_of([risen.get(name, name) for name in names], MOST_NAMED)}"
        for how, names in standing.items()
        if names
    ]
    yield "  " + " | ".join([*val, f"lr {event['lr']:.2e}", f"phase: {event['phase']}", *losses.values(), *worse])
    for average, sets in eval_averages(event).items():
        yield f"  {average}: " + " | ".join(_losses(sets, [*regressed, *warned]).values())
    for note in event.get("notes", []):
        yield f"  {note}"


def _losses(sets: Mapping[str, Recorded], worse: Iterable[str]) -> dict[str, str]:
    """The text for each set, by name; of many sets, only for the primary and `worse` ones, and a count of others."""
    names = list(sets)
    if len(sets) > _MANY_SETS:
        names = [name for name in dict.fromkeys(["val", *worse]) if name in sets][: 1 + MOST_NAMED]
    told = {name: f"{name} {loss(sets[name].loss)}" for name in names}
    left = len(sets) - len(told)
    return told | {"": f"{left} others"} if left else told


def progress_line(row: dict[str, Any], total_steps: int) -> str:
    rate = row["tokens_per_sec"]
    told = [f"step {row['step']}/{total_steps}", f"loss {loss(row['loss'])}", f"lr {row['lr']:.2e}"]
    told += [] if rate is None else [f"{count(rate, 100)} tok/s"]
    return " | ".join([*told, f"phase {row['phase']}"])


def _mixture(mixture: dict[str, float]) -> str:
    shares = {source: share for source, share in mixture.items() if share}
    return ", ".join(largest(shares, lambda source: f"{source} {shares[source]:.4g}"))


def steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def count(value: float, decimal_below: float) -> str:
    """A number in thousands, millions, billions or trillions, with one decimal below `decimal_below` of them."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.1f}{unit}" if scaled < decimal_below else f"{scaled:.0f}{unit}"
    return f"{value:.0f}"
