"""The report of several runs: config differences, the comparison, and a chart per text with a line per run."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from curriculum.errors import InputError
from curriculum.record.queries import content_hashes, eval_points, planned_tokens
from curriculum.record.wording import listed, loss
from curriculum.run import Run
from curriculum.views import figures
from curriculum.views.compare import compare_runs
from curriculum.views.compare_text import (
    COLUMNS,
    MOST_SENTENCES,
    RECIPE_COLUMNS,
    measured,
    notes,
    of_recipes,
    verdicts,
    which_evals,
)
from curriculum.views.comparison import BITS, ComparedRuns, RecipeOnSet, RunOnSet
from curriculum.views.config_differences import config_differences
from curriculum.views.config_differences import rows as config_rows
from curriculum.views.figures import Curve, eval_curve
from curriculum.views.inspection import inspect_run
from curriculum.views.inspection_text import lineage_lines
from curriculum.views.page import bullets, figure, folded, legend, note, section, table, tag
from curriculum.views.report_run import of_run
from curriculum.views.same_text import same_text, set_title
from curriculum.views.shared_past import shared_past

MOST_WHOLE = 4  # runs up to which the page holds each one's own report: with many sets each is megabytes
_MOST_OF_SECTION = 200  # keys of a section of the config that are shown
_MOST_KEYS = 15  # more differing keys are folded, as they would push the comparison off the first screen


def of_runs(runs: Sequence[Run], names: Sequence[str]) -> list[Markup]:
    """The page's sections: config differences, the comparison, eval charts, and each run's own report, folded.

    A page with more than MOST_WHOLE runs leaves out the reports of single runs.
    """
    colors = figures.colors_of(names)
    facts = [inspect_run(run) for run in runs]
    rows = []
    for name, f in zip(names, facts, strict=True):
        progress, val = f["progress"], f["evals"].get("val", {})
        rows.append(
            (
                tag("i", class_="swatch", style=f"background:{colors[name]}") + name,
                tag("td", f["path"], *(Markup("<br>") + tag("small", line) for line in lineage_lines(f["lineage"]))),
                f"{progress['step']:,} of {progress['total_steps']:,}",
                figures.short_count(progress["tokens"]),
                figures.short_count(f["model"]["num_parameters"]),
                loss(val.get("loss")),
                f"step {f['gold']['step']:,}" if f["gold"] else "none",
            )
        )
    header = ("run", "directory", "step", "tokens", "parameters", "val loss", "gold")
    try:
        comparison = compare_runs(runs)
        compared = [_compare_table(comparison)]
    except InputError as error:
        comparison, compared = None, [note(problem) for problem in error.problems]
        if error.details:
            compared.append(bullets(error.details))
    return [
        tag("header", tag("h1", f"{len(runs)} runs"), table(header, rows, text_columns=2)),
        section("Config differences", _config_table(runs, names)),
        section("Comparison", *compared),
        section("Eval loss", *_overlays(runs, names, colors, comparison)),
        *_single_reports(runs, facts, names),
    ]


def _single_reports(runs: Sequence[Run], facts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Markup]:
    if len(runs) > MOST_WHOLE:
        return [note("For the full report of one run: curriculum report RUN -o FILE")]
    return [
        tag("section", tag("h2", name), folded("Full report of this run", *of_run(run, of_it, name)))
        for run, of_it, name in zip(runs, facts, names, strict=True)
    ]


def _config_table(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    differences = config_differences(runs, names)
    if not differences:
        return note("No key differs.")
    told = table(("key", *names), config_rows(differences, _MOST_OF_SECTION), text_columns=1 + len(names))
    return told if len(differences) <= _MOST_KEYS else folded(f"{len(differences):,} keys", told)


def _compare_table(comparison: ComparedRuns) -> Markup:
    of_runs, of_their_recipes = _with_looks(measured(comparison)), _with_looks(of_recipes(comparison))
    in_words = verdicts(comparison)
    *special, closing = notes(comparison)
    return (
        note(which_evals(comparison))
        + table(COLUMNS, of_runs, text_columns=2, grouped=True)
        + (table(RECIPE_COLUMNS, of_their_recipes, text_columns=2, grouped=True) if of_their_recipes else "")
        + note(closing)
        + (bullets(special) if special else "")
        + folded("In words", bullets(in_words), open_=len(in_words) <= MOST_SENTENCES)
    )


def _with_looks(rows: Iterable[tuple[RunOnSet | RecipeOnSet, tuple[str, ...]]]) -> list[tuple[str | Markup, ...]]:
    """The cells of each row, the difference marked as good or bad where its interval leaves no doubt."""
    marked = []
    for m, (*cells, delta, interval) in rows:
        low, high = (m.difference and m.difference.interval) or (0.0, 0.0)
        look = "n good" if high < 0 else "n bad" if low > 0 else "n"
        marked.append((*cells, tag("td", delta, class_=look), interval))
    return marked


def _overlays(
    runs: Sequence[Run], names: Sequence[str], colors: Mapping[str, str], comparison: ComparedRuns | None
) -> list[Markup]:
    """A chart per text with a line per run; in bits per byte for what `comparison` compares by its documents."""
    drawn = overlays(runs, names, colors)
    if not drawn:
        return [note("No eval yet.")]
    panels = []
    for overlay in drawn:
        whose = "every run" if len(overlay.curves) == len(runs) else listed([curve.label for curve in overlay.curves])
        title = f"eval loss of {overlay.title}, {whose}"
        svg = figures.eval_chart(title, overlay.curves, x_label=overlay.x, dotted_at=overlay.branch_at)
        without = f"without {overlay.name} of {listed(overlay.left_out)}: other windows" if overlay.left_out else ""
        panels.append(figure(svg, escape(f"{overlay.title} ") + tag("small", without)))
    by_text = [] if comparison is None else [compared for compared in comparison.sets if compared.unit == BITS]
    for compared in by_text:
        curves = []
        of_runs = {measured.run for measured in compared.runs}
        for number, (name, run) in enumerate(zip(names, runs, strict=True), start=1):
            if name not in of_runs:
                continue
            points = [point for point in eval_points(run.events).get(compared.name, ()) if point.bpb is not None]
            if points:
                curves.append(eval_curve(name, colors[name], points, drawn[0].x, "bpb", end=f"{number}"))
        title = f"bits per byte of {compared.name}, {listed([curve.label for curve in curves])}"
        svg = figures.eval_chart(title, curves, x_label=drawn[0].x)
        panels.append(figure(svg, escape(f"{compared.name} ") + tag("small", "in bits per byte, each run's documents")))
    keys = "Loss in nats per token; bands: ± 1.96 standard errors over the choice of held-out text."
    if any(overlay.branch_at for overlay in drawn):
        keys += " Dotted: where a run branches off another; the steps before are shared and drawn once."
    if comparison is not None and comparison.begun:
        keys += " A run that began from another one is drawn from its own step 0, not where that one ended."
    numbered = {f"{i} {name}": colors[name] for i, name in enumerate(names, start=1)}
    return [note(keys), legend(numbered), tag("div", *panels, class_="panels")]


class Overlay(NamedTuple):
    """The curves of one text over `step`, or over `tokens` if steps differ in tokens.

    name, title: the first run's name for the set; the same with the other runs' names.
    branch_at: each x where a run branches off an earlier one listed; its curve begins with their last joint eval.
    left_out: runs that measured other text under this name.
    """

    name: str
    title: str
    x: str
    curves: list[Curve]
    branch_at: list[int]
    left_out: list[str]


def overlays(runs: Sequence[Run], names: Sequence[str], colors: Mapping[str, str]) -> list[Overlay]:
    """An overlay for each text that any run measured; sets are matched by `same_text`."""
    of_update = {run.plan["tokens_per_step"] for run in runs}
    x = "step" if len(runs) == 1 or (len(of_update) == 1 and None not in of_update) else "tokens"
    points = [eval_points(run.events) for run in runs]
    hashes = [content_hashes(run.events, of_run) for run, of_run in zip(runs, points, strict=True)]
    past = cache(lambda i, j: shared_past(runs[i], runs[j]))  # the same for every set, and reads the whole record
    drawn = []
    for group in same_text(hashes):
        curves, branch_at = [], []
        for position, (i, its_name) in enumerate(group.items()):
            of_set = points[i][its_name]
            pasts = [s for j in list(group)[:position] if (s := past(j, i)) is not None]
            if pasts:
                shared = max(pasts)
                branch_at.append(shared if x == "step" else planned_tokens(runs[i].plan, shared))
                of_set = [*[p for p in of_set if p.step <= shared][-1:], *(p for p in of_set if p.step > shared)]
            curves.append(eval_curve(names[i], colors[names[i]], of_set, x, end=f"{i + 1}"))
        first, name = next(iter(group.items()))
        left_out = [
            names[i] for i, of_run in enumerate(hashes) if of_run.get(name, hashes[first][name]) != hashes[first][name]
        ]
        title = set_title({names[i]: its_name for i, its_name in group.items()})
        drawn.append(Overlay(name, title, x, curves, sorted(set(branch_at)), left_out))
    return drawn
