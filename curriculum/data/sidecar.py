"""Small JSON records that describe what lies beside them, checked field by field when read back."""

import dataclasses
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from curriculum.errors import InputError

Record = TypeVar("Record")


def write_sidecar(path: Path, record: object) -> None:
    """Write a dataclass as indented JSON and force it to the disk."""
    with open(path, "w", encoding="utf-8") as stream:
        json.dump(dataclasses.asdict(record), stream, indent=2, ensure_ascii=False)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())


def read_sidecar(path: Path, record_type: type[Record], remedy: str) -> Record:
    """Read what `write_sidecar` wrote; `remedy` ends the InputError raised where it is missing or damaged."""
    from pydantic import ValidationError

    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; {remedy}") from error
    try:
        return _adapter(record_type).validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(f"{path}: {place + ': ' if place else ''}{first['msg']}; {remedy}") from error


@lru_cache
def _adapter(record_type: type) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(record_type)
