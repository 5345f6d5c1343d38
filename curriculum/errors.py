"""Errors for bad user input: InputError, FieldError for a single key, and helpers that word their messages."""

import json
import os
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

FROM_WORKING_FOLDER = "paths are relative to the working folder"  # what messages of paths that are not there say


class InputError(ValueError):
    """The user's input cannot be used as it is; the command exits with code 2.

    Each problem is one line: where it is, what was given, what was expected and how to fix it. `details` are further
    lines to read or copy that belong to all problems together.
    """

    def __init__(self, *problems: str, details: Sequence[str] = ()):
        self.problems, self.details = problems, tuple(details)
        super().__init__("\n".join([*problems, *details]))


class FieldError(ValueError):
    """Raised by a config dataclass if its field `key` is invalid, by itself or given the other fields."""

    def __init__(self, key: str, message: str):
        self.key = key
        super().__init__(message)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the host or a device is out of memory.

    For a device jax raises a RuntimeError that says so, or has gRPC's status RESOURCE_EXHAUSTED; that has other causes
    too, so its message must also speak of memory or allocation.
    """
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    told = str(error).lower()
    return "out of memory" in told or ("resource_exhausted" in told and ("memory" in told or "alloc" in told))


@contextmanager
def readable(path: Path, what: str = "read") -> Iterator[None]:
    """Turn an OSError of the block into an InputError that says that the path cannot be `what`, "read" or "listed"."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename or path}: cannot be {what}: {error.strerror}; fix that, and try again"
        ) from None


def check_read_as_utf8(path: str | os.PathLike, option: str = "") -> None:
    """Raise InputError for a path that is not UTF-8, or not in this locale; jax and orbax raise errors of their own."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        told = os.fsencode(path).decode(errors="backslashreplace")
        fix = "choose another folder, and a UTF-8 locale if the name is UTF-8 (LC_ALL=C.UTF-8)"
        raise InputError(f"{option}{told}: the path is not read as UTF-8, as jax and orbax need it; {fix}") from None


def check_choice(option: str, name: str, choices: Collection[str]) -> None:
    if name not in choices:
        near = nearest(str(name), choices)
        hint = f"did you mean {near!r}? " if near else ""
        raise InputError(f"{option} {name}: unknown value; {hint}expected one of: {', '.join(choices)}")


def check_several(name: str, given: Any) -> None:
    """Raise InputError for a single text where several are expected: it would be taken letter by letter."""
    if isinstance(given, str | os.PathLike):
        raise InputError(f"{name}: got {str(given)!r}, expected a list, as in [{str(given)!r}]")


def check_folder(name: str, given: Any) -> None:
    """Raise InputError unless the path of a folder is given: not empty, and not with `~`, which a shell replaces."""
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else ""
    if path and path.split(os.sep)[0] != "~":
        return
    fix = f"; write it out, as os.path.expanduser({path!r}) does" if path else ""
    raise InputError(f"{name}: got {shown(given)}, expected the path of a folder{fix}")


def shown(value: Any) -> str:
    """A value of a config as a message quotes it: as JSON, with its letters as they are."""
    return json.dumps(value, ensure_ascii=False, default=str)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `name` was probably meant to be; None if none is similar.

    That is one with the same letters in another Unicode normalization, else one spelled almost alike, else the one that
    it is the last word of, such as dtype of compute_dtype, or else one spelled somewhat alike.
    """
    from difflib import get_close_matches  # only an error needs it

    known = list(known)
    if same := [other for other in known if other_normalization(name, other)]:
        return same[0]
    longer = [other for other in known if other.endswith(f"_{name}")]
    found = [*get_close_matches(name, known, 1, 0.8), *(longer if len(longer) == 1 else ())]
    return next(iter(found or get_close_matches(name, known, 1)), None)


def checked_text(value: object, name: str) -> str:
    """`value` if it is Unicode text; otherwise raises InputError, which calls it `name`."""
    if not isinstance(value, str):
        raise InputError(f"{name} holds {type_name(value)}; expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} holds half a surrogate pair at character {error.start}; expected Unicode text"
        ) from error
    return value


def type_name(value: object) -> str:
    """The kind of a JSON value in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def found_keys(keys: Iterable[str]) -> str:
    """The first keys of a row, long ones cut, for an error message."""
    shown = (key if len(key) <= 40 else key[:37] + "..." for key in islice(map(str, keys), 12))
    return ", ".join(map(repr, shown)) or "no keys"


def other_normalization(name: str, near: str) -> str:
    """That two names look the same and are not, to be put behind "did you mean ...?"; empty if they look different."""
    same = name != near and unicodedata.normalize("NFC", name) == unicodedata.normalize("NFC", near)
    return " (the same letters in another Unicode normalization, NFC or NFD)" if same else ""


def no_such(what: str, name: str, known: Iterable[str]) -> str:
    """`no such key; did you mean ...? (keys: ...)`, with the closest known name, or else up to 3 that begin with it."""
    near = nearest(name, known := list(known))
    meant = [near] if near else [other for other in known if name and other.startswith(name)]
    hint = f"; did you mean {' or '.join(map(repr, meant))}?" if 0 < len(meant) <= 3 else ""
    hint += other_normalization(name, near) if near else ""
    return f"no such {what}{hint} ({what}s: {', '.join(sorted(known))})"


def no_such_path(path: Path) -> str:
    """The message for a path that does not exist, with the most similar name in the same folder as a suggestion."""
    parent = next((p for p in path.parents if p.exists()), Path("."))
    listable = parent == path.parent and parent.is_dir() and os.access(parent, os.R_OK | os.X_OK)
    names = [name for name in os.listdir(parent) if name != path.name] if listable else []
    near = nearest(path.name, names)
    hint = f"; did you mean {str(parent / near)!r}?{other_normalization(path.name, near)}" if near else ""
    return f"does not exist{hint} ({FROM_WORKING_FOLDER})"
