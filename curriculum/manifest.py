"""What a folder must hold, written beside it: the sizes and checksums of its files, in `manifest.json`.

{"step", "files": {relative path: {"bytes", "xxh3_128"}}, "checksum"}; the last is the xxh3_128 of the rest as canonical
JSON. The manifest is written last and replaced at once, so a folder that was not finished has none.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from curriculum.errors import InputError

MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 22
# What is wrong with the file itself: it is gone or no file, or its disk cannot read it.
_OF_THE_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EIO}


def write_manifest(folder: Path, step: int | None = None) -> None:
    """Write down what a folder holds. `step`: the name that the folder will have, None where it is not a step's."""
    _write(folder, {"step": step, "files": {name: _entry(folder / name) for name in _files(folder)}})


def update_manifest(folder: Path, names: Iterable[str]) -> None:
    """Take up that these files of a folder were changed; any other that is damaged stays so, a manifest too."""
    try:
        manifest = _read(folder)
    except ValueError:
        return
    manifest["files"] |= {name: _entry(folder / name) for name in names}
    _write(folder, manifest)


def damage(folder: Path, part: str | tuple[str, ...] = "") -> str | None:
    """What is wrong with a folder or its manifest, in one line with the word checksum; None where all of it verifies.

    `part`: read only the files whose path begins so, or in one of these ways, `ledger/` for one; of the others only the
    sizes are compared.
    Raises InputError where this process cannot read a file at all (rights, a file server that is away, too many open
    files): that says nothing of the file, and nothing may be thrown away for it.
    """
    try:
        return _damage(folder, part)
    except OSError as error:
        if error.errno not in _OF_THE_FILE:
            raise InputError(
                f"{error.filename}: cannot be read: {error.strerror}; whether {folder} is whole cannot be told: mend "
                "that, and try again"
            ) from None
        return f"{error.filename}: no checksum can be taken: {error.strerror}"


def _damage(folder: Path, part: str | tuple[str, ...]) -> str | None:
    try:
        manifest = _read(folder)
    except ValueError as error:
        return str(error)
    if folder.name.isdecimal() and manifest["step"] not in (None, int(folder.name)):
        return f"its checksum manifest is of step {manifest['step']}"
    expected, there = manifest["files"], _files(folder)
    if gone := sorted(expected.keys() - there):
        return f"{gone[0]} is missing: the checksum manifest lists it{_more(gone)}"
    if extra := sorted(there - expected.keys()):
        return f"{extra[0]} is not in the checksum manifest{_more(extra)}"
    for name, entry in expected.items():
        num_bytes = (folder / name).stat().st_size
        if num_bytes != entry["bytes"]:
            return f"{name} has {num_bytes} bytes, the checksum manifest says {entry['bytes']}"
    for name, entry in expected.items():
        if name.startswith(part) and file_checksum(folder / name) != entry["xxh3_128"]:
            return f"{name} has another checksum than the manifest says"
    return None


def _more(names: list[str]) -> str:
    return f" ({len(names) - 1} more)" if len(names) > 1 else ""


def _read(folder: Path) -> dict[str, Any]:
    """The manifest of a folder. Raises ValueError where it is missing or not as it was written."""
    try:
        content = (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        empty = folder.is_dir() and not any(folder.iterdir())
        what = "the folder is empty" if empty else f"{MANIFEST} is missing"
        raise ValueError(f"{what}: no checksum to verify it by") from None
    try:
        manifest = json.loads(content)
        checksum = manifest.pop("checksum")
        if checksum == _checksum_of(manifest) and {"step", "files"} <= manifest.keys():
            return manifest
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        pass
    raise ValueError(f"{MANIFEST} does not have the checksum that it was written with")


def _write(folder: Path, manifest: Mapping[str, Any]) -> None:
    temporary = folder / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps({**manifest, "checksum": _checksum_of(manifest)}, indent=1) + "\n")
    temporary.replace(folder / MANIFEST)


def _files(folder: Path) -> set[str]:
    """Paths of all files below a folder, from there; the manifest aside."""
    found = {
        (Path(place) / name).relative_to(folder).as_posix()
        for place, _, names in os.walk(folder, onerror=_raise)
        for name in names
    }
    return found - {MANIFEST}


def _raise(error: OSError) -> None:
    raise error


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "xxh3_128": file_checksum(path)}


def file_checksum(path: Path) -> str:
    """xxh3_128 of a file, read block by block: a map of it would count as memory of the process."""
    checksum = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum.update(chunk)
    return checksum.hexdigest()


def _checksum_of(manifest: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())


def sync_folder(folder: Path) -> None:
    """Return once a folder with all that is in it is on the disk: a rename outlives a power cut only then."""
    for place, _, names in os.walk(folder, topdown=False):
        for path in (*(os.path.join(place, name) for name in names), place):
            sync(path)


def sync(path: str | os.PathLike) -> None:
    """Return once a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
