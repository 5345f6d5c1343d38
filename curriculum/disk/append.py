"""Appending to files on a disk that may be full."""

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

# A disk that is full, has no more room for this user or this file, fails, or is read-only.
_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


def is_disk_error(error: object) -> bool:
    """Whether the disk is what failed: it is full, cannot be written to, or has errors."""
    return isinstance(error, OSError) and error.errno in _OF_THE_DISK


def how_to_make_room(error: OSError) -> str:
    """What lets a disk take what it refused with this error, to begin a sentence with."""
    of_file = error.errno == errno.EFBIG  # most often the limit of a shell or a batch system
    return "raise the limit on the size of a file (ulimit -f)" if of_file else "free disk space"


def discard(stream: TextIO) -> None:
    """Let what is written to an open stream go nowhere from here on, as its reader or disk does not take it."""
    try:
        descriptor = stream.fileno()
    except (AttributeError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; not one that is closed, missing, or an object that only writes."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


class Appender:
    """Appends whole pieces to a file. What the disk does not take is held in memory and written with the next piece.

    A piece that was written only in part is cut off again, so the file always ends with a whole piece. The first
    failure is reported on stderr, and so is the recovery. Only `flush` and `sync` raise an error of the disk;
    every method raises others. `new`: the file must not exist yet.
    """

    def __init__(self, path: Path, *, new: bool = False):
        self.path = path
        self._flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_EXCL if new else 0)
        self._descriptor: int | None = None
        self._held = b""
        self._failing = False
        self.write(b"")

    def write(self, piece: bytes) -> None:
        self._held += piece
        try:
            self.flush()
        except OSError as error:
            if not is_disk_error(error):
                raise
            if not self._failing:
                tell(f"{self.path}: cannot be written: {error.strerror}; held back in memory until it can be")
            self._failing = True

    def flush(self) -> None:
        """Write all pieces to the file. Raises OSError if the disk does not take them."""
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, self._flags, 0o666)
        size, rest = os.fstat(self._descriptor).st_size, self._held
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise
        self._held = b""
        if self._failing:
            tell(f"{self.path}: can be written again; nothing is missing")
        self._failing = False

    def sync(self) -> int:
        """Return the file's size once all pieces are on the disk. Raises OSError if it does not take them."""
        self.flush()
        os.fsync(self._descriptor)
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Close the file. What the disk does not take even then is lost, and reported."""
        self.write(b"")
        if self._held:
            tell(f"{self.path}: the last {len(self._held)} bytes could not be written: they are lost")
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def tell(message: str) -> None:
    """Print to stderr. Errors are ignored: it may be a file on the same disk, or closed."""
    with suppress(OSError, ValueError):
        print(message, file=sys.stderr, flush=True)
