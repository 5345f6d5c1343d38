"""The report of one run: its evals, what happened, how it was trained and on what."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from markupsafe import Markup

from curriculum.record.events import number
from curriculum.record.queries import eval_points, shapes_of
from curriculum.record.wording import (
    counted,
    duration,
    epochs_text,
    first_of,
    loss,
    mesh_text,
    moment,
    percent_done,
    printable,
    typed,
)
from curriculum.run import Run
from curriculum.views import figures
from curriculum.views.figures import PALETTE, Curve, Phase
from curriculum.views.inspection_text import least_seen, lineage_lines, mixture_text, model_text, state_text, troubles
from curriculum.views.page import bullets, figure, folded, legend, note, section, table, table_of_phases, tag, tiles
from curriculum.views.report_evals import eval_figures, log, set_marks, set_table, transfer_matrix, turns

MAX_SOURCES = 7  # with a colour of their own; the others together are "other"
MAX_SAMPLES = 20  # earlier generation events below the newest
_MOST_COLUMNS = 12  # sources with a column of their own
_MOST_IN_TILE, _MOST_BELOW = 20, 12  # characters of set names in a tile's value; names in the small text below it
MAX_TRAINING_POINTS = 150  # of a training loss, which is noisy: more points hide the trend


def of_run(run: Run, facts: Mapping[str, Any], label: str) -> list[Markup]:
    """The page's sections about one run; `facts` are those of `inspect_run`."""
    points = eval_points(run.events)
    phases = [Phase(p["name"], p["start"], p["end"]) for p in facts["phases"]]
    marks = set_marks(run, facts, points)
    sources = _source_colors(run)
    return [
        _header(run, facts, label),
        section("Eval loss", *eval_figures(label, points, phases, marks, turns(run))),
        section("Eval sets", set_table(run, facts)),
        section("What happened", log(run)),
        section("Transfer between phases", *transfer_matrix(run, points)),
        section("Training", *_training_figures(run, label, phases, sources)),
        section("Phases and epochs", _phase_table(facts), _epoch_table(facts)),
        section("Text samples", *_samples(run)),
        section("How it was run", *_setup(run, facts)),
    ]


def _header(run: Run, facts: Mapping[str, Any], label: str) -> Markup:
    progress = facts["progress"]
    lead = f"{facts['name']} · begun {moment(progress['started_at'])} · {state_text(progress)}"
    lines = [tag("p", line, class_="lead") for line in lineage_lines(facts["lineage"])]
    lines += [tag("p", line, class_="bad") for line in troubles(progress)]
    lines += [tag("p", problem, class_="bad") for problem in facts["problems"]]
    warnings = _warnings(run)
    told = folded(f"{counted(len(warnings), 'warning')} of the plan", bullets(warnings)) if warnings else ""
    shown = [*_figures_of(facts), _regressed(facts)]
    return tag("header", tag("h1", label), tag("p", lead, class_="lead"), *lines, tiles(shown), told)


def _figures_of(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(title, value, what stands below it) of each tile but the last."""
    progress, num_parameters = facts["progress"], facts["model"]["num_parameters"]
    step, total_steps = progress["step"], progress["total_steps"]
    yield "step", f"{step:,}", f"of {total_steps:,} ({percent_done(step, total_steps)} %)"
    yield "tokens", figures.short_count(progress["tokens"]), f"in {duration(progress['elapsed_s'])}"
    yield "parameters", figures.short_count(num_parameters), f"{num_parameters:,}"
    if val := facts["evals"].get("val"):
        yield "val loss", loss(val["loss"]), f"best {loss(val['best'])} at step {val['best_step']:,}"
    if gold := facts["gold"]:
        missing = ", its checkpoint is missing" if gold["missing"] else ""
        yield "gold", f"step {gold['step']:,}", f"{gold['metric']} {loss(gold['value'])}{missing}"
    else:
        yield "gold", "none", ""


def _regressed(facts: Mapping[str, Any]) -> tuple[str, Any, Any]:
    worse = sorted({pair["set"] for pair in facts["regressions"]})
    warned = [name for name, e in facts["evals"].items() if e["warned"]]
    value, below = ", ".join(worse), []
    if len(value) > _MOST_IN_TILE:
        num_sets = sum(e["still_measured"] and "@" not in name for name, e in facts["evals"].items())
        value = f"{len(worse)} of {num_sets} sets"
        below.append(first_of(worse, _MOST_BELOW))
    if warned:
        below.append(f"maybe {first_of(warned, _MOST_BELOW)}")
    if said := least_seen(facts):
        below.append(said)
    return "regressed now", tag("span", value, class_="bad") if worse else "none", "; ".join(below) or None


def _warnings(run: Run) -> list[str]:
    """The warnings of the start and of later edits, each once, with the step at which it was first given."""
    told: dict[str, int] = {}
    for event in run.events:
        for warning in event.get("warnings", []):
            told.setdefault(warning, event["step"])
    return [f"step {step:,}: {warning}" if step else warning for warning, step in told.items()]


def _source_colors(run: Run) -> dict[str, str]:
    """A colour for each source; of too many, those with the largest shares have one and the rest are `other`."""
    totals: Counter[str] = Counter()
    for row in run.metrics:
        totals.update(row["mixture"])
    for phase in run.plan["phases"]:
        totals.update(dict.fromkeys(phase["mixture"], 0))
    names = list(totals)
    if len(names) > MAX_SOURCES + 1:
        names = sorted(sorted(names, key=totals.__getitem__, reverse=True)[:MAX_SOURCES], key=list(totals).index)
    return figures.colors_of(names) | ({"other": figures.OTHER} if len(names) < len(totals) else {})


def _training_figures(run: Run, label: str, phases: Sequence[Phase], colors: dict[str, str]) -> list[Markup]:
    rows = run.metrics
    if not rows:
        return [note("No metrics row yet.")]
    steps = [row["step"] for row in rows]
    names = [name for name in colors if any(f"loss_{name}" in row for row in rows)]
    series = [[_float(row.get(key)) for row in rows] for key in ("loss", *(f"loss_{name}" for name in names))]
    xs, means, per_bin = figures.thinned(steps, *series, most=MAX_TRAINING_POINTS)
    curves = [Curve("all", figures.ALL, xs, means[0])]
    curves += [Curve(name, colors[name], xs, ys) for name, ys in zip(names, means[1:], strict=True)]
    smoothed = f"means of {per_bin} rows" if per_bin > 1 else "one point per metrics row"
    rate_xs, (rates,), _ = figures.thinned(steps, [_float(row["lr"]) for row in rows], most=figures.MAX_POINTS)
    norms = [_float(row["grad_norm"]) for row in rows]
    norm_xs, (norms,), _ = figures.thinned(steps, norms, most=MAX_TRAINING_POINTS)
    skipped = rows[-1]["skipped_updates"]
    left_out = f"{counted(skipped, 'update')} skipped" if skipped else ""
    mixture = figures.mixture_chart(f"{label}: mixture", *_mixture_course(run, colors), colors, phases)
    lr, norm = Curve("lr", PALETTE[0], rate_xs, rates), Curve("all", PALETTE[0], norm_xs, norms)

    def lines(what: str, curves: Sequence[Curve], caption: Any, **look: Any) -> Markup:
        return figure(figures.line_chart(f"{label}: {what}", curves, phases, **look), caption)

    panels = (
        figure(mixture, "Mixture, share of the sequences"),
        lines("training loss by source", curves, Markup("Training loss by source ") + tag("small", smoothed)),
        lines("learning rate", [lr], "Learning rate", from_zero=True),
        lines("gradient norm", [norm], Markup("Gradient norm before clipping ") + tag("small", left_out)),
    )
    return [legend({**colors, "all sources together": figures.ALL}), tag("div", *panels, class_="panels")]


def _mixture_course(run: Run, colors: Mapping[str, str]) -> tuple[list[float], dict[str, list[float]]]:
    """(steps, shares by source) of metrics rows, sharp at switches and edits, without points in constant stretches."""
    first = run.plan["phases"][0]
    course: list[tuple[int, int, Mapping[str, float]]] = [(0, 0, first["mixture"])] if not first["ramp_steps"] else []
    course += [(row["step"], 0, row["mixture"]) for row in run.metrics]
    for event in run.events:
        if event["event"] == "phase_switch":
            after = event["mixture_before"] if event["ramp_steps"] else event["mixture_after"]
            course += [(event["step"], 1, event["mixture_before"]), (event["step"], 2, after)]
        elif event["event"] == "schedule_edit" and event["mixture_before"] != event["mixture_after"]:
            course += [(event["step"], 3, event["mixture_before"]), (event["step"], 4, event["mixture_after"])]
    course.sort(key=lambda point: point[:2])
    shares = []
    for _, _, mixture in course:
        own = {name: mixture.get(name, 0.0) for name in colors if name != "other"}
        if "other" in colors:
            own["other"] = max(0.0, sum(mixture.values()) - sum(own.values()))
        shares.append(own)
    kept = [
        i for i in range(len(course)) if i in (0, len(course) - 1) or not shares[i - 1] == shares[i] == shares[i + 1]
    ]
    every = -(-len(kept) // (2 * figures.MAX_POINTS)) or 1
    kept = sorted({*kept[::every], *kept[-1:]})
    return [course[i][0] for i in kept], {name: [shares[i][name] for i in kept] for name in colors}


def _float(value: Any) -> float:
    as_float = number(value)
    return math.nan if as_float is None else as_float


def _phase_table(facts: Mapping[str, Any]) -> Markup:
    rows, shapes = [], shapes_of(facts["phases"])
    has_shapes = any(shapes)
    for i, (phase, shape) in enumerate(zip(facts["phases"], shapes, strict=True), start=1):
        mixture = tag("td", mixture_text(phase, lambda share: f"{100 * share:.4g}\u00a0%"), class_="text")
        steps = f"{phase['start']:,}", f"{phase['end']:,}", f"{phase['ramp_steps']:,}" if phase["ramp_steps"] else ""
        done = tag("td", "done" if phase["done"] else "")
        rows.append((f"{i}", phase["name"], mixture, *steps, *([shape] if has_shapes else []), done))
    header = ("", "phase", "mixture", "from step", "to step", "ramp", *(["rows x tokens"] if has_shapes else []), "")
    return table_of_phases(header, rows, text_columns=3)


def _epoch_table(facts: Mapping[str, Any]) -> Markup:
    """Tokens read in each phase and epochs since the run's start, one column per source."""
    read = [phase for phase in facts["phases"] if phase["tokens"] or phase["epochs"]]
    if not read:
        return Markup("")
    total: dict[str, int] = {}
    for phase in read:
        for name in (*phase["tokens"], *phase["epochs"]):
            total[name] = total.get(name, 0) + phase["tokens"].get(name, 0)
    names, others = list(total), []
    if len(names) > _MOST_COLUMNS:
        by_tokens = sorted(names, key=total.__getitem__, reverse=True)
        names, others = by_tokens[:_MOST_COLUMNS], by_tokens[_MOST_COLUMNS:]
    rows = []
    for phase in read:
        so_far = "" if phase["done"] else f" (to step {phase['counted_at_step']:,})"
        cells = []
        for name in names:
            epochs = phase["epochs"].get(name)
            below = "" if epochs is None else Markup("<br>") + tag("small", f"{epochs_text(epochs)} epochs")
            cells.append(tag("td", figures.short_count(phase["tokens"].get(name, 0)), below, class_="n"))
        if others:
            cells.append(figures.short_count(sum(phase["tokens"].get(name, 0) for name in others)))
        rows.append((phase["name"] + so_far, *cells))
    explained = (
        "Tokens that each phase read from each source; below them, how many epochs of it are used up since the run's "
        "start, including what rollbacks and changes of length passed over."
    )
    header = ("phase", *names, *([f"{len(others)} others"] if others else []))
    return tag("h3", "Epochs per source") + note(explained) + table_of_phases(header, rows)


def _samples(run: Run) -> list[Markup]:
    """The newest samples as a table, with earlier ones folded below it, newest first."""
    told = [event for event in run.events if event["event"] == "generation"]
    if not told:
        return []
    earlier = told[-2 : -2 - MAX_SAMPLES : -1]
    newest = _sample_table(told[-1:])
    return [newest, folded("Earlier samples", _sample_table(earlier))] if earlier else [newest]


def _sample_table(events: Sequence[Mapping[str, Any]]) -> Markup:
    rows = []
    for event in events:
        for i, sample in enumerate(event["samples"]):
            texts = (tag("td", printable(sample[key]), class_="text") for key in ("prompt", "text"))
            rows.append((f"{event['step']:,}" if i == 0 else "", *texts))
    return table(("step", "prompt", "continuation"), rows, text_columns=3, grouped=True)


def _setup(run: Run, facts: Mapping[str, Any]) -> list[Markup]:
    devices = facts["devices"]
    rows = [
        ("directory", facts["path"]),
        ("model", model_text(facts["model"])),
        ("devices", f"{devices['num']} x {devices['kind']} ({devices['platform']}), mesh {mesh_text(devices['mesh'])}"),
        *(("lineage", line) for line in lineage_lines(facts["lineage"])),
        *((name, ", ".join(map(str, steps))) for name, steps in facts["checkpoints"].items() if steps),
    ]
    if options := run.directory.command_line():
        rows.append(("command line", " ".join(map(typed, options))))
    as_yaml = yaml.safe_dump(run.config_json, sort_keys=False, allow_unicode=True, width=110)
    told = table(("", ""), [(name, tag("td", value, class_="text")) for name, value in rows], text_columns=2)
    return [told, folded("Config, every default filled in", tag("pre", as_yaml))]
