"""Runs that differ in their seeds alone, taken together: how far apart recipes are, beyond what another seed does."""

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from curriculum.record.wording import counted, signed
from curriculum.run import Run
from curriculum.views.comparison import NATS, Recipe, RecipeDifference, RecipeOnSet
from curriculum.views.config_differences import config_differences
from evalsets.metrics import WindowResults, difference_of_recipes


def recipes_of(runs: Sequence[Run], names: Sequence[str]) -> tuple[Recipe, ...]:
    """The recipes of runs, in the order of their first runs; none if none has runs of two seeds.

    Two runs are of one recipe if `config_differences` finds nothing but the seed, or nothing at all, and they began
    from the same parameters. A run whose config was edited on its way is alone: its config is not what it was all of
    the time.
    """
    groups: list[dict[str, Run]] = []
    for name, run in zip(names, runs, strict=True):
        group = next((group for group in groups if _is_of(next(iter(group.values())), run)), None)
        if group is None:
            groups.append({name: run})
        else:
            group[name] = run
    recipes = [_recipe(group) for group in groups]
    if all(len(recipe.seeds) < 2 for recipe in recipes):
        return ()
    uses = Counter(recipe.name for recipe in recipes)
    return tuple(r if uses[r.name] == 1 else replace(r, name=next(iter(r.seeds))) for r in recipes)


def _is_of(first: Run, other: Run) -> bool:
    if any(event["event"] == "schedule_edit" for run in (first, other) for event in run.events):
        return False
    if _began_with(first) != _began_with(other):
        return False
    return {found["key"] for found in config_differences([first, other], ["first", "other"])} <= {"seed"}


def _began_with(run: Run) -> tuple[Any, ...] | None:
    """What tells the first parameters of a run from those of others; None: they are of its seed."""
    lineage = run.start["lineage"]
    return lineage and tuple(lineage.get(key) for key in ("run", "started_at", "step", "fingerprint"))


def recipes_on_set(
    recipes: Sequence[Recipe], windows: Mapping[str, WindowResults], tokens: Mapping[str, int] | None
) -> tuple[RecipeOnSet, ...]:
    """Each recipe on one set, compared with the first that has several runs there; `windows` are those of each run.

    `tokens`: how many each of these runs had been trained on. Of a recipe those count that have as many as most of them
    have, or the more. None: they may differ, as those of golds do.
    """
    nats: dict[str, np.ndarray] = {}
    found = []
    for recipe in recipes:
        used = [run for run in recipe.seeds if run in windows]
        if tokens is not None and used:
            num = Counter(tokens[run] for run in used)
            usual = max(num, key=lambda of: (num[of], of))
            used = [run for run in used if tokens[run] == usual]
        if not used:
            continue
        nats[recipe.name] = np.array([windows[run].nats_N for run in used], np.float64)
        losses_R = nats[recipe.name].sum(axis=1) / windows[used[0]].tokens_N.sum(dtype=np.int64)
        sd = float(np.std(losses_R, ddof=1)) if len(losses_R) > 1 else None
        found.append(RecipeOnSet(recipe.name, tuple(used), float(losses_R.mean()), sd, None, None))
    if not found:
        return ()
    first = next((m for m in found if len(m.runs) > 1), found[0])
    of_first = windows[first.runs[0]]
    for i, m in enumerate(found):
        if m is not first:
            before = first.recipe, nats[first.recipe]
            difference = _difference(before, nats[m.recipe], of_first.tokens_N, of_first.document_N)
            compared = replace(m, difference=difference)
            found[i] = replace(compared, verdict=_verdict(compared, first))
    return tuple(found)


def _recipe(group: dict[str, Run]) -> Recipe:
    seeds: dict[str, int] = {}
    repeats: dict[str, str] = {}
    for name, run in group.items():
        seed = run.config_json["seed"]
        if same := [other for other, its in seeds.items() if its == seed]:
            repeats[name] = same[0]
        else:
            seeds[name] = seed
    return Recipe(_common_name(list(seeds)), seeds, repeats)


def _common_name(names: Sequence[str]) -> str:
    """`small` of `small-seed0` and `small-seed1`, or `small/0` and `small/1`; the first name if there is no such."""
    if len(names) == 1:
        return names[0]
    begin = "".join(os.path.commonprefix([re.split(r"([-_. /]|\d+)", name) for name in names]))
    return re.sub(r"[-_. /]+(s|seed)?[-_. /]*$", "", begin).rpartition("/")[2] or names[0]


def _difference(
    first: tuple[str, np.ndarray], nats_RN: np.ndarray, tokens_N: np.ndarray, document_N: np.ndarray
) -> RecipeDifference:
    against, before_RN = first
    found = difference_of_recipes(nats_RN, before_RN, tokens_N, document_N)
    if math.isnan(found.sem_seeds):
        return RecipeDifference(against, found.delta, None, None, None, None)
    half = found.half_width(0.025)
    interval = (found.delta - half, found.delta + half)
    return RecipeDifference(against, found.delta, interval, found.sem_seeds, found.df_seeds, found.sem_text)


def _verdict(now: RecipeOnSet, before: RecipeOnSet) -> str:
    """The difference between two recipes on one set in one sentence that can stand alone."""
    between = now.difference
    ours, theirs = (f"{of.recipe} ({counted(len(of.runs), 'seed')})" for of in (now, before))
    for who, of in ((ours, now), (theirs, before)):
        if not math.isfinite(of.loss):
            return f"no verdict: not every loss of {who} is a number"
    if single := [of.recipe for of in (now, before) if len(of.runs) < 2]:
        differs = f"{ours} differs from {theirs} by {signed(between.delta)} {NATS}"
        return f"no verdict: {differs}, but what another seed does is not known of {' and '.join(single)}"
    if between.interval is None:
        differs = f"{ours} differs from {theirs} by {signed(between.delta)} {NATS}"
        return f"no verdict: {differs}, but the set is a single document of few windows"
    if between.interval == (0.0, 0.0):
        return f"{ours} and {theirs} are equal in every window"
    low, high = between.interval
    if low <= 0 <= high:
        by_seeds = round(100 * between.sem_seeds**2 / (between.sem_seeds**2 + between.sem_text**2))
        return (
            f"no difference shown between {ours} and {theirs}: {signed(between.delta)} (95 % {signed(low)} to "
            f"{signed(high)}); {by_seeds} % of its variance comes from the seeds"
        )
    better, (least, most) = ("better", (-high, -low)) if high < 0 else ("worse", (low, high))
    return f"{ours} is {better} than {theirs} by {abs(between.delta):.4f} {NATS} (95 % {least:.4f} to {most:.4f})"
