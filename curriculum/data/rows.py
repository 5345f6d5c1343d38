"""Checks of what a row of JSONL or of a table holds, and words for it in error messages."""

from collections.abc import Iterable
from itertools import islice

from curriculum.errors import InputError


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
