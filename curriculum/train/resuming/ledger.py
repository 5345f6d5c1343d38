"""The ledger: what a checkpoint remembers of a run beside its arrays, and whether a config may continue from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from curriculum.config import Config
from curriculum.data.chat import ROLES, Template
from curriculum.data.config_stores import place_of
from curriculum.data.split import parse_share
from curriculum.errors import shown
from curriculum.record.events import plain
from curriculum.scheduling import Past, declaration, training_settings
from curriculum.train.optimizer import state_layout
from evalsets.evalset import PRIMARY
from phases.schedule import Schedule, Segment, cut, segments_from_json, segments_to_json

if TYPE_CHECKING:
    from curriculum.train.history import History
    from curriculum.train.setup import Setup

Problem = tuple[str, str]  # path in the config, message


@dataclass(frozen=True)
class Found:
    """What a config resolves to, to be compared with a ledger. What is not known is None, or missing from a mapping.

    `sources`: the details of each, as in `Corpus`. `evalsets`: content hashes by name. `parameters`: the shape of each
    trained parameter.
    """

    config: Config
    schedule: Schedule
    architecture: Mapping[str, Any] | None
    parameters: Mapping[str, list[int]] | None
    tokenizer: str | None  # its fingerprint
    sources: Mapping[str, Mapping[str, Any]]
    evalsets: Mapping[str, str]


def found_in(setup: Setup) -> Found:
    """The `Found` of a run that is built, with everything known."""
    corpus = setup.corpus
    return Found(
        config=setup.config,
        schedule=setup.course.schedule,
        architecture=plain(setup.model.architecture),
        parameters=setup.states.trained_shapes,
        tokenizer=corpus.tokenizer.fingerprint,
        sources=corpus.details,
        evalsets={name: evalset.content_hash for name, evalset in corpus.evalsets.items()},
    )


def entry(setup: Setup, step: int, history: History, offsets: Mapping[str, int], elapsed_s: float) -> dict[str, Any]:
    """The ledger of a checkpoint, as plain JSON."""
    course = setup.course
    drawn = course.schedule.read(0, step)
    return {
        "step": step,
        "data_seed": course.plan.seed,
        "model": plain(setup.model.architecture),
        "parameters": setup.states.trained_shapes,
        "optimizer": state_layout(setup.config.optim),
        "window_steps": setup.config.train.window_steps,
        "tokenizer": setup.corpus.tokenizer.fingerprint,
        "packing": asdict(setup.config.packing),
        "data": _data_settings(setup.config),
        "chat_special_tokens": list(Template.of(setup.config.chat, setup.corpus.tokenizer.special_tokens).special),
        "block_tokens": setup.config.longest_seq_len,  # the size of the blocks in which its sources are read
        **scheduled(setup),
        "branched_from": course.branched_from,
        "sources": {name: _source(setup, name) | {"tokens_drawn": drawn[name]} for name in course.plan.sources},
        "lineage": setup.lineage,
        "data_warnings": list(setup.corpus.warnings),
        "history": history.to_json(),
        "offsets": dict(offsets),
        "elapsed_s": round(elapsed_s, 3),
    }


# The keys of `scheduled`.
OF_SCHEDULE = ("declared", "settings", "segments", "past_end", "settled", "before_raised")


def scheduled(setup: Setup) -> dict[str, Any]:
    """What a ledger says about the schedule, and about the config that it was resolved from and trained by."""
    course = setup.course
    return {
        "declared": declaration(setup.config),
        "settings": training_settings(setup.config),
        **_planned(course.schedule, course.past),
        "before_raised": [{"at": at, **_planned(schedule, past)} for at, schedule, past in course.before_raised],
    }


def _planned(schedule: Schedule, past: Past) -> dict[str, Any]:
    return {"segments": segments_to_json(schedule.segments), "past_end": past.end, "settled": dict(past.settled)}


def past_of(saved: Mapping[str, Any]) -> tuple[Segment, ...]:
    """The part of a run's schedule that does not come from its config; the config decides what follows."""
    return cut(segments_from_json(saved["segments"]), saved["past_end"])


def _source(setup: Setup, name: str) -> dict[str, Any]:
    """The fingerprint of a source's training text, its size, and what was left out of it."""
    if name not in setup.corpus.details:  # the run continues without it
        return dict(setup.course.past.sources[name])
    details = setup.corpus.details[name]
    return {key: details[key] for key in ("stream", "tokens_per_epoch", "dropped_documents")}


def changed_contents(saved: Mapping[str, Any], found: Found) -> Iterator[dict[str, Any]]:
    """{path, was, now} of each source whose training text has another fingerprint than in the ledger."""
    for name, details in found.sources.items():
        was = saved["sources"].get(name, details)["stream"]
        if details["stream"] != was:
            yield {"path": f"sources.{name}", "was": {"stream": was}, "now": {"stream": details["stream"]}}


def check_past(
    saved: Mapping[str, Any], found: Found, *, accept_past: bool = False, of_branch: bool = False
) -> list[Problem]:
    """Raise InputError if `found` does not fit the run of the ledger `saved`.

    With `accept_past`, a source that was read may be gone or have other text; these changes are returned, as (path,
    message). The error mentions that option, except to the command that makes a branch (`of_branch`), which lacks it.
    """
    problems = [*_model_changed(saved, found), *_settings_changed(saved, found)]
    changed = _changed_data_settings(saved, found.config)
    # With another tokenizer or packing every text has changed.
    contents = list(_text_changed(saved, found, changed, compare=not problems))
    if not _other_tokenizer(saved, found):  # which changes every set as well
        problems += _evalsets_changed(saved, found, changed)
    problems += _still_read(saved, found)
    if problems:
        raise found.config.error(dict.fromkeys([*([] if accept_past else contents), *problems]))
    if contents and not accept_past:
        way_out = ", or branch before it was read" if of_branch else _OR_ACCEPT
        raise found.config.error((path, message + way_out) for path, message in dict.fromkeys(contents))
    return contents


def _model_changed(saved: Mapping[str, Any], found: Found) -> Iterator[Problem]:
    model, parameters, were = found.architecture, found.parameters, saved["parameters"]
    known = {} if model is None else {**saved["model"], **model}
    follows = _OF_VOCABULARY if _other_tokenizer(saved, found) else ()
    changed = [k for k in known if k not in follows and model.get(k) != saved["model"].get(k)]  # null is as if left out
    if changed == ["lora"]:
        yield from _adapters_changed(model.get("lora"), saved["model"].get("lora"))
    elif changed:
        got = ", ".join(f"{k} {model.get(k)} (was {saved['model'].get(k)})" for k in changed)
        if changed == ["num_ids"] and "num_ids" not in saved["model"]:  # it is left out if no row is padding
            got += f"; with model.num_ids: {model['vocab_size']} all rows are predicted, as before"
        yield "model", f"the architecture of a run cannot change: {got}"
    elif parameters is not None and parameters != were and not follows:
        name = next(n for n in sorted({**were, **parameters}) if parameters.get(n) != were.get(n))
        got = f"{name} {parameters.get(name)} (was {were.get(name)})"
        yield "model", f"the parameters of a run cannot change: {got}"


def _adapters_changed(ours: Mapping[str, Any] | None, its: Mapping[str, Any] | None) -> Iterator[Problem]:
    if ours is None or its is None:
        pairs = {"adaptation.lora": (ours, its)}
    else:
        pairs = {f"adaptation.lora.{key}": (setting, its.get(key)) for key, setting in ours.items()}
    for path, (now, was) in pairs.items():
        if now != was:
            yield path, f"got {shown(now)}, but the run was begun with {shown(was)}; restore it"


def _settings_changed(saved: Mapping[str, Any], found: Found) -> Iterator[Problem]:
    optimizer = state_layout(found.config.optim)
    for key, was in saved["optimizer"].items():
        if optimizer.get(key, was) != was:
            yield f"optim.{key}", f"got {optimizer[key]}, but the run's optimizer state belongs to {was}; {_OR_NEW}"
    if _other_tokenizer(saved, found):
        yield OTHER_TOKENIZER
    for key, value in asdict(found.config.packing).items():
        if value != (was := saved["packing"][key]):
            got = f"got {shown(value)}, but the run was trained with {shown(was)}"
            yield f"packing.{key}", f"{got}; {_OR_NEW}"


def _other_tokenizer(saved: Mapping[str, Any], found: Found) -> bool:
    return found.tokenizer not in (None, saved["tokenizer"])


def _text_changed(
    saved: Mapping[str, Any], found: Found, changed: Mapping[str, str], *, compare: bool
) -> Iterator[Problem]:
    """Each source that was read and whose training text is gone or, with `compare`, has changed.

    `changed`: the messages about changed data settings, by place in the config; they are blamed first.
    """
    config = found.config
    for name, source in saved["sources"].items():
        if source["tokens_drawn"] == 0:
            continue
        if name not in config.sources:
            if name in saved["declared"]["sources"]:
                drawn = f"{source['tokens_drawn']:,} of its tokens were trained on"
                yield "sources", f"{name} is gone, but {drawn}; restore it"
        elif compare and name in found.sources and found.sources[name]["stream"] != source["stream"]:
            settings = [path for path in _of_source(config, name) if path in changed]
            yield from ((path, changed[path]) for path in settings)
            if not settings:
                why = _why_changed(source, found.sources[name], config)
                if "chat_special_tokens" not in saved and config.sources[name].format != "text":
                    why += (
                        " (older code took the names of special tokens in the chat section for text: if it has such "
                        "names, begin another run from this one with --init-from)"
                    )
                yield f"sources.{name}", why


def _still_read(saved: Mapping[str, Any], found: Found) -> Iterator[Problem]:
    """Each source that is gone but is read by updates ahead that a branch's trunk or a rollback has fixed."""
    schedule, step = found.schedule, saved["step"]
    for name, num_tokens in schedule.read(step, schedule.total_steps).items():
        if num_tokens and name not in found.config.sources:
            yield (
                "sources",
                f"{name} is gone, but already scheduled updates from step {step} on still read it; restore it",
            )


def _evalsets_changed(saved: Mapping[str, Any], found: Found, changed: Mapping[str, str]) -> Iterator[Problem]:
    """Each eval set that is not the one that the run measured under its name; `changed` as in `_text_changed`."""
    config = found.config
    for name, content_hash in found.evalsets.items():
        if content_hash == saved["history"]["eval_sets"].get(name, content_hash):
            continue
        chosen = config.eval_sources[name]
        paths = ["evalsets.seq_len"]
        if chosen.held_out_of is not None:
            paths += _of_source(config, chosen.held_out_of)
        elif chosen.format != "text":
            paths += _CHAT
        settings = [path for path in paths if path in changed]
        yield from ((path, changed[path]) for path in settings)
        if not settings:
            anew = f", add it under another name, or measure it no longer: {place_of(name)}=null"
            fix = f"restore it{'' if name == PRIMARY else anew}"
            yield place_of(name), f"is not the set that the run measured under this name; {fix}"


_OF_VOCABULARY = ("vocab_size", "num_ids")  # of an architecture
_OR_NEW = "restore it, or start a new --run-dir"
OTHER_TOKENIZER = "tokenizer", f"is not the one that the run was trained with; {_OR_NEW}"
_OR_ACCEPT = ", or continue after the number of tokens already read: --accept-past"
_CHAT = [f"chat.{role}" for role in ROLES]


def _data_settings(config: Config) -> dict[str, Any]:
    """The settings that decide, beside the files, what the data are; by place in the config."""
    settings: dict[str, Any] = {"evalsets.seq_len": config.evalsets.seq_len}
    settings |= {f"chat.{role}": template for role, template in asdict(config.chat).items()}
    for name, source in config.sources.items():
        settings[f"sources.{name}.format"] = source.format
        settings[f"sources.{name}.held_out"] = parse_share(source.held_out)
    return settings


def _changed_data_settings(saved: Mapping[str, Any], config: Config) -> dict[str, str]:
    """A message about each data setting that has changed, by place in the config."""
    settings = _data_settings(config)
    return {
        path: f"got {shown(settings[path])}, but the run was begun with {shown(was)}; restore it"
        for path, was in saved["data"].items()
        if settings.get(path, was) != was
    }


def _of_source(config: Config, name: str) -> list[str]:
    """The settings that decide what a source gives to training and to eval sets."""
    own = [f"sources.{name}.format", f"sources.{name}.held_out"]
    return own if config.sources[name].format == "text" else own + _CHAT


def _why_changed(saved: Mapping[str, Any], details: Mapping[str, Any], config: Config) -> str:
    """The most likely reason why the training text of a source has changed, and how to fix it."""
    whys = []
    if added := [name for name in details["dropped_documents"] if name not in saved["dropped_documents"]]:
        whys.append(
            f"eval set {', '.join(added)} holds documents that the run has trained on: taking them out of training "
            "would change what it read; take them out of the set"
        )
    if gone := [name for name in saved["dropped_documents"] if name not in config.eval_sources]:
        whys.append(
            f"eval set {', '.join(gone)} is gone: reading the documents that it kept out of training would change what "
            f"the run read; put eval set {', '.join(gone)} back"
        )
    if whys:
        return "; ".join(whys)
    return "its training text has changed since the run read from it; restore it"
