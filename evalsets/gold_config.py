"""What a config says of the gold checkpoint."""

import math
import shlex
from dataclasses import dataclass, field
from typing import ClassVar

METRICS = ("loss", "bpb", "perplexity")


@dataclass(frozen=True)
class Limit:
    """How much worse another eval set may be at the gold."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    max_increase: float
    """Nats per token above its lowest loss so far; after --init-from above its loss at the start."""


@dataclass(frozen=True)
class GoldConfig:
    """Which checkpoint is the best of the run, and what keeps one from being it."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    minimise: str = "primary/loss"
    """SET/loss, SET/bpb or SET/perplexity of one eval set; the lowest is the best."""
    subject_to: dict[str, Limit] = field(default_factory=dict)
    """Limits on other eval sets; these are guarded against regressions too. Where none is named, all others are."""
    overfit_ratio: float | None = 5.0
    """Most that the validation loss may be of the recent training loss; null: no limit."""
    consecutive_rises: int | None = 2
    """After so many rises in a row a new best must be confirmed by the next eval; 0 or null: never."""
    gate: str | None = None
    """A command that may veto: it gets a checkpoint's path as last argument and prints {"accept": true} or so."""
    gate_timeout_seconds: float = 600.0
    """A gate that takes longer is a veto."""

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
