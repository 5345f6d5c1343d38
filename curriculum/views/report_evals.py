"""The sections of a report about the eval sets of one run: curves, numbers, verdicts, transfer between phases."""

import math
from collections.abc import Mapping, Sequence, Set
from itertools import accumulate, groupby
from typing import Any

from markupsafe import Markup, escape

from curriculum.record.events import EMA, PHASE_MEAN, number, record_name
from curriculum.record.queries import EvalPoint, evalset_facts
from curriculum.record.sentences import new_offenders, verdict, what_changed
from curriculum.record.wording import (
    WITH_SCATTER,
    few_documents,
    loss,
    metric_texts,
    metric_titles,
    signed,
    smallest_rise,
)
from curriculum.run import Run
from curriculum.views import figures
from curriculum.views.figures import Mark, Phase, eval_curve
from curriculum.views.inspection_text import by_eval, offender_in
from curriculum.views.page import MANY_PHASES, figure, folded, legend, note, table, table_of_phases, tag

MAX_OVERLAID = 7  # more lines in one drawing cannot be told apart
MAX_PANELS = 12  # sets that are drawn alone; more are folded
MAX_LISTED = 24
_FIT_A_PAGE = 100  # characters of set names beside each other
_SHOWN = ("eval_regression", "eval_recovered", "gold_checkpoint", "gold_blocked", "checkpoint_failed", "phase_switch",
          "schedule_edit", "rollback", "resume", "diverged")  # fmt: skip
_MARKS = {"regressed": "▲\u00a0regressed", "recovered": "○\u00a0recovered", "gold": "★\u00a0gold"}
_ALIKE = ("event", "metric", "guard")  # consecutive golds, or blocked ones, that agree in these share a row


def set_marks(run: Run, facts: Mapping[str, Any], points: Mapping[str, Sequence[EvalPoint]]) -> dict[str, list[Mark]]:
    """The marks of each set: new regressions, recoveries and the gold checkpoint."""
    marks: dict[str, list[Mark]] = {name: [] for name in points}
    for event in run.events:
        if event["event"] == "eval_regression":
            found = [("regressed", name) for name in sorted({o["set"] for o in new_offenders(event)[0]})]
        elif event["event"] == "eval_recovered":
            found = [("recovered", name) for name in sorted({o["set"] for o in event["offenders"]})]
        else:
            continue
        for kind, name in found:
            marks.setdefault(name, []).append(Mark(kind, event["step"]))
    if gold := facts["gold"]:
        name = gold["metric"].partition("/")[0]
        marks.setdefault(record_name(name), []).append(Mark("gold", gold["step"]))
    return marks


def turns(run: Run) -> list[int]:
    """The steps of schedule edits and of rollbacks."""
    return sorted({event["step"] for event in run.events if event["event"] in ("schedule_edit", "rollback")})


def eval_figures(
    label: str,
    points: Mapping[str, Sequence[EvalPoint]],
    phases: Sequence[Phase],
    marks: Mapping[str, Sequence[Mark]],
    turns: Sequence[int],
) -> list[Markup]:
    """One chart of every set or, if they are many, of their rises, and a panel for each set."""
    if not points:
        return [note("No eval yet.")]
    names = [name for name in points if "@" not in name]
    colors = figures.colors_of(names)
    kinds = {mark.kind for of_set in marks.values() for mark in of_set}
    drawn = [note(_key(points, kinds, has_turns=bool(turns)))]
    if 1 < len(names) <= MAX_OVERLAID:
        curves = [eval_curve(name, colors[name], points[name], marks=marks.get(name, ())) for name in names]
        svg = figures.eval_chart(f"{label}: eval loss of every set", curves, phases, size=figures.WIDE, dotted_at=turns)
        drawn.append(figure(svg, "Every set", wide=True))
        # The names stand at the curves' ends, which a narrow screen shows only if it is scrolled sideways.
        drawn.append(tag("div", legend(colors), class_="narrow"))
    risen = {name: figures.rises(points[name]) for name in names}
    if len(names) > MAX_OVERLAID:
        svg = figures.rise_chart(f"{label}: rises of every set", risen, phases, marks)
        most = max((rise for of_set in risen.values() for _, rise in of_set if math.isfinite(rise)), default=0)
        caption = Markup("Every set: how far it is above its lowest loss so far ")
        drawn.append(figure(svg, caption + tag("small", f"full colour: {loss(most)} nats"), wide=True))
    if len(names) > MAX_PANELS:  # those that are worst now come first, the others are folded
        names.sort(key=lambda name: risen[name][-1][1], reverse=True)

    is_alone = len(names) == 1
    panels = []
    for name in names:
        curves = [eval_curve(name, colors[name], points[name], marks=marks.get(name, ()))]
        curves += _curves_of_averages(name, colors[name], points)
        last = points[name][-1]
        size = figures.WIDE if is_alone else figures.PANEL
        svg = figures.eval_chart(f"{label}: eval loss of {name}", curves, phases, size=size, dotted_at=turns)
        caption = escape(f"{name} ") + tag("small", f"{loss(last.loss)} at step {last.step:,}")
        panels.append(figure(svg, caption, wide=is_alone))
    if is_alone:
        return [*drawn, *panels]
    drawn.append(tag("div", *panels[:MAX_PANELS], class_="panels"))
    if others := panels[MAX_PANELS:]:
        drawn.append(folded(f"{len(others)} more sets", tag("div", *others, class_="panels")))
    return drawn


def _key(points: Mapping[str, Sequence[EvalPoint]], kinds: Set[str], has_turns: bool) -> str:
    key = "Loss in nats per token. Bands: ± 1.96 standard errors over the choice of held-out text."
    if kinds:
        key += f" {', '.join(look for kind, look in _MARKS.items() if kind in kinds)}."
    if any("@" in name for name in points):
        key += " Dashed: the moving average of the parameters; ◇: the mean of a phase's last checkpoints."
    if any(not math.isfinite(point.loss) for of_set in points.values() for point in of_set):
        key += " ✕ the loss was not finite."
    if has_turns:
        key += " Dotted: an edit of the schedule or a rollback."
    return key


def _curves_of_averages(name: str, color: str, points: Mapping[str, Sequence[EvalPoint]]) -> list[figures.Curve]:
    """The curves of a set with averages of the parameters, without their bands."""
    curves = []
    for average, style in ((EMA, (0, (4, 2))), (PHASE_MEAN, "D")):
        if of_average := points.get(f"{name}@{average}"):
            curves.append(eval_curve(average, color, of_average, style=style)._replace(sems=()))
    return curves


def set_table(run: Run, facts: Mapping[str, Any]) -> Markup:
    about = evalset_facts(run.events)
    standing = {o["set"] for o in facts["regressions"]}
    rows: list[Sequence[Any]] = []
    averaged: list[Sequence[Any]] = []
    counts = ("documents", "windows", "tokens")
    for name, e in facts["evals"].items():
        of_set = about.get(name, {})
        (averaged if "@" in name else rows).append(
            (
                escape(name)
                + (tag("small", f" {e['text']}") if e["text"] else "")
                + (tag("span", " regressed", class_="bad") if name in standing else "")
                + ("" if e["still_measured"] else tag("small", " no longer measured")),
                *metric_texts(e),
                loss(e["first"]),
                f"{loss(e['best'])} at {e['best_step']:,}",
                smallest_rise(e["detectable"]),
                *(f"{of_set[key]:,}" if key in of_set else "" for key in counts),
            )
        )
    header = ("set", *metric_titles(), "first", "best", "detects a rise of", *counts)
    if not rows:
        return Markup("")
    few = [name for name, e in facts["evals"].items() if e["few_documents"] and "@" not in name]
    explained = "A set detects a rise of that many nats per token, or more, with 80 % power."
    return (
        table(header, rows)
        + (note(explained) if any(e["detectable"] for e in facts["evals"].values()) else "")
        + (note(f"Few documents in {few_documents(few)}.") if few else "")
        + (folded("With averages of the parameters", table(header, averaged)) if averaged else "")
    )


def log(run: Run) -> Markup:
    """The events of _SHOWN as a table, consecutive golds in one row, the earlier of many rows folded."""
    rows = []
    shown = [event for event in run.events if event["event"] in _SHOWN]
    for (kind, *_), together in groupby(shown, key=lambda event: [event.get(key) for key in _ALIKE]):
        if kind in ("gold_checkpoint", "gold_blocked"):
            rows.append(_gold_row(list(together)))
            continue
        for event in together:
            lines = [verdict(event)]
            match kind:
                case "eval_regression":
                    what = tag("span", "▲ regression", class_="bad")
                    new, still = new_offenders(event)
                    lines = [offender_in(event, o, what_changed(o)) for o in by_eval(new)] + still
                    lines += [f"action: {event['action']}"] if event["action"] else []
                case "eval_recovered":
                    what, lines = "○ recovered", [offender_in(event, o) for o in by_eval(event["offenders"])]
                case "checkpoint_failed":
                    what, lines = tag("span", "checkpoint failed", class_="bad"), [_after_colon(event)]
                case "schedule_edit":
                    what, lines = "schedule edited", [_after_colon(event)]
                case "phase_switch":
                    what, lines = "phase switch", [_after_colon(event)]
                case other:
                    what = other
            rows.append((f"{event['step']:,}", what, tag("td", Markup("<br>").join(lines), class_="text")))
    if not rows:
        return Markup("")
    header = ("step", "event", "details")
    judged = any("offenders" in event for event in shown)
    intervals = note(f"The intervals of regressions and recoveries are {WITH_SCATTER}.") if judged else Markup("")
    if len(rows) <= MAX_LISTED:
        return intervals + table(header, rows, text_columns=3)
    earlier = folded(f"{len(rows) - MAX_LISTED} earlier events", table(header, rows[:-MAX_LISTED], text_columns=3))
    return intervals + earlier + table(header, rows[-MAX_LISTED:], text_columns=3)


def _gold_row(golds: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    first, last = golds[0], golds[-1]
    if blocked := last["event"] == "gold_blocked":
        said = last["reason"]
    else:
        said = f"{last['metric']} {loss(last['value'])}"
        said += "" if first["previous"] is None else f", was {loss(first['previous'])}"
    steps = f"{first['step']:,}"
    if len(golds) > 1:
        steps += f" to {last['step']:,}"
        said = f"{len(golds)} times, the last: {said}" if blocked else f"{said}; {len(golds)} times"
    return steps, "gold blocked" if blocked else "★ gold", tag("td", said, class_="text")


def _after_colon(event: Mapping[str, Any]) -> str:
    """The verdict of an event without its name and step, which have columns of their own."""
    return verdict(event).partition(": ")[2]


def transfer_matrix(run: Run, points: Mapping[str, Sequence[EvalPoint]]) -> list[Markup]:
    """Every set's loss at every phase end, with forgetting and gain; of an unfinished run the losses so far."""
    final = (run.complete or {}).get("transfer")
    told = _losses_so_far(run, points) if final is None else final
    if not told or not told["phases"] or not told["sets"]:
        return []
    names = list(told["sets"])
    shades = {name: _shades(told["sets"][name]) for name in names}
    start = ("start", "0", *(_start(told["sets"][name]["start"], points[name][0]) for name in names))
    ends: list[Sequence[Any]] = []
    for i, (phase, step) in enumerate(zip(told["phases"], told["steps"], strict=True)):
        cells = [_heat(told["sets"][name]["loss"][i], shades[name][i]) for name in names]
        ends.append((phase, f"{step:,}", *cells))
    changes = [
        (title, "", *(_change(told["sets"][name][key]) for name in names))
        for title, key in (("forgetting", "forgetting"), ("gain over start", "gain"))
        if all(key in told["sets"][name] for name in names)
    ]
    explained = (
        "Loss at the end of each phase; the stronger the shade, the further above the set's lowest loss until then, at "
        "its start and the phase ends."
    )
    if final:
        explained += (
            " Forgetting: the last loss minus the lowest one of these, without the start if that was random. Gain: the "
            f"loss at the start minus the last; positive is better. In brackets: 95 % intervals {WITH_SCATTER}."
        )
    wide = len(names) > MAX_OVERLAID or sum(map(len, names)) > _FIT_A_PAGE
    if wide and len(ends) <= MAX_OVERLAID:  # a row for each set
        told_at = [start, *ends, *changes]
        header = ("set", *(escape(what) + (tag("small", f" at {step}") if step else "") for what, step, *_ in told_at))
        return [note(explained), table(header, zip(names, *(cells for _, _, *cells in told_at), strict=True))]
    header = ("after phase", "step", *names)
    if len(ends) <= MANY_PHASES:
        return [note(explained), table(header, [start, *ends, *changes])]
    return [note(explained), table(header, [start, ends[-1], *changes]), table_of_phases(header, ends)]


def _losses_so_far(run: Run, points: Mapping[str, Sequence[EvalPoint]]) -> dict[str, Any]:
    step = max(event["step"] for event in run.events)
    ended = [phase for phase in run.plan["phases"] if phase["end"] <= step]
    sets = {}
    for name, of_set in points.items():
        if "@" not in name:
            at = {p.step: p.loss for p in of_set}
            sets[name] = {"start": of_set[0].loss, "loss": [at.get(phase["end"]) for phase in ended]}
    return {"phases": [p["name"] for p in ended], "steps": [p["end"] for p in ended], "sets": sets}


def _shades(of_set: Mapping[str, Any]) -> list[float]:
    """For each phase end, from 0 to 1: how far a set's loss is above its lowest until then, over the range of all."""

    def finite(value: Any) -> float:
        as_float = number(value)
        return as_float if as_float is not None and math.isfinite(as_float) else math.inf

    losses = [finite(loss) for loss in of_set["loss"]]
    lowest = list(accumulate([finite(of_set["start"]), *losses], min))
    height = max((x for x in losses if x < math.inf), default=0.0) - lowest[-1]
    return [(x - low) / height if low < x < math.inf else 0.0 for x, low in zip(losses, lowest[1:], strict=True)]


def _heat(value: Any, shade: float) -> Markup:
    style = {"style": f"background:rgba(213,94,0,{0.3 * shade:.2f})"} if shade > 0 else {}
    return tag("td", loss(value), class_="n heat", **style)


def _start(value: Any, first: EvalPoint) -> Markup:
    """The cell of a set's loss at its start; for a set that was added later, with that step."""
    return tag("td", loss(value), tag("small", f" at {first.step:,}") if first.step else "", class_="n heat")


def _change(told: Mapping[str, Any]) -> Markup:
    low, high = map(number, told["interval"] or (None, None))
    if low == high == 0:  # a checkpoint's difference from itself
        return tag("td", "0", Markup("<br>") + tag("small", "lowest at the end"), class_="n heat")
    known = low is not None and high is not None and math.isfinite(high - low)
    span = Markup("<br>") + tag("small", f"[{signed(low)}, {signed(high)}]") if known else ""
    return tag("td", signed(told["value"]), span, class_="n heat")
