"""Plain data read by the annotations of dataclasses: as pydantic reads it, and each problem at its place."""

import json
from dataclasses import dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from curriculum.config import Config, sections
from curriculum.data.packing import PackingFacts
from curriculum.data.store import StoreFacts
from curriculum.data.tokenizers.tokenizer import TokenizerFacts
from curriculum.parsing.typed import Limits, annotations, read

STRICT = {"extra": "forbid"}  # for pydantic: what takes keys of its own alone


@dataclass(frozen=True)
class Inner:
    __pydantic_config__: ClassVar = STRICT

    low: float = 0.0
    high: float = 1.0
    from_: str | None = None

    def __post_init__(self):
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")


@dataclass(frozen=True)
class Outer:
    """One field of each kind."""

    __pydantic_config__: ClassVar = STRICT

    count: Annotated[int, Limits(ge=1, le=9)]
    name: str = "x"
    share: Annotated[float, Limits(gt=0, lt=1)] | None = None
    rate: Annotated[float, Limits(ge=0, le=100)] = 1.0
    on: bool = False
    mode: Literal["auto", "plain", "xla"] = "auto"
    only: Literal["sqrt"] | None = None
    until: int | str = 0
    held_out: str | float | None = None
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    by_name: dict[str, Inner] = field(default_factory=dict)
    shares: dict[str, Annotated[float, Limits(gt=0, lt=1)]] = field(default_factory=dict)
    tags: tuple[Literal["query", "key"], ...] = ()
    lists: list[Inner] = field(default_factory=list)


def problems(given, kind=Outer, path="here"):
    found = []
    read(kind, given, path, found)
    return found


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, [("here.count", "missing; this key is needed")]),
        ([1], [("here", "got [1], expected a mapping with keys such as count, name, share")]),
        ({"count": 0}, [("here.count", "got 0, expected at least 1")]),
        ({"count": 10}, [("here.count", "got 10, expected at most 9")]),
        ({"count": True}, [("here.count", "got true, expected an integer")]),
        ({"count": 1e2}, [("here.count", "got 100.0, expected an integer: write 100")]),
        ({"count": 1.5}, [("here.count", "got 1.5, expected an integer")]),
        ({"count": 1, "name": None}, [("here.name", "got null, expected text")]),
        ({"count": 1, "share": 0}, [("here.share", "got 0, expected more than 0.0")]),
        ({"count": 1, "share": 1}, [("here.share", "got 1, expected less than 1.0")]),
        ({"count": 1, "rate": float("nan")}, [("here.rate", "got NaN, expected at most 100.0")]),
        ({"count": 1, "rate": "x" * 99}, [("here.rate", f'got "{"x" * 79}, expected a number')]),
        ({"count": 1, "on": 1}, [("here.on", "got 1, expected true or false")]),
        ({"count": 1, "mode": "plan"}, [("here.mode", "got \"plan\", expected 'auto', 'plain' or 'xla' (did you mean 'plain'?)")]),
        ({"count": 1, "only": 3}, [("here.only", "got 3, expected 'sqrt'")]),
        ({"count": 1, "until": [5]}, [("here.until", "got [5], expected an integer or text")]),
        ({"count": 1, "until": 0.03}, [("here.until", "got 0.03, expected an integer or text such as 3%")]),
        ({"count": 1, "until": 1.5}, [("here.until", "got 1.5, expected an integer or text")]),
        ({"count": 1, "held_out": True}, [("here.held_out", "got true, expected text or a number")]),
        ({"count": 1, "inner": None}, [("here.inner", "got null, expected a mapping with keys such as low, high, from")]),
        ({"count": 1, "maybe": {"high": -1}}, [("here.maybe", "low 0.0 is above high -1.0")]),
        ({"count": 1, "by_name": {"a": {"hgih": 1}}}, [("here.by_name.a.hgih", "no such key; did you mean 'high'? (keys: from, high, low)")]),
        ({"count": 1, "by_name": {"a": {"from_": "x"}}}, [("here.by_name.a.from_", "no such key; did you mean 'from'? (keys: from, high, low)")]),
        ({"count": 1, "by_name": []}, [("here.by_name", "got [], expected a mapping, NAME: {low: ...}")]),
        ({"count": 1, "shares": {"a": 0.5, "b": 2}}, [("here.shares.b", "got 2, expected less than 1.0")]),
        ({"count": 1, "tags": "key"}, [("here.tags", 'got "key", expected a list')]),
        ({"count": 1, "tags": ["key", "kye"]}, [("here.tags[1]", "got \"kye\", expected 'query' or 'key' (did you mean 'key'?)")]),
        ({"count": 1, "lists": [{}, {"low": []}]}, [("here.lists[1].low", "got [], expected a number")]),
        ({"count": 0, "inner": {"low": 2, "x": 1}}, [("here.count", "got 0, expected at least 1"), ("here.inner.x", "no such key (keys: from, high, low)")]),
    ],
)  # fmt: skip
def test_each_problem_has_its_place_and_what_is_expected(given, expected):
    assert problems(given) == expected


def test_an_integer_too_large_for_a_float_is_infinite():
    assert problems({"count": 1, "share": 10**400}) == [("here.share", f"got {10**79}, expected less than 1.0")]
    values = [read(Outer, {"count": 1, "held_out": sign * 10**400}, "", []).held_out for sign in (1, -1)]
    assert values == [float("inf"), float("-inf")]


def test_a_dataclass_takes_keys_of_its_own_alone():
    assert problems({"other": 1}, Inner, "") == [("other", "no such key (keys: from, high, low)")]


def values():
    """JSON, and often what one of the fields takes."""
    numbers = st.sampled_from([0, 1, 5, 9, 10, -1, 10**30, 10**400, -(10**400), 0.5, 1.0, -0.0, 1e300])
    numbers |= st.sampled_from([float("inf"), float("-inf"), float("nan")])
    texts = st.sampled_from(["", "auto", "sqrt", "key", "kye", "5%"])
    plain = st.none() | st.booleans() | numbers | texts
    inner = st.dictionaries(st.sampled_from(["low", "high", "from", "from_", "x"]), plain, max_size=3)
    return plain | inner | st.lists(plain | inner, max_size=3) | st.dictionaries(texts, plain | inner, max_size=2)


FIELDS = list(Outer.__dataclass_fields__)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*FIELDS, "other"]), values(), max_size=4))
def test_it_takes_what_pydantic_takes_and_makes_the_same_of_it(given):
    given = {"count": 3, **given}
    by_us = read(Outer, renamed(given), "", found := [])
    try:
        by_pydantic = TypeAdapter(Outer).validate_json(json.dumps(given), strict=True)
    except ValidationError:
        assert found
        return
    assert found == [] and repr(by_us) == repr(by_pydantic)  # -0.0, nan and the types too


def renamed(given):
    """The keys of a file for the names of fields, which pydantic is given here: `from` for `from_`, and the reverse."""
    if isinstance(given, dict):
        swapped = {"from": "from_", "from_": "from"}
        return {swapped.get(key, key): renamed(item) for key, item in given.items()}
    return [renamed(item) for item in given] if isinstance(given, list) else given


PLAIN = {str, int, float, bool}


def unreadable(kind, where):
    """Where an annotation says what `read` does not know, and would take for something else."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        for f in fields(kind):
            yield from unreadable(annotations(kind)[f.name], f"{kind.__name__}.{f.name}")
    elif origin in (Union, UnionType):
        one, *more = (argument for argument in arguments if argument is not NoneType)
        if not more:
            yield from unreadable(one, where)
        elif not {one, *more} <= PLAIN:
            yield where
    elif origin in (list, dict) or origin is tuple and arguments[1:] == (...,):
        yield from unreadable(arguments[0 if origin is not dict else 1], where)
    elif origin is Annotated:
        if arguments[0] not in (int, float) or [type(limits) for limits in arguments[1:]] != [Limits]:
            yield where
    elif origin is Literal:
        if not all(isinstance(argument, str) for argument in arguments):
            yield where
    elif kind not in PLAIN:
        yield where


@pytest.mark.parametrize("kind", [Any, tuple[int, int], Literal[1], dict[str, Any], Inner | str, Annotated[str, 1]])
def test_what_it_does_not_know_is_found(kind):
    assert list(unreadable(kind, "here")) == ["here"]


def test_it_knows_every_annotation_of_a_config_and_of_what_lies_beside_the_data():
    kinds = {f.name: annotations(Config)[f.name] for f in sections()}
    kinds |= {kind.__name__: kind for kind in (TokenizerFacts, StoreFacts, PackingFacts)}
    assert len(kinds) > 15 and [where for name, kind in kinds.items() for where in unreadable(kind, name)] == []
