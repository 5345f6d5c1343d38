"""Which parameters of a run are meant: the `--step` and `--weights` of eval, generate and export.

Nothing is verified of a checkpoint but what is then read: the rest is twice as large.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from curriculum.errors import InputError, check_choice
from curriculum.run import RunDirectory, find_checkpoint, read_ledger

_WEIGHTS = {"raw": "params", "ema": "ema", "mean:PHASE": None}  # and the item of a checkpoint that holds them


def find_weights(directory: RunDirectory, step: str | int | None, weights: str) -> tuple[int, Path]:
    """(step, folder of the arrays) of the "raw" or "ema" weights of a checkpoint, or of "mean:PHASE".

    `step` is as for `find_checkpoint`, and None for a mean. Raises InputError where there are none.
    """
    kind, _, phase = weights.partition(":")
    if kind == "mean":
        if step is not None:
            raise InputError(f"--step {step}: the mean of a phase is of its last checkpoints; leave --step out")
        from curriculum.train.averages import mean_of_phase

        return mean_of_phase(directory.averages, phase)
    check_choice("--weights", weights, _WEIGHTS)
    item = _WEIGHTS[weights]
    step, checkpoint = find_checkpoint(directory, step, part=("ledger/", f"{item}/"))
    if not (checkpoint / item).is_dir():
        raise InputError(
            f"--weights {weights}: step {step} of {directory.path} was saved without a moving average, which "
            "averages.ema_decay keeps; expected raw, or mean:PHASE"
        )
    return step, checkpoint / item


def ledger_of(directory: RunDirectory, arrays: Path) -> dict[str, Any]:
    """The ledger of the checkpoint that some weights are of; of a mean of several, that of the run's latest."""
    checkpoint = arrays.parent
    if not (checkpoint / "ledger").is_dir():
        _, checkpoint = find_checkpoint(directory, "latest", part="ledger/")
    return read_ledger(checkpoint)
