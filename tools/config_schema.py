"""The JSON schema of a config file, made from the dataclasses that validate it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter

from curriculum.config import Config, sections
from curriculum.parsing.typed import annotations, field_key
from curriculum.schema.adaptation import AdaptationSection
from curriculum.schema.sections import OptimSection
from curriculum.train.optimizer import OPTIMIZERS

_USE = {
    "type": "string",
    "pattern": r"^\$(variables\..+|\{variables\..+\})$",
    "description": "The value of a variable.",
}
_PERCENT = {"type": "string", "pattern": r"^\s*\d{1,18}(\.\d{1,18})?\s*%\s*$"}  # as read by `with_shares`
_NOTES = ("title", "description", "default")


def json_schema(*, variables: bool = True) -> dict:
    """The JSON schema of a config file, for editors. `variables=False`: of the file after their substitution."""
    schema = _schema()
    if not variables:
        return schema
    for section in (schema, *schema["$defs"].values()):
        section["properties"] = {
            name: value if name == "variables" else _or_variable(value) for name, value in section["properties"].items()
        }
    schema["$defs"]["variable"] = _USE
    return schema


def _or_variable(schema: dict) -> dict:
    """The schema changed so that the value, or anything inside it, may also be given as `$variables.x`."""
    options = []
    for option in schema.get("anyOf", [{key: value for key, value in schema.items() if key not in _NOTES}]):
        inside = {key: _or_variable(option[key]) for key in ("items", "additionalProperties") if key in option}
        options.append(option | inside)
    if {"type": "string"} not in options:
        options.append({"$ref": "#/$defs/variable"})
    notes = {key: schema[key] for key in _NOTES if key in schema}
    return ({"anyOf": options} if len(options) > 1 else options[0]) | notes


def _schema() -> dict:
    adapters = [(f.name, "validation", TypeAdapter(annotations(Config)[f.name])) for f in sections()]
    schemas, definitions = TypeAdapter.json_schemas(adapters)
    for f in sections():
        if isinstance(f.default, str | int):
            schemas[f.name, "validation"]["default"] = f.default
    for name, text in _meanings(Config).items():
        schemas[name, "validation"]["description"] = text
    by_title = {t.__name__: t for t in _dataclasses_below(Config)}
    for title, schema in definitions["$defs"].items():
        definitions["$defs"][title] = schema = {"additionalProperties": False, **schema}
        schema["properties"] = {field_key(name): value for name, value in schema["properties"].items()}
        for name, text in _meanings(by_title[title]).items():
            schema["properties"][name]["description"] = text
    definitions["$defs"][OptimSection.__name__]["properties"]["name"]["enum"] = list(OPTIMIZERS)
    replay = definitions["$defs"][AdaptationSection.__name__]["properties"]["replay"]
    replay["additionalProperties"] = {"anyOf": [replay["additionalProperties"], _PERCENT]}
    required = [
        f.name for f in sections() if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "curriculum config",
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": {
            "variables": {
                "type": "object",
                "description": "Values named once, used whole as $variables.x or inside text as ${variables.x}.",
            },
            **{name: schema for (name, _), schema in schemas.items()},
        },
        **definitions,
    }


def _dataclasses_below(kind: Any) -> Iterable[type]:
    """Every dataclass inside a type of the config."""
    if dataclasses.is_dataclass(kind):
        yield kind
        for inner in typing.get_type_hints(kind, include_extras=True).values():
            yield from _dataclasses_below(inner)
    for inner in typing.get_args(kind):
        yield from _dataclasses_below(inner)


def _meanings(section: type) -> dict[str, str]:
    """The docstring below each field of a dataclass and of its bases, read from the source."""
    meanings: dict[str, str] = {}
    for base in section.__bases__:
        meanings |= _meanings(base) if dataclasses.is_dataclass(base) else {}
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0].body
    for statement, text in zip(body, body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            meanings[field_key(statement.target.id)] = " ".join(text.value.value.split())
    return meanings
