"""Where the configs of several runs differ, key by key."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from curriculum.data.sources import SourceConfig
from curriculum.errors import shown
from curriculum.record.wording import printable
from curriculum.run import Run
from curriculum.schema.sections import EvalSource
from phases.mixture import normalised
from phases.schedule import Phase

_ENTRIES = {"sources": SourceConfig, "evalsets.sets": EvalSource, "phases": Phase}  # what each entry of a section is
_LONGEST = 48  # characters of a value in a table


def config_differences(runs: Sequence[Run], names: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """{key, values} for every key that differs, except the run's `name`, and the defaults of what not all runs have.

    `key` is the dotted path, with phases by name; `values` has each run's value, None if it is null or absent. Model
    fields that a config leaves out have the values that the run gave them. Mixtures are shares of 1, however a config
    writes them. A phase that configs declare alike may have other steps, as in a branch of a run that was extended:
    they come last, as `phases.NAME, its steps`.
    """
    configs = [_by_name(_spelled_out(run)) for run in runs]
    found = [*_differing("", configs), *_steps_that_differ(configs, runs)]
    return tuple({"key": path, "values": dict(zip(names, values, strict=True))} for path, values in found)


def rows(differences: Iterable[Mapping[str, Any]], most: int | None = None) -> list[tuple[str, ...]]:
    """Each key and its values as text, `-` for None; long values are shortened unless that makes two look alike.

    If more than `most` keys of a section differ, such as those of 300 phases, the first of them and a count of the
    others.
    """
    sections: dict[str, list[tuple[str, ...]]] = {}
    for difference in differences:
        whole = [_text(value) for value in difference["values"].values()]
        short = [t if len(t) <= _LONGEST else f"{t[: _LONGEST // 2]} … {t[3 - _LONGEST // 2 :]}" for t in whole]
        row = (difference["key"], *(short if len({*short}) == len({*whole}) else whole))
        sections.setdefault(difference["key"].partition(".")[0], []).append(row)
    found = []
    for section, its in sections.items():
        found += its[:most]
        if most is not None and len(its) > most:
            found.append((f"{len(its) - most:,} more keys of {section}: --json", *("…" for _ in its[0][1:])))
    return found


def _spelled_out(run: Run) -> dict[str, Any]:
    """The config with the model's null fields and the evals' seq_len as the run took them."""
    config, start = run.config_json, run.events[0] if run.events else {}
    config = {**config, "evalsets": {**config["evalsets"], "seq_len": run.eval_seq_len}}
    if not config.get("model") or "model" not in start:
        return config
    fields = {key: start["model"].get(key) if value is None else value for key, value in config["model"].items()}
    return {**config, "model": fields}


def _by_name(config: Mapping[str, Any]) -> dict[str, Any]:
    phases = {}
    for phase in config["phases"]:
        shares = {source: round(share, 12) for source, share in normalised(phase["mixture"]).items()}
        phases[phase["name"]] = {k: v for k, v in phase.items() if k != "name"} | {"mixture": shares}
    return {key: phases if key == "phases" else section for key, section in config.items() if key != "name"}


def _steps_that_differ(configs: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> Iterator[tuple[str, list[str]]]:
    if not all("plan" in event for run in runs for event in run.events[:1] or [{}]):
        return
    planned = [{p["name"]: f"{p['start']} to {p['end']}" for p in run.plan["phases"]} for run in runs]
    for name in planned[0]:
        steps = [of_run.get(name) for of_run in planned]
        declared = [(config["phases"].get(name) or {}).get("until") for config in configs]
        if None not in steps and len({*steps}) > 1 == len({*map(str, declared)}):
            if len({str(config["train"]["steps"]) for config in configs}) == 1:
                yield f"phases.{name}, its steps", steps


def _differing(path: str, values: Sequence[Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    if all(value == values[0] for value in values):
        return
    if not all(value is None or isinstance(value, Mapping) for value in values):
        yield path, values
        return
    sections = [value or {} for value in values]
    defaults = {}
    if None in values and (entry := _ENTRIES.get(path.rpartition(".")[0])):  # a source, a set or a phase of some runs
        defaults = {field.name: field.default for field in fields(entry)}
    for key in dict.fromkeys(key for section in sections for key in section):
        if all(section[key] == defaults.get(key, ...) for section in sections if key in section):
            continue
        yield from _differing(f"{path}.{key}" if path else key, [section.get(key) for section in sections])


def _text(value: Any) -> str:
    return "-" if value is None else printable(value) if isinstance(value, str) else shown(value)
