"""The console: a view of the record that prints, and keeps what it prints in `<run>/train.log`.

It prints a header, two lines per eval, one per verdict, progress between evals, and at the end where to resume from,
what to deploy and how to open TensorBoard.
"""

import math
import os
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from curriculum.disk.append import Appender, discard, is_disk_error, is_terminal
from curriculum.find_checkpoint import checkpoint_steps
from curriculum.record.commands import MORE_EPOCHS, MORE_STEPS, program, tensorboard_link
from curriculum.record.console_text import count, eval_lines, header, phase_lines, progress_line, steps, warnings
from curriculum.record.events import TAKEN_UP, number
from curriculum.record.queries import longer_from, planned_tokens
from curriculum.record.sentences import sample_lines, skipped_counts, skipped_line, skipped_why, verdict
from curriculum.record.wording import duration, interval_text, loss, printable
from curriculum.run_directory import RunDirectory

_PROGRESS_EVERY_SECONDS = 10.0  # at least; a terminal shows every row, in place
_RECENT_EVALS = 5
_CALM_EVALS = 10  # after so many without a skipped update, the next one is reported at once
_PHASES_AHEAD = 8  # that a resume shows
# Terminal codes by event: red, yellow, green, bold.
_COLORS = {"eval_regression": 31, "diverged": 31, "checkpoint_failed": 31, "rollback": 33, "schedule_edit": 33,
           "eval_recovered": 32, "phase_switch": 1}  # fmt: skip


class Console:
    """Prints the events and rows of one process to `stream` and to `<run>/train.log`.

    resume_command: gives the command that goes on with this run, from the step and the key to raise for that, if any;
        without it only the checkpoint is named.
    device_lines: what this process trains on, printed once as it begins.
    clock: seconds, for the lines of progress alone; every time shown comes from the events.
    """

    def __init__(
        self,
        run_dir: Path,
        resume_command: Callable[[str, str | None], str] | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        device_lines: Iterable[str] = (),
    ):
        self._run_dir = run_dir
        self._resume_command = resume_command
        self._stream = sys.stdout if stream is None else stream  # None again without a stdout, as in a daemon
        self._in_place = is_terminal(self._stream) and os.environ.get("TERM") != "dumb"
        self._in_color = self._in_place and not os.environ.get("NO_COLOR")
        self._progress_open = False
        self._clock = clock
        self._progress_due = clock()
        self._log = Appender(run_dir / "train.log")
        self._device_lines = tuple(device_lines)
        self._total_steps = 0
        self._checkpoint_step: int | None = None
        self._over = False  # complete, or diverged
        self._failed: tuple[Any, ...] = ()  # step, reason and next try of the last save that failed
        self._blocked: dict[str, Any] | None = None  # the event if the last candidate for the gold was blocked
        self._regressed: list[str] = []  # the sets with a standing alarm
        self._rises: dict[str, Any] = {}  # of these sets, nats over the baseline that each rose most from
        self._skipped: dict[str, int] = {}  # the counts of skipped updates when last reported
        self._row: dict[str, Any] = {}  # the last metrics row
        self._calm_evals = _CALM_EVALS  # evals since skipped updates were reported
        self._plan: dict[str, Any] = {}
        # (step, elapsed seconds) at the last evals of this process: the pace, evals included.
        self._marks: deque[tuple[int, float]] = deque(maxlen=_RECENT_EVALS + 1)
        self._began: tuple[int, float] = (0, 0.0)  # where this process began: step, elapsed seconds
        self._eval_s = 0.0  # seconds that its evals took

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] in ("eval", "rollback", "diverged", "training_complete"):
            self._calm_evals += event["event"] == "eval"
            self._tell_skipped()
        if event["event"] in TAKEN_UP:
            self._skipped, self._row = skipped_counts(event), {}
            self._plan, self._total_steps = event["plan"], event["plan"]["total_steps"]
            self._marks.clear()  # after a rollback they are of later steps
        match event["event"]:
            case "training_start":
                self._print(*header(event, self._run_dir), *self._device_lines)
            case "resume":
                self._checkpoint_step, self._began = event["step"], (event["step"], event["elapsed_s"])
                ahead = phase_lines(event["plan"], event["step"], _PHASES_AHEAD)
                self._print(verdict(event), *ahead, *self._device_lines)
            case "rollback":
                self._checkpoint_step = event["step"] or None  # at step 0 it begins anew, without a checkpoint
                self._mark(event)
                self._print(verdict(event), color=_COLORS["rollback"])
            case "eval":
                self._regressed, self._rises = event.get("regressed", []), event.get("rises", {})
                self._eval_s += event["eval_duration_s"]
                if self._marks or event["step"] > self._began[0]:  # before, compiling is still to come
                    self._mark(event)
                self._print(*eval_lines(event, self._total_steps, self._seconds_left(event["step"])))
            case "checkpoint":
                self._checkpoint_step = event["step"]
                self._log.write(f"checkpoint at step {event['step']}: {self._checkpoint}\n".encode())
            case "checkpoint_failed":
                self._checkpoint_step = event["last_good_step"]
                before = self._failed
                self._failed = Path(event["path"]).name, event["why"], event["next_try_step"]
                again = self._failed == before  # the gold of that step, say, which is a copy
                line = f"  nor was {event['path']}" if again else verdict(event)
                self._print(line, color=_COLORS["checkpoint_failed"])
            case "gold_blocked":
                before, self._blocked = self._blocked, event
                if before is None or before["guard"] != event["guard"]:  # many in a row would tell the same
                    self._print(verdict(event))
            case "gold_checkpoint":
                self._blocked = None
                self._print(verdict(event))
            case "generation":
                self._print(*sample_lines(event))
            case "training_complete":
                self._over = True
                self._print(*self._closing(event))
            case kind if line := verdict(event):
                self._over |= kind == "diverged"  # no hint to resume: the run would diverge again
                self._print(line, color=_COLORS.get(kind))
                self._print(*warnings(event))

    def row(self, row: dict[str, Any]) -> None:
        self._row = row
        if self._calm_evals >= _CALM_EVALS:  # else with the next eval, as a run may skip updates all the time
            self._tell_skipped()
        line = progress_line(row, self._total_steps)
        due = self._clock() >= self._progress_due
        if due:
            self._progress_due = self._clock() + _PROGRESS_EVERY_SECONDS
            self._log.write(f"{line}\n".encode())
        if self._in_place:
            columns = shutil.get_terminal_size().columns
            self._show(f"\r\x1b[K{line[: columns - 1]}")
            self._progress_open = True
        elif due:
            self._show(line + "\n")

    def _tell_skipped(self) -> None:
        if line := skipped_line(self._row, self._skipped):
            self._print(line)
            self._skipped, self._calm_evals = skipped_counts(self._row), 0

    def close(self) -> None:
        """Close the view; if the run is not over, and its folder where it was, print where to resume from."""
        self._tell_skipped()
        if self._total_steps and not self._over and (self._run_dir / "train.log").exists():
            if self._checkpoint_step is not None and not self._checkpoint.is_dir():  # its save failed, or is under way
                saved = checkpoint_steps(RunDirectory(self._run_dir).checkpoints)
                self._checkpoint_step = max((step for step in saved if step < self._checkpoint_step), default=None)
            if self._checkpoint_step is None:
                self._print("stopped before the first checkpoint: the run starts again at step 0")
            else:
                self._print("stopped", f"  resume from  {self._checkpoint}{self._resume_hint('latest')}")
        self._log.close()

    @property
    def _checkpoint(self) -> Path:
        return self._folder_of(self._checkpoint_step)

    def _folder_of(self, step: int | None) -> Path:
        folders = [place / str(step) for place in RunDirectory(self._run_dir).places]
        return next((folder for folder in folders if folder.is_dir()), folders[0])

    def _resume_hint(self, step: str, raised: str | None = None) -> str:
        return f": {self._resume_command(step, raised)}" if self._resume_command else ""

    def _closing(self, event: dict[str, Any]) -> Iterator[str]:
        if skipped := event["skipped_updates"]:
            were = "was" if skipped == 1 else "were"
            yield f"{skipped} of {event['total_steps']} updates {were} skipped: {skipped_why(skipped_counts(event))}"
        yield (
            f"complete: {steps(event['total_steps'])}, {count(event['total_tokens'], 10)} tokens in "
            f"{duration(event['total_elapsed_s'])} ({count(event['tokens_per_sec'], 100)} tok/s"
            f"{self._of_evals(event)}) | "
            f"train {loss(event['final_train_loss'])} | val {loss(event['final_val_loss'])}, "
            f"best {loss(event['best_val_loss'])}"
        )
        yield from self._risen(event)
        early = event["total_steps"] < event["train_steps"]
        if early:
            at = f"at step {event['total_steps']} of {event['train_steps']}"
            yield f"  ended early  {at}: a source with on_exhaust: stop has been read max_epochs times"
        yield from self._longer(early)
        deploy, why = self._to_deploy(event)
        yield f"  deploy       {deploy}"
        yield from (f"{'':15}{line}" for line in why)
        if (self._run_dir / "tensorboard").is_dir():
            logdir = shlex.quote(str(self._run_dir.parent))
            yield f"  TensorBoard  {program('tensorboard')} --logdir {logdir} --host 127.0.0.1"
            yield f"               {tensorboard_link(self._run_dir)}"

    def _risen(self, event: dict[str, Any]) -> Iterator[str]:
        forgotten, not_judged, told = [], [], set()
        for name, of_set in event["transfer"]["sets"].items():
            lost = of_set["forgetting"]
            value, interval = number(lost["value"]), lost["interval"]
            if value is None:
                continue
            since = f"{name} {value:+.4f} since {lost['best_phase']}"
            if interval is None and 0 < value < math.inf:
                not_judged.append(f"{since}, too little text for a standard error")
            elif interval is not None and interval[0] > 0:
                told.add(name)
                forgotten.append(since)
            elif interval is not None and name in self._regressed and value:
                told.add(name)
                ends = interval_text(tuple(interval))
                forgotten.append(f"{name} {value:+.4f} (95 % {ends}) since {lost['best_phase']}")
        # Alarms against other evals than those at the phases' ends, which forgetting is measured by.
        untold = [name for name in self._regressed if name not in told and name in self._rises]
        worse = [f"{name} {number(self._rises[name]):+.4f} over its baseline" for name in untold]
        for label, sets in (("forgotten", forgotten), ("not judged", not_judged), ("still worse", worse)):
            if sets:
                yield f"  {label:<12} {'; '.join(sets)}"

    def _to_deploy(self, event: dict[str, Any]) -> tuple[str, list[str]]:
        """What to deploy, and lines on why it is that and no other."""
        gold, val_loss = event["gold_step"], number(event["final_val_loss"])
        guard = self._blocked and self._blocked["guard"]
        blocked = [f"({verdict(self._blocked)})"] if self._blocked else []
        if gold is None and val_loss is not None and not math.isfinite(val_loss):
            return f"nothing: val is {loss(val_loss)}, and the run has no gold checkpoint", []
        if gold is None and guard == "start":
            return "nothing: the last eval was no better than before training, and none before it is gold", blocked
        if gold is None:
            return f"{self._checkpoint} (the latest; the run has no gold checkpoint)", blocked
        if gold == 0:
            if guard in ("regression", "limit"):
                blocked.append("(evalsets.gold.subject_to says how far each other set may rise)")
            blocked = [
                "(the run's initial parameters: no later eval was lower and passed every guard;",
                "eval and export take another checkpoint with --step, such as latest)",
                *blocked,
            ]
        metric = f"{event['gold_metric']} {loss(event['gold_value'])}"
        return f"{self._run_dir / 'gold' / str(gold)} (gold, step {gold}, {metric})", blocked

    def _longer(self, early: bool) -> Iterator[str]:
        """The lines on how to train a complete run for longer; `early`: an exhausted source ended it."""
        newest, places = self._checkpoint_step, RunDirectory(self._run_dir).places
        step = longer_from(self._plan, {newest, *(step for place in places for step in checkpoint_steps(place))})
        resumed = "latest" if step in (None, newest) else str(step)
        before = "" if resumed == "latest" else ", before the rate's decay"
        raised = MORE_EPOCHS if early else MORE_STEPS
        how = self._resume_hint(resumed, raised) or f"{',' if before else ''} with a higher {raised}"
        yield f"  resume from  {self._folder_of(newest if step is None else step)}{before}{how}"
        if step is None:
            yield "               (the rate has decayed by then; continuing at its peak needs optim.allow_jump: true)"

    def _of_evals(self, event: dict[str, Any]) -> str:
        """The share of the time that evals took, which the rate in the progress lines leaves out; empty below 10 %."""
        step, elapsed_s = self._began
        share = self._eval_s / max(event["elapsed_s"] - elapsed_s, self._eval_s, 1e-9)
        return f"; evals took {share:.0%} of the time{f' since step {step}' if step else ''}" if share >= 0.1 else ""

    def _mark(self, event: dict[str, Any]) -> None:
        if self._marks and self._marks[-1][0] == event["step"]:
            self._marks.pop()  # time without a step does not count towards the pace
        self._marks.append((event["step"], event["elapsed_s"]))

    def _seconds_left(self, step: int) -> float | None:
        """Estimated by tokens, since updates of one phase may have more of them than those of another.

        Up to the second eval of this process by the last row's rate, which evals are no part of.
        """
        tokens_left = planned_tokens(self._plan, self._total_steps) - planned_tokens(self._plan, step)
        if len(self._marks) > 1:
            (first_step, first_s), (last_step, last_s) = self._marks[0], self._marks[-1]
            between = planned_tokens(self._plan, last_step) - planned_tokens(self._plan, first_step)
            return tokens_left * (last_s - first_s) / between
        rate = self._row.get("tokens_per_sec")
        return tokens_left / rate if rate else None

    def _print(self, *lines: str, color: int | None = None) -> None:
        if self._progress_open:
            self._show("\r\x1b[K")
            self._progress_open = False
        for line in map(printable, lines):  # they name folders as well
            self._log.write(f"{line}\n".encode())
            self._show(f"\x1b[{color}m{line}\x1b[0m\n" if color and self._in_color else f"{line}\n")

    def _show(self, text: str) -> None:
        if self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError) as error:
            if is_disk_error(error):  # it may be a file; train.log keeps the line
                return
            # The pipe's reader or the terminal is gone, or the stream is closed: the run goes on without it.
            why = getattr(error, "strerror", None) or error
            self._log.write(f"console: {why}; from here on, output goes to this file only\n".encode())
            discard(self._stream)
            self._stream = None
