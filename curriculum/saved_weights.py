"""Find the parameters of a run that `--step` and `--weights` of eval, generate and export name.

Of a checkpoint only what is then read is verified: the rest is twice as large.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from curriculum.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from curriculum.errors import InputError, check_choice
from curriculum.find_checkpoint import CheckpointGone, find_checkpoint, mean_of_phase, read_ledger
from curriculum.record.events import EMA, PHASE_MEAN
from curriculum.run_directory import RunDirectory

if TYPE_CHECKING:
    from curriculum.config import Config
    from curriculum.model.model import Model


_MOST_TRIES = 5  # of finding a checkpoint that is still there when it is read

_Read = TypeVar("_Read", bound=Callable[..., Any])


def chosen_again(read: _Read) -> _Read:
    """Call `read` again if a run that trains has deleted the checkpoint that it chose, unless `step` names that one."""

    @wraps(read)
    def again(*arguments: Any, step: str | int | None = None, **named: Any) -> Any:
        tries = _MOST_TRIES if step in (None, "latest", "gold") else 1
        for left in reversed(range(tries)):
            try:
                return read(*arguments, step=step, **named)
            except CheckpointGone as gone:
                if not left:
                    raise
                print(
                    f"{gone.problems[0].partition(': ')[0]}: is gone by now; the one after it is used", file=sys.stderr
                )

    return again


@dataclass(frozen=True)
class Weights:
    """What `--weights` names: the raw parameters, or one of their averages.

    `average` is the record's name of the average, None for raw. `phase` is the phase of a mean, else None.
    """

    average: str | None = None
    phase: str | None = None

    @classmethod
    def parse(cls, text: str) -> Weights:
        """Parse "raw", "ema" or "mean:PHASE". Raises InputError for anything else."""
        kind, _, phase = str(text).partition(":")
        if kind == "mean":
            return cls(PHASE_MEAN, phase)
        check_choice("--weights", text, ("raw", "ema", "mean:PHASE"))
        return cls() if text == "raw" else cls(EMA)

    def __str__(self) -> str:
        return f"mean:{self.phase}" if self.phase is not None else self.average or "raw"


def find_weights(directory: RunDirectory, step: str | int | None, weights: str) -> tuple[int, Path]:
    """(step, folder of the arrays) of `weights`, as `Weights.parse` takes them: of a checkpoint, or a phase's mean.

    `step` is as for `find_checkpoint`, and must be None for a mean. Raises InputError if there are none.
    """
    of = Weights.parse(weights)
    if of.phase is not None:
        if step is not None:
            raise InputError(f"--step {step}: the mean of a phase is of its last checkpoints; leave --step out")
        return mean_of_phase(directory.averages, of.phase)
    item = of.average or "params"
    step, checkpoint = find_checkpoint(directory, step, part=("ledger/", f"{item}/"))
    if not (checkpoint / item).is_dir():
        means = [f"mean:{mean.name}" for mean in sorted(directory.averages.glob("[!.]*"))]
        raise InputError(
            f"--weights {weights}: step {step} of {directory.path} was saved without a moving average "
            f"(averages.ema_decay); expected {' or '.join(['raw', *means])}"
        )
    return step, checkpoint / item


class Saved(NamedTuple):
    """Weights of a run on the disk, and what is needed to load them.

    `arrays` is their folder, `step` the number of updates that they had, `ledger` that of `ledger_beside`. `make_model`
    makes the run's model; None if its config describes it.
    """

    config: Config
    step: int
    arrays: Path
    ledger: dict[str, Any]
    tokenizer: Tokenizer
    make_model: Callable[[int], Model] | None


def find_saved(
    run: str | os.PathLike,
    config: Config,
    step: str | int | None,
    weights: str,
    make_model: Callable[[int], Model] | None,
    caller: str,
) -> Saved:
    """What `find_weights` finds, with all that is needed to load it.

    `config` is the run's. `caller` is the function that takes `make_model` from the user, for the message. Raises
    InputError as `find_weights` does, and if the run has a model of one's own but `make_model` is None.
    """
    if config.model is None and make_model is None:
        raise InputError(f"{run}: was trained with a custom model; call {caller}(make_model=...) from Python")
    directory = RunDirectory(Path(run))
    step, arrays = find_weights(directory, step, weights)
    ledger = ledger_beside(directory, arrays)
    return Saved(config, step, arrays, ledger, load_tokenizer(directory.tokenizer), make_model)


def ledger_beside(directory: RunDirectory, arrays: Path) -> dict[str, Any]:
    """The ledger of the checkpoint that holds `arrays`; for a mean of several, that of the run's latest checkpoint."""
    checkpoint = arrays.parent
    if checkpoint.parent == directory.averages:
        _, checkpoint = find_checkpoint(directory, "latest", part="ledger/")
    return read_ledger(checkpoint)
