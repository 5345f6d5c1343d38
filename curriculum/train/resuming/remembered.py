"""The config of a resumed run, from the file and from the options that the run remembers."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from curriculum.config import Config, load_config, run_name_of
from curriculum.errors import shown
from curriculum.parsing.options import apply_options, options_of
from curriculum.parsing.variables import substitute
from curriculum.parsing.yaml12 import Origin, parse_yaml
from curriculum.run_directory import RunDirectory

_ABSENT = object()


def config_going_on(
    config_path: str | Path, run_dir: Path | None, changes: Mapping[str, Any]
) -> tuple[Config, Path, list[str]]:
    """(config, run directory, notes) of a run that is resumed.

    The directory is `runs/<name>` if none is given. `changes` are as in `load_config`; options that the run remembers
    apply before them. The notes are `outranked`'s lines on values of the file that are not used. Raises InputError.
    """
    run_dir = run_dir or Path("runs") / run_name_of(config_path, changes["overrides"])
    remembered = RunDirectory(run_dir).command_line()
    config = load_config(config_path, **changes, remembered=remembered, continues=run_dir)
    return config, run_dir, list(outranked(config, remembered, **changes))


def outranked(config: Config, remembered: Sequence[str], **given: Any) -> Iterator[str]:
    """A line on each value of a config's file that is not used because an option of an earlier command overrides it.

    `remembered` and `given` are what `load_config` made the config from. An option that is given again is left out.
    """
    places, origin = Origin(config.origin.file), Origin(config.origin.file)
    in_file, data = (parse_yaml(config.origin.text, o) for o in (places, origin))
    new = options_of(**given)
    apply_options(new, data, origin, remembered)
    new_texts = {f"{flag} {value}".rstrip() for flag, value in new}
    in_file, data = _substituted(in_file, places), _substituted(data, origin)
    for option in origin.dropped:
        section = option.removeprefix("--set ").strip().partition(".")[0]
        of = {"phases": "phase", "sources": "source", "evalsets": "eval set"}[section]
        yield f"{origin.file}: has no such {of} any more: {option}, which the run remembers, is dropped"
    for place, option in origin.options.items():
        says = _at(in_file, place)
        if place == "name" or option in new_texts or says is _ABSENT or says == _at(data, place):
            continue  # a run keeps its name, whichever file it is resumed with
        says = shown(says)
        yield (
            f"{places.place(place)}: {place}: the file says {says}, but {option} is used, which the run remembers; to "
            f"use the file's value, give --set {shlex.quote(f'{place}={says}')}"
        )


def _substituted(data: dict[str, Any], origin: Origin) -> dict[str, Any]:
    return {**substitute(data, origin.numbers)[0], "variables": data.get("variables")}


def _at(data: Any, place: str) -> Any:
    """The value at a place such as `phases[1].until`, _ABSENT if there is none."""
    for part in re.findall(r"[^.\[\]]+", place):
        if isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        elif isinstance(data, dict) and part in data:
            data = data[part]
        else:
            return _ABSENT
    return data
