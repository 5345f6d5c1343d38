"""Read plain data, as in JSON, into the dataclasses of a config or a sidecar, and report every problem with its path.

A field's annotation says what it may be: text, a number, true or false, `Literal`, another dataclass, dict[str, X],
tuple[X, ...], list[X], `X | None`, or a number within `Limits`. Pydantic reads these annotations in the same way and
makes the JSON schema from them; to import it here would take a third of a plan's time.
"""

import dataclasses
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

from curriculum.errors import FieldError, nearest, no_such, shown

Problems = list[tuple[str, str]]  # (path, message)
_WORDS = {str: "text", int: "an integer", float: "a number", bool: "true or false", dict: "a mapping"}
_WORDS |= {tuple: "a list", list: "a list"}


class Limits(NamedTuple):
    """The bounds of a number, as in `Annotated[int, Limits(ge=1, le=9)]`."""

    le: float | None = None
    lt: float | None = None
    ge: float | None = None
    gt: float | None = None

    def broken_by(self, number: float) -> str | None:
        """The first bound that the number breaks, in words, or None. NaN breaks any bound."""
        holds = (operator.le, operator.lt, operator.ge, operator.gt)
        for bound, keeps, words in zip(self, holds, ("at most", "less than", "at least", "more than"), strict=True):
            if bound is not None and not keeps(number, bound):
                return f"{words} {type(number)(bound)}"
        return None

    def __get_pydantic_core_schema__(self, kind: Any, handler: Callable[[Any], dict]) -> dict:
        """Pydantic's hook for annotations: add the limits to the schema."""
        return handler(kind) | {name: limit for name, limit in self._asdict().items() if limit is not None}


def read(kind: Any, given: Any, path: str, problems: Problems) -> Any:
    """Read `given` as a value of the annotation `kind`. Adds what is wrong to `problems`; the result is then unusable.

    A dataclass takes no keys that are not its own.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _within(arguments[1], arguments[0], given, path, problems)
    if origin in (typing.Union, types.UnionType):
        return _any_of(arguments, given, path, problems)
    if origin is dict and isinstance(given, dict):
        return {key: read(arguments[1], item, f"{path}.{key}", problems) for key, item in given.items()}
    if origin in (tuple, list) and isinstance(given, list):
        return origin(read(arguments[0], item, f"{path}[{i}]", problems) for i, item in enumerate(given))
    if dataclasses.is_dataclass(kind) and isinstance(given, dict):
        return _dataclass(kind, given, path, problems)
    if origin is Literal and isinstance(given, str) and given in arguments:
        return given
    if type(given) is kind:
        return given
    if kind is float and type(given) is int:
        return _as_float(given)
    problems.append((path, _message(given, _expected(kind, given))))
    return None


def _expected(kind: Any, given: Any) -> str:
    """What stands for `kind` in a message about `given`, which it does not take: with the way to write it, if known."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return _one_of(arguments, given)
    if origin is dict:
        return f"{_WORDS[dict]}, NAME: {_brief(arguments[1])}"
    if dataclasses.is_dataclass(kind):
        return _WORDS[dict] + _form(kind, given)
    words = _WORDS[origin or kind]
    if kind is int and type(given) is float and given.is_integer() and abs(given) < 2**53:  # YAML reads 1e5 so
        return f"{words}: write {int(given)}"
    if kind in (int, float) and isinstance(given, str) and given.endswith("%"):
        return f"{words}, without %"
    if kind is float and isinstance(given, str) and re.fullmatch(r"\d+,\d+", given):
        return f"{words}, with a decimal point: {given.replace(',', '.')}"
    return words


def _within(limits: Limits, kind: type, given: Any, path: str, problems: Problems) -> Any:
    wrong: Problems = []
    number = read(kind, given, path, wrong)
    if not wrong and (expected := limits.broken_by(number)):
        wrong.append((path, _message(given, expected)))
    problems += wrong
    return number


def _form(kind: type, given: Any) -> str:
    """How to write `given` as a dataclass's only field, if that takes it; or else the keys that the dataclass has."""
    names = [field.name for field in dataclasses.fields(kind)]
    if len(names) == 1:
        read(annotations(kind)[names[0]], given, "", wrong := [])
        if not wrong:
            return f": {{{field_key(names[0])}: {shown(given)}}}"
    return f" with keys such as {', '.join(map(field_key, names[:3]))}"


def _brief(kind: Any) -> str:
    return f"{{{field_key(dataclasses.fields(kind)[0].name)}: ...}}" if dataclasses.is_dataclass(kind) else "..."


def _any_of(kinds: tuple[Any, ...], given: Any, path: str, problems: Problems) -> Any:
    """Read `given` as the first kind that takes it; several besides None are plain types, named in one message."""
    if given is None and types.NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    if len(kinds) == 1:
        return read(kinds[0], given, path, problems)
    for kind in kinds:
        value = read(kind, given, path, wrong := [])
        if not wrong:
            return value
    expected = " or ".join(_WORDS[kind] for kind in kinds)
    if type(given) is float and 0 < given < 1 and str in kinds:  # a share that has to be given as text
        expected += f" such as {100 * given:.10g}%"
    problems.append((path, _message(given, expected)))
    return None


def _dataclass(kind: type, given: dict[str, Any], path: str, problems: Problems) -> Any:
    """Read a dataclass. Problems come in the order of its fields, then unknown keys; if none, from `__post_init__`."""
    known, values, below = len(problems), {}, f"{path}." if path else ""
    keys = {field_key(field.name): field for field in dataclasses.fields(kind)}
    for key, field in keys.items():
        if key in given:
            values[field.name] = read(annotations(kind)[field.name], given[key], below + key, problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append((below + key, "missing; this key is needed"))
    problems += [(below + key, no_such("key", key, keys)) for key in given if key not in keys]
    if len(problems) > known:
        return None
    try:
        return kind(**values)
    except FieldError as error:
        problems.append((below + error.key, str(error)))
    except ValueError as error:
        problems.append((path, str(error)))
    return None


def field_key(name: str) -> str:
    """The key of a field in a file: `from` for `from_`, as `from` is reserved in Python."""
    return name.removesuffix("_")


def key_paths(kind: Any, path: str = "") -> Iterator[str]:
    """The path of every key that a value of this annotation may have; entries of mappings and lists are NAME and N."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        for name, annotation in annotations(kind).items():
            below = f"{path}.{field_key(name)}" if path else field_key(name)
            yield below
            yield from key_paths(annotation, below)
    elif origin is dict:
        yield from key_paths(arguments[1], f"{path}.NAME")
    elif origin in (tuple, list):
        yield from key_paths(arguments[0], f"{path}[N]")
    elif origin in (Annotated, typing.Union, types.UnionType):
        for argument in arguments:
            yield from key_paths(argument, path)


@lru_cache
def annotations(kind: type) -> dict[str, Any]:
    """The annotation of each field of a dataclass, its limits included."""
    return typing.get_type_hints(kind, include_extras=True)


def _as_float(number: int) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _message(given: Any, expected: str) -> str:
    return f"got {shown(given)[:80]}, expected {expected}"


def _one_of(choices: tuple[str, ...], given: Any) -> str:
    *others, last = map(repr, choices)
    near = nearest(str(given), choices)
    hint = f" (did you mean {near!r}?)" if near else ""
    return (f"{', '.join(others)} or {last}" if others else last) + hint
