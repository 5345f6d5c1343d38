"""The manifest of a folder: the sizes and checksums of its files, in its `manifest.json`.

{"step", "files": {relative path: {"bytes", "xxh3_128"}}, "checksum"}; the last is the xxh3_128 of the rest as canonical
JSON. The manifest is written last and atomically, so a folder that was not finished has none.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from curriculum.disk.durable import write_whole
from curriculum.errors import InputError

MANIFEST = "manifest.json"
# Errors of the file itself: it is missing or not a file, or the disk cannot read it.
_OF_THE_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EIO}


def write_manifest(folder: Path, step: int | None = None) -> None:
    """Write a folder's manifest. `step`: the step that the folder will be named after, None if it is not a step's."""
    _write(folder, {"step": step, "files": {name: _entry(folder / name) for name in _files(folder)}})


def write_part_of(folder: Path, whole: Path, parts: tuple[str, ...]) -> None:
    """Write the manifest of a folder that has the files of another, `whole`, under these path prefixes.

    Raises ValueError if the other has no manifest.
    """
    manifest = _read(whole)
    files = {name: entry for name, entry in manifest["files"].items() if name.startswith(parts)}
    _write(folder, {**manifest, "files": files})


def update_manifest(folder: Path, names: Iterable[str]) -> None:
    """Renew the entries of these files after a change. Damage to other files, or to the manifest, stays detectable."""
    try:
        manifest = _read(folder)
    except ValueError:
        return
    manifest["files"] |= {name: _entry(folder / name) for name in names}
    _write(folder, manifest)


def damage(folder: Path, part: str | tuple[str, ...] = "") -> str | None:
    """What is wrong with a folder or its manifest, in one line that contains "checksum"; None if the folder verifies.

    `part` is one or several path prefixes, such as `ledger/`: only files under them are read, and of the others only
    the sizes are compared.
    Raises InputError if this process cannot read a file at all (permissions, a file server that is away, too many open
    files): that says nothing about the file, so nothing may be discarded because of it.
    """
    try:
        return _damage(folder, part)
    except OSError as error:
        if error.errno not in _OF_THE_FILE:
            raise InputError(
                f"{error.filename}: cannot be read: {error.strerror}, so {folder} cannot be verified; fix that, and "
                "try again"
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
    """The manifest of a folder. Raises ValueError if it is missing or not as it was written."""
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
    content = json.dumps({**manifest, "checksum": _checksum_of(manifest)}, indent=1) + "\n"
    write_whole(folder / MANIFEST, content, durable=False)  # it gets to the disk with the rest of the folder


def _files(folder: Path) -> set[str]:
    """Paths, relative to a folder, of all files below it except the manifest."""
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
    """xxh3_128 of a file, read in blocks: a memory map of it would count as the process's memory."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _checksum_of(manifest: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())
