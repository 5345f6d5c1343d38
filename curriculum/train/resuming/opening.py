"""How a run directory is opened: what the run continues from, and what speaks against it.

Nothing is written but the lock, and the name of a checkpoint that lost it as the run was killed.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from curriculum.config import Config
from curriculum.data.config_stores import own_sources
from curriculum.data.prepare import prepare_tokenizer
from curriculum.data.sources import would_read
from curriculum.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from curriculum.disk.append import tell
from curriculum.disk.lock import RunLock
from curriculum.disk.manifest import damage
from curriculum.errors import InputError
from curriculum.find_checkpoint import read_ledger, saved_steps
from curriculum.record.events import EVENTS
from curriculum.record.wandb_log import check_wandb
from curriculum.record.wording import counted
from curriculum.run_directory import RunDirectory, put_back_replaced, step_folders
from curriculum.scheduling import NO_PAST, Past, check_schedule
from curriculum.train.resuming import going_back, ledger
from curriculum.train.resuming.edits import find_edit
from curriculum.train.resuming.resumed import Resumed


def claim(
    directory: RunDirectory, lock: RunLock, resume: str | int | None
) -> tuple[Resumed | None, dict[str, Any] | None]:
    """Lock the run of a directory, if there is one, and find what it continues from, as `going_back.to_continue`.

    If there is nothing to resume, a line on stderr says so: the folder may not be the one that was meant. Raises
    InputError if the directory is unusable, if it holds a run and `resume` is None, if the checkpoint asked for is not
    there, or all that the run had are gone, or if another process trains the run.
    """
    directory.check_usable()
    if directory.holds_run() and resume is None:
        raise InputError(
            f"{directory.path}: already holds a run; continue it with --resume latest, or choose another --run-dir "
            "(in Python resume='latest' and run_dir)"
        )
    if directory.holds_run():
        lock.take()
        put_back_replaced(directory.checkpoints)
    resumed, under_way = going_back.to_continue(directory, resume)
    if resume is not None and resumed is None and under_way is None:
        told = nothing_to_resume(directory)
        if not step_folders(directory.checkpoints):  # damaged ones are reported
            tell(told)
    if under_way is None:
        for line in resumed_from_copy(directory, resume, resumed):
            tell(line)
    return resumed, under_way


def resumed_from_copy(directory: RunDirectory, resume: str | int | None, resumed: Resumed | None) -> list[str]:
    """A line if "latest" is an older copy beside a `checkpoints/` that holds nothing: its disk may be away."""
    saved = saved_steps(directory) if resume == "latest" and resumed is not None else []
    if not saved or saved[-1] <= resumed.step or step_folders(directory.checkpoints):
        return []
    copy = resumed.folder.relative_to(directory.path)
    return [
        f"{directory.checkpoints}: holds no checkpoint, though the record has some up to step {saved[-1]}: the newest "
        f"is {copy}; if they were moved, or their disk is away, stop, and put them back"
    ]


def check(config: Config, past: Past = NO_PAST) -> None:
    """Raise InputError for problems of a config that can be found before anything is prepared."""
    check_schedule(config, past)
    check_wandb(config.logging.wandb)


def check_apart(config: Config, directory: RunDirectory) -> None:
    """Raise InputError if a run would replace files of others, or write what is read as the text of its sources."""
    if replaced := directory.files_of_others(config):
        raise InputError(
            f"--run-dir {directory.path}: holds no run, but {', '.join(replaced)}, which a run here would replace; "
            "choose another folder, or move what is there away"
        )
    written = [directory.path / EVENTS, directory.checkpoints / "0/manifest.json"]
    for name, source in {**own_sources(config), **config.sources}.items():
        if any(would_read(source, path) for path in written):
            raise InputError(
                f"--run-dir {directory.path}: lies in {source.location}, whose files are the text of {name}, so the "
                "run's own would be read as text; choose another folder, or leave it out with a glob"
            )


def nothing_to_resume(directory: RunDirectory) -> str:
    """The message when a run was to be resumed, but begins.

    Raises InputError if by its record there were checkpoints, of which there are not even damaged ones: it would begin
    anew only because the disk that they are on is away.
    """
    saved = saved_steps(directory)
    if saved and not (step_folders(directory.checkpoints) or _were_set_aside(directory, saved)):
        raise InputError(
            f"{directory.checkpoints}: holds no checkpoint, nor do {directory.gold} and {directory.kept}, but the "
            f"record has those of {counted(len(saved), 'step')} up to {saved[-1]}: if they were moved, or their disk "
            f"is away, put them back; to begin at step 0, give another --run-dir, or move {directory.path / EVENTS} "
            "away"
        )
    there = "the run in it has no checkpoint" if directory.holds_run() else "holds no run"
    return f"{directory.path}: {there}: nothing to resume; the run starts at step 0"


def _were_set_aside(directory: RunDirectory, steps: Iterable[int]) -> bool:
    """Whether a start that was killed moved checkpoints to `superseded/`, before it did the same with the record."""
    last_written = (directory.path / EVENTS).stat().st_mtime
    places = [directory.superseded / str(step) for step in steps]
    return any(place.exists() and place.stat().st_ctime >= last_written for place in places)


def tell_new_name(config: Config, directory: RunDirectory) -> None:
    """Say on stderr that the config has another name than the run: perhaps it is another run's."""
    was = directory.resolved()["name"] if directory.has_config else config.name
    if was != config.name:
        by = config.origin.options.get("name", config.origin.file)
        tell(f"{directory.path}: is the run {was}; {by} names it {config.name}")


def check_ahead(config: Config, directory: RunDirectory, step: int, past: Past) -> None:
    """Raise InputError if the config's schedule does not resolve for a run that continues from `step`.

    The error names the newest earlier checkpoint that would do for this config, if there is one; best one from before
    the rate began to decay, as `longer_from` does.
    """
    try:
        check_schedule(config, past)
    except InputError as error:
        found = [(s, folder) for place in directory.places for s, folder in step_folders(place).items() if s < step]
        last = past.segments[-1].lr[-1] if past.segments else None
        decaying = last is not None and last.last < last.first and last.shape != "inverse_sqrt"
        best_first = sorted(found, key=lambda it: (not decaying or it[0] <= last.start, it), reverse=True)
        earlier = next((s for s, folder in best_first if _would_do(config, s, folder)), None)
        if earlier is None:
            raise
        fix = f"or resume from an earlier checkpoint and retrain the steps after it: --resume {earlier}"
        raise InputError(*error.problems, details=[*error.details, fix]) from None


def _would_do(config: Config, step: int, checkpoint: Path) -> bool:
    """Whether a run can continue from a checkpoint with a config, as far as is known before it is built."""
    try:
        check_schedule(config, find_edit(config, read_ledger(checkpoint)).past)
    except InputError:
        return False
    return step < config.train.steps and damage(checkpoint) is None


def kept_tokenizer(directory: RunDirectory, config: Config) -> Tokenizer | None:
    """The run's own tokenizer, so that new sources train none; None if it has none or the config asks for another."""
    kept = directory.keeps_tokenizer(config.to_json()["tokenizer"])
    return load_tokenizer(directory.tokenizer) if kept else None


def tokenizer_to_go_on(
    directory: RunDirectory, config: Config, store_dir: str | Path, saved: Mapping[str, Any]
) -> Tokenizer:
    """The tokenizer of a run that continues from the ledger `saved`: the one kept with it, or the config's.

    Raises InputError if that is another than the run was trained with, before any text is prepared with it.
    """
    tokenizer = kept_tokenizer(directory, config)
    tokenizer = tokenizer or prepare_tokenizer(config.tokenizer, config.sources, store_dir, config.chat)
    if tokenizer.fingerprint != saved["tokenizer"]:
        raise config.error([ledger.OTHER_TOKENIZER])
    return tokenizer


def damaged(directory: RunDirectory, resumed: Resumed | None) -> list[tuple[int, Path, str]]:
    """(step, folder, why) of the damaged ones in `checkpoints/`; the one that the run continues from has verified.

    Of older ones only the ledger is read: it says which golds must stay.
    """
    found = []
    for step, folder in step_folders(directory.checkpoints).items():
        older = resumed is not None and step < resumed.step
        verified = resumed is not None and folder == resumed.folder
        if not verified and (why := damage(folder, "ledger/" if older else "")):
            found.append((step, folder, why))
    return found
