"""Small JSON records that describe the files beside them, checked field by field when read back."""

import dataclasses
import json
import os
from pathlib import Path
from typing import TypeVar

from curriculum.errors import InputError
from curriculum.parsing.typed import read

Record = TypeVar("Record")


def write_sidecar(path: Path, record: object) -> None:
    """Write a dataclass as indented JSON and force it to the disk."""
    # A path that is not UTF-8 holds half surrogates: they are escaped, as \udce9, which JSON reads back.
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as stream:
        json.dump(dataclasses.asdict(record), stream, indent=2, ensure_ascii=False)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())


def read_sidecar(path: Path, record_type: type[Record], remedy: str) -> Record:
    """Read what `write_sidecar` wrote; `remedy` ends the InputError raised if it is missing or damaged.

    Keys at the top that the record does not have are passed over: those of another version.
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
    return record
