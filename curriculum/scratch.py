"""Hidden folders in which a folder is made before it has its name, so that an error leaves nothing of it, and a kill
nothing that the next try does not clear."""

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

_WHOLE = "whole"  # the folder within, made once the one around it is locked


@contextmanager
def scratch(place: Path, target: Path) -> Iterator[Path]:
    """Around the making of `target`: an empty folder within a hidden one in `place`, which is gone in the end.

    While it is there the hidden one has the kernel's lock (flock), which is free however its process ends.
    """
    with tempfile.TemporaryDirectory(dir=place, prefix=_prefix(target)) as hidden, _locked(hidden):
        folder = Path(hidden) / _WHOLE
        folder.mkdir()
        yield folder


def clear_killed(place: Path, target: Path) -> None:
    """Throw away what processes that were killed while they made `target` left in `place`; where the disk has no locks
    it stays."""
    for whole in glob(f"{_prefix(target)}*/{_WHOLE}", root_dir=place):
        hidden = (place / whole).parent
        with suppress(OSError), _locked(hidden) as is_ours:
            if is_ours:
                shutil.rmtree(hidden)


def _prefix(target: Path) -> str:
    """A link's is that of where it leads; a checksum, as the name itself may be as long as names can be."""
    name = os.path.basename(os.path.realpath(target))
    return f".export.{zlib.crc32(os.fsencode(name)):08x}."


@contextmanager
def _locked(folder: str | Path) -> Iterator[bool]:
    """Whether the lock of a folder could be taken; it is held to the end of the block."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = True
    except OSError:  # another has it, or the disk has none
        is_ours = False
    try:
        yield is_ours
    finally:
        os.close(descriptor)
