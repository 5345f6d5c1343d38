"""Write what is generated from the config's dataclasses: configs/schema.json for editors, docs/config.md for people.

python tools/write_config_reference.py
"""

import ast
import dataclasses
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from curriculum.config import Config, sections
from curriculum.parsing.typed import annotations, field_key
from curriculum.schema.adaptation import AdaptationSection
from curriculum.schema.sections import OptimSection
from curriculum.train.optimizer import OPTIMIZERS

ROOT = Path(__file__).parents[1]
HEAD = """\
# Every key of a config

Generated from the code by `python tools/write_config_reference.py`; `NAME` stands for a name of yours.
"""
COLUMNS = "| key | type | default | meaning |\n|---|---|---|---|\n"
VARIABLE = {
    "type": "string",
    "pattern": r"^\$(variables\..+|\{variables\..+\})$",
    "description": "The value of a variable.",
}
PERCENT = {"type": "string", "pattern": r"^\s*\d{1,18}(\.\d{1,18})?\s*%\s*$"}  # as read by `with_shares`
NOTES = ("title", "description", "default")


def json_schema() -> dict:
    """The JSON schema of a config file, for editors."""
    schema = substituted_schema()
    for section in (schema, *schema["$defs"].values()):
        section["properties"] = {
            name: value if name == "variables" else or_variable(value) for name, value in section["properties"].items()
        }
    schema["$defs"]["variable"] = VARIABLE
    return schema


def or_variable(schema: dict) -> dict:
    """The schema changed so that the value, or anything inside it, may also be given as `$variables.x`."""
    options = []
    for option in schema.get("anyOf", [{key: value for key, value in schema.items() if key not in NOTES}]):
        inside = {key: or_variable(option[key]) for key in ("items", "additionalProperties") if key in option}
        options.append(option | inside)
    if {"type": "string"} not in options:
        options.append({"$ref": "#/$defs/variable"})
    notes = {key: schema[key] for key in NOTES if key in schema}
    return ({"anyOf": options} if len(options) > 1 else options[0]) | notes


def substituted_schema() -> dict:
    """The JSON schema of a config file whose variables are substituted, from the dataclasses that validate it."""
    adapters = [(f.name, "validation", TypeAdapter(annotations(Config)[f.name])) for f in sections()]
    schemas, definitions = TypeAdapter.json_schemas(adapters)
    for f in sections():
        if isinstance(f.default, str | int):
            schemas[f.name, "validation"]["default"] = f.default
    for name, text in field_docs(Config).items():
        schemas[name, "validation"]["description"] = text
    by_title = {t.__name__: t for t in dataclasses_below(Config)}
    for title, schema in definitions["$defs"].items():
        definitions["$defs"][title] = schema = {"additionalProperties": False, **schema}
        schema["properties"] = {field_key(name): value for name, value in schema["properties"].items()}
        for name, text in field_docs(by_title[title]).items():
            schema["properties"][name]["description"] = text
    definitions["$defs"][OptimSection.__name__]["properties"]["name"]["enum"] = list(OPTIMIZERS)
    replay = definitions["$defs"][AdaptationSection.__name__]["properties"]["replay"]
    replay["additionalProperties"] = {"anyOf": [replay["additionalProperties"], PERCENT]}
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
                "description": 'Values named once, used whole as $variables.x or inside text as "${variables.x}".',
            },
            **{name: schema for (name, _), schema in schemas.items()},
        },
        **definitions,
    }


def dataclasses_below(kind: Any) -> Iterable[type]:
    """Every dataclass inside a type of the config."""
    if dataclasses.is_dataclass(kind):
        yield kind
        for inner in typing.get_type_hints(kind, include_extras=True).values():
            yield from dataclasses_below(inner)
    for inner in typing.get_args(kind):
        yield from dataclasses_below(inner)


def field_docs(section: type) -> dict[str, str]:
    """The docstring below each field of a dataclass and of its bases, read from the source."""
    meanings: dict[str, str] = {}
    for base in section.__bases__:
        meanings |= field_docs(base) if dataclasses.is_dataclass(base) else {}
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0].body
    for statement, text in zip(body, body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            meanings[field_key(statement.target.id)] = " ".join(text.value.value.split())
    return meanings


def rows(schema, definitions, path=""):
    """(key, type, default, meaning) of every field in a schema, those of nested sections included."""
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        key = f"{path}.{name}" if path else name
        default = "needed" if name in required else cell(field["default"]) if "default" in field else ""
        options = field.get("anyOf", [field])
        for option in options:
            items = option.get("items", {})
            more = option.get("additionalProperties")
            below = option.get("$ref") or items.get("$ref") or (more.get("$ref") if isinstance(more, dict) else None)
            if below:
                target = definitions[below.rpartition("/")[2]]
                inner = f"{key}[]" if items else f"{key}.NAME" if more else key
                yield (
                    inner,
                    "section",
                    default,
                    field.get("description") or target.get("description", "").split("\n")[0],
                )
                yield from rows(target, definitions, inner)
                break
        else:
            yield key, " or ".join(type_of(o) for o in options), default, field.get("description", "")


def reference():
    """The page: a table for each section, after one for the keys that are none."""
    schema = substituted_schema()
    lines = {}
    for key, kind, default, meaning in rows(schema, schema["$defs"]):
        cells = (text.replace("|", "\\|") for text in (f"`{key}`", kind, default, " ".join(meaning.split())))
        lines.setdefault(re.split(r"[.[]", key)[0], []).append(f"| {' | '.join(cells)} |")
    single = [name for name, of_section in lines.items() if len(of_section) == 1]
    tables = {", ".join(single): [line for name in single for line in lines.pop(name)], **lines}
    parts = [f"\n## {names}\n\n{COLUMNS}" + "\n".join(of_section) + "\n" for names, of_section in tables.items()]
    return HEAD + "".join(parts)


def type_of(option):
    if "anyOf" in option:
        return " or ".join(map(type_of, option["anyOf"]))
    if "enum" in option:
        return ", ".join(option["enum"])
    if "const" in option:
        return str(option["const"])
    if option["type"] == "array":
        return f"list of {type_of(option['items'])}"
    if option["type"] == "object":
        return f"NAME: {type_of(option['additionalProperties'])}" if "additionalProperties" in option else "NAME: value"
    return {"null": "null", "string": "text", "boolean": "true, false"}.get(option["type"], option["type"])


def cell(value):
    return "" if isinstance(value, dict) else f"`{json.dumps(value)}`"


def stale() -> dict[Path, str]:
    """What each file should hold that does not."""
    schema = json.dumps(json_schema(), indent=2) + "\n"
    files = {ROOT / "configs/schema.json": schema, ROOT / "docs/config.md": reference()}
    return {path: text for path, text in files.items() if not path.exists() or path.read_text() != text}


if __name__ == "__main__":
    for path, text in stale().items():
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")
