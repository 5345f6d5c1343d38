"""What a branch takes over from its trunk: the record, checkpoints, evals and means up to its first checkpoint."""

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from curriculum.config import Config
from curriculum.disk.durable import clear_killed, rename_whole, scratch, write_whole
from curriculum.disk.manifest import damage, update_manifest
from curriculum.errors import InputError
from curriculum.find_checkpoint import MEAN_SIDECAR, checkpoint_steps, read_ledger
from curriculum.record.board import Board
from curriculum.record.events import EVENTS, METRICS, Record, plain, read_events, read_metrics, unstamped
from curriculum.run_directory import RunDirectory, link_or_copy, names_in, read_json, write_tokenizer
from curriculum.train.fields import branch_edit, derived
from curriculum.train.resuming import ledger
from curriculum.train.setup import Setup


@contextmanager
def made_whole(directory: RunDirectory, trunk: RunDirectory) -> Iterator[RunDirectory]:
    """A temporary directory beside `directory`, to make the branch in: renamed at the end, or removed on an error.

    Raises InputError for what the disk refuses, and if another process has made the directory meanwhile.
    """
    target = Path(os.path.abspath(directory.path))
    clear_killed(target.parent, target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch(target.parent, target) as folder:
            made = RunDirectory(folder / target.name)  # TensorBoard's files name the run by its folder
            yield made
            rename_whole(made.path, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # it was new when the branch began
            raise InputError(f"--run-dir {directory.path}: is not empty any more; choose a new folder") from None
        raise InputError(
            f"{trunk.path}: could not be copied to {directory.path}: {error}; fix that (free disk "
            "space, grant write permission) and try again"
        ) from None


def copy_trunk(
    made: RunDirectory,
    trunk: RunDirectory,
    setup: Setup,
    step: int,
    checkpoint: Path,
    recorded_after: Sequence[Mapping[str, Any]],
    rollbacks: Sequence[Mapping[str, Any]],
) -> None:
    """Write the branch into `made`, as of the trunk's `checkpoint` of `step`.

    `recorded_after` are the events of that step that the trunk recorded after saving it. `rollbacks` are those that
    concern the branch; they replace the rollbacks of every ledger, which would else name data that the branch does not
    pass over.
    """
    saved = read_ledger(checkpoint)
    made.create(setup.config, derived(setup), plain(setup.model.architecture))
    write_tokenizer(made, setup.corpus.tokenizer)
    for measured, path in trunk.all_results():
        if measured <= step:
            link_or_copy(made.results(measured), path)
    copy_means(made, trunk, step)
    if trunk.frozen.exists():
        link_or_copy(made.frozen, trunk.frozen)
    events = [(event["event"], unstamped(event)) for event in recorded_after]
    if setup.course.branched_from["step"] == step:  # else it is recorded when the branch reaches that step
        events.append(("schedule_edit", branch_edit(setup)))
    offsets = _copy_record(made, trunk, setup, saved, events)
    now = {**ledger.scheduled(setup), "branched_from": setup.course.branched_from}
    _copy_checkpoint(made.checkpoints / str(step), checkpoint, {**now, "offsets": offsets}, rollbacks)
    before = {key: value for key, value in now.items() if key != "settings"}  # theirs stay the trunk's
    folders = [(made.gold, trunk.gold), (made.kept, trunk.kept)]
    if setup.config.averages.phase_mean is not None:  # the phase's mean may need them
        folders.append((made.checkpoints, trunk.checkpoints))
    for to, place in folders:
        for s in checkpoint_steps(place):
            if s <= step and not (to / str(s)).exists():
                _copy_checkpoint(to / str(s), place / str(s), now if s == step else before, rollbacks)
    if setup.config.logging.tensorboard:
        _draw(made, setup.config)


def _copy_record(
    made: RunDirectory,
    trunk: RunDirectory,
    setup: Setup,
    saved: Mapping[str, Any],
    events: Sequence[tuple[str, Mapping[str, Any]]],
) -> dict[str, int]:
    """Take over the record up to the checkpoint of the ledger `saved`, and add `events`; give its length in bytes."""
    for name in (EVENTS, METRICS):
        with open(trunk.path / name, "rb") as file:
            (made.path / name).write_bytes(file.read(saved["offsets"][name]))
    if not events:
        return saved["offsets"]
    record = Record(made.path, setup.course.tokens_at, saved["elapsed_s"])
    for name, event in events:
        record.event(name, saved["step"], **event)
    offsets = record.offsets()
    record.close()
    return offsets


def copy_means(made: RunDirectory, trunk: RunDirectory, step: int) -> None:
    """Take over the means of phases that end at or before `step`. A damaged one is reported and left out."""
    for name in names_in(trunk.averages):
        folder = trunk.averages / name
        if name.startswith("."):  # one that is being written
            continue
        if why := damage(folder, MEAN_SIDECAR):
            print(f"{folder}: is damaged: {why}; the branch is made without it", file=sys.stderr)
        elif read_json(folder / MEAN_SIDECAR)["end"] <= step:
            link_or_copy(made.averages / name, folder)


def _copy_checkpoint(
    to: Path, checkpoint: Path, changed: Mapping[str, Any], rollbacks: Sequence[Mapping[str, Any]]
) -> None:
    link_or_copy(to, checkpoint)
    saved = read_ledger(checkpoint)
    history = {**saved["history"], "rollbacks": list(rollbacks)}
    write_whole(to / "ledger" / "metadata", json.dumps({**saved, **changed, "history": history}))
    update_manifest(to, ["ledger/metadata"])


def _draw(made: RunDirectory, config: Config) -> None:
    """Write TensorBoard files from the record that was taken over, as if one run had made it in one go."""
    board = Board(made.path, of_whole_record=True)
    for line in sorted([*read_metrics(made.path), *read_events(made.path)], key=lambda line: line["step"]):
        if line.get("event") == "training_start":
            line = {**line, "config": config.to_json()}
        board.event(line) if "event" in line else board.row(line)
    board.close()
