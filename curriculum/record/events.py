"""The record of a run: two append-only files of JSON lines, `events.jsonl` and `metrics.jsonl`.

Every line is one complete JSON object. Console, TensorBoard and reports are views of these lines and
see nothing else, so whatever they show can be read again from the files.

Numbers: a float at the top level of a line is rounded to six decimals (losses are nats per token), except `lr` and
`grad_norm`, whose scales differ; nested values (config, plan, mixtures) are kept as given.
JSON has no literal for a float that is not finite, so such a float is written as the string "NaN",
"Infinity" or "-Infinity"; `number` turns any of them back into a float.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from curriculum.disk.append import Appender, tell
from curriculum.disk.durable import sync, write_whole
from curriculum.errors import InputError, readable
from evalsets.summary import RECORDED, Recorded

EVENTS = "events.jsonl"
METRICS = "metrics.jsonl"
SUPERSEDED = "superseded.jsonl"
_PENDING_CUT = "superseded.pending.json"
EMA, PHASE_MEAN = "ema", "phase_mean"
AVERAGES = (EMA, PHASE_MEAN)  # averages of the parameters; each is a field of an `eval` event that measured it
TAKEN_UP = ("training_start", "resume", "rollback")  # events after which training starts or goes on; they have the plan
STAMPS = ("event", "step", "timestamp", "elapsed_s", "tokens_processed")  # what every event has
_KEYS = {EVENTS: STAMPS, METRICS: ("step",)}  # what every line of a file has
_UNROUNDED = ("lr", "grad_norm")
_TAIL_BYTES = 1 << 16  # more than most metrics rows have


class View(Protocol):
    """Shows the record as it grows. `event` and `row` get a copy, the view's own, of what the line in the file has.

    After a rollback lines of steps that were trained before come again. What a view raises ends the run.
    """

    def event(self, event: dict[str, Any]) -> None: ...

    def row(self, row: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def check_views(given: Any) -> None:
    """Raise InputError unless views are given: a list of objects with the methods of `View`."""
    several = isinstance(given, Sequence)
    if not several or not all(_is_view(view) for view in given):
        raise InputError(f"views: got {given!r}, expected a list of objects with the methods event, row and close")


def _is_view(given: Any) -> bool:
    # Not isinstance: from Python 3.12 on it does not see methods that an object has by __getattr__, as a proxy has.
    return not isinstance(given, type) and all(
        callable(getattr(given, name, None)) for name in ("event", "row", "close")
    )


class Record:
    """Appends to the record of `run_dir` and hands every line to the views.

    run_dir: None in the processes that do not write the record: lines are returned as in the one that does.
    tokens_at: gives the number of tokens consumed by the first `step` updates, which every event has.
    elapsed_before_s: `elapsed_s` when the checkpoint that this process resumes from was saved.
    The views are closed with the record. On a full disk lines are held back: see Appender.
    """

    def __init__(
        self,
        run_dir: Path | None,
        tokens_at: Callable[[int], int],
        elapsed_before_s: float = 0.0,
        views: Iterable[View] = (),
    ):
        self._tokens_at = tokens_at
        self._clock_zero_s = time.monotonic() - elapsed_before_s
        self._views = tuple(views)
        self._run_dir = run_dir
        self._files = self._opened()

    def cut_back(self, offsets: Mapping[str, int]) -> None:
        """Go on from `offsets` in the same process, as after `cut_record`."""
        if self._run_dir is None:
            return
        for file in self._files.values():
            file.close()
        cut_record(self._run_dir, offsets)
        self._files = self._opened()

    def _opened(self) -> dict[str, Appender]:
        if self._run_dir is None:
            return {}
        return {name: Appender(self._run_dir / name) for name in (EVENTS, METRICS)}

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run has taken so far, over all its processes."""
        return time.monotonic() - self._clock_zero_s

    def event(self, name: str, step: int, **fields: Any) -> dict[str, Any]:
        """Append one event, stamped with `step`, the number of updates done, and return it as written."""
        event = self._append(
            EVENTS,
            {
                "event": name,
                "step": step,
                "timestamp": datetime.now().astimezone().isoformat(timespec="seconds"),
                "elapsed_s": round(self.elapsed_s, 3),
                "tokens_processed": self._tokens_at(step),
                **fields,
            },
        )
        for view in self._views:
            view.event(deepcopy(event))
        return event

    def row(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Append one metrics row, which has its own `step`, and return it as written."""
        row = self._append(METRICS, fields)
        for view in self._views:
            view.row(deepcopy(row))
        return row

    def offsets(self) -> dict[str, int]:
        """Size in bytes of each file once every line is on the disk: what a checkpoint stores and `cut_record` takes.

        Raises OSError while the disk does not take them, so that a checkpoint is never ahead of the record.
        """
        return {name: file.sync() for name, file in self._files.items()}

    def close(self) -> None:
        with ExitStack() as closing:  # all of them, whatever one raises; the files first
            for part in (*reversed(self._views), *self._files.values()):
                closing.callback(part.close)

    def _append(self, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        line = {key: _rounded(key, plain(value)) for key, value in fields.items()}
        if self._run_dir is not None:
            self._files[name].write(json.dumps(line, allow_nan=False).encode() + b"\n")
        return line


class DamagedRun(InputError):
    """Something that a view needs of the run in `run_dir` is missing or cannot be read."""

    def __init__(self, run_dir: Path, *problems: str):
        self.run_dir = run_dir
        super().__init__(*problems)


class _Line(dict[str, Any]):
    """A line of a record that was read. Whoever takes a field that it lacks gets a DamagedRun that says where it is.

    So a view needs no fields but those that it shows, of a run of another version too.
    """

    __slots__ = ("_path", "_number")

    def __init__(self, fields: Mapping[str, Any], path: Path, number: int):
        super().__init__(fields)
        self._path, self._number = path, number

    def __missing__(self, key: str) -> Any:
        raise DamagedRun(
            self._path.parent,
            f"{self._path}:{self._number}: {self.get('event', 'the row')} has no {key}; it was edited, or another "
            "version wrote it: restore the file from a copy, or use that version",
        )


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """The events of a run, oldest first; a last line that is still being written is left out.

    Raises DamagedRun, naming file and line, if there is no record or a line is broken, and so does taking a field that
    an event lacks.
    """
    return _read(run_dir, EVENTS)


def read_events_before_damage(run_dir: Path) -> list[dict[str, Any]]:
    """The events up to the first line that is broken: what a resume goes by, which cuts off what follows anyway."""
    events = []
    with suppress(InputError):
        for event in _lines(run_dir, EVENTS):
            events.append(event)
    return events


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics rows of a run, as `read_events`."""
    return _read(run_dir, METRICS)


def read_train_losses(run_dir: Path) -> list[tuple[int, Any]]:
    """(step, training loss as written) of each metrics row; the rows themselves would take ten times the memory."""
    return [(row["step"], row["loss"]) for row in _lines(run_dir, METRICS)]


def last_row(run_dir: Path) -> dict[str, Any] | None:
    """The last complete metrics row, without reading the rest; None if there is none. Raises InputError if broken."""
    path = run_dir / METRICS
    if not path.exists():
        return None
    lines: list[bytes] = []
    with readable(path), open(path, "rb") as file:
        size_bytes = start = file.seek(0, 2)
        tail_bytes = _TAIL_BYTES
        while start > 0 and len(lines) < 2:  # the first line of a tail may lack its beginning
            start = file.seek(max(0, size_bytes - tail_bytes))
            lines = file.read().split(b"\n")[:-1]
            tail_bytes *= 2
    return _checked(lines[-1], path, ": last line", _KEYS[METRICS]) if lines else None


def number(value: Any) -> float | None:
    """The float that a line holds as a number or as one of its strings for NaN and infinity, else None."""
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def unstamped(event: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an event beyond those that every event has."""
    return {key: value for key, value in event.items() if key not in STAMPS}


def eval_key(name: str, metric: str = "loss") -> str:
    """Where an `eval` event has a metric of a set: `val_loss`, `val_bpb`; `eval_code`, `eval_code_bpb`."""
    if name == "val":
        return f"val_{metric}"
    return f"eval_{name}" if metric == "loss" else f"eval_{name}_{metric}"


def eval_sets(event: Mapping[str, Any]) -> dict[str, Recorded]:
    """What an `eval` event says of each set that it measured; the primary set is `val`.

    Numbers are as written: None where there is none, and strings for NaN and infinities.
    """
    named = ["val", *(key.removeprefix("eval_") for key in event if key.startswith("eval_"))]
    more = [metric for metric in RECORDED if metric != "loss"]
    return {
        name: Recorded(loss=event[eval_key(name)], **{m: event.get(eval_key(name, m)) for m in more})
        for name in named
        if eval_key(name, "bpb") in event  # other fields that begin with `eval_` have none: no set may have their name
    }


def eval_averages(event: Mapping[str, Any]) -> dict[str, dict[str, Recorded]]:
    """`eval_sets` for each average of the parameters that an `eval` event measured."""
    return {name: eval_sets(event[name]) for name in AVERAGES if name in event}


def last_gold(events: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The newest `gold_checkpoint` event whose checkpoint was saved.

    None if that checkpoint was lost since, or if the search for the gold began anew, as another metric is minimised.
    """
    failed, lost = set(), set()
    for event in reversed([*events]):
        match event["event"]:
            case "checkpoint_failed":
                failed.add(event["path"])
            case "resume":
                lost |= {gold["step"] for gold in event.get("gold_lost", [])}
            case "schedule_edit" if any(_changes_metric(change) for change in event.get("changes", ())):
                return None
            case "gold_checkpoint" if event["step"] in lost:
                return None
            case "gold_checkpoint" if f"gold/{event['step']}" not in failed:
                return event
    return None


def _changes_metric(change: Mapping[str, Any]) -> bool:
    """Whether a change of the config is of what the gold minimises."""
    if change["path"] != "evalsets.gold":
        return False
    was, now = ((change[key] or {}).get("minimise") for key in ("was", "now"))
    return was != now


def record_name(evalset: str) -> str:
    """The name in the record of an eval set of the config: `val` for the primary one, as in `val_loss`."""
    return "val" if evalset == "primary" else evalset


def config_name(evalset: str) -> str:
    """The name in the config and the files of windows of an eval set of the record."""
    return "primary" if evalset == "val" else evalset


def plain(value: Any) -> Any:
    """The value in JSON's types: numpy scalars and arrays as numbers and lists, floats that are not finite as text."""
    if hasattr(value, "tolist"):  # a numpy value; importing numpy to ask is slow for a view that only reads
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _rounded(name: str, value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) and name not in _UNROUNDED else value


def _read(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [*_lines(run_dir, name)]


def _lines(run_dir: Path, name: str) -> Iterator[dict[str, Any]]:
    path = run_dir / name
    if not path.is_file():
        raise DamagedRun(run_dir, f"{path}: no such file; expected the directory of a run, which holds one")
    with readable(path), open(path, "rb") as file:  # line by line: the rows of a long run are hundreds of megabytes
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield _Line(_checked(line[:-1], path, f":{number}", _KEYS[name]), path, number)


def _checked(line: bytes, path: Path, place: str, keys: tuple[str, ...]) -> dict[str, Any]:
    record = _parsed(line)
    if not isinstance(record, dict) or any(record.get(k) is None for k in keys) or type(record["step"]) is not int:
        expected = f"one JSON object with {', '.join(keys)}"
        raise DamagedRun(
            path.parent,
            f"{path}{place}: got {line[:60].decode(errors='backslashreplace')!r}, expected {expected}; restore the "
            "file from a copy, or resume from a checkpoint before this line",
        )
    return record


def _with_shared_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {sys.intern(key): value for key, value in pairs}


_DECODER = json.JSONDecoder(object_pairs_hook=_with_shared_keys)  # own keys took half of the memory of a line


def _parsed(line: bytes) -> Any:
    """The JSON value of a line, or the line itself as a string if it is not complete JSON."""
    try:
        return _DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        return line.decode(errors="backslashreplace")


def check_offsets(run_dir: Path, offsets: Mapping[str, int]) -> None:
    """Raise InputError if the record is shorter than a checkpoint's offsets, or has a broken event up to there.

    A broken metrics row is only reported on stderr: training needs none, and there may be no other copy of the file.
    """
    check_ends(run_dir, offsets)
    for name in (EVENTS, METRICS):
        if (left := offsets[name]) == 0:
            continue
        path = run_dir / name  # joined once: a long run has a hundred thousand lines
        with open(path, "rb") as file:
            for line_number, line in enumerate(file, start=1):
                try:
                    _checked(line.removesuffix(b"\n"), path, f":{line_number}", _KEYS[name])
                except InputError as error:
                    if name == EVENTS:
                        raise
                    tell(f"{error}; training continues, but report, branch and export to hf read it")
                left -= len(line)
                if left <= 0:
                    break


def check_ends(run_dir: Path, offsets: Mapping[str, int]) -> None:
    """Raise InputError if the record is shorter than a checkpoint's offsets."""
    for name in (EVENTS, METRICS):
        path, offset = run_dir / name, offsets[name]
        size_bytes = path.stat().st_size if path.exists() else 0
        if offset > size_bytes or (offset > 0 and _read_from(path, offset - 1, 1) != b"\n"):
            raise InputError(
                f"{path}: got {size_bytes} bytes, expected a line to end at byte {offset}, as when "
                "the checkpoint was saved; restore the file from a copy, or go on from an earlier checkpoint "
                "(--resume STEP), of which the record may still be whole"
            )


def _read_from(path: Path, offset: int, num_bytes: int = -1) -> bytes:
    with readable(path), open(path, "rb") as file:
        file.seek(offset)
        return file.read(num_bytes)


def cut_record(run_dir: Path, offsets: Mapping[str, int]) -> None:
    """Take the record back to `offsets`: later lines are moved to superseded.jsonl, an entry `{file, line}` for each.

    A kill at any moment neither loses nor doubles a line: calling this again completes what was begun.
    Raises InputError if in a file no line ends at its offset, or if a cut that was begun cannot be read.

    Several files cannot change atomically. So the whole change is first described in one file, which appears
    atomically, and then carried out in steps that can be repeated from the start.
    """
    _finish_cut(run_dir)
    check_ends(run_dir, offsets)
    entries = []
    for name in (EVENTS, METRICS):
        path, offset = run_dir / name, offsets[name]
        cut = _read_from(path, offset).removesuffix(b"\n") if path.exists() else b""
        entries += [{"file": name, "line": _parsed(line)} for line in cut.split(b"\n") if cut]
    if not entries:
        return
    superseded = run_dir / SUPERSEDED
    pending = {
        "superseded_bytes": superseded.stat().st_size if superseded.exists() else 0,
        "offsets": dict(offsets),
        "entries": entries,
    }
    write_whole(run_dir / _PENDING_CUT, json.dumps(pending))
    _finish_cut(run_dir)


def _finish_cut(run_dir: Path) -> None:
    """Carry out a pending cut, from its start; do nothing if there is none."""
    path = run_dir / _PENDING_CUT
    if not path.exists():
        return
    try:
        pending = json.loads(path.read_text())
        num_bytes, offsets, entries = (pending[key] for key in ("superseded_bytes", "offsets", "entries"))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            f"{path}: is damaged, and describes an unfinished cut of the record; restore it from a copy, or delete it: "
            "the next resume makes the cut again"
        ) from None
    with open(run_dir / SUPERSEDED, "ab") as file:
        file.truncate(num_bytes)
        file.writelines(json.dumps(entry).encode() + b"\n" for entry in entries)
        file.flush()
        os.fsync(file.fileno())
    for name, offset in offsets.items():
        with open(run_dir / name, "ab") as file:
            file.truncate(offset)
            os.fsync(file.fileno())
    path.unlink()
    sync(run_dir)
