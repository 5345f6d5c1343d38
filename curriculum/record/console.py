"""The console: a view of the record that prints, and keeps what it prints in `<run>/train.log`.

Two lines an eval, one line a verdict, a header, a sign of life between evals, and at the end where to resume
from, what to deploy and how to open TensorBoard.
"""

import math
import os
import re
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from curriculum.record.append import DISK_ERRORS, Appender
from curriculum.record.events import eval_averages, eval_sets, number
from curriculum.record.queries import beginning, listed, shapes_of, tokens_of

_RECENT_EVALS = 5
_LONGEST_PROMPT, _LONGEST_SAMPLE = 40, 160  # characters of a sample's line


class Console:
    """Prints the events and rows of one process to `stream` and to `<run>/train.log`.

    resume_command: what the user types to go on with this run; without it only the checkpoint is named.
    device_lines: what this process trains on, said once as it begins.
    progress_every_seconds: at most one line of progress in this time; a terminal shows every row, in place.
    clock: seconds, for that rate alone; every time shown comes from the events.
    """

    def __init__(
        self,
        run_dir: Path,
        resume_command: str | None = None,
        stream: TextIO | None = None,
        progress_every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        device_lines: Iterable[str] = (),
    ):
        self._run_dir = run_dir
        self._resume_command = resume_command
        self._stream = sys.stdout if stream is None else stream
        self._in_place = self._stream.isatty()
        self._progress_open = False
        self._progress_every_seconds = progress_every_seconds
        self._clock = clock
        self._progress_due = clock()
        self._log = Appender(run_dir / "train.log")
        self._device_lines = tuple(device_lines)
        self._total_steps = 0
        self._checkpoint_step: int | None = None
        self._complete = False
        self._skipped: dict[str, int] = {}  # what the last row or event said
        self._plan: dict[str, Any] = {}
        # (step, elapsed seconds) at the last evals of this process: the pace, evals included.
        self._marks: deque[tuple[int, float]] = deque(maxlen=_RECENT_EVALS + 1)

    def event(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "training_start":
                self._skipped = {}
                self._plan, self._total_steps = event["plan"], event["plan"]["total_steps"]
                self._print(*header(event, self._run_dir), *self._device_lines)
            case "resume" | "rollback" as kind:
                self._skipped = _skipped(event)
                self._plan, self._total_steps = event["plan"], event["plan"]["total_steps"]
                self._checkpoint_step = event["step"]
                self._marks.clear()  # a rollback's lie ahead of it
                self._mark(event)
                self._print(verdict(event), *(self._device_lines if kind == "resume" else ()))
            case "eval":
                self._mark(event)
                self._print(*eval_lines(event, self._total_steps, self._seconds_left(event["step"])))
            case "checkpoint":
                self._checkpoint_step = event["step"]
                self._log.write(f"checkpoint at step {event['step']}: {self._checkpoint}\n".encode())
            case "checkpoint_failed":
                self._checkpoint_step = event["last_good_step"]
                self._print(verdict(event))
            case "generation":
                self._print(*sample_lines(event))
            case "training_complete":
                self._complete = True
                self._print(*self._closing(event))
            case _ if line := verdict(event):
                self._print(line, *_warnings(event))

    def row(self, row: dict[str, Any]) -> None:
        if line := skipped_line(row, self._skipped):
            self._print(line)
        self._skipped = _skipped(row)
        line = progress_line(row, self._total_steps)
        due = self._clock() >= self._progress_due
        if due:
            self._progress_due = self._clock() + self._progress_every_seconds
            self._log.write(f"{line}\n".encode())
        if self._in_place:
            columns = shutil.get_terminal_size().columns
            self._show(f"\r\x1b[K{line[: columns - 1]}")
            self._progress_open = True
        elif due:
            self._show(line + "\n")

    def close(self) -> None:
        """Ends the view; where the run is not complete, says where it can be taken up."""
        if self._total_steps and not self._complete:
            if self._checkpoint_step is None:
                self._print("stopped before the first checkpoint: the run starts again at step 0")
            else:
                self._print("stopped", f"  resume from  {self._checkpoint}{self._resume_hint()}")
        self._log.close()

    @property
    def _checkpoint(self) -> Path:
        return self._run_dir / "checkpoints" / str(self._checkpoint_step)

    def _resume_hint(self) -> str:
        return f": {self._resume_command}" if self._resume_command else ""

    def _closing(self, event: dict[str, Any]) -> Iterator[str]:
        if skipped := event.get("skipped_updates", 0):
            yield f"{skipped} of {event['total_steps']} updates were skipped: {_why(_skipped(event))}"
        yield (
            f"complete: {_steps(event['total_steps'])}, {_count(event['total_tokens'], 10)} tokens in "
            f"{_duration(event['total_elapsed_s'])} ({_count(event['tokens_per_sec'], 100)} tok/s) | "
            f"train {_loss(event['final_train_loss'])} | val {_loss(event['final_val_loss'])}, "
            f"best {_loss(event['best_val_loss'])}"
        )
        if forgotten := [
            f"{name} {number(lost['value']):+.4f} since {lost['best_phase']}"
            for name, lost in ((name, of_set["forgetting"]) for name, of_set in event["transfer"]["sets"].items())
            if lost and lost["interval"] and number(lost["interval"][0]) > 0
        ]:
            yield f"  forgotten    {', '.join(forgotten)}"
        yield f"  resume from  {self._checkpoint} with more train.steps{self._resume_hint()}"
        yield "               (where the learning rate has decayed: with --resume STEP, a checkpoint before that)"
        if event["gold_step"] is None:
            yield f"  deploy       {self._checkpoint} (the latest; the run has no gold checkpoint)"
        else:
            yield f"  deploy       {self._run_dir / 'gold' / str(event['gold_step'])} (gold, {_gold(event)})"
        if (self._run_dir / "tensorboard").is_dir():
            logdir = shlex.quote(str(self._run_dir.parent))
            yield f"  TensorBoard  {program('tensorboard')} --logdir {logdir} --host 127.0.0.1"
            yield f"               {tensorboard_link(self._run_dir)}"

    def _mark(self, event: dict[str, Any]) -> None:
        if self._marks and self._marks[-1][0] == event["step"]:
            # What happened without a step (start-up, the eval at step 0) is no part of the pace.
            self._marks.pop()
        self._marks.append((event["step"], event["elapsed_s"]))

    def _seconds_left(self, step: int) -> float | None:
        """By tokens, of which the updates of one phase may have more than those of another."""
        (first_step, first_s), (last_step, last_s) = self._marks[0], self._marks[-1]
        if first_step == last_step:
            return None
        sizes = self._plan.get("step_sizes") or [{"start": 0, "end": self._total_steps, "tokens_per_step": 1}]
        first, last, now, end = (tokens_of(sizes, s) for s in (first_step, last_step, step, self._total_steps))
        return (end - now) * (last_s - first_s) / (last - first)

    def _print(self, *lines: str) -> None:
        if self._progress_open:
            self._show("\r\x1b[K")
            self._progress_open = False
        for line in lines:
            self._log.write(f"{line}\n".encode())
            self._show(line + "\n")

    def _show(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except OSError as error:
            if error.errno in DISK_ERRORS:  # it may be a file; train.log keeps the line
                return
            # A pipe's reader or a terminal that is gone: the run is not to end with it.
            self._log.write(f"console: {error.strerror}; what follows stands here alone\n".encode())
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def header(event: dict[str, Any], run_dir: Path) -> Iterator[str]:
    """What is about to be trained, from the `training_start` event."""
    config, plan = event["config"], event["plan"]
    sets = ["val", *config["evalsets"]["sets"]]
    num_parameters, num_trained = (event["model"].get(key) for key in ("num_parameters", "num_trained"))
    trained = "" if num_trained is None else f", {_count(num_trained, 10)} of them trained"
    yield f"{config['name']}: {_count(num_parameters, 10)} parameters{trained}, {_steps(plan['total_steps'])}"
    if lineage := event.get("lineage"):
        yield f"  {beginning(lineage)}"
    yield f"  run        {run_dir}"
    yield f"  sources    {', '.join(config['sources'])}"
    yield f"  eval sets  {', '.join(sets)}"
    name_width = max(len(phase["name"]) for phase in plan["phases"])
    step_width = len(str(plan["total_steps"]))
    shapes = shapes_of(plan["phases"])
    for phase, shape in zip(plan["phases"], shapes, strict=True):
        bounds = f"[{phase['start']:>{step_width}}, {phase['end']:>{step_width}})"
        mixture = _mixture(phase["mixture"])
        yield f"  phase      {phase['name']:<{name_width}} {bounds} {mixture}{f' | {shape}' if shape else ''}"
    if (wandb := config.get("logging", {}).get("wandb")) and wandb["mode"] == "offline":
        folder = shlex.quote(str(run_dir / "wandb"))
        yield f"  wandb      offline, {folder}; later: {program('wandb')} sync {folder}/offline-run-*"
    yield from _warnings(event)


def _warnings(event: dict[str, Any]) -> Iterator[str]:
    return (f"  warning    {warning}" for warning in event.get("warnings", []))


def eval_lines(event: dict[str, Any], total_steps: int, seconds_left: float | None) -> Iterator[str]:
    """The two lines of an `eval` event, and one for each average; a set that was not measured is left out."""
    yield " | ".join(
        (
            f"step {event['step']}/{total_steps} ({event['progress_pct']:.1f}%)",
            event["timestamp"][11:19],
            _duration(event["elapsed_s"]),
            f"ETA {'?' if seconds_left is None else _duration(seconds_left)}",
            f"{_count(event['tokens_processed'], 10)} tokens",
        )
    )
    losses = {name: f"{name} {_loss(loss)}" for name, (loss, _) in eval_sets(event).items()}
    val = [losses.pop("val")] if "val" in losses else []
    yield "  " + " | ".join([*val, f"lr {event['lr']:.2e}", f"phase: {event['phase']}", *losses.values()])
    for average, sets in eval_averages(event).items():
        yield f"  {average}: " + " | ".join(f"{name} {_loss(loss)}" for name, (loss, _) in sets.items())
    for note in event.get("notes", []):
        yield f"  {note}"


def sample_lines(event: dict[str, Any]) -> Iterator[str]:
    """A line for each sample of a `generation` event, its beginning where it is long."""
    for sample in event["samples"]:
        prompt, text = (printable(sample[key]) for key in ("prompt", "text"))
        prompt = prompt if len(prompt) <= _LONGEST_PROMPT else f"...{prompt[-_LONGEST_PROMPT:]}"
        text = text if len(text) <= _LONGEST_SAMPLE else f"{text[:_LONGEST_SAMPLE]}..."
        yield f"  sample at step {event['step']}: {prompt} | {text}"


def printable(text: str, also: str = "") -> str:
    """What a model or a document says, with nothing in it that steers a terminal; `also`: what else stays as it is."""
    return "".join(c if c.isprintable() or c in also else repr(c)[1:-1] for c in text)


def progress_line(row: dict[str, Any], total_steps: int) -> str:
    """The sign of life of a metrics row."""
    return (
        f"step {row['step']}/{total_steps} | loss {_loss(row['loss'])} | lr {row['lr']:.1e} | "
        f"{_count(row['tokens_per_sec'], 100)} tok/s | phase {row['phase']}"
    )


def skipped_line(row: dict[str, Any], before: dict[str, int]) -> str | None:
    """What a metrics row says of updates that were skipped since the counts were `before`; None where none was."""
    now = _skipped(row)
    more = {key: now[key] - before.get(key, 0) for key in now}
    if not more.get("skipped_updates"):
        return None
    num = more["skipped_updates"]
    return f"skipped {num} update{'s' if num > 1 else ''} up to step {row['step']}: {_why(more)}"


def _skipped(line: dict[str, Any]) -> dict[str, int]:
    keys = ("skipped_updates", "skipped_nonfinite", "skipped_outliers")
    return {key: line[key] for key in keys if key in line}


def _why(skipped: dict[str, int]) -> str:
    """The reasons of skipped updates, each with its count."""
    nonfinite, outliers = skipped.get("skipped_nonfinite", 0), skipped.get("skipped_outliers", 0)
    reasons = {
        "not finite": nonfinite,
        "beyond the window's standard deviations": outliers,
        "without a scored target": skipped["skipped_updates"] - nonfinite - outliers,
    }
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)


def verdict(event: dict[str, Any]) -> str | None:
    """The line of an event that says something happened; None for the others."""
    step = event["step"]
    match event["event"]:
        case "phase_switch":
            switch = f"phase switch at step {step}: {event['from_phase']} → {event['new_phase']}"
            return " | ".join([switch, *_moves(event), *shape_moves(event), f"lr {event['lr']:.2e}"])
        case "schedule_edit":
            edit = f"schedule edit at step {step}: {event['reason']}"
            return " | ".join(
                [edit, *_moves(event), *_left_out(event), f"{event['phase']} until step {event['until']}"]
            )
        case "eval_regression":
            action = f" | {event['action']}" if event["action"] else ""
            new = [pair for pair in event["offenders"] if pair["first_step"] == step]
            since = {pair["set"]: pair["first_step"] for pair in event["offenders"] if pair["first_step"] < step}
            old = [f"{name} (since step {first})" for name, first in since.items() if name not in _sets(new)]
            still = f"; still worse: {', '.join(old)}" if old else ""
            return f"eval regression at step {step}: {_offenders(new)}{still}{action}"
        case "eval_recovered":
            return f"eval recovered at step {step}: {_offenders(event['offenders'])}"
        case "gold_checkpoint":
            known = event["previous"] is not None
            previous = f", before {_loss(event['previous'])} at step {event['previous_step']}" if known else ""
            return f"gold checkpoint at step {step}: {event['metric']} {_loss(event['value'])}{previous}"
        case "gold_blocked":
            return f"gold blocked at step {step}: {event['reason']}"
        case "checkpoint_failed":
            last, then = event["last_good_step"], event["next_try_step"]
            good = "there is no good one yet" if last is None else f"the last good one is of step {last}"
            again = "" if then is None else f"; the next is tried at step {then}"
            return f"checkpoint failed: {event['path']} was not saved: {event['why']}; {good}{again}"
        case "rollback":
            number, first, steps = event["number"], event["first_bad_step"], event["skip_steps"]
            told = f"rollback {number} of {event['max']} at step {event['told_at_step']}, to step {step}"
            return f"{told}: {event['reason']} | the data of {steps} steps from step {first} on are passed over"
        case "diverged":
            good = event["last_good_step"]
            kept = "there is no checkpoint" if good is None else f"the last good checkpoint is of step {good}"
            return f"diverged at step {step}: {event['reason']} | {kept}"
        case "resume":
            back = [
                f"step {d['step']} is damaged ({d['why']}), moved to {d['moved_to']}" for d in event.get("damaged", [])
            ]
            back += [
                f"gold/{gold['step']} is lost ({gold['why']}): the search for a gold checkpoint begins anew"
                for gold in event.get("gold_lost", [])
            ]
            return "; ".join([f"resumed at step {step} of {event['plan']['total_steps']}", *back])
    return None


def _moves(event: dict[str, Any]) -> list[str]:
    """The sources whose share changes."""
    before, after = event["mixture_before"], event["mixture_after"]
    return [
        f"{source} {before.get(source, 0.0):.4g} → {after.get(source, 0.0):.4g}"
        for source in dict.fromkeys([*before, *after])
        if before.get(source, 0.0) != after.get(source, 0.0)
    ]


def shape_moves(event: dict[str, Any]) -> list[str]:
    """What a phase switch changes of the updates' shape, and what it passes over for that."""
    before, after = event.get("shape_before", {}), event.get("shape_after", {})
    moves = []
    for key, name in _SHAPE_NAMES.items():
        was, now = before.get(key), after.get(key)
        if was != now:
            moves.append(f"{name} {_of_shape(was)} → {_of_shape(now)}")
    return [*moves, *_left_out(event)]


def _left_out(event: dict[str, Any]) -> list[str]:
    """What a switch or an edit passes over, to begin a longer sequence."""
    passed_over = event.get("passed_over")
    left = ", ".join(f"{source} {tokens:,}" for source, tokens in (passed_over or {}).items())
    return [f"passed over {left} tokens"] if left else []


def _of_shape(number: float | None) -> str:
    if number is None:
        return "the model's own"
    return f"{number:,.4g}" if number < 1000 else f"{number:,.10g}"


_SHAPE_NAMES = {
    "seq_len": "seq_len",
    "batch_size": "batch_size",
    "grad_accum": "grad_accum",
    "rope_theta": "rope theta",
    "lr_scale": "rates x",
}


def tensorboard_link(run_dir: Path) -> str:
    """The chart of every eval set of this run, with TensorBoard serving the folder above it."""
    run_filter = "^" + re.sub(r"([^\w-])", r"\\\1", run_dir.resolve().name) + "/"
    query = f"runFilter={quote(run_filter, safe='')}&tagFilter=eval_sets&smoothing=0"
    return f"http://127.0.0.1:6006/?{query}#timeseries"


def _sets(pairs: Iterable[dict[str, Any]]) -> set[str]:
    return {pair["set"] for pair in pairs}


def _offenders(offenders: Iterable[dict[str, Any]]) -> str:
    """Each set that an event names with what it is compared to, and how the mixture changed since the newest."""
    sets: dict[str, list[dict[str, Any]]] = {}
    for pair in offenders:
        sets.setdefault(pair["set"], []).append(pair)
    lines = []
    for name, pairs in sets.items():
        names: dict[int, list[str]] = {}  # of the baselines at a step; they are one eval and one difference
        for pair in pairs:
            names.setdefault(pair["baseline_step"], []).append(pair["baseline"])
        by_step = {pair["baseline_step"]: pair for pair in pairs}
        changes = [f"{_change(by_step[s])} against {listed(names[s])} at step {s}" for s in sorted(names)]
        lines.append(f"{name} {_loss(pairs[0]['loss'])}: {', '.join(changes)}")
        newest = by_step[max(names)]
        if moved := [f"{s} {then:.4g} → {now:.4g}" for s, (then, now) in newest["mixture_change"].items()]:
            lines[-1] += f" (since step {newest['baseline_step']}: {', '.join(moved)})"
    return "; ".join(lines)


def _change(pair: dict[str, Any]) -> str:
    """A difference in nats per token and its interval, where there is one."""
    delta, low, high = (number(value) for value in (pair["delta"], *pair["interval"]))
    if not math.isfinite(delta):
        return "not finite"
    return f"{delta:+.4f} (95 % {low:+.4f} to {high:+.4f})"


def _mixture(mixture: dict[str, float]) -> str:
    return ", ".join(f"{source} {share:.4g}" for source, share in mixture.items() if share)


def program(name: str) -> str:
    """What to type for a program of this environment, which need not be on the PATH."""
    path = Path(sys.executable).with_name(name)
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _gold(event: dict[str, Any]) -> str:
    return f"step {event['gold_step']}, {event['gold_metric']} {_loss(event['gold_value'])}"


def _loss(value: Any) -> str:
    number_or_none = number(value)
    return "-" if number_or_none is None else f"{number_or_none:.4f}"


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{int(seconds)}s"
    return f"{int(seconds // 60)}m" if seconds < 3600 else f"{seconds / 3600:.1f}h"


def _count(value: float, decimal_below: float) -> str:
    """The number in thousands, millions or billions, with one decimal below `decimal_below` of them."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.1f}{unit}" if scaled < decimal_below else f"{scaled:.0f}{unit}"
    return f"{value:.0f}"
