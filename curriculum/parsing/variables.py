"""`variables:` of a config: values named once, used whole as `$variables.x` or inside text as `${variables.x}`."""

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
    substitution = _Substitution(variables, numbers)
    try:
        substitution.replaced(variables, "variables")
        replaced = substitution.replaced(rest, "")
    except (_Endless, RecursionError):
        limits = f"more than {_MAX_VALUES:,} values or {_MAX_DEPTH} levels"
        return rest, [("variables", f"expand to {limits}; nest variables in each other less")]
    bad_names = [
        (f"variables.{name}", f"got the name {name!r}, expected letters (a-z, A-Z), digits, '_' and '-'")
        for name in variables
        if not NAME.fullmatch(name)
    ]
    return replaced, bad_names + substitution.problems


class _Substitution:
    """Replaces uses of `variables`; the problems that it meets are gathered, and their values left as they are.

    Below, `within` are the names of the variables that are being looked up, the outermost first, and `depth` is how
    deep a value lies, counted through them.
    """

    def __init__(self, variables: dict[str, Any], numbers: Mapping[str, str]):
        self.variables, self.numbers = variables, numbers
        self.problems: list[tuple[str, str]] = []
        self._num_values = 0  # inside of variables: those outside are finite in number

    def replaced(self, value: Any, path: str, within: tuple[str, ...] = (), depth: int = 1) -> Any:
        """The value of `path` with every use in it replaced."""
        if within:
            self._num_values += 1
        if self._num_values > _MAX_VALUES or depth > _MAX_DEPTH:
            raise _Endless
        below = within, depth + 1
        if isinstance(value, dict):
            return {key: self.replaced(item, f"{path}.{key}" if path else key, *below) for key, item in value.items()}
        if isinstance(value, list):
            return [self.replaced(item, f"{path}[{i}]", *below) for i, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        try:
            return self._replaced_text(value, path, *below)
        except _Problem as problem:
            if within:
                raise
            self.problems.append((problem.path, problem.message))
            return value

    def _replaced_text(self, text: str, path: str, within: tuple[str, ...], depth: int) -> Any:
        """What a text stands for: the variable that it names, or itself with the variables inside it written out."""
        if match := _WHOLE.fullmatch(text):
            return self._look_up(match[1] or match[2], path, within, depth)

        def written(match: re.Match) -> str:
            name = match[1]
            found = self._look_up(name, path, within, depth)
            if isinstance(found, dict | list | bool) or found is None:
                raise _Problem(path, f"variable {name!r} is neither text nor a number: it cannot be used in text")
            return self.numbers.get(f"variables.{name}", str(found))

        replaced = _INSIDE.sub(written, text)
        if _LEFT_OVER.search(replaced):
            raise _Problem(path, f"got {text!r}, which uses no variable; inside text write ${{variables.x}}")
        return replaced

    def _look_up(self, name: str, path: str, within: tuple[str, ...], depth: int) -> Any:
        """The value of the variable `name`, with every use in it replaced."""
        if name in within:
            circle = " -> ".join([*within[within.index(name) :], name])
            raise _Problem(path, f"variables use each other in a circle: {circle}")
        here: Any = self.variables
        for part in name.split("."):
            if not isinstance(here, dict) or part not in here:
                known = [str(key) for key in self.variables]
                near = nearest(name, known)
                hint = f"; did you mean {near!r}?" if near else ""
                raise _Problem(path, f"no such variable: {name!r}{hint} (variables: {', '.join(known) or 'none'})")
            here = here[part]
        return self.replaced(here, path, (*within, name), depth)


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
