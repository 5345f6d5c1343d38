"""A run directory as an object: where everything lies, what was written at the start, what can be read back."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curriculum.config import Config, config_from_json
from curriculum.errors import InputError
from curriculum.record.events import EVENTS, plain, read_events, read_metrics


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path

    @property
    def resolved_config(self) -> Path:
        return self.path / "config.resolved.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def averages(self) -> Path:
        return self.path / "averages"

    @property
    def superseded(self) -> Path:
        return self.path / "superseded"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    def holds_run(self) -> bool:
        """Whether a run was begun here: it has a record or checkpoints."""
        return (self.path / EVENTS).exists() or self.checkpoints.exists()

    def command_line(self) -> list[str]:
        """The options that earlier commands added to the config of this run, in order."""
        if not self.resolved_config.exists():
            return []
        return read_json(self.resolved_config).get("command_line", [])

    def create(self, config: Config, derived: dict[str, Any], model: dict[str, Any]) -> None:
        """Write what describes the run; harmless to repeat."""
        self.path.mkdir(parents=True, exist_ok=True)
        if config.origin.text is not None:
            write_text(self.path / "config.yaml", config.origin.text)
        resolved = {**config.to_json(), "command_line": config.command_line, "derived": derived}
        write_text(self.resolved_config, json.dumps(resolved, indent=2) + "\n")
        write_text(self.path / "model.json", json.dumps(model, indent=2) + "\n")

    def write_training_state(self, state: dict[str, Any]) -> None:
        """Rewrite the summary of where the run stands."""
        write_text(self.path / "training_state.json", json.dumps(plain(state), indent=2, allow_nan=False) + "\n")

    def check_usable(self) -> None:
        """Raise InputError where the path cannot be a folder of ours; creates nothing."""
        nearest = next((p for p in (self.path, *self.path.absolute().parents) if p.exists()), None)
        if nearest is None or not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise InputError(f"--run-dir {self.path}: {nearest} is no folder that can be written to; choose another")

    def set_aside_evals_after(self, step: int) -> None:
        """Move the results of evals after `step` to `superseded/`: they will be measured again."""
        for path in self.path.glob("evals/*.npz"):
            if path.stem.isdecimal() and int(path.stem) > step:
                target = self.superseded / "evals" / path.name
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)


@dataclass(frozen=True)
class Run:
    """A run read back from its directory."""

    directory: RunDirectory
    config: Config
    events: list[dict[str, Any]]
    metrics: list[dict[str, Any]]

    @property
    def complete(self) -> dict[str, Any] | None:
        """The `training_complete` event, None while the run is not finished."""
        return self.events[-1] if self.events and self.events[-1]["event"] == "training_complete" else None

    def evals(self, name: str = "val") -> list[tuple[int, float]]:
        """(step, loss) of every eval of a set; `val` is the primary one."""
        key = "val_loss" if name == "val" else f"eval_{name}"
        return [(e["step"], e[key]) for e in self.events if e["event"] == "eval" and key in e]


def load_run(run_dir: str | os.PathLike) -> Run:
    """Read a run directory. Raises InputError when there is none."""
    directory = RunDirectory(Path(run_dir))
    if not directory.resolved_config.exists():
        raise InputError(f"{run_dir}: holds no run; expected a directory made by `curriculum train`")
    resolved = read_json(directory.resolved_config)
    config = config_from_json({k: v for k, v in resolved.items() if k not in ("command_line", "derived")})
    return Run(directory, config, read_events(directory.path), read_metrics(directory.path))


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}; expected the JSON that this program wrote") from None


def write_text(path: Path, text: str) -> None:
    """Replace a file at once, so that a kill leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_tokenizer(directory: RunDirectory, tokenizer) -> None:
    """Keep the tokenizer with the run: nothing outside the run directory is needed to read its checkpoints."""
    if directory.tokenizer.exists():
        return
    temporary = directory.path / "tokenizer.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    tokenizer.save(temporary)
    temporary.rename(directory.tokenizer)
