"""What a config says of the verdicts on eval sets: when one regressed, and which checkpoint is the gold."""

import math
import shlex
from dataclasses import dataclass, field
from typing import Literal

METRICS = ("loss", "bpb", "perplexity")  # those that `minimise` may name


@dataclass(frozen=True)
class RegressionConfig:
    """When an eval set counts as worse, and what is done then."""

    tolerance: float = 0.01
    """Rise of a set's loss that does not count as worse, in nats per token."""
    confidence: float = 0.95
    """Chance that a run in which no set gets worse ends without any alarm, over all sets, evals and baselines."""
    action: Literal["log", "checkpoint", "stop", "replay"] = "log"
    """What an alarm does besides its event: `log` nothing; `checkpoint` keeps that step's checkpoint for good; `stop`
    saves and ends the run; `replay` raises the share of the set's source (sets with `held_out_of`) to the phase's end.
    """
    replay_factor: float = 2.0
    """`replay` multiplies the source's share by this; a share below 1 % counts as 1 %."""
    replay_max_share: float = 0.5
    """`replay` raises no source above this share of the mixture."""

    def problems(self) -> list[tuple[str, str]]:
        """What is wrong with the numbers: (field, message) pairs."""
        return [
            (key, f"got {getattr(self, key)}, expected {expected}")
            for key, (expected, fits) in _RANGES.items()
            if not fits(getattr(self, key))
        ]


_RANGES = {
    "tolerance": ("a finite number, 0 or more", lambda number: 0 <= number < math.inf),
    "confidence": ("above 0.5 and below 1", lambda number: 0.5 < number < 1),
    "replay_factor": ("above 1, at most 10", lambda number: 1 < number <= 10),
    "replay_max_share": ("above 0 and below 1", lambda number: 0 < number < 1),
}


@dataclass(frozen=True)
class Limit:
    """How much worse another eval set may be at the gold."""

    max_increase: float
    """Maximum rise, in nats per token, above its lowest loss so far or, after --init-from, its loss at the start."""


@dataclass(frozen=True)
class GoldConfig:
    """Which checkpoint is the best of the run, and what keeps one from being it."""

    minimise: str = "primary/loss"
    """SET/loss, SET/bpb or SET/perplexity of one eval set; the lowest is the best."""
    subject_to: dict[str, Limit] = field(default_factory=dict)
    """How far other eval sets may rise at the gold. If none is given, no other set may have an alarm."""
    overfit_ratio: float | None = 5.0
    """Highest ratio of the validation loss to the recent training loss; null: no limit."""
    consecutive_rises: int | None = 2
    """After this many rises in a row a new best must be confirmed by the next eval; 0 or null: never."""
    gate: str | None = None
    """A command that may veto: it gets a checkpoint's path as last argument and prints {"accept": true} or {"accept":
    false}."""
    gate_timeout_seconds: float = 600.0
    """A gate that takes longer counts as a veto."""

    @property
    def target(self) -> tuple[str, str]:
        """(eval set, metric) of `minimise`."""
        evalset, _, metric = self.minimise.rpartition("/")
        return evalset, metric

    def problems(self) -> list[tuple[str, str]]:
        """What is wrong with the values: (field, message) pairs. Whether the sets exist is not known here."""
        found = []
        evalset, metric = self.target
        if not evalset or metric not in METRICS:
            expected = ", ".join(f"SET/{name}" for name in METRICS)
            found.append(("minimise", f"got {self.minimise!r}, expected one of {expected}"))
        for name, limit in self.subject_to.items():
            if name == evalset:
                found.append((f"subject_to.{name}", f"{name!r} is the set that is minimised; limit other sets"))
            elif not (math.isfinite(limit.max_increase) and limit.max_increase >= 0):
                message = f"got {limit.max_increase}, expected 0 or more nats per token"
                found.append((f"subject_to.{name}.max_increase", message))
        if self.overfit_ratio is not None and not (math.isfinite(self.overfit_ratio) and self.overfit_ratio > 0):
            found.append(("overfit_ratio", f"got {self.overfit_ratio}, expected more than 0, or null for no limit"))
        if self.consecutive_rises is not None and self.consecutive_rises < 0:
            found.append(("consecutive_rises", f"got {self.consecutive_rises}, expected 0 or more"))
        if self.gate is not None:
            try:
                if not shlex.split(self.gate):
                    found.append(("gate", "got an empty command, expected a program and its arguments, or null"))
            except ValueError as error:
                found.append(("gate", f"got {self.gate!r}: {error}; expected a command with its quotes closed"))
        if not (math.isfinite(self.gate_timeout_seconds) and self.gate_timeout_seconds > 0):
            found.append(("gate_timeout_seconds", f"got {self.gate_timeout_seconds}, expected more than 0"))
        return found
