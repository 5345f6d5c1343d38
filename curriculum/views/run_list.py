"""The runs in a folder, one line each: how far each has come and how well it does."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curriculum.errors import InputError
from curriculum.record.events import last_gold, number
from curriculum.record.queries import standing_regressions
from curriculum.record.wording import columns, loss, moment
from curriculum.run import Run, load_run, runs_below
from curriculum.run_directory import read_json
from curriculum.views.inspection import standing
from curriculum.views.inspection_text import state_text

_FACTS = ("step", "total_steps", "val_loss", "val_bpb", "tokenizer", "gold_step", "regressed", "last_event_at")


def list_runs(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """For each run in a folder, in order of name, what of `inspect_run` fits in a line, as plain data.

    If a run's record cannot be read, `state` says why and the rest is None. Raises InputError if no record can be.
    """
    rows = []
    for name in runs_below(folder):
        try:
            facts = _facts(load_run(Path(folder) / name))
        except InputError as error:
            facts = dict.fromkeys(_FACTS) | {"state": error.problems[0]}
        rows.append({"run": name, **facts})
    if rows and all(row["step"] is None for row in rows):
        raise InputError(*(row["state"] for row in rows))
    return rows


def _facts(run: Run) -> dict[str, Any]:
    """What stands in `_FACTS`, and the `state`. Raises InputError if the run's record lacks any of it."""
    progress, _ = standing(run)
    gold = last_gold(run.events)
    # Not `inspect_run`: for a long run it takes many times as long to see what each of its many evals had.
    val = next((event for event in reversed(run.events) if "val_bpb" in event), {})
    return {
        "step": progress["step"],
        "total_steps": progress["total_steps"],
        "val_loss": number(val.get("val_loss")),
        "val_bpb": number(val.get("val_bpb")),
        "tokenizer": _tokenizer_of(run),
        "gold_step": gold and gold["step"],
        "regressed": sorted({pair["set"] for pair in standing_regressions(run.events)}),
        "last_event_at": progress["last_event_at"],
        "state": state_text(progress),
    }


def _tokenizer_of(run: Run) -> str | None:
    """The fingerprint of its tokenizer; None if the run has not saved it yet, or if it cannot be read."""
    try:
        return read_json(run.directory.tokenizer / "tokenizer.json").get("fingerprint")
    except InputError:
        return None


def runs_text(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The runs as a table, and a line on what is not comparable between them."""
    header = ("run", "step", "of", "val loss", "val bpb", "gold", "regressed", "last event", "state")
    table = []
    for row in rows:
        known = row["step"] is not None
        table.append(
            (
                row["run"],
                f"{row['step']:,}" if known else "-",
                f"{row['total_steps']:,}" if known else "-",
                loss(row["val_loss"]),
                loss(row["val_bpb"]),
                "-" if row["gold_step"] is None else f"{row['gold_step']:,}",
                f"{len(row['regressed'])} sets" if row["regressed"] and len(row["regressed"]) > 2
                else ", ".join(row["regressed"] or ()) or "-",
                moment(row["last_event_at"]) if known else "-",
                row["state"],
            )
        )  # fmt: skip
    lines = columns([header, *table], right=(1, 2, 3, 4, 5), indent="")
    if len({row["tokenizer"] for row in rows} - {None}) > 1:
        lines += [
            "",
            "The runs' tokenizers differ: losses are nats per token, not comparable then; bits per byte (bpb) are.",
        ]
    return lines
