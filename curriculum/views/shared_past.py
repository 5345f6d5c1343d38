"""What one run has of another: the steps of a branch's trunk, the parameters of a checkpoint that it began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from curriculum.record.events import eval_sets
from curriculum.record.queries import base_directory
from curriculum.run import Run, RunDirectory


def began_at(run: Run, base: Run) -> int | None:
    """The step of `base` whose parameters `run` began with, or a run that it comes from; None where it did not.

    A lineage names its run by the path that was given, relative to where the training was started: that folder is
    looked for among those above `run`, then in the working folder.
    """
    path, wanted = run.directory.path.resolve(), base.directory.path.resolve()
    lineage = run.start.get("lineage")
    while lineage and path != wanted:
        if lineage.get("run") == base.resolved["name"]:
            given = Path(base_directory(lineage)).expanduser()
            places = ((folder / given).resolve() for folder in (*path.parents, Path()))
            if wanted == next((place for place in places if RunDirectory(place).has_config), None):
                return lineage["step"]
        lineage = lineage.get("lineage")
    return None


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
            losses = {f"eval {name}": measured.loss for name, measured in eval_sets(event).items()}
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
