"""Files and folders that have their names only when they are whole and on the disk, so that a power cut halves none."""

import fcntl
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path

_WHOLE = "whole"  # the folder inside a hidden one, made once that is locked


def write_whole(path: Path, content: str | bytes, *, suffix: str = ".tmp", durable: bool = True) -> None:
    """Replace a file atomically: whatever happens, it has either the old content or the new, a text as UTF-8.

    It is written beside its place, under the name with `suffix`, of which an error leaves nothing. If not `durable`,
    nothing waits for the disk: after a power cut the file may be empty. Raises OSError.
    """
    content = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(path.name + suffix)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def rename_whole(made: Path, folder: Path, replaced: Path | None = None) -> None:
    """Give a folder that was made its name, once all that is in it is on the disk. Raises OSError.

    With `replaced` there is a folder of that name already, which is renamed to `replaced` at the last moment, and gets
    its name back on an error. No system renames one folder over another: a kill in that moment leaves only `replaced`.
    """
    for place, _, names in os.walk(made, topdown=False):
        for path in (*(os.path.join(place, name) for name in names), place):
            sync(path)
    if replaced is not None:
        folder.rename(replaced)
    try:
        made.rename(folder)
    except OSError:
        if replaced is not None:
            replaced.rename(folder)
        raise
    sync(folder.parent)


def sync(path: str | os.PathLike) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def scratch(place: Path, target: Path) -> Iterator[Path]:
    """An empty folder to make `target` in, inside a hidden folder in `place` that is removed at the end of the block.

    An error leaves nothing behind; what a kill leaves, `clear_killed` removes. The hidden folder is locked with the
    kernel's lock (flock), which is released however the process ends.
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
    """The prefix of `target`'s hidden folders: a checksum, as its own name may be as long as names can be."""
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
