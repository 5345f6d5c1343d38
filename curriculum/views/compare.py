"""Compare runs: their losses on the eval sets that they share, and paired differences with confidence intervals.

A difference is between two checkpoints on the same windows, so the choice of held-out text hardly affects it. Where the
windows differ, as with another tokenizer, it is between the documents that both measured, in bits per byte. It says
nothing of the variation between seeds; runs that differ in their seeds alone are therefore taken together as well.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, permutations
from typing import Any

import numpy as np

from curriculum.errors import InputError, check_several
from curriculum.find_checkpoint import is_step
from curriculum.record.events import DamagedRun, config_name, eval_key, eval_sets
from curriculum.record.queries import EvalPoint, content_hashes, points_of
from curriculum.record.windows import recorded_windows
from curriculum.record.wording import listed, signed
from curriculum.run import Run, left_out, load_runs, of_whole_runs
from curriculum.run_directory import names_in, read_arrays
from curriculum.views.comparison import (
    BITS,
    NATS,
    ComparedRuns,
    ComparedSet,
    Difference,
    Recipe,
    RunOnSet,
    steps_of_bases,
)
from curriculum.views.config_differences import config_differences
from curriculum.views.recipes import recipes_of, recipes_on_set
from curriculum.views.same_text import same_text, set_title
from curriculum.views.shared_past import began_at, shared_past
from evalsets.metrics import WindowResults, paired_by_text, paired_difference, student_quantile

# Standard deviation of the final validation loss over seeds, in nats per token, of a GPT-2 of 124M parameters.
SEED_SPREAD_NATS = 0.002
_SHOWN_NATS = 0.0001  # the last decimal that is shown
_STAMP = {"step": "step", "tokens": "tokens_processed"}  # where an event has what evals are compared at
_NOTHING_SHARED = (
    "no eval set can be compared: no two of these runs measured the same text where they are compared; expected two of "
    "them to have a set of the same documents; to add one, resume a run with --eval-dataset-dir NAME=DIR"
)


def compare(run_dirs: Sequence[str | os.PathLike], *, at: str | int = "tokens") -> ComparedRuns:
    """Compare run directories by their last evals at or before the common `tokens` or `step`, or a given step.

    Or at "gold": each by its own gold checkpoint, which `export` takes, or by its last eval if it has none.

    A folder of runs stands for all of its runs. Runs without any eval yet are left out, and damaged runs of a folder.

    Raises InputError if a directory cannot be read, no two runs share a set, or an eval or its windows are missing.
    """
    check_several("run_dirs", run_dirs)
    # An empty record is that of a run without an eval.
    runs, damaged = load_runs(run_dirs, lambda run: run.events and run.start)
    try:
        comparison = of_whole_runs(partial(compare_runs, at=at), runs, damaged, run_dirs)
    except InputError as error:
        raise InputError(*error.problems, details=[*error.details, *left_out(damaged)]) from None
    return replace(comparison, damaged=damaged)


def compare_runs(runs: Sequence[Run], *, at: str | int = "tokens") -> ComparedRuns:
    """`compare` for runs that are loaded already. The same run may be given twice."""
    if len(runs) < 2:
        raise InputError(f"got {len(runs)} run, expected two or more to compare")
    if at not in ("tokens", "step", "gold") and not is_step(at):
        raise InputError(f"--at {at}: expected tokens, step, gold, or the number of a step")
    asked, at = (int(at), "step") if is_step(at) else (None, at)
    sides, unmeasured = _sides(runs)
    sharing = _sharing(sides)
    begun = tuple(
        {"run": side.name, "base": base.name, "step": step}
        for side, base in permutations(sides, 2)
        if at != "gold" and base in sharing and (step := began_at(side.run, base.run)) is not None
    )
    common = _take_evals(sides, sharing, steps_of_bases(begun), at, asked)
    recipes = recipes_of([side.run for side in sides], [side.name for side in sides])
    sets = [*_compared_sets(sides, begun, recipes, at)]
    by_text, refused, only = _compared_by_text(sides, begun)
    sets += by_text
    if not sets:
        reasons = [f"{name}: {why}" for name, whys in refused.items() for why in whys]
        reasons += [f"{name}: only {' and '.join(who)} measured it" for name, who in only.items()]
        raise InputError(_NOTHING_SHARED, details=reasons)
    return ComparedRuns(
        at=at,
        common=common,
        asked=asked is not None,
        runs=tuple(
            {
                "name": side.name,
                "path": str(side.run.directory.path),
                "step": max(p.step for p in side.last.values()),
                "tokens": max(p.tokens for p in side.last.values()),
                "gold_step": side.run.gold_step,
                "finished": side.run.complete is not None,
            }
            for side in sides
        ),
        sets=tuple(sets),
        refused=refused,
        only=only,
        shared=tuple(
            {"runs": (first.name, second.name), "step": step}
            for first, second in combinations(sides, 2)
            if (step := shared_past(first.run, second.run)) is not None
        ),
        begun=begun,
        alone=tuple(side.name for side in sides if side not in sharing),
        unmeasured=unmeasured,
        recipes=recipes,
        config=config_differences([side.run for side in sides], [side.name for side in sides]),
    )


def _sides(runs: Sequence[Run]) -> tuple[list[_Side], tuple[str, ...]]:
    """The runs that have an eval, and the names of those that have none yet."""
    sides, unmeasured = [], []
    for name, run in zip(labels(runs), runs, strict=True):
        evals = [event for event in run.events if event["event"] == "eval"]
        alike = {tuple(event): event for event in evals}  # most evals measure the same sets
        measured = dict.fromkeys(evalset for event in alike.values() for evalset in eval_sets(event))
        if measured:
            sides.append(_Side(name, run, evals, content_hashes(run.events, measured)))
        else:
            unmeasured.append(name)
    if len(sides) < 2:
        raise InputError(f"{listed(unmeasured)}: no eval yet, expected two runs or more that have one")
    return sides, tuple(unmeasured)


def _sharing(sides: Sequence[_Side]) -> set[_Side]:
    """Those that measured a set that another one measured too, or documents of it."""
    sharing = {sides[i] for group in same_text([side.hashes for side in sides]) if len(group) > 1 for i in group}
    for name in dict.fromkeys(name for side in sides for name in side.hashes):
        having = [side for side in sides if name in side.hashes]
        if len({side.hashes[name] for side in having}) < 2:
            continue
        for first, other in combinations([side for side in having if side.texts(name) is not None], 2):
            if first.hashes[name] != other.hashes[name] and np.isin(first.texts(name), other.texts(name)).any():
                sharing |= {first, other}
    return sharing


def _take_evals(
    sides: Sequence[_Side], sharing: set[_Side], base_steps: Mapping[str, int], at: str, asked: int | None
) -> int | None:
    """Take the evals of each run that enter the comparison.

    Returns the tokens or steps at which that is, bases aside; None if each run has a step of its own, its gold's.
    """
    if at == "gold":
        for side in sides:
            side.take_last("step", math.inf if side.run.gold_step is None else side.run.gold_step)
        return None
    free = [side for side in sides if side in sharing and side.name not in base_steps] or sides
    shortest = min(max(event[_STAMP[at]] for event in side.evals) for side in free)
    common = shortest if asked is None else asked
    for side in sides:
        of_base = side.name in base_steps
        most = base_steps[side.name] if of_base else common if side in sharing else math.inf
        side.take_last("step" if of_base else at, most)
        if not side.last:
            unit = "tokens" if at == "tokens" and not of_base else "steps"
            why = ", where another run begins" if of_base else ", where another run ends" if asked is None else ""
            raise InputError(f"{side.run.directory.path}: has no eval at or before {most:,} {unit}{why}")
    return common


def _compared_sets(
    sides: Sequence[_Side], begun: Iterable[Mapping[str, Any]], recipes: Sequence[Recipe], at: str
) -> Iterator[ComparedSet]:
    """Each text that two or more runs measured."""
    for group in same_text([{name: side.hashes[name] for name in side.last} for side in sides]):
        (first, name), *others = [(sides[i], name) for i, name in group.items()]
        if others:
            found = [(side, own, _difference(side, own, first, name)) for side, own in others]
            compared = _compared_set(first, name, found, begun, NATS)
            if recipes:
                windows = {side.name: side.windows(own, side.last[own]) for side, own in [(first, name), *others]}
                tokens = None if at == "gold" else {m.run: m.tokens for m in compared.runs}
                compared = replace(compared, recipes=recipes_on_set(recipes, windows, tokens))
            yield compared


def _compared_set(
    first: _Side,
    name: str,
    others: Iterable[tuple[_Side, str, Difference]],
    begun: Iterable[Mapping[str, Any]],
    unit: str,
) -> ComparedSet:
    """A set of the first run, and that of each other one under its own name there."""
    measured = [_measured(first, name)]
    for side, own, between in others:
        verdict = _verdict(side.name, first.name, side.last[own], first.last[name], between, begun, unit)
        measured.append(_measured(side, own, between, verdict))
    return ComparedSet(name, first.hashes[name], tuple(measured), unit)


def _compared_by_text(
    sides: Sequence[_Side], begun: Iterable[Mapping[str, Any]]
) -> tuple[list[ComparedSet], dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """The names under which windows differ, as far as documents are shared; `refused` and `only` of `ComparedRuns`."""
    sets, refused, only = [], {}, {}
    for name in dict.fromkeys(name for side in sides for name in side.last):
        first, *others = having = [side for side in sides if name in side.last]
        texts = {side.hashes[name] for side in having} - {None}
        holding = [s for s in sides if s in having or any(s.hashes[own] in texts for own in s.last)]
        if len(holding) < len(sides):
            only[name] = tuple(side.name for side in holding)
        different = [s for s in others if s.hashes[name] is None or s.hashes[name] != first.hashes[name]]
        if not different:
            continue
        told = [s for s in having if s.hashes[name] and s.windows(name, s.last[name]).text_N is not None]
        compared = _by_text(name, told, begun)
        sets += compared
        together = {m.run for of_name in compared for m in of_name.runs}
        if whys := [_refusal(first, s, name, told) for s in different if not {first.name, s.name} <= together]:
            refused[name] = tuple(whys)
    return sets, refused, only


def _by_text(name: str, told: Sequence[_Side], begun: Iterable[Mapping[str, Any]]) -> list[ComparedSet]:
    """Of the runs that tell documents apart, one and those with other windows than it, but documents of it.

    That one is the first for which there are such runs; [] if there is none.
    """
    for position, first in enumerate(told):
        others = [side for side in told[position + 1 :] if side.hashes[name] != first.hashes[name]]
        if found := [(side, name, d) for side in others if (d := _difference_by_text(side, first, name))]:
            return [_compared_set(first, name, found, begun, BITS)]
    return []


def labels(runs: Sequence[Run]) -> list[str]:
    """A short name for each run: its folder's name, or its path if another folder has that name.

    A run that is given twice is numbered.
    """
    paths = [run.directory.path for run in runs]
    whole = [run.real_path for run in runs]
    long = [
        str(path) if any(other.name == own.name and other != own for other in whole) else own.name
        for path, own in zip(paths, whole, strict=True)
    ]
    return [f"{name} ({long[: i + 1].count(name)})" if long.count(name) > 1 else name for i, name in enumerate(long)]


@dataclass(eq=False)
class _Side:
    """A run under its name in the comparison, with the evals and the content hash of each set.

    `evals` are events, of which few are looked into: a long run measures its sets a hundred thousand times. Averages of
    the parameters do not count. A hash is None if the record has none. `last` are the evals that enter the comparison,
    by set.
    """

    name: str
    run: Run
    evals: list[dict[str, Any]]
    hashes: dict[str, str | None]
    last: dict[str, EvalPoint] = field(default_factory=dict)
    _files: dict[int, Mapping[str, np.ndarray]] = field(default_factory=dict)  # by step: each is read once

    def take_last(self, at: str, most: float) -> None:
        """Take the last eval of each set at or before `most` tokens or steps; sets without one are left out."""
        found: dict[str, EvalPoint] = {}
        for event in reversed(self.evals):
            if self.hashes.keys() <= found.keys():
                break
            if event[_STAMP[at]] <= most:
                found = points_of(event) | found
        self.last = {name: found[name] for name in self.hashes if name in found}

    def windows(self, name: str, point: EvalPoint) -> WindowResults:
        """The windows of a set at an eval. Raises InputError if they are not on file."""
        step, path = point.step, self.run.directory.results(point.step)
        try:
            if step not in self._files:
                if path.name not in names_in(path.parent):
                    raise InputError(f"{path}: no such file; the paired difference needs the windows of that eval")
                self._files[step] = read_arrays(path)
            return recorded_windows(path, self._files[step], config_name(name), point.loss)
        except KeyError:
            told = f"{path}: has no windows of {name}, which the record says was measured then"
            raise DamagedRun(self.run.directory.path, told) from None
        except InputError as error:
            raise DamagedRun(self.run.directory.path, *error.problems) from None

    def texts(self, name: str) -> np.ndarray | None:
        """The documents of a set's last eval on file, a hash for each window; None if it does not tell them apart."""
        if self.hashes[name] is None:
            return None
        there = {path.name for _, path in self.run.directory.all_results()}
        having = (event for event in reversed(self.evals) if eval_key(name, "bpb") in event)
        on_file = next((event for event in having if self.run.directory.results(event["step"]).name in there), None)
        return None if on_file is None else self.windows(name, points_of(on_file)[name]).text_N


def _measured(side: _Side, name: str, between: Difference | None = None, verdict: str | None = None) -> RunOnSet:
    of_eval = {key: value for key, value in vars(side.last[name]).items() if key != "phase"}
    return RunOnSet(run=side.name, set=name, difference=between, verdict=verdict, **of_eval)


def _refusal(first: _Side, other: _Side, name: str, told: Sequence[_Side]) -> str:
    """Why two runs are not compared on a set; `told` are those whose evals tell documents apart."""
    if unknown := [side.name for side in (first, other) if side.hashes[name] is None]:
        without = " and ".join(unknown)
        return f"{first.name} and {other.name}: the record of {without} has no content hash of it"
    contents = f"{first.hashes[name][:12]} and {other.hashes[name][:12]}"
    measured = f"{first.name} and {other.name} measured different text (content {contents})"
    if older := [side.name for side in (first, other) if side not in told]:
        return (
            f"{measured}, or cut it otherwise (tokenizer, evalsets.seq_len): the evals of {listed(older)} are of a "
            "version that did not record which document is which"
        )
    return f"{measured}: they share no document"


def _difference(side: _Side, name: str, first: _Side, first_name: str) -> Difference:
    now, before = side.last[name], first.last[first_name]
    ours, theirs = side.windows(name, now), first.windows(first_name, before)
    if not np.array_equal(ours.tokens_N, theirs.tokens_N):
        title = set_title({first.name: first_name, side.name: name})
        where = f"evals/{now.step}.npz of {side.name} and evals/{before.step}.npz of {first.name}"
        raise InputError(f"{title}: {where} differ in windows though the content is the same; one is damaged")
    return paired(first.name, ours, theirs)


def paired(against: str, now: WindowResults, before: WindowResults) -> Difference:
    """The difference between two checkpoints on the windows of one set."""
    delta, sem, num_clusters, kind = paired_difference(now.nats_N, before.nats_N, now.tokens_N, now.document_N)
    return _in_interval(against, float(delta), float(sem), kind, num_clusters)


def _in_interval(
    against: str, delta: float, sem: float, kind: str, num_clusters: int, share: float = 1.0
) -> Difference:
    if num_clusters < 2:
        return Difference(against, delta, None, None, kind, num_clusters, share)
    half = float(student_quantile(0.025, num_clusters - 1)) * sem
    return Difference(against, delta, sem, (delta - half, delta + half), kind, num_clusters, share)


def _difference_by_text(side: _Side, first: _Side, name: str) -> Difference | None:
    """The difference over the documents that both measured, in bits per byte; None if they share none."""
    ours, theirs = (of_run.windows(name, of_run.last[name]) for of_run in (side, first))
    if (found := paired_by_text(ours, theirs)) is None:
        return None
    return _in_interval(first.name, found.delta, found.sem, "documents", found.num_documents, found.share)


def _verdict(
    run: str,
    against: str,
    now: EvalPoint,
    before: EvalPoint,
    between: Difference,
    begun: Iterable[Mapping[str, Any]],
    unit: str,
) -> str:
    """The difference on one set in one sentence that can stand alone."""
    points = {run: now, against: before}
    told = {name: f"{name} at step {point.step:,}" for name, point in points.items()}
    if of_pair := next((b for b in begun if {b["run"], b["base"]} == {run, against}), None):
        base, step = of_pair["base"], of_pair["step"]
        told[base] += f" ({of_pair['run']} comes from {'it' if points[base].step == step else f'its step {step:,}'})"
    elif now.tokens != before.tokens:
        told = {name: f"{words} ({points[name].tokens:,} tokens)" for name, words in told.items()}
    ours, theirs = told[run], told[against]
    for who, point in ((ours, now), (theirs, before)):
        if not math.isfinite(point.loss):
            return f"no verdict: the loss of {who} is {point.loss}"
    if between.delta == 0 and not between.sem:
        return f"{ours} and {theirs} are equal in every {'window' if unit == NATS else 'document'}"
    if between.interval is None:
        few = "the set is a single document of few windows" if unit == NATS else "they share a single document"
        differs = f"{ours} differs from {theirs} by {signed(between.delta)} {unit}"
        return f"no verdict: {differs}, but {few}: too little to estimate an error"
    low, high = between.interval
    if max(abs(low), abs(high)) < _SHOWN_NATS / 2:
        rounding = f"differ by less than {_SHOWN_NATS} {unit}, within another device's rounding"
        return f"{ours} and {theirs} {rounding}"
    if low <= 0 <= high:
        span = f"95 % {signed(low)} to {signed(high)}"
        amount = signed(between.delta) + ("" if unit == NATS else f" {unit}")
        return f"no difference shown between {ours} and {theirs}: {amount} ({span})"
    better, (least, most) = ("better", (-high, -low)) if high < 0 else ("worse", (low, high))
    # Twice the standard deviation of the difference between two seeds of one recipe.
    spread = SEED_SPREAD_NATS * (1.0 if unit == NATS else now.bpb / now.loss)
    by_seed = abs(between.delta) <= 2 * math.sqrt(2) * spread
    caution = "; so small that another seed could reverse it" if by_seed else ""
    amount = f"{abs(between.delta):.4f} {unit} (95 % {least:.4f} to {most:.4f}"
    return f"{ours} is {better} than {theirs} by {amount}{caution})"
