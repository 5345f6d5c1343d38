"""What one run takes from another: the steps of a branch's trunk, or the parameters that it began with."""

from contextlib import suppress
from datetime import datetime
from typing import Any

from curriculum.errors import InputError
from curriculum.find_checkpoint import checkpoint_steps, read_ledger
from curriculum.record.events import eval_sets
from curriculum.record.queries import base_directory
from curriculum.run import Run, load_run, run_near


def began_at(run: Run, base: Run) -> int | None:
    """The step of `base` whose parameters `run`, or a run in its lineage, began with; None if none did.

    A lineage names its base by its name, the time of its start and the path as it was given. If the run at that path is
    the one that is meant, it alone is; else, as the base was moved or another run is in its place, any run of that name
    and time is. Of a base that does not tell when it was begun only the path and the order of the starts decide.
    """
    path, wanted = run.real_path, base.real_path
    if path == wanted:
        return None
    began, lineage = run.start["timestamp"], run.start["lineage"]
    while lineage:
        if lineage.get("run") == base.resolved["name"]:
            there = run_near(base_directory(lineage), path)
            is_there = there is not None and there.path.resolve() == wanted
            its_start, meant = _started_at(base), lineage.get("started_at")
            if None in (its_start, meant):
                first, later = (datetime.fromisoformat(at) for at in (base.start["timestamp"], began))
                is_base = is_there and first <= later
            elif there is not None and there.path.resolve() != path and _started_at(load_run(there.path)) == meant:
                is_base = is_there
            else:
                is_base = its_start == meant
            if is_base:
                return lineage["step"]
        began, lineage = lineage.get("started_at", began), lineage["lineage"]  # a folder began at no time
    return None


def _started_at(run: Run) -> str | None:
    """When a run was begun, as its checkpoints and the lineages of other runs have it; None if nothing tells it."""
    if run.complete is not None:
        return run.complete.get("started_at")
    for place in run.directory.places:
        for step in checkpoint_steps(place)[-1:]:
            with suppress(InputError):  # a damaged one tells nothing
                return read_ledger(place / str(step))["history"]["started_at"]
    return None


def shared_past(first: Run, second: Run) -> int | None:
    """The step up to which two runs are one: one branched off the other, or both off a third; None if unrelated.

    A branch begins with a copy of its trunk's events, so related runs begin with the same event. If one of them has
    since changed its past, such as a trunk resumed from before the branching, it is the last step up to which their
    records agree.
    """
    if first.real_path == second.real_path or first.start != second.start:
        return None
    points = _branchings(first) ^ _branchings(second)
    return _agreed(first, second, min(step for step, _ in points)) if points else None


def _agreed(first: Run, second: Run, step: int) -> int:
    """`step`, or the last earlier step in both records up to which all their losses agree.

    What both records begin with, mostly nearly all up to `step`, is only found to be equal, not looked into.
    """
    alike = [0]  # recorded steps
    ours: dict[int, dict[str, Any]] = {}
    theirs: dict[int, dict[str, Any]] = {}
    for recorded in (_evals, _train_losses):
        of_first, of_second = (recorded(run, step) for run in (first, second))
        pairs = enumerate(zip(of_first, of_second, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(of_first), len(of_second)))
        alike += [at for at, _ in of_first[:same]]
        for found, of_run in ((ours, of_first), (theirs, of_second)):
            for at, losses in of_run[same:]:
                found.setdefault(at, {}).update(_losses(losses))
    for at in sorted(ours.keys() & theirs.keys()):
        if any(ours[at][key] != theirs[at][key] for key in ours[at].keys() & theirs[at].keys()):
            return max(earlier for earlier in alike if earlier < at)
        alike.append(at)
    return step


def _evals(run: Run, step: int) -> list[tuple[int, Any]]:
    return [(event["step"], event) for event in run.events if event["event"] == "eval" and event["step"] <= step]


def _train_losses(run: Run, step: int) -> list[tuple[int, Any]]:
    return [row for row in run.train_losses if row[0] <= step]


def _losses(recorded: Any) -> dict[str, Any]:
    """By what was measured; `recorded` is an `eval` event or a training loss."""
    if isinstance(recorded, dict):
        return {f"eval {name}": measured.loss for name, measured in eval_sets(recorded).items()}
    return {"train": recorded}


def _branchings(run: Run) -> set[tuple[int, str]]:
    """(step, id) of every branching in a run's ancestry."""
    points, branching = set(), run.branched_from
    while branching is not None:
        points.add((branching["step"], branching["id"]))
        branching = branching["branched_from"]
    return points
