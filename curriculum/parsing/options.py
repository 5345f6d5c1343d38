"""Options of the command line that change the data of a config, and how a run remembers them."""

import os
import re
import shlex
from collections.abc import Iterable, Mapping

from curriculum.errors import InputError, check_several
from curriculum.parsing.yaml12 import WHENCE, Origin, entry_names, read_override
from phases.checks import EXPECTED_NAME, NAME

_NO_EVAL_SET = re.compile(r"\s*evalsets\.sets\.([A-Za-z0-9_-]+)\s*=\s*(?:null|~)?\s*")  # an override that drops it
_OF_A_NAMED_PHASE = re.compile(r"\s*phases\.(?!\d+[.\[=\s])([A-Za-z0-9_-]+)[.\[=\s]")  # an override of it
_OF_VARIABLES = re.compile(r"--set\s+variables\b")


def options_of(
    overrides: Iterable[str] = (),
    dataset_dirs: Iterable[str] = (),
    eval_dataset_dirs: Iterable[str] = (),
    init_from: str | os.PathLike | None = None,
    keep_optimizer: bool = False,
) -> list[tuple[str, str]]:
    """What is given to `load_config` as (option of the command line, its value), in the order in which it applies."""
    check_several("overrides", overrides)
    options = [("--init-from", os.fspath(init_from))] if init_from is not None else []
    options += [("--keep-optimizer", "")] if keep_optimizer else []
    for flag, items in (("--dataset-dir", dataset_dirs), ("--eval-dataset-dir", eval_dataset_dirs)):
        options += [(flag, f"{name}={folder}") for name, folder in named_directories(flag, items).items()]
    return options + [("--set", value) for value in overrides]


def apply_options(
    options: Iterable[tuple[str, str]], data: dict, origin: Origin, remembered: Iterable[str] = ()
) -> None:
    """Change the data of a config by options as the command line gives them, in their order.

    `remembered` come first, as `Config.command_line` gives them. Those of a phase, source or eval set that is there no
    more are dropped: they would make it anew, of one field, or change another.
    """
    given, added = list(options), []
    remembered = [option.partition(" ")[::2] for option in remembered]
    remembered.sort(key=lambda option: not _OF_VARIABLES.match(_as_text(option)))  # which may be the names of phases
    origin.remembered = {_as_text(option) for option in remembered} - {_as_text(option) for option in given}
    for flag, value in [*remembered, *given]:
        option = _as_text((flag, value))
        if flag == "--set":
            is_remembered = option in origin.remembered
            if is_remembered and _is_gone(value, data, origin):
                origin.dropped.append(option)
            elif null := _NO_EVAL_SET.fullmatch(value):
                _drop_eval_set(null[1], value, data, origin, is_remembered)
            else:
                read_override(data, origin, value)
        elif flag == "--dataset-dir":
            name = _take_directory(flag, value, _table(data, "sources"), "sources", origin)
            added.append(name)
        elif flag == "--eval-dataset-dir":
            _take_directory(flag, value, _table(_table(data, "evalsets"), "sets"), "evalsets.sets", origin)
        elif flag == "--init-from":
            _table(data, "adaptation")["init_from"] = value
            origin.given_by("adaptation.init_from", option)
        else:
            _table(data, "adaptation")["keep_optimizer"] = True
            origin.given_by("adaptation.keep_optimizer", option)
    _drop_incomplete(data, origin)
    _name_anew(data, origin)
    if added and "phases" not in data:
        replayed = _table(_table(data, "adaptation"), "replay")
        if mixture := {name: 1.0 for name in added if name not in replayed}:
            data["phases"] = [{"name": "adaptation", "until": "end", "mixture": mixture}]
        origin.made_of["phases"] = f"sources.{added[-1]}"


def _as_text(option: tuple[str, str]) -> str:
    return "{} {}".format(*option).rstrip()


def _drop_eval_set(name: str, override: str, data: dict, origin: Origin, is_remembered: bool) -> None:
    """Take an eval set out of the data. There may be none only if the override is remembered."""
    evalsets = data.get("evalsets")
    sets = evalsets.get("sets") if isinstance(evalsets, dict) else None
    is_there = isinstance(sets, dict) and name in sets
    if is_there or not is_remembered:
        read_override(data, origin, override)  # left in the data it is refused, as no set may be null
    if is_there:
        del sets[name]


def _take_directory(flag: str, value: str, entries: dict, path: str, origin: Origin) -> str:
    """Put a directory in the place of the source or eval set of that name, which is returned."""
    name, _, directory = value.partition("=")
    replaced = entries.get(name)
    entries[name] = {"path": directory}
    origin.given_by(f"{path}.{name}", f"{flag} {value}")
    if isinstance(replaced, dict):
        origin.replaced[f"{path}.{name}"] = replaced
    return name


def _is_gone(override: str, data: dict, origin: Origin) -> bool:
    """Whether an override is of a phase, by its name, that the data do not have."""
    if not (named := _OF_A_NAMED_PHASE.match(override)):
        return False
    phases = data.get("phases")
    return isinstance(phases, list) and named[1] not in entry_names(phases, data, origin)


def _name_anew(data: dict, origin: Origin) -> None:
    """Give options of phases that are named by a variable the name that it has in the end."""
    phases = data.get("phases")
    for i, name in enumerate(entry_names(phases, data, origin) if isinstance(phases, list) else ()):
        where = f"phases[{i}]"
        if name is None or name.isdecimal() or where in origin.options or f"{where}.name" in origin.options:
            continue  # a later option finds it by the name that it had before
        for path in [path for path in origin.by_name if path.startswith(f"{where}.")]:
            value = origin.by_name[path].partition("=")[2]
            origin.by_name[path] = f"--set phases.{name}{path[len(where) :]}={value}"


def _drop_incomplete(data: dict, origin: Origin) -> None:
    """Drop sources and eval sets of which there is nothing but single fields that remembered options give."""
    evalsets = data.get("evalsets")
    sets = evalsets.get("sets") if isinstance(evalsets, dict) else None
    for where, entries in (("sources", data.get("sources")), ("evalsets.sets", sets)):
        for name, entry in list(entries.items()) if isinstance(entries, dict) else ():
            path = f"{where}.{name}"
            below = {p: option for p, option in origin.options.items() if p.startswith(f"{path}.")}
            whole = path in origin.positions or path in origin.options
            if below and not whole and origin.remembered >= {*below.values()} and not entry.keys() & {*WHENCE}:
                del entries[name]
                origin.dropped += [origin.options.pop(p) for p in below]


def named_directories(flag: str, items: Iterable[str] | Mapping[str, str | os.PathLike]) -> dict[str, str]:
    """Directories by name, of all values `[NAME=]DIR` of one command's option `flag`; a bare one has its own name.

    From Python they may be given by name already. Raises InputError for a name given twice, or of other characters.
    """
    check_several(flag, items)
    found: dict[str, str] = {}
    by_name = isinstance(items, Mapping)
    for item in items.items() if by_name else items:
        if by_name:
            name, directory = map(str, item)
            item = f"{name}={directory}"
        else:
            name, equals, directory = os.fspath(item).partition("=")
            if not equals:
                name, directory = os.path.basename(os.path.abspath(item)), os.fspath(item)
        if name and not NAME.fullmatch(name):
            folder = item if not by_name and os.path.exists(item) else directory  # its own name may have a =
            fix = f"give another: {flag} NAME={shlex.quote(os.fspath(folder))}"
            raise InputError(f"{flag} {item}: got the name {name!r}, {EXPECTED_NAME}; {fix}")
        if not name or not directory:
            raise InputError(f"{flag} {item}: expected DIR or NAME=DIR")
        if name in found:
            message = f"{name} is already the name of {found[name]}; expected another one, as in OTHER={directory}"
            raise InputError(f"{flag} {item}: {message}")
        found[name] = directory
    return found


def _table(data: dict, key: str) -> dict:
    """data[key] as a mapping to add to; a wrong kind is left for the validation to name."""
    table = data.setdefault(key, {})
    return table if isinstance(table, dict) else {}
