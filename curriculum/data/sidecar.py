"""Small JSON records of the files beside them, checked field by field when read back; and the size of these files."""

import dataclasses
import json
from pathlib import Path
from typing import TypeVar

import numpy as np

from curriculum.errors import InputError, readable
from curriculum.parsing.typed import read

Record = TypeVar("Record")


def write_sidecar(path: Path, record: object) -> None:
    """Write a dataclass as indented JSON."""
    content = json.dumps(dataclasses.asdict(record), indent=2, ensure_ascii=False) + "\n"
    # A path that is not UTF-8 holds half surrogates: they are escaped, as \udce9, which JSON reads back.
    path.write_text(content, encoding="utf-8", errors="backslashreplace")


def read_sidecar(path: Path, record_type: type[Record], remedy: str, versions: tuple[int, ...] = ()) -> Record:
    """Read what `write_sidecar` wrote; `remedy` ends the InputError raised if it is missing or damaged.

    It is raised too if `versions` are given and `format_version` is none of them. Keys at the top that the record does
    not have are passed over: those of another version.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; {remedy}") from error
    try:
        given = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: Invalid JSON: {error}; {remedy}") from error
    if isinstance(given, dict):
        given = {field.name: given[field.name] for field in dataclasses.fields(record_type) if field.name in given}
    record = read(record_type, given, "", problems := [])
    if problems:
        place, message = problems[0]
        raise InputError(f"{path}: {place + ': ' if place else ''}{message}; {remedy}")
    if versions and record.format_version not in versions:
        reads = " and ".join(map(str, versions))
        raise InputError(f"{path}: format_version {record.format_version}; this version reads {reads}; {remedy}")
    return record


def check_size(path: Path, expected_bytes: int, remedy: str) -> None:
    """Raise InputError, which `remedy` ends, unless a file that a sidecar describes is there and as long as it says."""
    try:
        size_bytes, is_folder = path.stat().st_size, path.is_dir()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; {remedy}") from error
    if is_folder:  # its size may happen to match
        raise InputError(f"{path}: is a folder; the sidecar says {expected_bytes:,} bytes; {remedy}")
    if size_bytes != expected_bytes:
        raise InputError(f"{path}: {size_bytes:,} bytes; the sidecar says {expected_bytes:,}; {remedy}")


def map_file(path: Path, dtype: np.dtype) -> np.ndarray:
    """A file as a plain read-only array: slicing np.memmap itself costs several times as much. Raises InputError."""
    with readable(path):
        return np.memmap(path, dtype, mode="r").view(np.ndarray)
