"""The model card of an exported folder, README.md, made from the record of the run.

Like the report it measures nothing anew, and the same run and installation give the same bytes. Of the machine it tells
the devices, the versions of Python and packages, and the paths that the user gave.
"""

import json
import platform
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from curriculum.data.chat import Stretch, Template, render_question
from curriculum.model.counts import num_parameters
from curriculum.model.formats.gguf import fields_for_transformers
from curriculum.model.presets import ModelConfig
from curriculum.record.queries import base_directory
from curriculum.record.wording import mesh_text, typed
from curriculum.run import Run
from curriculum.saved_weights import Weights
from curriculum.views.inspection_text import lineage_lines
from curriculum.views.model_card_sections import evals, fenced, happened, one_line, plan_of, table_of, training

_QUESTION = "Who are you?"
_PACKAGES = ("curriculum", "jax", "flax", "optax", "numpy", "tokenizers", "tiktoken")
_HUB_CACHE = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")  # the hub's cache: owner and name of the model


@dataclass(frozen=True)
class Exported:
    """What the exported folder holds beside the card.

    kind: "hf", "peft" (adapters alone) or "gguf". dtype: as `export` takes it. tokens_drawn: tokens read of each source
    up to `step`, from the checkpoint's ledger; None for a mean of checkpoints.
    """

    step: int
    weights: Weights
    kind: str
    dtype: str
    config: ModelConfig
    tokens_drawn: Mapping[str, int] | None = None
    opens_with: str | None = None  # the token that preceded each document in evals
    merged: bool = False
    template: Template | None = None  # of the conversations that it was trained on
    template_opens: bool = False  # whether the chat template begins with `opens_with`
    reads_otherwise: tuple[str, ...] = ()  # how readers of a GGUF file encode text otherwise, a sentence each
    ids_are_bytes: bool = False  # of a GGUF file, whose tokenizer transformers then cannot read


def model_card(run: Run, exported: Exported) -> str:
    """The card as Markdown. Raises InputError if the record has a broken line; says what else could not be read."""
    unknown: list[str] = []
    parts = [
        _front_matter(run, exported),
        *_headline(run, exported),
        "## What it was trained on",
        *training(run, exported.step, exported.tokens_drawn, unknown),
        "## How well it does",
        *evals(run, exported.step, exported.weights, exported.opens_with, unknown),
        "## What happened in training",
        *happened(run, exported.step),
        "## Where its parameters come from",
        *_lineage(run),
        "## How to load it",
        *_loading(run, exported),
        "## How to reproduce it",
        *_reproducing(run, exported),
        "## What is not known",
        *_not_known(run, unknown),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(run: Run, exported: Exported) -> str:
    library = {"hf": "transformers", "peft": "peft", "gguf": "gguf"}[exported.kind]
    base = _base_model(run)
    matter = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["curriculum", "text-generation"]}
    matter["tags"] += {"hf": [], "peft": ["lora"], "gguf": ["gguf"]}[exported.kind]
    if base is not None:
        matter |= {"base_model": base, "base_model_relation": "adapter" if exported.kind == "peft" else "finetune"}
    return f"---\n{yaml.safe_dump(matter, sort_keys=False, allow_unicode=True)}---"


def _base_model(run: Run) -> str | None:
    """The hub name of the model that the lineage goes back to; None unless a path in the hub's cache proves it."""
    lineage = _beginning(run)
    while lineage is not None:
        if named := _HUB_CACHE.search(f"{lineage['init_from']}/".replace("\\", "/")):
            return f"{named[1]}/{named[2]}"
        lineage = lineage["lineage"]
    return None


def _headline(run: Run, exported: Exported) -> list[str]:
    config, step = exported.config, exported.step
    total = plan_of(run)["total_steps"]
    average, phase = exported.weights.average, exported.weights.phase
    is_what = "are the parameters" if average is None else "is the moving average of the parameters"
    if phase is not None:
        is_what = f"is the mean of the last checkpoints of phase {phase}, which ends"
    if exported.kind == "peft":
        of_raw = "as they were" if average is None else is_what.removeprefix("is ")
        targets = ", ".join(config.lora.targets)
        is_what = f"are LoRA adapters for it, rank {config.lora.rank}, of {targets}, {of_raw}"
    folded = ", LoRA adapters folded in" if exported.merged else ""
    is_gold = phase is None and run.gold_step == step
    gold = ", the gold checkpoint of the run" if is_gold else ""
    if phase is None and run.gold_step is not None and run.gold_step < step:
        gold = f"; the gold checkpoint of the run is that of step {run.gold_step:,}"
    ids = config.num_ids or config.vocab_size
    size = num_parameters(replace(config, vocab_size=ids, num_ids=None, lora=None))
    shape = {"layers": config.n_layer, "width": config.d_model, "feed-forward": f"{config.d_ff} ({config.mlp_type})"}
    shape["heads"] = f"{config.n_head} of width {config.head_width}"
    if config.n_kv_head != config.n_head:
        shape["key and value heads"] = config.n_kv_head
    base = f", theta {config.rope_theta:,g}" if config.pos_encoding == "rope" else ""
    shape |= {"positions": f"{config.max_seq_len:,} ({config.pos_encoding}{base})", "norm": config.norm_type}
    shape |= {"vocabulary": f"{ids:,} ids, embeddings {'tied' if config.tie_embeddings else 'not tied'}"}
    shape["stored as"] = exported.dtype
    return [
        f"# {run.name}",
        f"A language model of {size:,} parameters, a decoder-only transformer trained with `curriculum`. Here "
        f"{is_what} after step {step:,} of {total:,}{folded}{gold}.",
        table_of(("", ""), shape.items()),
    ]


def _lineage(run: Run) -> list[str]:
    lines = lineage_lines({"init_from": _beginning(run), "branched_from": run.branched_from})
    if not lines:
        seed = run.start["config"]["seed"] if run.events else run.resolved["seed"]  # an edit may have changed it since
        return [f"Initialised at random, from the run's seed {seed}."]
    return ["\n".join(f"- {one_line(line)}" for line in lines)]


def _loading(run: Run, exported: Exported) -> list[str]:
    after = ["The prompt begins with the token that preceded every document of the evals."]
    if exported.template is not None:
        after += _conversation(exported.template)
    if exported.kind == "peft":
        code = _python("AutoPeftModelForCausalLM", '"."', "", exported)
        return ["In this folder, with peft:", code, *after, *_base_of_adapters(run)]
    if exported.kind == "hf":
        others = "For vllm, and for llama.cpp with its converter (or `curriculum export RUN --format gguf`):"
        serve = fenced("", "vllm serve .\npython convert_hf_to_gguf.py .")
        code = _python("AutoModelForCausalLM", '"."', "", exported)
        return ["In this folder, with transformers:", code, *after, others, serve]
    prompt = "-p 'Once'" if exported.template is None else "--jinja -cnv"
    run_it = fenced("", f"llama-cli -m model.gguf {prompt}")
    fields = fields_for_transformers(exported.config)
    if fields is None:
        other = "What transformers reads from such a file is not this model; `--format hf` writes a folder for it."
        return ["With llama.cpp:", run_it, other, *_otherwise(exported)]
    told = "".join(f", {key}={value}" for key, value in fields.items())
    if exported.ids_are_bytes:
        code = _python_of_bytes(told, exported.template)
    else:
        code = _python("AutoModelForCausalLM", '".", gguf_file="model.gguf"', told, exported)
    return ["With llama.cpp, or in this folder with transformers:", run_it, code, *after, *_otherwise(exported)]


def _otherwise(exported: Exported) -> list[str]:
    told = [f"- {one_line(line)}" for line in exported.reads_otherwise]
    return ["About the tokenizer in `model.gguf`:", "\n".join(told)] if told else []


def _python(loader: str, where: str, fields: str, exported: Exported) -> str:
    """Python that loads model and tokenizer from `where`, and continues a prompt; `fields` are what the file lacks."""
    imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    if exported.kind == "peft":
        imports = [f"from peft import {loader}", "from transformers import AutoTokenizer"]
    code = [
        "import torch",
        *imports,
        "",
        f"model = {loader}.from_pretrained({where}{fields})",
        f"tokenizer = AutoTokenizer.from_pretrained({where})",
        *_prompt(exported),
        "print(tokenizer.decode(model.generate(ids, max_new_tokens=40)[0]))",
    ]
    return fenced("python", "\n".join(code))


def _python_of_bytes(fields: str, template: Template | None) -> str:
    """As `_python` for a GGUF file of kind byte, whose tokenizer transformers cannot read; end-of-text is 256."""
    stretches = [Stretch("Once upon a time", False)] if template is None else render_question(_QUESTION, template)
    ids = ", ".join("256" if stretch.special else f"*{stretch.text!r}.encode()" for stretch in stretches)
    code = [
        "import torch",
        "from transformers import AutoModelForCausalLM",
        "",
        f'model = AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf"{fields})',
        f"ids = torch.tensor([[256, {ids}]])  # end-of-text, then bytes",
        "found = model.generate(ids, max_new_tokens=40)[0].tolist()",
        'print(bytes(id for id in found if id < 256).decode(errors="replace"))',
    ]
    return fenced("python", "\n".join(code))


def _base_of_adapters(run: Run) -> list[str]:
    """Where the model is that adapters are for, and what has to be done before peft finds it."""
    told = [
        "`adapter_config.json` names the model that the adapters are for; with `--merge`, `curriculum export` "
        "writes that model with them folded in."
    ]
    base = _beginning(run)
    if base is None:
        return told
    if base.get("kind") != "hf":
        directory = shlex.quote(base_directory(base))
        export = f"curriculum export {directory} --step {base['step']} --format hf -o base"
        read_by = f"It names a checkpoint of a run, which peft cannot read: export it with `{export}`"
        told.append(f"{read_by}, and write that folder into it.")
    elif not Path(base["init_from"]).is_absolute():
        told.append(
            "It names that model by a path relative to where the run was trained; peft resolves it from where "
            "Python is started: start Python there and give this folder's path, or write another path or a hub "
            "name into it."
        )
    return told


def _prompt(exported: Exported) -> list[str]:
    """The lines of Python that define `ids`."""
    if exported.template is None:
        text = 'text = tokenizer.encode("Once upon a time", add_special_tokens=False)'
    else:
        text = "text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)"
        text = f'messages = [{{"role": "user", "content": "{_QUESTION}"}}]\n{text}'
    ids = "text" if exported.template_opens else "[tokenizer.bos_token_id, *text]"
    return [text, f"ids = torch.tensor([{ids}])"]


def _conversation(template: Template) -> list[str]:
    """What the template writes, and where the model's answer ends."""
    question = "".join(stretch.text for stretch in render_question(_QUESTION, template))
    _, after = template.chat.around("assistant")
    ends = f" An answer ends before `{json.dumps(after, ensure_ascii=False)}`." if after else ""
    return [
        "It was trained on conversations. The chat template writes one like this, up to where an answer begins:",
        fenced("", question),
        f"Its roles are {', '.join(template.chat.roles)}.{ends}",
    ]


def _reproducing(run: Run, exported: Exported) -> list[str]:
    parts = [fenced("", "\n".join(_commands(run, exported)))]
    if run.branched_from is not None:
        parts.append("The run is a branch: up to that step it is its trunk, which must still exist.")
    if any(_edited(run, event) for event in run.events if event["step"] <= exported.step):
        parts.append(
            "The run was resumed or edited on the way; the config is the last one. A new run with it does not repeat "
            "the edits."
        )
    if run.events:
        devices = [e["devices"] for e in run.events if "devices" in e][-1]
        mesh = mesh_text(devices["mesh"])
        parts.append(f"Trained on {devices['num']} x {devices['kind']} ({devices['platform']}), mesh {mesh}.")
    versions = ", ".join(f"{package} {version(package)}" for package in _PACKAGES)
    parts.append(f"Exported with Python {platform.python_version()}, {versions}.")
    given = run.directory.own_config
    if given.exists():
        text, which = given.read_text(encoding="utf-8"), "run.yaml, as it was given"
    else:
        text = yaml.safe_dump(run.config_json, sort_keys=False, allow_unicode=True)
        which = "run.yaml, every default filled in"
    return [*parts, f"<details><summary>{which}</summary>", fenced("yaml", text.rstrip("\n")), "</details>"]


def _edited(run: Run, event: Mapping[str, Any]) -> bool:
    """Whether an event is a resume or an edit of the config, which the card's commands do not repeat."""
    if run.branched_from is not None and event["step"] < run.branched_from["step"]:
        return False  # taken over from the trunk
    if event["event"] == "schedule_edit":
        return event["kind"] == "config"
    return event["event"] == "resume" and not event.get("begins_branch")


def _commands(run: Run, exported: Exported) -> list[str]:
    """The commands that train the run again and export it in the same way."""
    name = shlex.quote(run.name)
    given = run.directory.command_line()
    branch = run.branched_from
    if branch is None:
        train = ["curriculum train run.yaml"]
    else:  # a branch takes over the beginning of its trunk
        given = [option for option in given if not option.startswith(("--init-from", "--keep-optimizer"))]
        train = [f"curriculum branch {shlex.quote(str(branch['run']))}", f"--at {branch['step']}"]
    train += [f"--run-dir runs/{name}", *map(typed, given)]
    if run.own_optimizer is not None:
        train.append(f"# from Python alone, with {run.own_optimizer!r} in OPTIMIZERS")
    export = [f"curriculum export runs/{name}", "--format", "gguf" if exported.kind == "gguf" else "hf"]
    export += ["--merge"] if exported.merged else []
    export += [] if exported.weights.phase is not None else [f"--step {exported.step}"]
    export.append(f"--weights {exported.weights} --dtype {exported.dtype} -o {name}-export")
    return [" ".join(train), " ".join(export)]


def _not_known(run: Run, unknown: Iterable[str]) -> list[str]:
    lines = [
        "No licence is stated here: those of the sources apply"
        + (", and that of the model it began from" if _beginning(run) else "")
        + "; the program that wrote this knows none of them.",
        "What the texts hold beyond what the eval sets measure: errors, bias, personal data.",
        "Whether near-copies of eval documents were trained on (exact copies were left out).",
        "How the figures would differ with another seed.",
        "The package versions used in training, if they differ from those at export.",
        *unknown,
    ]
    return ["\n".join(f"- {one_line(line)}" for line in lines)]


def _beginning(run: Run) -> dict[str, Any] | None:
    """The run's lineage, which says where its first parameters come from; None if from its own seed."""
    return run.start["lineage"] if run.events else run.resolved["derived"]["lineage"]
