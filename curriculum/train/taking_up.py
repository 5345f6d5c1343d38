"""How a run directory is taken up by a run whose parts are built: its state, what is moved away, and its record."""

import errno
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from curriculum.disk.append import discard, how_to_make_room, tell
from curriculum.disk.durable import sync
from curriculum.disk.lock import RunLock
from curriculum.errors import InputError
from curriculum.record.board import Board
from curriculum.record.commands import resume_command
from curriculum.record.console import Console
from curriculum.record.events import (
    EVENTS,
    METRICS,
    Record,
    View,
    check_offsets,
    cut_record,
    last_row,
    plain,
    read_events,
    read_events_before_damage,
)
from curriculum.record.queries import stopping_alarm
from curriculum.record.wandb_log import WandbLog
from curriculum.record.wording import MOST_NAMED, first_of
from curriculum.run import load_run
from curriculum.run_directory import RunDirectory, write_tokenizer
from curriculum.train import fields
from curriculum.train.averages import adopt_parts, set_aside_means_after
from curriculum.train.checkpoints.best import BadGolds, BestCheckpoints, bad_golds
from curriculum.train.checkpoints.folder import Checkpoints, baselines_in
from curriculum.train.history import History
from curriculum.train.processes.together import check_in_each, count, from_first, is_first
from curriculum.train.results import Results
from curriculum.train.resuming.going_back import Rollback
from curriculum.train.resuming.opening import damaged
from curriculum.train.resuming.resumed import Resumed
from curriculum.train.setup import Setup
from curriculum.train.step import TrainState

_SEEN_SECONDS = 30.0  # by which a network folder may show a file late


def finished(
    setup: Setup, directory: RunDirectory, checkpoints: Checkpoints, resumed: Resumed, edit: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return the `training_complete` event of a run that has nothing left to train, and say so; None for other runs.

    `edit`: what the config changed of it, which is said to come too late.
    """
    step, own = resumed.step, resumed.folder.parent == directory.checkpoints
    if not own or not step == setup.course.total_steps == max(checkpoints.steps(), default=None):
        return None
    run = load_run(directory.path)
    if complete := run.complete:
        added = [name for name in setup.corpus.evalsets if name not in resumed.ledger["history"]["eval_sets"]]
        unsaid = f" Not measured: {', '.join(added)} (needs more train.steps)." if added else ""
        if setup.config.train.steps > step:
            unsaid += " It ended before train.steps because a source with on_exhaust: stop ran out."
        # A config that ended the run where it stood differs from the ledger, but changes nothing.
        changes = [] if edit is None or plain(setup.config.to_json()) == run.config_json else edit["changes"]
        if any(not change["path"].startswith("evalsets.") for change in changes):
            unsaid += " The changes in the config have no effect: all steps are trained."
        try:
            print(f"{directory.path} is finished: {step} of {step} steps. Nothing to do.{unsaid}", flush=True)
        except (OSError, ValueError):  # its reader is gone, its disk full, or it is closed: the run is finished
            discard(sys.stdout)
    return complete


def state_as_of(setup: Setup, directory: RunDirectory, resumed: Resumed | None) -> tuple[TrainState, History, BadGolds]:
    """What the run continues from: its state, its history without lost golds, and what is wrong with its golds.

    Nothing on disk is changed, so that InputError leaves the directory as it was.
    """
    if resumed is None:
        return setup.states.first(), History.begin(setup), []
    _, folder, saved = resumed
    from_first(lambda: check_offsets(directory.path, saved["offsets"]))
    state = setup.states.restored(folder, tuple(saved["sources"]), saved["window_steps"])
    history = History.of(saved, baselines_in(folder))
    bad = from_first(lambda: bad_golds(directory, resumed))
    gold = history.gold.without({gold for gold, _, lost in bad if lost}).minimising(setup.config.evalsets.gold.minimise)
    return state, replace(history, gold=gold), bad


@contextmanager
def writable(directory: RunDirectory) -> Iterator[None]:
    """Raise InputError if a run cannot begin, or continue, because its folder cannot be written to."""
    try:
        yield
    except OSError as error:
        fix = f"{how_to_make_room(error)}, grant write permission"
        if error.errno == errno.EXDEV:
            fix = f"its folder is on another disk than {directory.path}: put all of the run on one"
        raise InputError(
            f"{error.filename or directory.path}: {error.strerror or error}: nothing was trained; fix that ({fix}), "
            "then start again, or continue with --resume latest"
        ) from None


def take_up(
    directory: RunDirectory, lock: RunLock, checkpoints: Checkpoints, resumed: Resumed | None, rollback: Rollback | None
) -> list[dict[str, Any]]:
    """Lock a directory that had no run to lock before, and move damaged checkpoints to `superseded/`.

    `rollback`: the one that was under way; without it nothing may be left of one. Returns {step, why, moved_to} of each
    damaged checkpoint. Raises InputError if another process has begun a run here, or not all see the directory.
    """
    moved = from_first(lambda: _locked(directory, lock, checkpoints, resumed))
    check_shared(lock)
    if rollback is None and is_first():
        directory.going_back.unlink(missing_ok=True)
    return moved


def _locked(
    directory: RunDirectory, lock: RunLock, checkpoints: Checkpoints, resumed: Resumed | None
) -> list[dict[str, Any]]:
    directory.check_folders()
    if not lock.held:
        lock.take()
        if directory.holds_run():
            raise InputError(f"{directory.path}: another process began a run here; choose another --run-dir")
    moved = []
    for s, folder, why in damaged(directory, resumed):
        to = checkpoints.set_aside(s).relative_to(checkpoints.directory.parent)
        moved.append({"step": s, "why": why, "moved_to": str(to)})
        tell(f"{folder}: is damaged: {why}; moved to {directory.path / to}")
    if moved:
        where = "no checkpoint verifies: the run starts over"
        if resumed is not None:
            where = f"the run continues from step {resumed.step}"
        tell(f"{directory.path}: {where}")
    return moved


def check_shared(lock: RunLock) -> None:
    """Raise InputError in every process if one does not see the folder in which process 0 has taken the lock."""
    if count() == 1:
        return

    def written() -> str:
        sync(lock.path)  # on a network disk others see only what has left this machine's cache
        return lock.path.read_text()

    said = from_first(written)

    def unseen() -> list[str]:
        until = time.monotonic() + _SEEN_SECONDS
        while not lock.path.is_file() or lock.path.read_text() != said:
            if time.monotonic() > until:
                return [
                    f"{lock.path.parent.absolute()}: on {socket.gethostname()} (pid {os.getpid()}) this is not the "
                    "folder that process 0 has the run in; give all processes the same --run-dir, on a disk that all "
                    "of them see"
                ]
            time.sleep(0.1)
        return []

    check_in_each(unseen)


def directory_as_of(
    setup: Setup,
    directory: RunDirectory,
    checkpoints: Checkpoints,
    resumed: Resumed | None,
    history: History,
    bad: BadGolds,
) -> BestCheckpoints:
    """Bring the directory to what the run continues from, whose `history` and bad golds are given; return its golds.

    What came after it is moved away, and the config, model and tokenizer that continue from there are written. The
    record is cut back after that: otherwise a kill could leave checkpoints newer than the record.
    """
    last = -1 if resumed is None else resumed.step
    if resumed is not None:
        checkpoints.adopt(resumed.folder)
        adopt_parts(setup.config, directory, checkpoints, resumed.step)
    checkpoints.set_aside_after(last)
    best = BestCheckpoints(directory, last, bad)
    from_first(lambda: _files_as_of(setup, directory, last, history))
    return best


def _files_as_of(setup: Setup, directory: RunDirectory, last: int, history: History) -> None:
    """Even at step `last` a set may have been measured after the checkpoint: one added when it was taken up there."""
    directory.set_aside_evals_after(last)
    Results(directory).keep_only(last, history.watch.measured_at(last))
    # Of an eval that was left and is done again, the mean too: making it tells which checkpoints it lacks.
    set_aside_means_after(directory, last - 1 if history.eval_left else last)
    derived = {**fields.derived(setup), "store_dir": setup.store_dir, "own_optimizer": setup.config.optim.users_own}
    with suppress(OSError):  # of a folder that was removed
        derived["started_in"] = os.getcwd()
    directory.create(setup.config, derived, plain(setup.model.architecture))
    write_tokenizer(directory, setup.corpus.tokenizer)


def before(directory: RunDirectory) -> fields.Before:
    """What the record of a run that is taken up tells, before it is cut back."""
    row, alarm = None, None
    events = read_events_before_damage(directory.path)
    with suppress(InputError):
        row = last_row(directory.path)
    with suppress(InputError):
        alarm = stopping_alarm(events, max([row["step"] if row else 0, *(e["step"] for e in events[-1:])]))
    software = next((e["software"] for e in reversed(events) if "software" in e), None)
    return fields.Before(row and row["step"], software, alarm)


def record_as_of(
    setup: Setup,
    directory: RunDirectory,
    resumed: Resumed | None,
    record: Record | None,
    at_end: ExitStack,
    own_views: Sequence[View],
) -> Record:
    """The record, cut back to what the run continues from.

    `record` is the one that this process already has open; None: it is opened, with `own_views` beside the program's,
    and closed by `at_end`.
    """
    offsets = {EVENTS: 0, METRICS: 0} if resumed is None else resumed.ledger["offsets"]
    if record is not None:
        record.cut_back(offsets)
        return record
    elapsed_before_s = 0.0 if resumed is None else resumed.ledger["elapsed_s"]
    tokens_at = setup.course.tokens_at
    if not is_first():
        return Record(None, tokens_at, elapsed_before_s)
    origin = setup.config.origin
    go_on = None
    if origin.text is not None:
        given = {"own_model": setup.config.model is None, "own_optimizer": setup.config.optim.users_own}
        go_on = partial(resume_command, origin.file, directory.path, setup.store_dir, **given)
    views: list[View] = [Console(directory.path, go_on, device_lines=setup.device_lines)]
    if setup.config.logging.tensorboard:
        views.append(Board(directory.path))
    if wandb := setup.config.logging.wandb:
        views.append(WandbLog(directory.path, wandb, setup.config.to_json()))
    cut_record(directory.path, offsets)
    if resumed is not None:
        _tell_missing_results(directory)
    record = Record(directory.path, tokens_at, elapsed_before_s, [*views, *own_views])
    at_end.callback(record.close)
    return record


def _tell_missing_results(directory: RunDirectory) -> None:
    """Say on stderr of which evals of the record the windows are gone, as in a copy made while the run was saved."""
    there = {step for step, _ in directory.all_results()}
    measured = dict.fromkeys(e["step"] for e in read_events(directory.path) if e["event"] == "eval")
    if missing := [str(step) for step in measured if step not in there]:
        tell(
            f"{directory.path}: evals/ lacks the windows of the evals at step {first_of(missing, MOST_NAMED)}, which "
            "are in the record; restore them from what this is a copy of: figures computed from them will be missing"
        )
