"""Pydantic's errors in the project's words: what was got, what was expected, did you mean."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import ValidationError


def translate(section: str, section_type: Any, data: Any, error: ValidationError) -> list[tuple[str, str]]:
    """One (path, message) a place: pydantic gives one error a union member, with the member's tag in its path."""
    grouped: dict[str, list[dict]] = {}
    for detail in error.errors(include_url=False):
        path, here, here_type = section, data, section_type
        for part in detail["loc"]:
            inside = isinstance(here, dict) and part in here or isinstance(here, list) and isinstance(part, int)
            if not inside and detail["type"] not in ("missing", "missing_argument"):
                continue
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
            here_type = _member_type(here_type, part)
            here = here[part] if inside else None
        detail["parent_type"] = here_type
        grouped.setdefault(path, []).append(detail)
    return [(path, _message(path, details)) for path, details in grouped.items()]


def _message(path: str, details: list[dict]) -> str:
    first = details[0]
    if first["type"] == "unexpected_keyword_argument":
        parent = first["parent_type"]
        keys = [field_key(f.name) for f in dataclasses.fields(parent)] if dataclasses.is_dataclass(parent) else []
        return no_such("key", path.rpartition(".")[2], keys)
    if first["type"] in ("missing", "missing_argument"):
        return "missing; this key is needed"
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    expected = " or ".join(dict.fromkeys(_expected(d) for d in details))
    return f"got {json.dumps(first['input'], default=str)[:80]}, expected {expected}"


def _expected(detail: dict) -> str:
    message = detail["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    context = detail.get("ctx", {})
    if detail["type"] == "literal_error":
        near = difflib.get_close_matches(str(detail["input"]), re.findall(r"'([^']+)'", context["expected"]), 1)
        return context["expected"] + (f" (did you mean {near[0]!r}?)" if near else "")
    if "ctx" in detail and detail["type"].startswith(("greater", "less")):
        sign = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
        return " and ".join(f"{sign[key]} {limit}" for key, limit in context.items())
    words = {"dictionary": "a mapping", "integer": "an integer", "string": "text", "number": "a number"}
    words |= {"array": "a list", "an object": "a mapping", "a boolean": "true or false", "boolean": "true or false"}
    return words.get(message, message)


def _member_type(parent, part):
    """The type a key or index leads to; the same dataclass for an unknown key, so that its keys can be listed."""
    options = typing.get_args(parent) if typing.get_origin(parent) in (typing.Union, types.UnionType) else (parent,)
    for option in options:
        option = typing.get_args(option)[0] if typing.get_origin(option) is Annotated else option
        if dataclasses.is_dataclass(option):
            return typing.get_type_hints(option).get(part, option)
        if typing.get_origin(option) is dict:
            return typing.get_args(option)[1]
        if typing.get_origin(option) is tuple:
            return typing.get_args(option)[0]
    return parent


def field_key(name: str) -> str:
    """The key of a field in a file: `from` for `from_`, which Python could not be told otherwise."""
    return name.removesuffix("_")


def no_such(what: str, name: str, known: Iterable[str]) -> str:
    """`no such key; did you mean ...? (keys: ...)`."""
    near = difflib.get_close_matches(name, list(known), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"no such {what}{hint} ({what}s: {', '.join(sorted(known))})"
