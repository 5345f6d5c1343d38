"""The lock by which one process at a time trains in a run directory."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from curriculum.errors import InputError

LOCK = ".lock"


class RunLock:
    """The lock of a run directory, held from `take` to the end of the `with`.

    What counts is the kernel's lock (flock) on the file `.lock`, which is released however its process ends; that the
    file exists means nothing. Its content, {pid, host, started_at, command}, only tells who holds the lock. The file is
    never removed, as another process may be about to lock it.
    """

    _held: ClassVar[set[tuple[int, int]]] = set()  # device and inode of each file that this process has locked

    def __init__(self, run_dir: Path):
        self.path = run_dir / LOCK
        self._descriptor: int | None = None
        self._taken_by: int | None = None  # the process

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            self._held.discard(_identity(self._descriptor))
            # A process forked meanwhile has the descriptor as well. It must neither keep the lock nor release it.
            if self._taken_by == os.getpid():
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def take(self) -> None:
        """Lock the directory, and create it if needed. Does nothing if this lock is held already.

        Raises InputError that names the holder if another process has it, or if the file cannot be opened or locked.
        """
        if self.held:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be opened: {error.strerror}; expected the run's lock, a writable file; fix it, "
                "or remove it while no process trains here"
            ) from None
        try:
            _lock(descriptor)
        except OSError as error:
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise InputError(
                    f"{self.path}: cannot be locked: {error.strerror}; choose a --run-dir on a disk with locks"
                ) from None
            holder = _holder(self.path, "process {pid} on {host} (since {started_at}, command {command})")
            raise InputError(
                f"{self.path.parent}: is being trained by {holder}; wait for it, stop it, or choose another --run-dir"
            ) from None
        self._descriptor, self._taken_by = descriptor, os.getpid()
        self._held.add(_identity(descriptor))
        own = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started_at": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": shlex.join(sys.argv),
        }
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, (json.dumps(own) + "\n").encode(), 0)
        except OSError:
            os.ftruncate(descriptor, 0)  # the disk is full: the lock is held all the same


def _lock(descriptor: int) -> None:
    """Lock a file for this process alone. Retries, as `trained_by` of another process holds a lock for an instant."""
    for _ in range(9):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def trained_by(run_dir: Path) -> str | None:
    """Which other process is training in a run directory; None if there is none, or it cannot be told."""
    path = run_dir / LOCK
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        own = _identity(descriptor) in RunLock._held  # pids say little: in two containers both may be process 1
        return None if own else _holder(path, "process {pid} on {host}")
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _holder(path: Path, what: str) -> str:
    try:
        holder: Any = json.loads(path.read_text(encoding="utf-8"))
        return what.format(**holder)
    except (OSError, ValueError, TypeError, LookupError):
        return f"another process ({path.name} does not say which)"
