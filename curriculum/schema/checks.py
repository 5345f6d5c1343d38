"""Checks across the sections of a config. Each takes the sections by name, and `origin`, and yields (path, message)."""

import math
import os
import shlex
import shutil
from pathlib import Path

from curriculum.data.split import parse_share
from curriculum.errors import FieldError, nearest, no_such, no_such_path
from curriculum.model.presets import model_problems
from curriculum.schema.sections import EvalSource
from curriculum.schema.shapes import SHAPE_CHECKS, known_vocab_size, model_of
from curriculum.train.optimizer import OPTIMIZERS, no_rule
from evalsets.evalset import PRIMARY
from evalsets.summary import RECORDED
from phases.checks import EXPECTED_NAME, NAME, check_cap, check_phases
from phases.lr import check_rates

_METRICS = tuple(f"_{metric}" for metric in RECORDED if metric != "loss")  # suffixes of the record's keys
NO_ADAPTERS = "a custom model (model: null) has no adapters; leave lora out, and freeze within the model itself"


def _check_name(v):
    if not NAME.fullmatch(v["name"]):
        yield "name", f"got {v['name']!r}, {EXPECTED_NAME}"


def _check_sources(v):
    if not v["sources"]:
        yield "sources", "got none, expected at least one source"
    for name, source in v["sources"].items():
        path = f"sources.{name}"
        if not NAME.fullmatch(name):
            yield path, f"got the name {name!r}, {EXPECTED_NAME}"
        yield from check_cap(name, source.max_epochs)
        if source.max_epochs is None and source.on_exhaust in ("stop", "renormalise"):
            why = "which has no effect without max_epochs: the source then repeats forever"
            fix = "set max_epochs, such as 1, or leave on_exhaust out"
            yield f"{path}.on_exhaust", f"got {source.on_exhaust}, {why}; {fix}"


def _check_source_paths(v):
    for name, source in v["sources"].items():
        yield from _check_readable(f"sources.{name}.path", source.path)


def _check_eval_paths(v):
    for path, source in _eval_sources(v):
        yield from _check_readable(f"{path}.path", source.path)


def _check_gate_program(v):
    gate = v["evalsets"].gold
    if gate.gate is None or any(key == "gate" for key, _ in gate.problems()):
        return
    if shutil.which(program := shlex.split(gate.gate)[0]) is None:
        yield "evalsets.gold.gate", f"got the program {program!r}, which is neither an executable file nor on the PATH"


def _check_tokenizer_path(v):
    if v["adaptation"].init_from is not None:  # the tokenizer is the base run's, or a resumed run's own copy
        return
    yield from _check_readable("tokenizer.path", v["tokenizer"].path)


def _eval_sources(v):
    """(path in the config, eval set) of the primary set and of the named ones."""
    section = v["evalsets"]
    return [("evalsets.primary", section.primary)] + [(f"evalsets.sets.{n}", s) for n, s in section.sets.items()]


def _below(section, problems):
    """A section's problems, given as (key, message), as (path, message); an empty key means the section itself."""
    return ((f"{section}.{key}" if key else section, message) for key, message in problems)


def _check_readable(path, location):
    if location is None:
        return
    where = Path(os.path.expanduser(location))
    try:
        where.stat()
    except (FileNotFoundError, NotADirectoryError):
        yield path, f"{location!r} {no_such_path(where)}"
        return
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        yield path, f"{location!r} cannot be accessed: {reason}; expected a readable path"
        return
    if not os.access(where, os.R_OK | (os.X_OK if where.is_dir() else 0)):
        yield path, f"{location!r} cannot be read; check its permissions"


def _check_evalsets(v):
    section = v["evalsets"]
    spelt: dict[str, str] = {}
    for name, source in section.sets.items():
        path, lower = f"evalsets.sets.{name}", name.lower()
        if not NAME.fullmatch(name):
            yield path, f"got the name {name!r}, {EXPECTED_NAME}"
        elif lower in (PRIMARY, "val", "duration_s") or lower.endswith(_METRICS):
            yield path, f"the name {name!r} is reserved for the record; expected another one"
        elif spelt.setdefault(lower, name) != name:
            why = "each set has a folder in tensorboard/, and a disk may not tell upper and lower case apart"
            yield path, f"differs from {spelt[lower]!r} by case alone, expected another name: {why}"
        if source.every is not None and source.every % section.every:
            got = f"got {source.every}, expected a multiple of evalsets.every ({section.every})"
            yield f"{path}.every", got
    if section.primary.every is not None:
        yield "evalsets.primary.every", "the primary set is measured at every eval; use evalsets.every"
    for path, source in _eval_sources(v):
        yield from _check_eval_source(path, source, section.sets)


def _check_eval_source(path, source, sets):
    """Problems of where an eval set has its text from; `sets` are all that a mistyped name may have meant."""
    given = [key for key in ("held_out_of", "path", "hf") if getattr(source, key) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        where = f"{path}.{given[-1]}" if given else path
        name = path.rpartition(".")[2]
        near = None if given else nearest(name, (other for other in sets if other != name))
        hint = f"; did you mean the set {near!r}?" if near else ""
        yield where, f"got {got}, expected exactly one of 'held_out_of', 'path' and 'hf'{hint}"
    own = [key for key in ("text_key", "glob", "format") if getattr(source, key) != getattr(EvalSource, key)]
    if source.held_out_of is not None and own:
        reason = "apply to 'path' and 'hf' only; held-out text comes from its source"
        yield f"{path}.{own[0]}", f"text_key, glob and format {reason}"
    elif len(given) == 1:
        try:
            source.own_source()
        except FieldError as error:
            yield f"{path}.{error.key}", str(error)


def _check_held_out(v):
    for path, source in _eval_sources(v):
        if source.held_out_of is None:
            continue
        if source.held_out_of not in v["sources"]:
            got = f"got {source.held_out_of!r}: "
            yield f"{path}.held_out_of", got + no_such("source", source.held_out_of, v["sources"])
            continue
        if parse_share(v["sources"][source.held_out_of].held_out) == 0:
            yield f"{path}.held_out_of", f"source {source.held_out_of} holds nothing out; {_to_hold_out(source, v)}"


def _to_hold_out(evalset, v):
    origin, path = v["origin"], f"sources.{evalset.held_out_of}"
    option = origin.options.get(path, "")
    if again := origin.lost(path).get("held_out"):
        return f"{option} replaced all of {path}: add {again}"
    if option.startswith("--dataset-dir"):
        return f"{option} gives its path alone: add --set {path}.held_out=1%"
    return f"give {path} a 'held_out' share such as 1%"


def _check_adaptation(v):
    section = v["adaptation"]
    if section.keep_optimizer and section.init_from is None:
        yield "adaptation.keep_optimizer", "got true without adaptation.init_from, the run to take the state from"
    for name in section.replay:
        if name not in v["sources"]:
            yield f"adaptation.replay.{name}", no_such("source", name, v["sources"])
    if (total := math.fsum(section.replay.values())) >= 1:
        yield "adaptation.replay", f"the shares add up to {total:g}, expected less than 1, the whole of a phase"


def _check_lora(v):
    section = v["adaptation"]
    lora = section.lora
    if lora is None:
        return
    if section.init_from is None:
        yield "adaptation.lora", "needs adaptation.init_from, the model that the adapters are for"
    if section.keep_optimizer:
        message = (
            "got true, but the base run's optimizer state is not that of the adapters (adaptation.lora); leave it out"
        )
        yield "adaptation.keep_optimizer", message
    if not lora.targets:
        yield "adaptation.lora.targets", "got none, expected at least one of query, key, value, out, gate, up, down"
    for name in dict.fromkeys(lora.targets):
        if (times := lora.targets.count(name)) > 1:
            yield "adaptation.lora.targets", f"names {name} {times} times; name it once"
    if "model" in v and v["model"] is None:
        yield "adaptation.lora", NO_ADAPTERS


def _check_lora_fits(v):
    lora = v["adaptation"].lora
    if lora is None or (model := model_of(v)) is None:
        return
    shapes = model.projections()
    for name in dict.fromkeys(lora.targets):
        if name not in shapes:
            expected = f"gelu has no gate; expected some of {', '.join(shapes)}"
            yield "adaptation.lora.targets", f"got {name}, but the model's mlp_type is gelu: {expected}"
        elif lora.rank > min(shapes[name]):
            inputs, outputs = shapes[name]
            got = f"got {lora.rank}, expected at most {min(inputs, outputs)}"
            yield "adaptation.lora.rank", f"{got}: {name} is {inputs} x {outputs}, and a higher rank adds nothing"


def _check_regression(v):
    section = v["evalsets"]
    yield from _below("evalsets.regression", section.regression.problems())
    if section.regression.action == "replay" and not any(s.held_out_of for _, s in _eval_sources(v)):
        message = "got replay, but no eval set is held out of a source whose share could be raised"
        yield "evalsets.regression.action", f"{message}; give one a held_out_of, or choose log, checkpoint or stop"


def _check_gold(v):
    section = v["evalsets"]
    problems = section.gold.problems()
    yield from _below("evalsets.gold", problems)
    names = [PRIMARY, *section.sets]
    if not problems and (name := section.gold.target[0]) not in names:
        yield "evalsets.gold.minimise", f"got {section.gold.minimise!r}: {_no_such_set(name, v)}"
    for name in section.gold.subject_to:
        if name not in names:
            yield f"evalsets.gold.subject_to.{name}", _no_such_set(name, v)


def _no_such_set(name, v):
    """As `no_such`, but suggests for a source's name the set that is held out of it, and for `val` the primary set."""
    sets = {PRIMARY: v["evalsets"].primary, **v["evalsets"].sets}
    meant = [f"{evalset!r}, which is held out of {name}" for evalset, s in sets.items() if s.held_out_of == name]
    if name == "val":
        meant.append(f"{PRIMARY!r}, which record and console call val")
    if not meant:
        return no_such("eval set", name, sets)
    return f"no such eval set; did you mean {meant[0]}? (eval sets: {', '.join(sorted(sets))})"


def _check_skip_updates(v):
    skip = v["train"].skip_updates
    if skip is not None and skip.judge_from_steps > skip.window_steps:
        got = f"got {skip.judge_from_steps}, expected at most the window_steps ({skip.window_steps})"
        yield "train.skip_updates.judge_from_steps", f"{got}: a window never holds more"


def _check_deterministic(v):
    if v["train"].deterministic and v["model"].attention == "cudnn":
        expected = "expected auto, plain or xla with train.deterministic (docs/gpu.md says why)"
        yield "model.attention", f"got cudnn, {expected}; leave it out for auto"
    if v["train"].deterministic is False and not (v["model"].dropout or 0) > 0:
        yield "train.deterministic", "got false with model.dropout 0, expected a dropout above 0, true or null"


def _check_optimizer(v):
    if v["optim"].name not in OPTIMIZERS:
        yield "optim.name", no_rule(v["optim"].name)


def _check_axes(v):
    """An axis that splits no matrix would make devices do the same work twice."""
    if (model := model_of(v)) is None:
        return
    for axis in ("fsdp", "tensor"):
        size = getattr(v["mesh"], axis)
        if size > 1 and model.d_model % size and model.d_ff % size:
            got = f"got {size}, which divides neither d_model ({model.d_model}) nor d_ff ({model.d_ff})"
            yield f"mesh.{axis}", f"{got}: nothing would be split; expected a divisor, or 1"


def _check_tied(v):
    chosen = v["optim"].name == "muon" and v["optim"].muon.allow_tied_embed
    if chosen and (model := model_of(v)) is not None and not model.tie_embeddings:
        message = "the model has a separate head, not tied to the embedding (model.tie_embeddings: false)"
        yield "optim.muon.allow_tied_embed", f"{message}; leave it out, or set allow_all_2d"


def _check_logging(v):
    wandb = v["logging"].wandb
    if wandb is None:
        return
    # wandb refuses these names itself, but only once the run has begun.
    if not wandb.project or len(wandb.project) > 128 or set(wandb.project) & set("/\\#?%:"):
        expected = "1 to 128 characters without / \\ # ? % and :"
        yield "logging.wandb.project", f"got {wandb.project!r}, expected {expected}"
    for i, tag in enumerate(wandb.tags):
        if not 1 <= len(tag) <= 64:
            yield f"logging.wandb.tags[{i}]", f"got {tag!r}, expected 1 to 64 characters"


def _check_generate(v):
    section, names = v["logging"].generate, [PRIMARY, *v["evalsets"].sets]
    yield from _below("logging.generate", section.problems())
    if section.from_evalset is not None and section.from_evalset not in names:
        yield "logging.generate.from_evalset", f"got {section.from_evalset!r}: {_no_such_set(section.from_evalset, v)}"


CHECKS = [
    *SHAPE_CHECKS,
    ({"name"}, _check_name),
    ({"sources"}, _check_sources),
    ({"phases", "sources"}, lambda v: check_phases(v["phases"], v["sources"])),
    ({"evalsets"}, _check_evalsets),
    ({"evalsets", "sources"}, _check_held_out),
    ({"adaptation", "sources"}, _check_adaptation),
    ({"adaptation"}, _check_lora),
    ({"adaptation", "model", "tokenizer"}, _check_lora_fits),
    ({"evalsets"}, _check_regression),
    ({"evalsets"}, _check_gold),
    ({"train"}, _check_skip_updates),
    ({"train", "model"}, _check_deterministic),
    ({"optim"}, lambda v: _below("optim", [*check_rates(v["optim"]), *v["optim"].problems()])),
    ({"mesh"}, lambda v: _below("mesh", v["mesh"].problems())),
    ({"mesh", "model", "tokenizer"}, _check_axes),
    ({"logging"}, _check_logging),
    ({"logging", "evalsets"}, _check_generate),
    ({"model", "tokenizer"}, lambda v: _below("model", model_problems(v["model"], known_vocab_size(v)))),
    ({"model", "tokenizer", "optim"}, _check_tied),
]
PATH_CHECKS = [
    ({"sources"}, _check_source_paths),
    ({"evalsets"}, _check_eval_paths),
    ({"evalsets"}, _check_gate_program),
]
TRAIN_CHECKS = [({"optim"}, _check_optimizer)]  # a run is read without its optimizer, which may be the user's own
TOKENIZER_PATH_CHECKS = [({"tokenizer", "adaptation"}, _check_tokenizer_path)]
