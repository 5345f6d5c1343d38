"""A new run that shares another one's history up to a step, and goes its own way from there."""

import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from curriculum.branching.between import check_between
from curriculum.branching.copy import copy_trunk, made_whole
from curriculum.config import Config, changed_config, load_config
from curriculum.disk.lock import RunLock
from curriculum.disk.manifest import damage
from curriculum.errors import InputError, check_folder
from curriculum.find_checkpoint import check_there, checkpoint_steps, is_step, read_ledger, undamaged
from curriculum.model.model import Model
from curriculum.parsing.yaml12 import Origin
from curriculum.record.commands import resume_command
from curriculum.record.console_text import phase_lines
from curriculum.record.events import EVENTS, View, check_offsets, check_views
from curriculum.record.queries import acts_of
from curriculum.record.sentences import verdict
from curriculum.record.wording import printable
from curriculum.run import DEFAULT_STORE_DIR, Run, load_run
from curriculum.run_directory import RunDirectory
from curriculum.scheduling import Past, declaration
from curriculum.train.device import own_settings
from curriculum.train.fields import branch_edit, derived
from curriculum.train.resuming import ledger
from curriculum.train.resuming.edits import changes_since, find_edit, gone_on
from curriculum.train.resuming.opening import check, check_apart, tokenizer_to_go_on
from curriculum.train.resuming.resumed import to_resume
from curriculum.train.resuming.start import start_of
from curriculum.train.setup import Setup, build
from curriculum.train.trainer import train_built
from phases.schedule import Schedule, Segment, cut, segments_from_json

_HEAD = "# A branch of "  # at the top of a branch's copy of its trunk's config file


@own_settings()
def branch(
    run: str | Path,
    at: int | str,
    run_dir: str | Path,
    *,
    overrides: Iterable[str] = (),
    dataset_dirs: Iterable[str] = (),
    eval_dataset_dirs: Iterable[str] = (),
    store_dir: str | Path = DEFAULT_STORE_DIR,
    make_model: Callable[[int], Model] | None = None,
    views: Sequence[View] = (),
    dry_run: bool = False,
) -> dict[str, Any] | None:
    """Begin a run in `run_dir` that equals `run`, the trunk, up to step `at`, and train it to its end.

    The branch starts from the trunk's newest checkpoint at or before `at` that verifies and takes over the record up to
    it. It trains the steps from there to `at` exactly as the trunk did. From `at` on it follows the config that the
    trunk was last trained with, changed by `overrides` (`a.b=value`) and directories, as in `load_config`. That config
    is refused if the steps up to `at` were trained, measured or judged by other settings. A share that the trunk raised
    stays raised to the end of its phase, unless the config changes what the phase draws. Without changes the branch
    repeats the whole trunk, if the trunk was not edited after `at`.

    The branch needs nothing of the trunk afterwards. `make_model` and `views` are as in `train`.

    With `dry_run` it only checks all of this, prints what would be trained, and returns None; text is prepared.

    Returns the branch's `training_complete` event. Raises InputError for what the user can fix, before `run_dir` is
    created, and Stopped after a signal: `train(..., resume="latest")` then resumes the branch.
    """
    check_folder("run_dir", run_dir)
    check_views(views)
    trunk, directory = load_run(run), RunDirectory(Path(run_dir))
    _check_new(directory, store_dir, make_model is not None)
    fork = _fork(trunk, _step_of(trunk, at))
    at, step, saved = fork.at, fork.step, fork.saved
    config = _config(trunk, overrides, dataset_dirs, eval_dataset_dirs)
    if step < at:
        check_between(trunk, config, saved, fork.whole, at, list(fork.bases))
    check_offsets(trunk.directory.path, saved["offsets"])
    check_apart(config, directory)
    past = _past(fork, config)
    check(config, past)
    start = start_of(config, saved, trunk.directory)
    tokenizer = tokenizer_to_go_on(trunk.directory, config, store_dir, saved)
    setup = build(config, store_dir, tokenizer, make_model, start, past, _branching(run, fork, config), step)
    ledger.check_past(saved, ledger.found_in(setup), of_branch=True)
    _check_goes_on(setup, at)
    edit_event = {"event": "schedule_edit", "step": at, **branch_edit(setup)}
    if dry_run:
        print(f"dry run: a branch of {trunk.directory.path} at step {at}, from its checkpoint of step {step}")
        print(*phase_lines(derived(setup), at), sep="\n")
        _tell(edit_event)
        print("no run was written")
        setup.close()
        return None
    if config.origin.text is not None:
        # Messages name the trunk's config file, which was read, up to here; from here on the branch's own copy.
        origin = _headed(config, str(directory.own_config), f"{os.fspath(run)} from step {at}")
        setup = replace(setup, config=replace(setup.config, origin=origin))
    try:
        with made_whole(directory, trunk.directory) as made:
            copy_trunk(made, trunk.directory, setup, step, fork.checkpoint, _recorded_after(fork), fork.rollbacks)
    except InputError:
        check_there(fork.checkpoint)  # a trunk that trains may have deleted it
        raise
    if step == at:  # else the console shows it when the branch reaches `at`
        _tell(edit_event)
    with RunLock(directory.path) as lock:
        lock.take()
        resumed = to_resume(directory, "latest")
        return train_built(setup, directory, resumed, lock, begins_branch=True, views=views)


@dataclass(frozen=True)
class _Fork:
    """Where a branch leaves its trunk: at step `at`.

    checkpoint: what the branch starts from, the trunk's newest one at or before `at` that verifies.
    saved: its ledger.
    folders: every checkpoint of the trunk, by step.
    bases: those of them that a branch can begin from, by step, ascending.
    """

    trunk: Run
    at: int
    checkpoint: Path
    saved: Mapping[str, Any]
    folders: Mapping[int, Sequence[Path]]
    bases: Mapping[int, Sequence[Path]]

    @cached_property
    def newest(self) -> Mapping[str, Any]:
        """The ledger of the trunk's newest checkpoint that verifies. Its files are read for that."""
        later = [step for step in self.folders if step > self.step]
        return read_ledger(_newest_whole(self.folders, later) or self.checkpoint)

    @property
    def step(self) -> int:
        return int(self.checkpoint.name)

    @cached_property
    def whole(self) -> Schedule:
        return Schedule(segments_from_json(self.newest["segments"]))

    @property
    def rollbacks(self) -> list[Mapping[str, Any]]:
        """The trunk's rollbacks that concern the branch: those that passed over data of the steps before `at`."""
        return [r for r in self.newest["history"]["rollbacks"] if r["first_bad_step"] < self.at]


def _fork(trunk: Run, at: int) -> _Fork:
    """Raises InputError if the trunk has no checkpoint at or before `at` that verifies and whose eval is not due."""
    folders = _checkpoints(trunk.directory)
    known = {step: [folder for folder in of_step if not _eval_left(folder)] for step, of_step in folders.items()}
    bases = {step: known[step] for step in sorted(known) if known[step]}
    left = [step for step in sorted(folders.keys() - bases) if step <= at]
    checkpoint = _checkpoint_before(trunk, bases, left, at)
    return _Fork(trunk, at, checkpoint, read_ledger(checkpoint), folders, bases)


def _past(fork: _Fork, config: Config) -> Past:
    """The part of the branch's schedule that its config does not decide."""
    at, newest = fork.at, fork.newest
    declared = find_edit(config, newest, at=at).past
    goes_back = any(r["first_bad_step"] == at for r in newest["history"]["rollbacks"])
    last = at if fork.step == at and not goes_back else max(at - 1, 0)
    passed_over = bool(fork.rollbacks) and at < newest["past_end"]
    return replace(
        declared,
        segments=cut(fork.whole.segments, at),
        settled=_settled(declared.settled, fork.whole, fork.rollbacks),
        planned=None,
        seed=declared.seed if at else None,
        going_on=_edit_in_force(fork, config, last, passed_over),
    )


def _check_goes_on(setup: Setup, at: int) -> None:
    if setup.course.total_steps > at:
        return
    ends = f"the run ends at step {at}, where the branch begins"
    if setup.config.train.steps > at:
        fix = "raise its max_epochs, or choose another on_exhaust"
        raise setup.config.error([("sources", f"{ends}, as a source with on_exhaust: stop is used up; {fix}")])
    raise setup.config.error([("train.steps", f"{ends}; expected more")])


def _tell(edit_event: Mapping[str, Any]) -> None:
    print(verdict(edit_event))
    print(*(f"warning: {w}\n" for w in edit_event["warnings"]), sep="", end="", file=sys.stderr)


def _headed(config: Config, file: str, trunk: str) -> Origin:
    """The origin of a branch's copy of its trunk's config file: comments at its top say what the branch adds."""
    added = [f"#   {printable(option)}" for option in config.command_line]
    lines = [f"{_HEAD}{printable(trunk)}: the config of that run{', to which this one adds' if added else ''}"]
    lines += [*added, "# What is trained is written out in config.resolved.json.", ""]
    text, positions = config.origin.text, config.origin.positions
    bom = "\ufeff" if text.startswith("\ufeff") else ""
    text = text.removeprefix(bom)
    if text.startswith(_HEAD):  # of a trunk that is a branch itself: its options are among these
        text = text.partition("\n\n")[2]
    moved = len(lines) - (config.origin.text.count("\n") - text.count("\n"))
    text = bom + "\n".join([*lines, text])
    positions = {path: (line + moved, column) for path, (line, column) in positions.items()}
    return replace(config.origin, file=file, text=text, positions=positions)


def go_on_command(run_dir: Path, store_dir: str | Path, **own: Any) -> str:
    """The command that resumes a branch that was begun; `own` as for `resume_command`."""
    return resume_command(RunDirectory(run_dir).own_config, run_dir, store_dir, **own)


def _check_new(directory: RunDirectory, store_dir: str | Path, own_model: bool) -> None:
    within = next((p for p in directory.path.absolute().parents if RunDirectory(p).has_config), None)
    if within is not None:
        raise InputError(f"--run-dir {directory.path}: lies within the run {within}; choose a folder outside it")
    directory.check_usable()
    if directory.holds_run():
        own_optimizer = directory.resolved()["derived"].get("own_optimizer") if directory.has_config else None
        command = go_on_command(directory.path, store_dir, own_model=own_model, own_optimizer=own_optimizer)
        from_file = directory.own_config.exists()  # else no command continues it
        more = f", or continue a branch begun there: {command}" if from_file else ""
        raise InputError(f"--run-dir {directory.path}: already holds a run; choose another{more}")
    if directory.path.exists() and any(directory.path.iterdir()):
        raise InputError(f"--run-dir {directory.path}: is not empty; choose a new folder")


def _recorded_after(fork: _Fork) -> list[Mapping[str, Any]]:
    """The events of the checkpoint's step that the trunk recorded after saving it, and that apply to the branch too."""
    if fork.step == fork.at:
        return []
    with open(fork.trunk.directory.path / EVENTS, "rb") as file:
        num_before = file.read(fork.saved["offsets"][EVENTS]).count(b"\n")
    known = len(fork.newest["history"]["rollbacks"])
    since = [event for event in fork.trunk.events[num_before:] if event["step"] == fork.step]
    return [event for event in since if _applies(event, fork.at, known)]


def _applies(event: Mapping[str, Any], at: int, known_rollbacks: int) -> bool:
    """Whether an event that was recorded after the checkpoint of its step was saved applies to a branch at `at` too.

    The first `known_rollbacks` of the trunk apply; one that no later checkpoint knows the branch comes to by itself.
    """
    if event["event"] == "rollback":
        return event["first_bad_step"] < at and event["number"] <= known_rollbacks
    return event["event"] == "schedule_edit" and event["kind"] == "config"


def _settled(settled: Mapping[str, int], whole: Schedule, rollbacks: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The entries of `settled` that hold in a branch with these rollbacks: no phase end that a later one settled."""
    ends = {f"{whole.segment_at(rollback['first_bad_step']).phase}.until" for rollback in rollbacks}
    return {key: steps for key, steps in settled.items() if not key.endswith(".until") or key in ends}


def _edit_in_force(fork: _Fork, config: Config, last: int, passed_over: bool) -> Segment | None:
    """The trunk's segment that the branch continues at `at`, if it has a raised share or follows data passed over.

    None if there is no such segment, or if the branch changes what its phase draws. `last` is the newest update whose
    segment counts: what the trunk did after an eval at `at` itself counts only if the branch's checkpoint is of that
    step, and data that it passed over from there on never do, as the branch comes to them by itself.
    """
    trunk, at = fork.trunk, fork.at
    edits = [e for e in trunk.events if e["event"] == "schedule_edit" and e["kind"] == "replay" and e["step"] <= last]
    segment = fork.whole.segment_at(last)
    if not passed_over and not any(edit["phase"] == segment.phase for edit in edits):
        return None
    if trunk.branched_from is not None and trunk.branched_from["step"] > at:
        return None  # up to that step the schedule is not the one that the trunk's config declares
    return gone_on(segment, at, declaration(trunk.config), declaration(config), fork.newest["settled"])


def _step_of(trunk: Run, at: int | str) -> int:
    """`at` as an int. Raises InputError unless it is a step that the trunk has reached."""
    if not is_step(at):
        raise InputError(f"--at {at}: expected a step of {trunk.directory.path}")
    last = max((line["step"] for line in [*trunk.events[-1:], *trunk.metrics[-1:]]), default=0)
    if int(at) > last:
        raise InputError(f"--at {at}: {trunk.directory.path} has only reached step {last}; give a step up to {last}")
    return int(at)


def _checkpoints(directory: RunDirectory) -> dict[int, list[Path]]:
    """By step, the folders of every checkpoint of a run, wherever it is kept."""
    folders: dict[int, list[Path]] = {}
    for place in directory.places:
        for step in checkpoint_steps(place):
            folders.setdefault(step, []).append(place / str(step))
    return folders


def _eval_left(folder: Path) -> bool:
    """Whether a signal ended the run in the eval of this step: what the trunk did after it is not known yet."""
    return damage(folder, "ledger/") is None and bool(read_ledger(folder)["history"].get("eval_left"))


def _checkpoint_before(trunk: Run, bases: Mapping[int, Sequence[Path]], left: Sequence[int], at: int) -> Path:
    """The newest checkpoint up to `at` that verifies; `left`: steps whose eval is still due. Raises InputError."""
    before = [step for step in bases if step <= at]
    if not before:
        there = ", ".join(map(str, bases)) or "none"
        due = f"; once the run is continued with --resume latest, that of step {left[0]}" if left else ""
        raise InputError(
            f"--at {at}: {trunk.directory.path} has no checkpoint at or before it; available: {there}{due}"
        )
    return _newest_whole(bases, before) or undamaged(bases[max(before)][0], f"--at {at}: ")


def _newest_whole(folders: Mapping[int, Sequence[Path]], steps: Iterable[int]) -> Path | None:
    """The newest checkpoint of these steps that verifies, if any; newer ones, damaged, are reported on stderr."""
    passed_over = []
    for folder in (folder for step in sorted(steps, reverse=True) for folder in folders[step]):
        if (why := damage(folder)) is None:
            print(*passed_over, sep="", end="", file=sys.stderr)
            return folder
        if folder.exists():  # else the trunk is training and has just deleted it
            passed_over.append(f"{folder}: is damaged: {why}; skipped\n")
    return None


def _config(
    trunk: Run, overrides: Iterable[str], dataset_dirs: Iterable[str], eval_dataset_dirs: Iterable[str]
) -> Config:
    path = trunk.directory.own_config
    directories = {"dataset_dirs": dataset_dirs, "eval_dataset_dirs": eval_dataset_dirs}
    if not path.exists():  # the run's config came from Python, not from a file
        return changed_config(trunk.config, overrides, **directories, continues=trunk.directory.path)
    remembered = trunk.directory.command_line()
    return load_config(path, overrides, **directories, remembered=remembered, continues=trunk.directory.path)


def _branching(run: str | Path, fork: _Fork, config: Config) -> dict[str, Any]:
    """What the branch's ledgers keep of its trunk, so that it can repeat what followed evals up to `at`."""
    trunk, at, saved = fork.trunk, fork.at, fork.saved
    remembered = trunk.directory.command_line()
    origin = config.origin
    new = {path: option for path, option in origin.options.items() if option not in remembered}
    options = [origin.by_name.get(path, option) for path, option in new.items()]
    return {
        "run": str(run),
        "step": at,
        "id": secrets.token_hex(8),
        "branched_from": trunk.branched_from,
        "mixture_before": fork.whole.shares(at),
        "reason": " ".join([f"branched from {run} at step {at}", *options]),
        "changes": _changes(trunk, config, saved, at),
        "acts": acts_of(event for event in trunk.events if event["step"] < at),
        "phase_ends": list(_phase_ends(trunk, at, saved)),
        "data_warnings": saved["data_warnings"],
    }


def _changes(trunk: Run, config: Config, saved: Mapping[str, Any], at: int) -> list[dict[str, Any]]:
    """{path, was, now} of what a branch changes of the config in force at `at`: a ledger's with the edits since."""
    changes = {change["path"]: change for change in changes_since(config, saved)}
    for event in trunk.events:
        if event["event"] == "schedule_edit" and saved["step"] <= event["step"] < at:
            for edited in event.get("changes", ()):
                path, was, now = (edited[key] for key in ("path", "was", "now"))
                if not (isinstance(was, Mapping) and was.keys() == {"stream"}):  # of text, which no config has
                    changes[path] = {"path": path, "was": now, "now": changes.get(path, {"now": was})["now"]}
    return [change for change in changes.values() if change["was"] != change["now"]]


def _phase_ends(trunk: Run, at: int, saved: Mapping[str, Any]) -> Iterator[tuple[int, list[int]]]:
    """(step, phase ends) in order: the phase ends as the trunk planned them up to that step. The last step is `at`."""
    if at == 0:  # nothing was trained or measured before
        return
    planned = (saved["branched_from"] or {"phase_ends": []})["phase_ends"]
    since = planned[-1][0] if planned else 0
    plans = [event for event in trunk.events if "plan" in event and event["step"] < at]
    for event, until in zip(plans, [*(event["step"] for event in plans[1:]), at], strict=True):
        if until > since:
            planned = [*planned, (until, sorted(phase["end"] for phase in event["plan"]["phases"]))]
    for until, ends in planned:
        yield min(until, at), ends
        if until >= at:
            return
