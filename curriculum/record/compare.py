"""Runs beside each other: their losses on the eval sets that they share, and paired differences with intervals.

A difference is of two checkpoints on the same windows, so the choice of held-out text hardly moves it. What another
seed would do is not in it: that two recipes differ takes several seeds of each to show.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from curriculum.errors import InputError
from curriculum.record.events import config_name, eval_sets, plain
from curriculum.record.queries import EvalPoint, eval_points, evalset_facts
from curriculum.record.wording import columns, interval_text, listed, loss, signed
from curriculum.run import Run, load_run, read_arrays
from evalsets.metrics import paired_difference
from evalsets.student import student_quantile

# Standard deviation of the final validation loss over seeds, in nats per token, of a GPT-2 of 124M parameters.
SEED_SPREAD_NATS = 0.002
_SHOWN_NATS = 0.0001  # the last decimal that is shown
_SCOPE = "of these two checkpoints, not of the recipe"


@dataclass(frozen=True)
class Difference:
    """One run minus the one it is compared with, on one set, in nats per token: positive is worse.

    interval: 95 %, over the choice of held-out text. sem and interval are None where the set has one cluster only.
    """

    against: str
    delta: float
    sem: float | None
    interval: tuple[float, float] | None
    clusters: str
    num_clusters: int


@dataclass(frozen=True)
class Measured:
    """One run on one set: the eval that counts. `difference` is None for the run that the others are compared with."""

    run: str
    step: int
    tokens: int
    loss: float
    bpb: float | None
    sem: float | None
    difference: Difference | None
    verdict: str | None


@dataclass(frozen=True)
class ComparedSet:
    """The runs that measured one set on the same text, in the order given; the others are compared with the first."""

    name: str
    content_hash: str
    runs: tuple[Measured, ...]


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    at, common: `tokens` or `step`, and how many of them: an eval counts when it is the run's last at or before them.
    They are the fewest over the runs that share a set with another; of a run that shares none the last eval counts.
    runs: name, path, step and tokens of the last eval that counts, and whether the run is finished.
    sets: one for each text that two runs or more measured under a name.
    refused: sets that two runs measured on different text, as messages. only: sets that not every run measured.
    shared: of two runs with a common past, the step up to which they share it.
    """

    at: str
    common: int
    runs: tuple[dict[str, Any], ...]
    sets: tuple[ComparedSet, ...]
    refused: dict[str, tuple[str, ...]]
    only: dict[str, tuple[str, ...]]
    shared: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON; a float that is not finite is one of the record's strings."""
        return plain(asdict(self))


def compare(run_dirs: Sequence[str | os.PathLike], *, at: str = "tokens") -> Comparison:
    """Compare run directories by their last evals at or before the common `tokens` or `step`. Raises InputError."""
    return compare_runs([load_run(path) for path in run_dirs], at=at)


def compare_runs(runs: Sequence[Run], *, at: str = "tokens") -> Comparison:
    """The same of runs that are loaded. The same run may stand there twice."""
    if len(runs) < 2:
        raise InputError(f"got {len(runs)} run, expected two or more to compare")
    if at not in ("tokens", "step"):
        raise InputError(f"--at {at}: expected tokens or step")
    names = labels(runs)
    points = [_raw_points(run) for run in runs]
    for run, of_run in zip(runs, points, strict=True):
        if not of_run:
            raise InputError(f"{run.directory.path}: has no eval yet; compare it once it has one")
    facts = [evalset_facts(run.events) for run in runs]
    hashes = [
        {name: told.get(name, {}).get("content_hash") for name in of_run}
        for told, of_run in zip(facts, points, strict=True)
    ]
    groups = _same_text(dict.fromkeys(name for of_run in points for name in of_run), hashes)
    sharing = {i for of_set in groups.values() for group in of_set if len(group) > 1 for i in group}
    last = {i: max(getattr(p, at) for of_set in points[i].values() for p in of_set) for i in range(len(runs))}
    common = min(last[i] for i in sharing or last)
    counting = [
        {
            name: before[-1]
            for name, of_set in of_run.items()
            if (before := [p for p in of_set if i not in sharing or getattr(p, at) <= common])
        }
        for i, of_run in enumerate(points)
    ]
    for run, of_run in zip(runs, counting, strict=True):
        if not of_run:
            unit = "tokens" if at == "tokens" else "steps"
            raise InputError(
                f"{run.directory.path}: has no eval at or before {common:,} {unit}, where another run ends"
            )

    windows = _Windows(runs)
    sets, refused, only = [], {}, {}
    for name in dict.fromkeys(name for of_run in counting for name in of_run):
        having = [i for i, of_run in enumerate(counting) if name in of_run]
        if len(having) < len(runs):
            only[name] = tuple(names[i] for i in having)
        of_set = [[i for i in group if i in having] for group in groups[name]]
        first = having[0]
        different = [i for group in of_set if first not in group for i in group]
        if different:
            why = (_refusal(names[first], names[i], hashes[first][name], hashes[i][name]) for i in sorted(different))
            refused[name] = tuple(why)
        for first, *others in (group for group in of_set if len(group) > 1):
            measured = [_measured(names[first], counting[first][name], None, None)]
            for i in others:
                between = windows.difference(name, names, (i, counting[i][name]), (first, counting[first][name]))
                verdict = _verdict(names[i], names[first], counting[i][name], counting[first][name], between)
                measured.append(_measured(names[i], counting[i][name], between, verdict))
            sets.append(ComparedSet(name, hashes[first][name], tuple(measured)))
    if not sets:
        reasons = [f"{name}: {why}" for name, whys in refused.items() for why in whys]
        reasons += [f"{name}: only {' and '.join(who)} measured it" for name, who in only.items()]
        raise InputError(*(f"no eval set can be compared: {reason}" for reason in reasons))
    return Comparison(
        at=at,
        common=common,
        runs=tuple(
            {
                "name": label,
                "path": str(run.directory.path),
                "step": max(p.step for p in of_run.values()),
                "tokens": max(p.tokens for p in of_run.values()),
                "finished": run.complete is not None,
            }
            for label, run, of_run in zip(names, runs, counting, strict=True)
        ),
        sets=tuple(sets),
        refused=refused,
        only=only,
        shared=tuple(
            {"runs": (names[i], names[j]), "step": step}
            for i in range(len(runs))
            for j in range(i + 1, len(runs))
            if (step := shared_past(runs[i], runs[j])) is not None
        ),
    )


def labels(runs: Sequence[Run]) -> list[str]:
    """A short name of each run: its folder, its path where two folders are called the same, numbered where both are."""
    paths = [run.directory.path for run in runs]
    whole = [path.resolve() for path in paths]
    long = [
        str(path) if any(other.name == own.name and other != own for other in whole) else own.name
        for path, own in zip(paths, whole, strict=True)
    ]
    return [f"{name} ({long[: i + 1].count(name)})" if long.count(name) > 1 else name for i, name in enumerate(long)]


def shared_past(first: Run, second: Run) -> int | None:
    """The step up to which two runs are one: one branched off the other, or both off a third. None where they are not.

    A branch begins with a copy of its trunk's events, so related runs begin with the same event. Where one of them went
    another way since, such as a trunk that was resumed from before the branching, it is the last step up to which
    their records agree.
    """
    if first.directory.path.resolve() == second.directory.path.resolve() or first.start != second.start:
        return None
    points = _branchings(first) ^ _branchings(second)
    return _agreed(first, second, min(step for step, _ in points)) if points else None


def _agreed(first: Run, second: Run, step: int) -> int:
    """`step`, or the last one before it that both records have and up to which they say the same losses."""
    ours, theirs = _recorded(first), _recorded(second)
    agreed = 0
    for at in sorted(s for s in ours.keys() & theirs.keys() if s <= step):
        if any(ours[at][key] != theirs[at][key] for key in ours[at].keys() & theirs[at].keys()):
            return agreed
        agreed = at
    return step


def _recorded(run: Run) -> dict[int, dict[str, Any]]:
    """Every loss of a run's record, by its step and what it is of."""
    found: dict[int, dict[str, Any]] = {}
    for event in run.events:
        if event["event"] == "eval":
            losses = {f"eval {name}": loss for name, (loss, _) in eval_sets(event).items()}
            found.setdefault(event["step"], {}).update(losses)
    for row in run.metrics:
        found.setdefault(row["step"], {})["train"] = row["loss"]
    return found


def _branchings(run: Run) -> set[tuple[int, str]]:
    """(step, id) of every branching on the way to a run."""
    points, branching = set(), run.branched_from
    while branching is not None:
        points.add((branching["step"], branching["id"]))
        branching = branching["branched_from"]
    return points


def _raw_points(run: Run) -> dict[str, list[EvalPoint]]:
    """The evals of the parameters themselves."""
    return {name: of_set for name, of_set in eval_points(run.events).items() if "@" not in name}


def _same_text(names: Iterable[str], hashes: Sequence[Mapping[str, str]]) -> dict[str, list[list[int]]]:
    """By set, the runs that measured the same text, together; one whose record has no content hash is alone."""
    groups: dict[str, dict[str | int, list[int]]] = {name: {} for name in names}
    for i, of_run in enumerate(hashes):
        for name, content_hash in of_run.items():
            groups[name].setdefault(content_hash or i, []).append(i)
    return {name: list(of_set.values()) for name, of_set in groups.items()}


def _measured(run: str, point: EvalPoint, difference: Difference | None, verdict: str | None) -> Measured:
    return Measured(run, point.step, point.tokens, point.loss, point.bpb, point.sem, difference, verdict)


def _refusal(first: str, other: str, hash_first: str | None, hash_other: str | None) -> str:
    if hash_first is None or hash_other is None:
        unknown = " and ".join(name for name, h in ((first, hash_first), (other, hash_other)) if h is None)
        return f"{first} and {other}: the record of {unknown} has no content hash of it"
    return (
        f"{first} measured other text than {other} (content {hash_first[:12]} and {hash_other[:12]}): other documents, "
        "another tokenizer or another evalsets.seq_len"
    )


class _Windows:
    """The results per window of several runs' evals, each file read once."""

    def __init__(self, runs: Sequence[Run]):
        self._runs = runs
        self._files: dict[tuple[int, int], Mapping[str, np.ndarray]] = {}

    def of(self, i: int, step: int, name: str) -> dict[str, np.ndarray]:
        """Arrays nats, tokens and document of a set. Raises InputError where the file does not have them."""
        path = self._runs[i].directory.path / "evals" / f"{step}.npz"
        if (i, step) not in self._files:
            if not path.exists():
                raise InputError(f"{path}: no such file; the paired difference needs the windows of that eval")
            self._files[i, step] = read_arrays(path)
        key = config_name(name)
        if f"{key}.nats" not in self._files[i, step]:
            raise InputError(f"{path}: has no windows of {name}, which the record says was measured then")
        return {field: self._files[i, step][f"{key}.{field}"] for field in ("nats", "tokens", "document")}

    def difference(
        self, name: str, names: Sequence[str], now: tuple[int, EvalPoint], before: tuple[int, EvalPoint]
    ) -> Difference:
        (i, now_point), (j, before_point) = now, before
        ours, theirs = self.of(i, now_point.step, name), self.of(j, before_point.step, name)
        if not np.array_equal(ours["tokens"], theirs["tokens"]):
            where = f"evals/{now_point.step}.npz of {names[i]} and evals/{before_point.step}.npz of {names[j]}"
            raise InputError(f"{name}: {where} differ in windows though the content is the same; one is damaged")
        return paired(names[j], ours["nats"], theirs["nats"], ours["tokens"], ours["document"])


def paired(
    against: str, now_N: np.ndarray, before_N: np.ndarray, tokens_N: np.ndarray, document_N: np.ndarray
) -> Difference:
    """The difference of two checkpoints on the windows of one set."""
    delta, sem, num_clusters, kind = paired_difference(now_N, before_N, tokens_N, document_N)
    if num_clusters < 2:
        return Difference(against, float(delta), None, None, kind, num_clusters)
    half = float(student_quantile(0.025, num_clusters - 1) * sem)
    return Difference(against, float(delta), float(sem), (float(delta) - half, float(delta) + half), kind, num_clusters)


def _verdict(run: str, against: str, now: EvalPoint, before: EvalPoint, between: Difference) -> str:
    """One sentence that can stand alone."""
    ours, theirs = f"{run} at step {now.step:,}", f"{against} at step {before.step:,}"
    if now.tokens != before.tokens:
        ours, theirs = f"{ours} ({now.tokens:,} tokens)", f"{theirs} ({before.tokens:,} tokens)"
    for who, point in ((ours, now), (theirs, before)):
        if not math.isfinite(point.loss):
            return f"no verdict: the loss of {who} is {point.loss}"
    if between.delta == 0 and not between.sem:
        return f"{ours} and {theirs} are equal in every window ({_SCOPE})"
    if between.interval is None:
        return (
            f"no verdict: {ours} differs from {theirs} by {signed(between.delta)} nats per token, but the set is a "
            "single document of few windows, which shows no error"
        )
    low, high = between.interval
    if max(abs(low), abs(high)) < _SHOWN_NATS / 2:
        rounding = f"differ by less than {_SHOWN_NATS} nats per token, which another device's roundings do too"
        return f"{ours} and {theirs} {rounding} ({_SCOPE})"
    if low <= 0 <= high:
        span = f"95 % {signed(low)} to {signed(high)}"
        return f"no difference shown between {ours} and {theirs}: {signed(between.delta)} ({span}; {_SCOPE})"
    better, (least, most) = ("better", (-high, -low)) if high < 0 else ("worse", (low, high))
    # Twice the spread of the difference of two seeds of one recipe.
    by_seed = abs(between.delta) <= 2 * math.sqrt(2) * SEED_SPREAD_NATS
    caution = "; so small that another seed could turn it round" if by_seed else ""
    amount = f"{abs(between.delta):.4f} nats per token (95 % {least:.4f} to {most:.4f}"
    return f"{ours} is {better} than {theirs} by {amount}; {_SCOPE}{caution})"


def table(comparison: Comparison) -> list[str]:
    """The comparison as lines of text."""
    unit = "tokens" if comparison.at == "tokens" else "steps"
    lines = [f"the last evals at or before {comparison.common:,} {unit}, the fewest that a run was measured at", ""]
    rows = [("run", "step", "tokens", "", "directory")]
    for run in comparison.runs:
        state = "finished" if run["finished"] else "not finished"
        rows.append((run["name"], f"{run['step']:,}", f"{run['tokens']:,}", state, run["path"]))
    lines += [*columns(rows, right=(1, 2)), ""]
    rows = [("eval set", "run", "step", "loss", "± sem", "bpb", "difference", "95 % interval")]
    for compared in comparison.sets:
        for i, m in enumerate(compared.runs):
            numbers = (f"{m.step:,}", loss(m.loss), loss(m.sem), loss(m.bpb))
            d = m.difference
            between = ("", "") if d is None else (signed(d.delta), interval_text(d.interval))
            rows.append((compared.name if i == 0 else "", m.run, *numbers, *between))
    lines += [*columns(rows, right=range(2, 8)), ""]
    for compared in comparison.sets:
        lines += [f"{compared.name}: {m.verdict}" for m in compared.runs if m.verdict]
    lines += notes(comparison)
    return lines


def notes(comparison: Comparison) -> list[str]:
    """What else has to be said: sets left out, shared pasts, and what no difference here can tell."""
    lines = [f"{name}: refused: {why}" for name, whys in comparison.refused.items() for why in whys]
    lines += [f"{name}: measured only by {', '.join(who)}" for name, who in comparison.only.items()]
    lines += [
        f"{listed(runs)} are one run up to step {step:,} and go their own ways after it"
        for step, runs in _families(comparison)
    ]
    unequal = [
        f"{compared.name} ({', '.join(f'{m.run} {m.tokens:,}' for m in compared.runs)})"
        for compared in comparison.sets
        if len({m.tokens for m in compared.runs}) > 1
    ]
    if unequal:
        lines.append(f"measured after unequal numbers of tokens, which is part of the difference: {', '.join(unequal)}")
    few = [c.name for c in comparison.sets if any(m.difference and m.difference.clusters == "blocks" for m in c.runs)]
    if few:
        lines.append(f"{', '.join(few)}: fewer than 20 documents; the intervals speak of more text from these few")
    lines.append(
        "Differences are nats per token of each run minus the first, over the same windows; below 0 is better. They "
        "speak of these checkpoints, not of the recipes: the seed alone moves a final loss by about "
        f"{SEED_SPREAD_NATS} nats (standard deviation at 124M parameters)."
    )
    return lines


def _families(comparison: Comparison) -> list[tuple[int, list[str]]]:
    """(step, runs) for every step up to which runs are one: a line a branching, however many pairs share it."""
    names = [run["name"] for run in comparison.runs]
    families: list[tuple[int, list[str]]] = []
    for pair in sorted(comparison.shared, key=lambda pair: pair["step"]):
        step, members = pair["step"], set(pair["runs"])
        touching = [f for f in families if f[0] == step and members & set(f[1])]
        members = members.union(*(f[1] for f in touching))
        families = [f for f in families if f not in touching]
        families.append((step, [name for name in names if name in members]))
    return families
