"""YAML 1.2 scalars, strictly: `3e-4` is a number, `on` is text, and every value knows its line and column."""

import json
import math
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import yaml

from curriculum.errors import InputError, nearest, shown
from curriculum.parsing.variables import NAME, substitute

_KEY = re.compile(r"[^.\[\]]+(?:\.[^.\[\]]+|\[[^.\[\]]+\])*")  # a.b[0].c
_MAX_CHARACTERS = 1 << 20  # takes seconds to read; a config is a thousand times shorter
_MAX_DEPTH = 50
_LONGEST_LINE = 100  # characters, of one that an error shows
_MAX_REPEATED = 100_000  # values; aliases can make a file of a few lines expand exponentially
_QUOTED = "while scanning a quoted scalar"  # where YAML ends, in PyYAML's words
_TOO_DEEP = "not readable YAML: nested too deeply"
_TAG = "tag:yaml.org,2002:"
_BREAKS = re.compile("[\x85\u2028\u2029]")  # of a line in YAML 1.1, as PyYAML reads them; ordinary text in 1.2
_BRACES = re.compile(r"\$\{[^\s{}]*\}")  # of a variable in text: outside of quotes YAML takes them for a mapping's
WHENCE = ("path", "hf", "held_out_of")  # where text comes from: an option for a directory means to replace it


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader in Python, without its plain scalars; libyaml's composer crashes on deep nesting."""

    yaml_implicit_resolvers: dict = {}
    depth = 0

    def compose_node(self, parent, index):
        # The deeper the nesting, the more a token costs the scanner: a file of brackets would take seconds.
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise RecursionError
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_scalar_node(self, anchor):
        tag = self.peek_event().tag
        node = super().compose_scalar_node(anchor)
        if tag in ("!", _TAG + "str"):  # an explicit tag makes it text, as quotes do
            node.style = '"'
        return node


_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_WORDS |= dict.fromkeys(("true", "True", "TRUE"), True) | dict.fromkeys(("false", "False", "FALSE"), False)


@dataclass
class Origin:
    """Where each value of a config came from: a place in its file, or an option of the command line."""

    file: str = "config"
    text: str | None = None
    positions: dict[str, tuple[int, int]] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    by_name: dict[str, str] = field(default_factory=dict)  # options of an entry of a list, with its name in its place
    numbers: dict[str, str] = field(default_factory=dict)  # as written: the value of 1.10 is 1.1
    made_of: dict[str, str] = field(default_factory=dict)  # a path that neither gave, to the path it was derived from
    replaced: dict[str, dict] = field(default_factory=dict)  # by path, what an option for a directory replaced
    remembered: Collection[str] = ()  # of the options, those of earlier commands
    dropped: list[str] = field(default_factory=list)  # of these, those of an entry that is there no more
    inherited_model: dict | None = None  # the `model` section that fills in what the config's own leaves out

    def given_by(self, path: str, option: str) -> None:
        """Remember the option that set a path. It replaces, and comes after, earlier ones for this path or below it."""
        for known in (self.options, self.by_name, self.positions, self.numbers, self.replaced):
            for replaced in [p for p in known if p == path or p.startswith((f"{path}.", f"{path}["))]:
                del known[replaced]
        self.options[path] = option

    def place(self, path: str) -> str:
        """Where a path, or its nearest known parent, was given: `file:line:column`, or a command-line option."""
        given = self._given(path)
        if isinstance(given, str):
            return f"{given} (which the run remembers)" if given in self.remembered else given
        return self.file if given is None else "{}:{}:{}".format(self.file, *given)

    def _given(self, path: str) -> str | tuple[int, int] | None:
        """The option or the (line, column) that `place` tells; None if neither is known."""
        below = [option for p, option in self.options.items() if path and p.startswith((f"{path}.", f"{path}["))]
        if below and path not in self.positions:
            return below[-1]
        here = path
        while True:
            if here in self.options:
                return self.options[here]
            if here in self.positions:
                return self.positions[here]
            if here in self.made_of:
                return self._given(self.made_of[here])
            if not here:
                return None
            cut = max(here.rfind("."), here.rfind("["))
            here = here[: max(cut, 0)]

    def lost(self, path: str) -> dict[str, str]:
        """By key, the `--set` that restores what was lost below `path` when an option replaced all of it."""
        lost = {key: (f"{path}.{key}", value) for key, value in self.replaced.get(path, {}).items()}
        return {
            key: set_option(below, value)
            for key, (below, value) in lost.items()
            if key not in WHENCE and value is not None and below not in self.options
        }

    def problem(self, path: str, message: str) -> str:
        parent, _, key = path.rpartition(".")
        if again := self.lost(parent).get(key):
            message += f"; {self.options[parent]} replaced all of {parent}: add {again}"
        return f"{self.place(path)}: {path}: {message}" if path else f"{self.place(path)}: {message}"

    def sort_key(self, path: str) -> tuple:
        """By which paths are in the order of the file, those of no place in it last."""
        given = self._given(path)
        return (0, *given) if isinstance(given, tuple) else (1,)


def read_yaml(path) -> tuple[dict, Origin]:
    """(plain data, its origin) of a YAML file. Raises InputError with file:line:column."""
    origin = Origin(str(path))
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected the path of a YAML config") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a directory; expected the path of a YAML config") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start}: not UTF-8; expected a YAML text file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if len(text) > _MAX_CHARACTERS:
        raise InputError(f"{path}: more than {_MAX_CHARACTERS:,} characters; expected a config: is it a data file?")
    origin.text = text
    data = parse_yaml(text, origin)
    if data is None:
        raise InputError(f"{path}: is empty; expected a YAML config with sources, phases, evalsets and train")
    if not isinstance(data, dict):
        raise InputError(origin.problem("", f"got {shown(data)}, expected a mapping of sections"))
    return data, origin


def read_override(data: dict, origin: Origin, override: str) -> None:
    """Apply `a.b[0].c=value` to data; the value is read as YAML. Instead of its number an entry's name may stand.

    `a.b.0` is the entry named 0, if there is one, else the first. Of what a run remembers it is the first.
    """
    option = f"--set {override}"
    path, equals, text = override.partition("=")
    if not equals or not _KEY.fullmatch(path.strip()):
        raise InputError(f"{option}: expected KEY=VALUE such as train.steps=100 or phases[0].until=50%")
    parts = re.findall(r"(\[?)([^.\[\]]+)", path.strip())
    given = Origin(option)
    try:
        value = parse_yaml(text, given)
    except InputError as error:
        if text.lstrip()[:1] in {"{", "[", '"', "'"} or text.strip().lstrip("+-").lower() in {".nan", ".inf"}:
            raise
        raise InputError(*(f"{p}; put text in quotes: {set_option(path, text)}" for p in error.problems)) from None
    here, dotted, by_name = data, "", ""
    for depth, (bracket, part) in enumerate(parts):
        if isinstance(here, list):
            names = entry_names(here, data, origin)
            key = _entry(part, names, as_number=bool(bracket) or option in origin.remembered)
            if key is None:
                raise InputError(f"{option}: {_no_such_entry(part, names, dotted)}")
            dotted = f"{dotted}[{key}]"
            named = names[key] is not None and names.count(names[key]) == 1 and not names[key].isdecimal()
            by_name += f".{names[key]}" if named else f"[{key}]"
        elif isinstance(here, dict):
            key, dotted = part, f"{dotted}.{part}" if dotted else part
            by_name += f".{part}" if by_name else part
        else:
            raise InputError(f"{option}: {dotted} is {here!r}, expected a section to look up {part!r} in")
        if depth == len(parts) - 1:
            here[key] = value
        else:
            here = here.setdefault(key, {}) if isinstance(here, dict) else here[key]
    origin.given_by(dotted, option)
    if by_name != dotted or by_name != path.strip():
        origin.by_name[dotted] = f"--set {by_name}={text}"
    for below, number in given.numbers.items():
        origin.numbers[dotted + ("." if below[:1] not in ("", "[") else "") + below] = number


def _entry(part: str, names: list[str | None], as_number: bool) -> int | None:
    """Which entry of a list a part of a path means, by name or else by number; None if neither is there.

    With `as_number` a number that is there comes first.
    """
    is_number = part.isascii() and part.isdecimal() and len(part) < 9 and int(part) < len(names)
    if is_number and as_number:
        return int(part)
    if names.count(part) == 1:
        return names.index(part)
    return int(part) if is_number else None


def _no_such_entry(part: str, names: list[str | None], path: str) -> str:
    num = len(names)
    entries = {0: "0 entries", 1: "1 entry (0)"}.get(num, f"{num} entries (0 to {num - 1})")
    message = f"{path} has {entries}, got {part!r}"
    known = [name for name in names if name is not None]
    if near := nearest(part, known):
        message += f"; did you mean {near!r}?"
    if known:
        message += f" (names: {', '.join(known)})"
    return message


def entry_names(entries: list, data: dict, origin: Origin) -> list[str | None]:
    """The name of each entry of a list, variables replaced; None for one without a name that an override can use."""
    given = {"names": [entry.get("name") if isinstance(entry, dict) else None for entry in entries]}
    names = substitute({**given, "variables": data.get("variables", {})}, origin.numbers)[0]["names"]
    usable = [isinstance(name, str) and NAME.fullmatch(name) for name in names]
    return [name if fits else None for name, fits in zip(names, usable, strict=True)]


def set_option(path: str, value) -> str:
    """`--set PATH=VALUE` quoted for a shell, and a text for YAML too if it would be read as something else."""
    text = value if isinstance(value, str) and _reads_as_itself(value) else json.dumps(value, ensure_ascii=False)
    text = _BREAKS.sub(_escaped, text)
    return f"--set {shlex.quote(f'{path}={text}')}"


def _escaped(found: re.Match) -> str:
    return f"\\u{ord(found[0]):04x}"


def _reads_as_itself(text: str) -> bool:
    try:
        return parse_yaml(text, Origin("")) == text
    except InputError:
        return False


def parse_yaml(text: str, origin: Origin):
    """The plain data of a YAML text. Adds where each value stands to `origin`. Raises InputError with the place."""
    node = _root(text, origin)
    if node is None:
        return None
    try:
        return _Conversion(origin).value(node, "")
    except RecursionError:
        raise _error(origin, None, _TOO_DEEP) from None


class _Conversion:
    """From the nodes of a YAML text to plain data."""

    def __init__(self, origin: Origin):
        self.origin = origin
        self._met: set[int] = set()  # nodes, by their id
        self._num_repeated = 0
        self._parents: set[int] = set()  # those that are being converted

    def value(self, node: yaml.Node, path: str) -> Any:
        self._check_aliases(node)
        self.origin.positions.setdefault(path, _line_and_column(node.start_mark))
        if isinstance(node, yaml.ScalarNode):
            scalar = _scalar(node, self.origin)
            if type(scalar) in (int, float):
                self.origin.numbers[path] = node.value
            return scalar
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            raise _tagged(node, self.origin)
        self._parents.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            values = [self.value(item, f"{path}[{i}]") for i, item in enumerate(node.value)]
        else:
            values = self._mapping(node, path)
        self._parents.remove(id(node))
        return values

    def _check_aliases(self, node: yaml.Node) -> None:
        """Raise InputError if aliases repeat too many nodes, or if this one contains itself."""
        if id(node) in self._met:
            self._num_repeated += 1
        self._met.add(id(node))
        if self._num_repeated > _MAX_REPEATED:
            message = f"repeats more than {_MAX_REPEATED:,} values; are aliases nested?"
            raise _error(self.origin, node.start_mark, message)
        if id(node) in self._parents:
            raise _error(self.origin, node.start_mark, "an alias contains itself")

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        origin = self.origin
        values: dict[str, Any] = {}
        for key_node, item in node.value:
            mark = key_node.start_mark
            if not isinstance(key_node, yaml.ScalarNode):
                raise _error(origin, mark, "got a collection as a key, expected text")
            key, is_plain = key_node.value, key_node.style is None
            if key == "<<" and is_plain:
                raise _error(origin, mark, "merge keys (<<) are not part of YAML 1.2; write the keys out")
            below = f"{path}.{key}" if path else key
            if key in values:
                line, _ = origin.positions[below]
                raise _error(origin, mark, f"the key {key!r} occurs twice in this mapping, first in line {line}")
            origin.positions[below] = _line_and_column(mark)
            is_empty = isinstance(item, yaml.ScalarNode) and item.style is None and not item.value
            if is_plain and is_empty and (meant := _meant(key, values)):
                raise _error(origin, mark, f"the key {key!r} has no value; {meant}")
            values[key] = self.value(item, below)
        return values


def _meant(key: str, before: dict) -> str | None:
    """What a plain key without a value was probably meant to be; `before` are the values before it in its mapping."""
    if ":" in key:
        return f"put a blank after its colon: {key.replace(':', ': ', 1)}"
    *_, last = before or [None]
    if key.isdecimal() and type(before.get(last)) is int:
        return f"is it {last}: {before[last]}.{key}, with a decimal point?"
    return None


def _root(text: str, origin: Origin) -> yaml.Node | None:
    """The root node of a YAML text, None if it is empty. Raises InputError with the place."""
    if found := _BREAKS.search(text):
        *above, line = re.split("\r\n?|\n", text[: found.start()])
        mark = yaml.Mark(None, found.start(), len(above), len(line), None, None)
        what = f"got the character U+{ord(found[0]):04X}, at which some readers of YAML end a line"
        raise _error(origin, mark, f"{what}; remove it, or write {_escaped(found)} in double quotes")
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        what = " ".join(filter(None, [error.context, error.problem]))
        mark, cause = (error.problem_mark if _QUOTED not in what else None) or error.context_mark, _cause(error)
        for use in _BRACES.finditer(text):
            if mark is not None and use.start() <= mark.index <= use.end():
                cause = f"; a value with {use[0]} in it needs quotes"
        (problem,) = _error(origin, mark, f"not YAML: {what}{cause}").problems
        raise InputError(problem, details=_lines_to(mark, text) if mark and origin.text is not None else ()) from None
    except yaml.YAMLError as error:
        raise _error(origin, None, f"not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise _error(origin, None, _TOO_DEEP) from None
    finally:
        if loader is not None:
            loader.dispose()


def _cause(error: yaml.MarkedYAMLError) -> str:
    """What most often causes an error of YAML's syntax, as the end of its message; empty if nothing does."""
    what, opened = f"{error.context} {error.problem}", error.context_mark
    if "'\\t'" in what:
        return "; it is a tab: indent with blanks"
    if _QUOTED in what:
        return "; this quote is not closed"
    if "parsing a flow" in what:
        where = f"line {opened.line + 1}, column {opened.column + 1}"
        return f"; is a comma missing, or the bracket opened in {where} not closed?"
    if "found '<scalar>'" in what:
        return "; is a quote before it not closed?"
    if "mapping values" in what or "<block end>" in what:
        return "; is it indented like the lines before, and a blank after each colon? Text with ': ' in it needs quotes"
    return ""


def _lines_to(mark: yaml.Mark, text: str) -> list[str]:
    """The line that a mark is in, and the one before it, as lines to read."""
    lines = list(enumerate(text.splitlines(), start=1))[: mark.line + 1]
    told = [(number, "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)) for number, line in lines[-2:]]
    return [f"{number:>4} | {line[:_LONGEST_LINE]}" for number, line in told]


def _scalar(node: yaml.ScalarNode, origin: Origin) -> str | int | float | bool | None:
    """The value of a scalar by YAML 1.2's core schema. Raises InputError with its place."""
    text, mark = node.value, node.start_mark
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise _error(origin, mark, "got half of a surrogate pair, expected text that is Unicode")
    if node.tag != _TAG + "str":
        raise _tagged(node, origin)
    if node.style in ("'", '"', "|", ">"):  # quoted, or a block
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        if len(text) > 40:
            raise _error(origin, mark, f"got an integer of {len(text)} digits, expected at most 40")
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        value = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if not math.isfinite(value):
            raise _error(origin, mark, f"got {text}, expected a finite number")
        return value
    return text


def _tagged(node: yaml.Node, origin: Origin) -> InputError:
    return _error(origin, node.start_mark, f"got the tag {node.tag!r}, expected plain YAML without tags")


def _line_and_column(mark: yaml.Mark) -> tuple[int, int]:
    return mark.line + 1, mark.column + 1


def _error(origin: Origin, mark: yaml.Mark | None, message: str) -> InputError:
    if mark is None:
        return InputError(f"{origin.file}: {message}")
    line, column = _line_and_column(mark)
    return InputError(f"{origin.file}:{line}:{column}: {message}")
