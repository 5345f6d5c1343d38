"""Write what is generated from the config's dataclasses: configs/schema.json for editors, docs/config.md for people.

python tools/write_config_reference.py [--check]
"""

import argparse
import json
import re
import sys
from pathlib import Path

from config_schema import json_schema

ROOT = Path(__file__).parents[1]
HEAD = """\
# Every key of a config

Generated from the code by `python tools/write_config_reference.py`; `NAME` stands for a name of yours.
"""
COLUMNS = "| key | type | default | meaning |\n|---|---|---|---|\n"


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
    schema = json_schema(variables=False)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is stale")
    check = parser.parse_args().check
    schema = json_schema()
    files = {ROOT / "configs/schema.json": json.dumps(schema, indent=2) + "\n", ROOT / "docs/config.md": reference()}
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    if check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run python tools/write_config_reference.py")
        sys.exit(bool(stale))
    for path in stale:
        path.write_text(files[path])
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
