"""A disk that is full for a while, or for good: the run goes on, says so, and nothing of it is lost.

The limit is RLIMIT_FSIZE: every write beyond it fails with EFBIG, as one on a full disk does with ENOSPC. A real file
system of a few MiB is used where this process may mount one. No bytecode is written under a limit: Python 3.11 keeps
a file that was cut short, and each later process fails at it.
"""

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tiny_run import assert_same_run, tiny_data, tiny_train, write_corpus

from curriculum.disk.append import Appender
from curriculum.disk.manifest import damage
from curriculum.run import load_run
from curriculum.train.checkpoints.arrays import _of_write

TRAIN = """
import json, os, resource, signal, sys, time
from pathlib import Path
from curriculum.errors import InputError
from curriculum.train import fields
from curriculum.train.checkpoints.folder import Checkpoints
from curriculum.train.feed import Feed
from curriculum.train.signals import Stopped
sys.path.insert(0, sys.argv[1])
from tiny_run import tiny_train
place, run_dir, resume, at, sections = json.loads(sys.argv[2])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True
make, begin, folders = Feed.__getitem__, Checkpoints.__init__, []
def init(self, *arguments, **settings):
    folders.append(self)
    begin(self, *arguments, **settings)
def fill(path):
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
def getitem(self, step):
    do = at.get(str(step))
    while do and not all(folder.settled for folder in folders):  # the saves before it are over
        time.sleep(0.01)
    if do == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
    elif do == "room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    elif do == "fill":
        fill(Path(run_dir).parent / "filler")
    elif do == "empty":
        (Path(run_dir).parent / "filler").unlink()
    elif do == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
    return make(self, step)
Feed.__getitem__, Checkpoints.__init__ = getitem, init
complete = fields.training_complete
def completed(*arguments):
    if at.get("end") == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
    return complete(*arguments)
fields.training_complete = completed
if at.get("begin") == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
try:
    tiny_train(Path(place), Path(run_dir), resume, **sections)
except InputError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
except Stopped as stopped:
    print(stopped, file=sys.stderr)
    sys.exit(128 + stopped.signal_number)
"""


def train_in_process(place, run_dir, at=(), resume=None, **sections):
    """(exit code, stderr): `at` says by the step of a batch when the disk gets full, has room again, or the run is
    asked to stop, the saves before it being over."""
    arguments = json.dumps([str(place), str(run_dir), resume, {str(k): v for k, v in dict(at).items()}, sections])
    command = [sys.executable, "-c", TRAIN, str(Path(__file__).parent), arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("place"))


BOARD = {"logging": {"every": 1, "tensorboard": True}}


@pytest.fixture(scope="module")
def whole(place):
    tiny_train(place, place / "whole", **BOARD)
    return place / "whole"


def failed(run_dir):
    keys = ("step", "path", "last_good_step", "next_try_step")
    return [tuple(e[k] for k in keys) for e in load_run(run_dir).events if e["event"] == "checkpoint_failed"]


def curves(run_dir):
    """(step, tag) of all that TensorBoard reads."""
    files = sorted((run_dir / "tensorboard").rglob("*.tfevents.*"))
    return sorted(
        (str(path.parent.relative_to(run_dir)), event.step, value.tag)
        for path in files
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    )


def test_a_disk_that_is_full_for_a_while_loses_nothing(place, whole, tmp_path):
    run_dir = tmp_path / "run"
    code, errors = train_in_process(place, run_dir, {5: "full", 9: "room"}, **BOARD)
    assert code == 0, errors
    # Full during updates 5 to 8: steps 6 and 8 could not be saved, nor the golds of 6 and 9.
    told = failed(run_dir)
    assert ("checkpoints/6", 4, 8) in [t[1:] for t in told] and ("checkpoints/8", 4, 10) in [t[1:] for t in told]
    assert {path for _, path, *_ in told} == {"checkpoints/6", "checkpoints/8", "gold/6", "gold/9"}
    # A gold that could not be saved is none, so the next one is compared with the one before.
    golds = [(e["step"], e["previous_step"]) for e in load_run(run_dir).events if e["event"] == "gold_checkpoint"]
    assert golds == [(3, None), (6, 3), (9, 3), (12, 3)]
    assert sorted(p.name for p in (run_dir / "gold").iterdir()) == ["12", "3"]
    assert_same_run(run_dir, whole, golds=False)
    assert curves(run_dir) == curves(whole) and len(curves(whole)) > 100
    for name in ("events.jsonl", "metrics.jsonl", "train.log", "evals/6.npz", "tensorboard"):
        assert errors.count(f"{run_dir / name}") >= 1, name
    assert errors.count("metrics.jsonl: cannot be written: File too large; held back in memory until it can be") == 1
    assert errors.count("metrics.jsonl: can be written again; nothing is missing") == 1
    kept = f"{run_dir}/evals/6.npz: cannot be written: File too large; kept in memory until there is room, as those after it"
    assert kept in errors and "evals/9.npz" not in errors  # nor is there room for those of 9
    log = (run_dir / "train.log").read_text()
    assert (
        "checkpoint failed: checkpoints/6 was not saved: File too large; the last good one is of step 4; the next is "
        "tried at step 8"
    ) in log
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["10", "12", "4"]
    assert not [path for path in run_dir.rglob("*") if path.name.endswith(".tmp") or "saving" in path.name]


def test_a_gate_is_not_asked_about_a_checkpoint_that_could_not_be_saved(place, tmp_path):
    gate, run_dir = tmp_path / "gate", tmp_path / "run"
    gate.write_text(f"#!/bin/sh\necho $1 >> {tmp_path}/asked\necho '{{\"accept\": true}}'\n")
    gate.chmod(0o700)
    evalsets = tiny_data(place)["evalsets"] | {"gold": {"gate": str(gate)}}
    code, errors = train_in_process(place, run_dir, {5: "full", 9: "room"}, evalsets=evalsets)
    assert code == 0, errors
    events = load_run(run_dir).events
    blocked = [(e["step"], e["reason"]) for e in events if e["event"] == "gold_blocked"]
    assert blocked == [(step, "gate: its checkpoint was not saved: File too large") for step in (6, 9)]
    golds = [(e["step"], e["previous_step"]) for e in events if e["event"] == "gold_checkpoint"]
    assert golds == [(3, None), (12, 3)]
    assert [Path(line).name for line in (tmp_path / "asked").read_text().splitlines()] == ["3", "12"]


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_in_an_error_and_the_run_goes_on_later(place, whole, tmp_path):
    run_dir = tmp_path / "run"
    code, errors = train_in_process(place, run_dir, {7: "full"}, **BOARD)
    assert code == 2
    assert (
        f"{run_dir}/checkpoints/12: the last checkpoint could not be saved: File too large; the last good one is of step 6; "
        "raise the limit on the size of a file (ulimit -f) and continue with --resume latest"
    ) in errors
    assert "bytes could not be written: they are lost" in errors
    assert damage(run_dir / "checkpoints/6") is None
    assert all(json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines())
    code, errors = train_in_process(place, run_dir, resume="latest", **BOARD)
    assert code == 0, errors
    assert_same_run(run_dir, whole)


@pytest.mark.parametrize(("every", "full", "last"), [(4, 7, 4), (12, 4, 3)])
def test_the_last_good_step_is_the_one_that_the_run_goes_on_from(place, tmp_path, every, full, last):
    """Not that of gold 6 beside checkpoint 4; gold 3 where there is nothing else."""
    run_dir, sections = tmp_path / "run", {"checkpoint": {"every": every, "keep": 3}}
    code, errors = train_in_process(place, run_dir, {full: "full"}, **sections)
    assert code == 2 and (run_dir / f"gold/{6 if every == 4 else 3}").is_dir()
    mend = "raise the limit on the size of a file (ulimit -f) and continue with --resume latest"
    why = f"File too large; the last good one is of step {last}; {mend}"
    assert f"{run_dir}/checkpoints/12: the last checkpoint could not be saved: {why}" in errors
    code, errors = train_in_process(place, run_dir, resume="latest", **sections)
    assert code == 0, errors
    assert [e["step"] for e in load_run(run_dir).events if e["event"] == "resume"] == [last]


@pytest.mark.slow
def test_a_run_whose_record_cannot_be_ended_is_finished_later(place, tmp_path):
    run_dir = tmp_path / "run"
    code, errors = train_in_process(place, run_dir, {"end": "full"})
    why = "is trained, but the end of its record could not be written: File too large; raise the limit on the size of a file"
    assert code == 2 and f"{run_dir}: {why} (ulimit -f) and finish it with --resume latest" in errors
    code, errors = train_in_process(place, run_dir, resume="latest")
    assert code == 0 and load_run(run_dir).complete["total_steps"] == 12, errors


@pytest.mark.slow
def test_a_run_that_cannot_be_begun_or_taken_up_is_told(place, whole, tmp_path):
    run_dir = tmp_path / "run"
    message = (
        f"{run_dir}: File too large: nothing was trained; fix that (raise the limit on the size of a file (ulimit -f), grant "
        "write permission), then"
    )
    code, errors = train_in_process(place, run_dir, {"begin": "full"}, **BOARD)
    assert code == 2 and message in errors
    assert [path.name for path in run_dir.iterdir()] == [".lock"]
    code, _ = train_in_process(place, run_dir, {5: "stop"}, **BOARD)  # it is no run yet: no resume is needed
    assert code == 143
    code, errors = train_in_process(place, run_dir, {"begin": "full"}, "latest", **BOARD)
    assert code == 2 and message in errors
    code, _ = train_in_process(place, run_dir, resume="latest", **BOARD)
    assert code == 0
    assert_same_run(run_dir, whole)


@pytest.mark.slow
def test_a_stop_on_a_full_disk_says_what_is_saved(place, whole, tmp_path):
    run_dir = tmp_path / "run"
    code, errors = train_in_process(place, run_dir, {6: "full", 8: "stop"}, **BOARD)
    assert code == 143
    assert "stopped by SIGTERM at step 9, which could not be saved (File too large)" in errors
    assert "the last good checkpoint is of step 6" in errors
    code, _ = train_in_process(place, run_dir, resume="latest", **BOARD)
    assert code == 0
    assert_same_run(run_dir, whole)


def test_a_file_system_that_runs_full(place, whole, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("only root may mount a small file system")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}")
    try:
        code, errors = train_in_process(place, disk / "run", {5: "fill", 9: "empty"}, **BOARD)
        assert code == 0, errors
        assert "No space left on device" in errors
        assert {path for _, path, *_ in failed(disk / "run")} >= {"checkpoints/6", "checkpoints/8"}
        assert_same_run(disk / "run", whole, golds=False)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_mean_of_a_phase_is_of_what_was_saved(place, tmp_path):
    sections = {"averages": {"phase_mean": 3}}
    code, errors = train_in_process(place, tmp_path / "run", {3: "full", 4: "room"}, **sections)
    assert code == 0, errors
    assert json.loads((tmp_path / "run/averages/a/mean.json").read_text()) == {"steps": [2, 6], "end": 6}
    assert damage(tmp_path / "run/averages/a") is None


def test_pieces_are_appended_whole(tmp_path, capfd):
    """In a process of its own: a limit on file sizes is for all of a process."""
    code = """
import resource, signal, sys
from pathlib import Path
from curriculum.disk.append import Appender
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True
path = Path(sys.argv[1])
file = Appender(path)
file.write(b"first\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (9, resource.RLIM_INFINITY))
file.write(b"second\\n")
assert path.read_bytes() == b"first\\n"
file.write(b"3\\n")
assert path.read_bytes() == b"first\\n"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.write(b"fourth\\n")
assert path.read_bytes() == b"first\\nsecond\\n3\\nfourth\\n" and file.sync() == 22
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "f")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        f"{tmp_path}/f: cannot be written: File too large; held back in memory until it can be\n"
        f"{tmp_path}/f: can be written again; nothing is missing\n"
    )


def test_an_error_that_is_not_the_disk_s_is_raised(tmp_path):
    with pytest.raises(IsADirectoryError):
        Appender(tmp_path)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RuntimeError("cannot schedule new futures after interpreter shutdown"), False),
        (RuntimeError("cannot schedule new futures after shutdown"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (FileNotFoundError(errno.ENOENT, "gone", "checkpoints/.saving/2/params"), False),
        (FileNotFoundError(errno.ENOENT, "gone", "elsewhere"), True),
        (RuntimeError("something else"), True),
    ],
)
def test_of_what_nobody_waited_for_only_writes_that_ended_with_their_save_are_silent(error, shown):
    told = logging.LogRecord("asyncio", logging.ERROR, "", 0, "never retrieved", (), (type(error), error, None))
    assert _of_write(told) != shown


def test_a_disk_without_any_room_is_told_once(tmp_path):
    """What orbax writes beside the arrays fails too, in a thread of its own; it is no second error at the end."""
    code = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_checkpoint import save
from curriculum.train.checkpoints.folder import Checkpoints, SaveFailed
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True
checkpoints = Checkpoints(Path(sys.argv[2]))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
try:
    save(checkpoints, 1)
    checkpoints.wait()
except SaveFailed as failure:
    print(failure.path)
checkpoints.close()
assert checkpoints.steps() == []
"""
    arguments = [str(Path(__file__).parent), str(tmp_path / "checkpoints")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "checkpoints/1\n"), done.stderr
    assert "Traceback" not in done.stderr
