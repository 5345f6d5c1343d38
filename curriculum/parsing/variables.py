"""`variables:` of a config: values named once, used whole as `$variables.x` or inside text as `${variables.x}`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from curriculum.errors import nearest

NAME = re.compile(r"[A-Za-z0-9_-]+")  # without a dot, which looks up a key of what is named
_WHOLE = re.compile(r"\$variables\.([A-Za-z0-9_.-]+)|\$\{variables\.([A-Za-z0-9_.-]+)\}")
_INSIDE = re.compile(r"\$\{variables\.([A-Za-z0-9_.-]+)\}")
_USE = re.compile(r"\$\{?variables\.([A-Za-z0-9_.-]+)")
_LEFT_OVER = re.compile(r"\$variables\.|\$\{variable")
# A few lines that each use the next one twice would expand exponentially.
_MAX_VALUES, _MAX_DEPTH = 100_000, 200


def substitute(data: dict[str, Any], numbers: Mapping[str, str]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """(data without `variables` and with every use replaced, problems as (path, message) pairs).

    A value that is nothing but a use gets the variable's type: a number stays a number, a mapping a mapping. Inside
    other text a variable must be text or a number. A number appears there as it was written, which `numbers` gives by
    path. Variables may use each other, but not in a circle. Every variable is checked, even if nothing uses it, and
    text that only resembles a use is a problem.
    """
    variables = data.get("variables", {})
    rest = {key: value for key, value in data.items() if key != "variables"}
    if not isinstance(variables, dict):
        return rest, [("variables", "expected a mapping of names to values")]
    problems = [
        (f"variables.{name}", f"got the name {name!r}, expected letters, digits, '_' and '-'")
        for name in variables
        if not NAME.fullmatch(name)
    ]

    def look_up(name: str, path: str, within: tuple[str, ...], depth: int) -> Any:
        if name in within:
            circle = " -> ".join([*within[within.index(name) :], name])
            raise _Problem(path, f"variables use each other in a circle: {circle}")
        here: Any = variables
        for part in name.split("."):
            if not isinstance(here, dict) or part not in here:
                known = [str(key) for key in variables]
                near = nearest(name, known)
                hint = f"; did you mean {near!r}?" if near else ""
                raise _Problem(path, f"no such variable: {name!r}{hint} (variables: {', '.join(known) or 'none'})")
            here = here[part]
        return replaced(here, path, (*within, name), depth)

    num_values = 0

    def replaced(value: Any, path: str, within: tuple[str, ...] = (), depth: int = 1) -> Any:
        nonlocal num_values
        num_values += bool(within)  # values outside of variables are finite in number
        if num_values > _MAX_VALUES or depth > _MAX_DEPTH:
            raise _Endless
        below = within, depth + 1
        if isinstance(value, dict):
            return {key: replaced(item, f"{path}.{key}" if path else key, *below) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item, f"{path}[{i}]", *below) for i, item in enumerate(value)]
        if not isinstance(value, str):
            return value

        def text_of(match: re.Match) -> str:
            found = look_up(match[1], path, *below)
            if isinstance(found, dict | list | bool) or found is None:
                raise _Problem(path, f"variable {match[1]!r} is neither text nor a number: it cannot be used in text")
            return numbers.get(f"variables.{match[1]}", str(found))

        try:
            if match := _WHOLE.fullmatch(value):
                return look_up(match[1] or match[2], path, *below)
            text = _INSIDE.sub(text_of, value)
            if _LEFT_OVER.search(text):
                raise _Problem(path, f"got {value!r}, which uses no variable; inside text write ${{variables.x}}")
            return text
        except _Problem as problem:
            if within:
                raise
            problems.append((problem.path, problem.message))
            return value

    try:
        replaced(variables, "variables")
        return replaced(rest, ""), problems
    except _Endless:
        limits = f"more than {_MAX_VALUES:,} values or {_MAX_DEPTH} levels"
        return rest, [("variables", f"expand to {limits}; nest variables in each other less")]


def unused(data: Mapping[str, Any], given: Iterable[str]) -> list[tuple[str, str]]:
    """A problem (path, message) for each of the paths `given` that is of a variable which nothing in `data` uses."""
    used = sorted({name.rstrip(".") for name in _USE.findall(json.dumps(data, default=str))})
    problems = []
    for path in given:  # of the command line, where a mistyped name would change nothing
        section, _, name = path.partition(".")
        name = name.partition("[")[0]
        is_used = any(f"{use}.".startswith(f"{name}.") or f"{name}.".startswith(f"{use}.") for use in used)
        if section == "variables" and name and not is_used:
            near = nearest(name, used)
            hint = f"; did you mean {near!r}?" if near else ""
            problems.append((path, f"nothing uses this variable{hint} (used: {', '.join(used) or 'none'})"))
    return problems


class _Endless(Exception):
    """Variables expand to more values or levels than the limits allow."""


class _Problem(Exception):
    def __init__(self, path: str, message: str):
        self.path, self.message = path, message
