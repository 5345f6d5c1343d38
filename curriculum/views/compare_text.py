"""A comparison of runs as lines of text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from curriculum.record.wording import (
    MOST_NAMED,
    columns,
    few_documents,
    first_of,
    interval_text,
    listed,
    loss,
    metric_texts,
    metric_titles,
    signed,
)
from curriculum.run import left_out
from curriculum.views.compare import SEED_SPREAD_NATS
from curriculum.views.comparison import BITS, ComparedRuns, ComparedSet, RecipeOnSet, RunOnSet
from curriculum.views.config_differences import rows as config_rows

COLUMNS = ("eval set", "run", "step", *metric_titles(), "difference", "95 % interval")
RECIPE_COLUMNS = ("eval set", "recipe", "seeds", "mean loss", "sd", "difference", "95 % interval")
MOST_SENTENCES = 24  # with more differences than that each set has one line
_MOST_OF_SECTION = 24  # keys of a section of the config that are shown


def table(comparison: ComparedRuns) -> list[str]:
    """The comparison as lines of text."""
    lines = [which_evals(comparison), ""]
    rows = [("run", "step", "tokens", "", "directory")]
    for run in comparison.runs:
        state = "finished" if run["finished"] else "not finished"
        rows.append((run["name"], f"{run['step']:,}", f"{run['tokens']:,}", state, run["path"]))
    lines += [*columns(rows, right=(1, 2)), ""]
    if differing := _by_recipe(comparison):
        rows = [("config", *differing[0]["values"]), *config_rows(differing, _MOST_OF_SECTION)]
        lines += [*columns(rows, right=()), ""]
    elif comparison.config:
        lines += ["No key of the configs differs but the seed.", ""]
    else:
        lines += ["No key of the configs differs.", ""]
    lines += [*columns([COLUMNS, *(cells for _, cells in measured(comparison))], right=range(2, len(COLUMNS))), ""]
    if comparison.recipes:
        rows = [RECIPE_COLUMNS, *(cells for _, cells in of_recipes(comparison))]
        lines += [*columns(rows, right=range(2, len(RECIPE_COLUMNS))), ""]
    sentences = verdicts(comparison)
    if len(sentences) > MOST_SENTENCES:
        sentences = verdicts(comparison, in_short=True)
    return [*lines, *sentences, *notes(comparison)]


def measured(comparison: ComparedRuns) -> Iterator[tuple[RunOnSet, tuple[str, ...]]]:
    """Each run on each eval set, with its cells under COLUMNS; of a set only the first row has the title."""
    for compared in comparison.sets:
        for i, m in enumerate(compared.runs):
            numbers = (f"{m.step:,}", *metric_texts(vars(m)))
            d = m.difference
            unit = " bpb" if compared.unit == BITS else ""
            between = ("", "") if d is None else (signed(d.delta) + unit, interval_text(d.interval))
            yield m, (compared.title if i == 0 else "", m.run, *numbers, *between)


def _by_recipe(comparison: ComparedRuns) -> list[Mapping[str, Any]]:
    """Where the configs differ; with recipes of several seeds a value for each recipe, and no row for the seed."""
    if not comparison.recipes:
        return list(comparison.config)
    names = {next(iter(recipe.seeds)): recipe.name for recipe in comparison.recipes}
    return [
        {"key": key, "values": {name: d["values"][run] for run, name in names.items()}}
        for d in comparison.config
        if (key := d["key"]) != "seed"
    ]


def of_recipes(comparison: ComparedRuns) -> Iterator[tuple[RecipeOnSet, tuple[str, ...]]]:
    """Each recipe on each eval set, with its cells under RECIPE_COLUMNS; of a set only the first row has the title."""
    for compared in comparison.sets:
        for i, m in enumerate(compared.recipes):
            d = m.difference
            between = ("", "") if d is None else (signed(d.delta), interval_text(d.interval))
            title = compared.title if i == 0 else ""
            yield m, (title, m.recipe, str(len(m.runs)), loss(m.loss), loss(m.sd), *between)


def verdicts(comparison: ComparedRuns, in_short: bool = False) -> list[str]:
    """A sentence for each difference: between recipes on sets where two of them have several seeds, else between runs.

    `in_short`: of runs a line for each set.
    """
    told = []
    for compared in comparison.sets:
        of_recipes = sum(len(m.runs) > 1 for m in compared.recipes) > 1
        if in_short and not of_recipes:
            told.append(_in_short(compared))
        else:
            between = compared.recipes if of_recipes else compared.runs
            told += [f"{compared.title}: {m.verdict}" for m in between if m.verdict]
    return told


def _in_short(compared: ComparedSet) -> str:
    """Which runs are better or worse than the first on a set, in one line."""
    first, *others = compared.runs
    kinds: dict[str, list[str]] = {"better": [], "worse": [], "no difference shown": [], "no verdict": []}
    for m in others:
        low, high = m.difference.interval or (math.nan, math.nan)
        kind = "better" if high < 0 else "worse" if low > 0 else "no difference shown"
        if not math.isfinite(high - low):
            kind = "no verdict"
        kinds[kind].append(f"{m.run} {signed(m.difference.delta)}{' bpb' if compared.unit == BITS else ''}")
    told = (f"{kind}: {first_of(runs, MOST_NAMED)}" for kind, runs in kinds.items() if runs)
    return f"{compared.title} against {first.run}: {'; '.join(told)}"


def which_evals(comparison: ComparedRuns) -> str:
    """Which evals are compared, in whole sentences."""
    if comparison.common is None:
        without = [run["name"] for run in comparison.runs if run["gold_step"] is None]
        told = (
            f" {listed(without)} {'has' if len(without) == 1 else 'have'} none: the last eval is used."
            if without
            else ""
        )
        return f"Each run is compared at its gold checkpoint, which export takes.{told}"
    common = f"{comparison.common:,} {'tokens' if comparison.at == 'tokens' else 'steps'}"
    if not comparison.asked:
        common += f", where the shortest{' that shares a set' if comparison.alone else ''} was last measured"
    sentences = []
    for base, step in comparison.base_steps.items():
        begun = [pair["run"] for pair in comparison.begun if (pair["base"], pair["step"]) == (base, step)]
        sentences.append(
            f"{base} is compared by its last eval at or before step {step:,}, where {listed(begun)} began."
        )
    each = "Each other run" if sentences else "Each run"
    sentences.append(f"{each} is compared by its last eval at or before {common}.")
    if comparison.alone:
        one = len(comparison.alone) == 1
        count = "shares no set: its last eval is used." if one else "share no set: their last evals are used."
        sentences.append(f"{listed(comparison.alone)} {count}")
    return " ".join(sentences)


def notes(comparison: ComparedRuns) -> list[str]:
    """Notes on the comparison: sets left out, shared pasts, unequal tokens, and what the differences cannot show."""
    lines = [f"{name}: no eval yet, left out" for name in comparison.unmeasured]
    lines += left_out(comparison.damaged)
    lines += [f"{name}: not compared: {why}" for name, whys in comparison.refused.items() for why in whys]
    lines += [f"{name}: measured only by {', '.join(who)}" for name, who in comparison.only.items()]
    lines += [
        f"{listed(runs)} are the same run up to step {step:,}{', and separate runs after it' if len(runs) == 2 else ''}"
        for step, runs in _families(comparison)
    ]
    lines += [
        f"{pair['run']} began from step {pair['step']:,} of {pair['base']}, not the step of {pair['base']} compared "
        "here; compare these two alone for that"
        for pair in comparison.begun
        if pair["step"] != comparison.base_steps[pair["base"]]
    ]
    if comparison.common is None:
        lines.append(
            "Golds are the best of many evals, most often by one of these losses: they look the better the more evals "
            "there were, and the less even they are"
        )
    lines += _measured_before(comparison)
    of_bases = [{pair["run"], pair["base"]} for pair in comparison.begun]
    unequal = [
        f"{compared.title} ({', '.join(f'{m.run} {m.tokens:,}' for m in compared.runs)})"
        for compared in comparison.sets
        for first in compared.runs[:1]
        if any(m.tokens != first.tokens and {m.run, first.run} not in of_bases for m in compared.runs)
    ]
    if unequal:
        lines.append(f"measured after unequal numbers of tokens, which is part of the difference: {', '.join(unequal)}")
    few = [c.title for c in comparison.sets if any(m.difference and m.difference.clusters == "blocks" for m in c.runs)]
    if few:
        lines.append(f"few documents in {few_documents(few)}")
    by_text = [
        f"{compared.title}: {m.run} has other windows than {compared.runs[0].run} (tokenizer, evalsets.seq_len or "
        f"documents); they are compared in bits per byte, over the {m.difference.num_clusters:,} documents that both "
        f"measured, {math.floor(100 * m.difference.share)} % of the bytes"
        for compared in comparison.sets
        if compared.unit == BITS
        for m in compared.runs[1:]
    ]
    lines += by_text
    lines += [
        f"{run} has the seed of {other}, of the same recipe: it does not count in {recipe.name}"
        for recipe in comparison.recipes
        for run, other in recipe.repeats.items()
    ]
    lines += [
        f"{compared.title}: {', '.join(left)} does not count in {m.recipe}: measured after another number of tokens"
        for compared in comparison.sets
        for m in compared.recipes
        for recipe in comparison.recipes
        if recipe.name == m.recipe
        if (left := [other.run for other in compared.runs if other.run in recipe.seeds.keys() - set(m.runs)])
    ]
    lines += _means_apart(comparison)
    if comparison.recipes:
        lines.append(
            "Recipes are runs that began alike and whose configs differ in the seed alone. Differences between them "
            "are of their mean losses; these intervals cover the seeds of these runs, not of runs that they began "
            "from, and the choice of held-out text."
        )
    differences = "Differences are nats per token of each run minus the first, over the same windows"
    if by_text:
        differences += ", or bits per byte where it says bpb"
    lines.append(
        f"{differences}; below 0 is better. Their "
        "intervals cover the choice of held-out text alone, and hold for these checkpoints only, not for neighbouring "
        f"ones or the recipes: another seed moves a final loss too, by about {SEED_SPREAD_NATS} nats in a long run of "
        "124M parameters (standard deviation), and by far more in small and short ones."
    )
    return lines


def _means_apart(comparison: ComparedRuns) -> Iterator[str]:
    """A line on each set that recipes measured in other windows: their mean losses stand in one table."""
    apart: dict[str, list[str]] = {}
    for compared in comparison.sets:
        if compared.recipes:
            apart.setdefault(compared.name, []).append(listed([m.recipe for m in compared.recipes]))
    of_same_documents = {compared.name for compared in comparison.sets if compared.unit == BITS}
    for name, groups in apart.items():
        if len(groups) > 1:
            instead = "; the runs' bits per byte do" if name in of_same_documents else ""
            yield (
                f"{name}: the mean losses of {' and of '.join(groups)} are of other tokens or documents, and say "
                f"nothing beside each other{instead}"
            )


def _measured_before(comparison: ComparedRuns) -> Iterator[str]:
    """A line on each base that did not measure some sets at the step where another run began, but before it."""
    for base, step in comparison.base_steps.items():
        late = [
            f"{compared.title} at step {m.step:,}"
            for compared in comparison.sets
            for m in compared.runs
            if m.run == base and m.step < step
        ]
        begun = [pair["run"] for pair in comparison.begun if (pair["base"], pair["step"]) == (base, step)]
        if late:
            runs = listed(begun)
            yield (
                f"{base} last measured {listed(late)}, before its step {step:,}, where {runs} began: what it learned "
                f"in between is part of these differences, but not of the gains over the start of {runs}"
            )


def _families(comparison: ComparedRuns) -> list[tuple[int, list[str]]]:
    """(step, runs) for each branching: runs that are one up to `step`, merged over all pairs that share it."""
    names = [run["name"] for run in comparison.runs]
    families: list[tuple[int, list[str]]] = []
    for pair in sorted(comparison.shared, key=lambda pair: pair["step"]):
        step, members = pair["step"], set(pair["runs"])
        touching = [f for f in families if f[0] == step and members & set(f[1])]
        members = members.union(*(f[1] for f in touching))
        families = [f for f in families if f not in touching]
        families.append((step, [name for name in names if name in members]))
    return families
