"""A rollback that is under way, on the disk: a run that is killed on the way back goes on as if it had not been.

The checkpoint that a run goes back to knows neither the rollback nor the edits that were made after it, and later ones
are set aside. Until a checkpoint knows of it, `going_back.json` stands in for what they knew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from curriculum.disk.durable import write_whole
from curriculum.errors import InputError
from curriculum.record.events import plain
from curriculum.run_directory import RunDirectory, read_json
from curriculum.train.history import History
from curriculum.train.resuming import ledger
from curriculum.train.resuming.resumed import Resumed, newest_resumed, to_resume

if TYPE_CHECKING:
    from curriculum.train.setup import Setup


class Rollback(NamedTuple):
    """A run goes back: `event` is what is recorded of it; `rollbacks` are all of the run, this one last.

    `edits` are config edits that the checkpoint lacks: those made at the very step that the run goes back to, and
    later ones that do not concern the schedule, which apply from that step on.
    """

    event: dict[str, Any]
    rollbacks: Sequence[dict[str, Any]]
    edits: Sequence[dict[str, Any]]


def write(setup: Setup, directory: RunDirectory, resumed: Resumed | None, rollback: Rollback) -> None:
    """Keep what a run goes back with, before it changes anything: from `resumed`, or None: from its start."""
    step = None if resumed is None else resumed.step
    saved = ledger.entry(setup, step or 0, History.begin(setup), {}, 0.0)
    under_way = {"step": step, "ledger": saved, "rollback": rollback._asdict()}
    write_whole(directory.going_back, json.dumps(plain(under_way)) + "\n")


def to_continue(directory: RunDirectory, resume: str | int | None) -> tuple[Resumed | None, dict[str, Any] | None]:
    """The checkpoint that `resume` means, as of `to_resume`, and what `write` kept of a rollback that leads there.

    If a run was ended on the way back, "latest" goes on with that rollback: from the newest checkpoint before the bad
    updates, or from the start. A step that is asked for leaves it out; the run comes to it again. Raises InputError.
    """
    if resume == "latest" and (under_way := _under_way(directory)) is not None:
        return newest_resumed(directory, under_way["rollback"]["event"]["first_bad_step"]), under_way
    return None if resume is None else to_resume(directory, resume), None


def _under_way(directory: RunDirectory) -> dict[str, Any] | None:
    """What `write` kept, if no checkpoint knows of that rollback yet."""
    if not directory.going_back.exists():
        return None
    damaged = f"{directory.going_back}: is damaged; delete it: the run then goes on without the rollback under way"
    try:
        under_way = read_json(directory.going_back)
        num_rollbacks = len(under_way["rollback"]["rollbacks"])
        under_way["step"], under_way["rollback"]["event"]["first_bad_step"], under_way["ledger"]["segments"]
    except (InputError, KeyError, TypeError):
        raise InputError(damaged) from None
    newest = newest_resumed(directory)
    known = [] if newest is None else newest.ledger["history"]["rollbacks"]
    return under_way if len(known) < num_rollbacks else None


def ledger_of(under_way: dict[str, Any] | None, resumed: Resumed | None) -> dict[str, Any] | None:
    """The ledger that a config is compared with; None if the run begins.

    Of a rollback under way it has the schedule, the text and the rollbacks as they were decided.
    """
    if under_way is None:
        return resumed and resumed.ledger
    before = under_way["ledger"] if resumed is None else resumed.ledger
    decided = {key: under_way["ledger"][key] for key in (*ledger.OF_SCHEDULE, "sources")}
    return {**before, **decided, "history": {**before["history"], "rollbacks": under_way["rollback"]["rollbacks"]}}
