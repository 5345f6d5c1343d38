"""What one run takes from another: the steps of a branch's trunk, or the parameters that it began with."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from curriculum.errors import InputError
from curriculum.find_checkpoint import checkpoint_steps, read_ledger
from curriculum.record.events import eval_sets
from curriculum.record.queries import base_directory
from curriculum.run import Run
from curriculum.run_directory import RunDirectory


def began_at(run: Run, base: Run) -> int | None:
    """The step of `base` whose parameters `run`, or a run in its lineage, began with; None if none did.

    A lineage names its base by the path as it was given, relative to the folder where training was started. The path
    is resolved against each folder above `run`, then against the working folder; the first that holds a run counts,
    unless that run was begun after the one that would have begun with its parameters. If none does, as the base was
    moved, its name and the time of its start count.
    """
    path, wanted = run.directory.path.resolve(), base.directory.path.resolve()
    its_start = datetime.fromisoformat(base.start["timestamp"])
    began, lineage = run.start["timestamp"], run.start["lineage"]
    while lineage and path != wanted:
        if lineage.get("run") == base.resolved["name"] and its_start <= datetime.fromisoformat(began):
            given = Path(base_directory(lineage)).expanduser()
            places = ((folder / given).resolve() for folder in (*path.parents, Path()))
            there = next((place for place in places if RunDirectory(place).has_config), None)
            if wanted == there or (there is None and lineage.get("started_at") == (_started_at(base) or "")):
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
    if first.directory.path.resolve() == second.directory.path.resolve() or first.start != second.start:
        return None
    points = _branchings(first) ^ _branchings(second)
    return _agreed(first, second, min(step for step, _ in points)) if points else None


def _agreed(first: Run, second: Run, step: int) -> int:
    """`step`, or the last earlier step in both records up to which all their losses agree."""
    ours, theirs = _recorded(first), _recorded(second)
    agreed = 0
    for at in sorted(s for s in ours.keys() & theirs.keys() if s <= step):
        if any(ours[at][key] != theirs[at][key] for key in ours[at].keys() & theirs[at].keys()):
            return agreed
        agreed = at
    return step


def _recorded(run: Run) -> dict[int, dict[str, Any]]:
    """Every loss in a run's record: {step: {what was measured: loss}}."""
    found: dict[int, dict[str, Any]] = {}
    for event in run.events:
        if event["event"] == "eval":
            losses = {f"eval {name}": measured.loss for name, measured in eval_sets(event).items()}
            found.setdefault(event["step"], {}).update(losses)
    for row in run.metrics:
        found.setdefault(row["step"], {})["train"] = row["loss"]
    return found


def _branchings(run: Run) -> set[tuple[int, str]]:
    """(step, id) of every branching in a run's ancestry."""
    points, branching = set(), run.branched_from
    while branching is not None:
        points.add((branching["step"], branching["id"]))
        branching = branching["branched_from"]
    return points
