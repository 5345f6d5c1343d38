"""A rollback that is under way, on the disk: a run that is killed on the way back goes on as if it had not been.

The checkpoint that a run goes back to knows neither the rollback nor the edits that were made after it, and later ones
are set aside. Until the next checkpoint is whole, `going_back.json` stands in for what they knew.
"""

from __future__ import annotations

import json
from typing import Any

from curriculum.record.events import plain
from curriculum.run import RunDirectory, read_json, read_ledger, write_text
from curriculum.train import ledger
from curriculum.train.checkpoints.resumed import Resumed, newest_whole
from curriculum.train.divergence import Rollback
from curriculum.train.history import History
from curriculum.train.setup import Setup


def write(setup: Setup, directory: RunDirectory, resumed: Resumed | None, rollback: Rollback) -> None:
    """Keep what a run goes back with, before it changes anything: from `resumed`, or None: from its start."""
    step = None if resumed is None else resumed.step
    saved = ledger.entry(setup, step or 0, History.begin(setup), {}, 0.0)
    told = {"step": step, "ledger": saved, "rollback": rollback._asdict()}
    write_text(directory.going_back, json.dumps(plain(told)) + "\n")


def found(directory: RunDirectory) -> dict[str, Any] | None:
    """What `write` kept, if the run was ended before a checkpoint knew of that rollback. Raises InputError."""
    if not directory.going_back.exists():
        return None
    told, newest = read_json(directory.going_back), newest_whole(directory)
    known = [] if newest is None else read_ledger(newest[1])["history"]["rollbacks"]
    return told if len(known) < len(told["rollback"]["rollbacks"]) else None


def found_for(directory: RunDirectory, resumed: Resumed | None) -> dict[str, Any] | None:
    """The same, if it leads to where the run now continues from."""
    told = found(directory)
    return told if told is not None and told["step"] == (resumed and resumed.step) else None


def ledger_of(told: dict[str, Any] | None, resumed: Resumed | None) -> dict[str, Any] | None:
    """The ledger that a config is compared with; None if the run begins."""
    if told is None:
        return resumed and resumed.ledger
    if resumed is None:
        return told["ledger"]
    return {**resumed.ledger, **{key: told["ledger"][key] for key in ledger.OF_SCHEDULE}}


def rollback_of(told: dict[str, Any]) -> Rollback:
    """The rollback that is under way."""
    kept = told["rollback"]
    return Rollback(kept["event"], tuple(kept["rollbacks"]), tuple(kept["edits"]))
