"""Weights & Biases: a view of the record, kept in `<run>/wandb/` and sent to a server if the mode is online.

The curves have the names that TensorBoard shows, over a custom axis, `step`: wandb's own step must not go back, but
a resume goes back to a checkpoint. Phase switches and verdicts are text.
"""

import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from curriculum.disk.append import tell
from curriculum.errors import InputError
from curriculum.record.curves import eval_curves, row_curves
from curriculum.record.events import EVENTS, TAKEN_UP, read_events, read_metrics
from curriculum.record.sentences import verdict
from curriculum.run_directory import RunDirectory

_TEXT = {
    "phase_switch": "phase_switch",
    "eval_regression": "regressions",
    "eval_recovered": "regressions",
    "gold_checkpoint": "gold",
    "gold_blocked": "gold",
    "schedule_edit": "schedule_edit",
    "rollback": "rollback",
    "diverged": "rollback",
}
_SUMMARY = ("final_train_loss", "final_val_loss", "best_val_loss", "best_val_step", "total_tokens", "gold_step")
_FINISH_SECONDS = 120  # what is not sent by then stays in the run directory, for `wandb sync`


@dataclass(frozen=True)
class WandbConfig:
    """Also show the run in Weights & Biases; needs the extra `curriculum[wandb]`."""

    project: str
    """The project that the run belongs to."""
    entity: str | None = None
    """The user or team of the project; by default the one logged in."""
    mode: Literal["online", "offline"] = "online"
    """offline sends nothing; `wandb sync` in the run directory sends it later."""
    tags: tuple[str, ...] = ()
    """Labels of the run."""


def check_wandb(config: WandbConfig | None) -> None:
    """Raise InputError if wandb is asked for but not installed or, online, without a login; a terminal asks for it."""
    if config is None:
        return
    _send_no_errors(config)
    try:
        from wandb import Error, login
    except ImportError:
        raise InputError(
            "logging.wandb: the package wandb is not installed; pip install 'curriculum[wandb]', or set "
            "logging.wandb: null"
        ) from None
    if config.mode == "offline":
        return
    try:
        login(verify=False)
    except Error as error:
        raise InputError(f"logging.wandb: {error} Log in, set WANDB_API_KEY, or choose mode: offline") from None


class WandbLog:
    """Logs the events and rows of one process to one run of wandb, which a resume continues.

    config: the resolved config as plain JSON, for wandb's config of the run; its files are logged as an artifact.
    A failure of wandb is reported once on stderr, and nothing more is logged to it: training and the record do not
    depend on it. Nothing can be taken back: steps that are trained again after a kill are logged again, with the same
    values unless the config was changed in between.
    """

    def __init__(self, run_dir: Path, settings: WandbConfig, config: dict[str, Any]):
        _send_no_errors(settings)
        self._run_dir = run_dir
        self._settings = settings
        self._config = config
        self._phase_names: list[str] = []
        self._run = None
        self._failed = False
        self._complete = False

    def event(self, event: dict[str, Any]) -> None:
        self._attempt(self._event, event)

    def row(self, row: dict[str, Any]) -> None:
        self._attempt(self._row, row)

    def close(self) -> None:
        self._attempt(self._finish)

    def _attempt(self, send: Callable[..., None], *arguments: Any) -> None:
        if self._failed:
            return
        try:
            send(*arguments)
        except Exception as error:  # wandb raises, beside its own Error, more than a dozen classes that share no other
            # An OSError: the disk refuses its folder, or, as a ConnectionError, its background process is gone.
            if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] != "wandb":
                raise
            self._failed = True
            where = self._run_dir / EVENTS
            tell(f"wandb failed; nothing more is logged to it: {error} (training continues; the record is {where})")

    def _event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in TAKEN_UP:
            if self._run is None:  # else this process went back
                self._start(event)
            self._phase_names = [phase["name"] for phase in event["plan"]["phases"]]
        match kind:
            case "eval":
                self._log(event["step"], eval_curves(event))
            case "training_complete":
                self._complete = True
                self._run.summary.update({key: event[key] for key in _SUMMARY if event.get(key) is not None})
            case _ if kind in _TEXT:
                self._log(event["step"], {_TEXT[kind]: verdict(event)})

    def _row(self, row: dict[str, Any]) -> None:
        self._log(row["step"], row_curves(row, self._phase_names))

    def _log(self, step: int, values: dict[str, Any]) -> None:
        self._run.log({"step": step, **values})

    def _start(self, event: dict[str, Any]) -> None:
        """Begin a run of wandb, or go on with the one that the run directory names.

        If a run goes on that wandb does not have, as that of a branch, all that its record has so far is logged first.
        """
        import wandb

        folder = self._run_dir.resolve() / "wandb"
        folder.mkdir(exist_ok=True)
        # Beside the run's own files wandb writes logs and copies of artifacts, by default into the home folder.
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "cache"))
        os.environ.setdefault("WANDB_DATA_DIR", str(folder / "data"))
        offline = self._settings.mode == "offline"
        # A run that goes back to its start begins anew, and is no other.
        goes_on = event["event"] != "training_start" or RunDirectory(self._run_dir).going_back.exists()
        kept_id = _kept_id(folder / "run_id") if goes_on else None
        self._run = wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            tags=self._settings.tags,
            name=folder.parent.name,
            id=kept_id or _new_id(folder / "run_id"),
            resume="allow",
            dir=folder.parent,
            mode=self._settings.mode,
            config=self._config,
            allow_val_change=True,
            reinit="create_new",  # a run that the caller has open is not ours to write to
            settings=wandb.Settings(
                console="off", silent=offline, quiet=True, show_info=False, finish_timeout=_FINISH_SECONDS
            ),
        )
        if not offline:
            print(f"  wandb      {self._run.url}")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        artifact = wandb.Artifact(f"config-{self._run.id}", type="config")
        for name in ("config.resolved.json", "config.yaml"):
            if (self._run_dir / name).exists():
                artifact.add_file(self._run_dir / name)
        self._run.log_artifact(artifact)
        if goes_on and kept_id is None:
            self._log_before(event)

    def _log_before(self, event: dict[str, Any]) -> None:
        # A line that is broken was told of as the run was taken up. What else is damaged ends no training either.
        passed_over = suppress(InputError, KeyError, TypeError, ValueError)
        before = []
        for read in (read_metrics, read_events):
            with passed_over:
                before += read(self._run_dir)
        for line in sorted(before, key=lambda line: line["step"]):
            with passed_over:
                if line != event:
                    self._event(line) if "event" in line else self._row(line)

    def _finish(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if self._complete else 1)


def _send_no_errors(config: WandbConfig) -> None:
    """Keep an offline process from sending wandb's own errors to its makers. Call it before wandb is imported."""
    if config.mode == "offline":
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")


def _kept_id(path: Path) -> str | None:
    """The wandb id kept in a run directory; None if there is none, or if it is damaged."""
    kept = path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else ""
    return kept if re.fullmatch(r"[A-Za-z0-9_.-]+", kept) else None


def _new_id(path: Path) -> str:
    run_id = secrets.token_hex(4)
    path.write_text(run_id + "\n", encoding="utf-8")
    return run_id
