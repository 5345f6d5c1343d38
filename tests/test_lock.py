"""One writer: who holds a run directory, and when it is free."""

import fcntl
import json
import os
import signal

import pytest
from locked import locked_by_another

from curriculum.config import build_config
from curriculum.disk.lock import RunLock, trained_by
from curriculum.errors import InputError
from curriculum.train.trainer import train


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path: its id."""
    with locked_by_another(tmp_path) as pid:
        yield pid


def take(folder):
    with RunLock(folder) as lock:
        lock.take()
        lock.take()
        assert lock.held
        return json.loads((folder / ".lock").read_text())


def test_the_second_process_is_refused_and_told_who_it_is(holder, tmp_path):
    with pytest.raises(InputError) as told, RunLock(tmp_path) as lock:
        lock.take()
    message = str(told.value)
    assert message.startswith(f"{tmp_path}: is being trained by process {holder} on {os.uname().nodename} (since 20")
    assert f"command -c {tmp_path})" in message and message.endswith("stop it, or choose another --run-dir")
    os.kill(holder, signal.SIGKILL)
    os.waitid(os.P_PID, holder, os.WEXITED | os.WNOWAIT)
    assert take(tmp_path)["pid"] == os.getpid()


def test_train_is_refused_before_it_reads_or_writes(holder, tmp_path):
    (tmp_path / "events.jsonl").write_text("what the other one writes")
    data = {
        "name": "x", "tokenizer": {"kind": "byte"}, "sources": {"a": {"path": __file__}},
        "phases": [{"name": "a", "until": "end", "mixture": {"a": 1.0}}],
        "evalsets": {"primary": {"path": __file__}}, "train": {"steps": 1},
    }  # fmt: skip
    with pytest.raises(InputError, match=f"is being trained by process {holder}"):
        train(build_config(data), tmp_path, resume="latest", store_dir=tmp_path / "store")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "events.jsonl"]


def test_a_lock_that_says_nothing_still_holds(holder, tmp_path):
    for content in ("", "nonsense", "[]", '{"pid": 3}', "\ud800".encode("utf-8", "surrogatepass")):
        (tmp_path / ".lock").write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(InputError, match=r"is being trained by another process \(.lock does not say which\)"):
            take(tmp_path)


def test_the_lock_of_a_dead_process_is_free_whatever_it_says(tmp_path):
    for content in ("nonsense", '{"pid": 1, "host": "elsewhere"}' + " " * 1000):
        (tmp_path / ".lock").write_text(content)
        assert take(tmp_path)["pid"] == os.getpid()


def test_the_lock_is_released_whatever_happens(tmp_path):
    with pytest.raises(ZeroDivisionError), RunLock(tmp_path) as lock:
        lock.take()
        raise ZeroDivisionError
    assert take(tmp_path)


FORKS = pytest.mark.filterwarnings("ignore:os.fork")  # jax is there, but the child only waits or ends


@FORKS
def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path):
    """It has a copy of the descriptor: a worker of a data loader, say, that lives on."""
    with RunLock(tmp_path) as lock:
        lock.take()
        ends, child = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(child)
            os.read(ends, 1)  # until the other side is closed
            os._exit(0)
    try:
        assert trained_by(tmp_path) is None
        assert take(tmp_path)["pid"] == os.getpid()
    finally:
        os.close(child)
        os.waitpid(pid, 0)
        os.close(ends)


@FORKS
def test_a_process_that_was_forked_meanwhile_does_not_release_the_lock(tmp_path):
    """As it leaves the `with` by an exception, say."""
    with RunLock(tmp_path) as lock:
        lock.take()
        if (pid := os.fork()) == 0:
            lock.__exit__()
            os._exit(0)
        os.waitpid(pid, 0)
        with open(tmp_path / ".lock") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert take(tmp_path)


def test_a_lock_is_ones_own_by_the_file_not_by_the_process_number(holder, tmp_path):
    own = {"pid": os.getpid(), "host": os.uname().nodename}
    (tmp_path / ".lock").write_text(json.dumps(own))  # as that of process 1 in another container
    assert trained_by(tmp_path) == f"process {own['pid']} on {own['host']}"
    with RunLock(tmp_path / "own") as lock:
        lock.take()
        assert trained_by(tmp_path / "own") is None
    with locked_by_another(tmp_path / "own") as pid:
        assert trained_by(tmp_path / "own").startswith(f"process {pid} on ")


def test_a_lock_that_cannot_be_opened_is_told(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(InputError, match=r".lock: cannot be opened: Is a directory; expected the run's lock"):
        take(tmp_path)
