"""Files and folders that have their names only when they are whole and on the disk, so that a power cut halves none."""

from __future__ import annotations

import os
from pathlib import Path


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
