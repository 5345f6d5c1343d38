"""Hidden folders in which a folder is made before it gets its name.

An error leaves nothing of it behind; what a kill leaves, the next try clears.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path

_WHOLE = "whole"  # the folder inside, made once the hidden one is locked


@contextmanager
def scratch(place: Path, target: Path) -> Iterator[Path]:
    """An empty folder to make `target` in, inside a hidden folder in `place` that is removed at the end of the block.

    The hidden folder is locked with the kernel's lock (flock), which is released however the process ends.
    """
    with tempfile.TemporaryDirectory(dir=place, prefix=_prefix(target)) as hidden, _locked(hidden):
        folder = Path(hidden) / _WHOLE
        folder.mkdir()
        yield folder


def clear_killed(place: Path, target: Path) -> None:
    """Remove what processes that were killed while making `target` left in `place`.

    Nothing is removed on a disk without locks, where it might still be in use.
    """
    for whole in glob(f"{_prefix(target)}*/{_WHOLE}", root_dir=place):
        hidden = (place / whole).parent
        with suppress(OSError), _locked(hidden) as is_ours:
            if is_ours:
                shutil.rmtree(hidden)


def _prefix(target: Path) -> str:
    """The prefix of the hidden folders of `target`, with links resolved.

    It has a checksum of the name, as the name itself may already be as long as names can be.
    """
    name = os.path.basename(os.path.realpath(target))
    return f".making.{zlib.crc32(os.fsencode(name)):08x}."


@contextmanager
def _locked(folder: str | Path) -> Iterator[bool]:
    """Whether the lock of a folder could be taken; it is held to the end of the block."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = True
    except OSError:  # another process has it, or the disk has no locks
        is_ours = False
    try:
        yield is_ours
    finally:
        os.close(descriptor)
