"""How a key is named, and told that there is none such."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def field_key(name: str) -> str:
    """The key of a field in a file: `from` for `from_`, which Python could not be told otherwise."""
    return name.removesuffix("_")


def no_such(what: str, name: str, known: Iterable[str]) -> str:
    """`no such key; did you mean ...? (keys: ...)`."""
    near = difflib.get_close_matches(name, list(known), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"no such {what}{hint} ({what}s: {', '.join(sorted(known))})"
