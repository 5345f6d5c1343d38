"""The model card of an exported folder, README.md, made from the record of the run.

A view of the run like the report: nothing in it is measured anew, and the same run gives the same bytes. Of the machine
it says only the paths that the user gave.
"""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import yaml

from curriculum.errors import InputError
from curriculum.model.presets import ModelConfig, num_parameters
from curriculum.record.compare import interval_text, paired
from curriculum.record.console import skipped_line, verdict
from curriculum.record.events import METRICS, config_name
from curriculum.record.inspection import edits_of, lineage_lines, loss, mixture_text, offender, signed
from curriculum.record.queries import EvalPoint, consumption, eval_points, evalset_facts, standing_regressions
from curriculum.run import Run, read_arrays

_HAPPENED = ("eval_regression", "eval_recovered", "schedule_edit", "rollback", "diverged")
_PACKAGES = ("curriculum", "jax", "flax", "optax", "numpy", "tokenizers", "tiktoken")
_HUB_CACHE = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")  # of the hub's own folders: whose the weights are


@dataclass(frozen=True)
class Exported:
    """What lies in the folder beside the card.

    `weights` and `dtype` as `export` takes them; `kind`: "hf", "peft" (adapters alone) or "gguf". `tokens_drawn`: by
    source up to `step`, of the checkpoint's ledger; None for a mean of checkpoints.
    """

    step: int
    weights: str
    kind: str
    dtype: str
    config: ModelConfig
    tokens_drawn: Mapping[str, int] | None = None
    opens_with: str | None = None  # the token that each document of training and evals came after
    merged: bool = False


def model_card(run: Run, exported: Exported) -> str:
    """The card. Raises InputError where the record has a broken line; what cannot be read beside it, the card says."""
    unknown: list[str] = []
    parts = [
        _front_matter(run, exported),
        *_headline(run, exported),
        "## What it was trained on",
        *_training(run, exported, unknown),
        "## How well it does",
        *_evals(run, exported, unknown),
        "## What happened on the way",
        *_happened(run, exported),
        "## Where its parameters come from",
        *_lineage(run),
        "## How to load it",
        *_loading(exported),
        "## How to make it again",
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
    """The hub's name of the model that the first run began from: only a path of the hub's own cache says it surely."""
    lineage = _beginning(run)
    while lineage is not None:
        if named := _HUB_CACHE.search(f"{lineage.get('init_from') or ''}/".replace("\\", "/")):
            return f"{named[1]}/{named[2]}"
        lineage = lineage.get("lineage")
    return None


def _headline(run: Run, exported: Exported) -> list[str]:
    config, step = exported.config, exported.step
    total = _plan(run)["total_steps"]
    its = {"raw": "the parameters", "ema": "the moving average of the parameters"}
    what = its.get(exported.weights) or f"the mean of the last checkpoints of phase {exported.weights[5:]}, which ends"
    if exported.kind == "peft":
        what = f"LoRA adapters for it, rank {config.lora.rank}, of {', '.join(config.lora.targets)}, as they were"
    elif exported.merged:
        what += ", LoRA adapters folded in,"
    is_gold = exported.weights in ("raw", "ema") and run.gold_step == step
    gold = ", the gold checkpoint of the run" if is_gold else ""
    ids = config.num_ids or config.vocab_size
    size = num_parameters(replace(config, vocab_size=ids, num_ids=None, lora=None))
    shape = {"layers": config.n_layer, "width": config.d_model, "feed-forward": f"{config.d_ff} ({config.mlp_type})"}
    shape["heads"] = f"{config.n_head} of width {config.head_width}"
    if config.n_kv_head != config.n_head:
        shape["key and value heads"] = config.n_kv_head
    shape |= {"positions": f"{config.max_seq_len:,} ({config.pos_encoding})", "norm": config.norm_type}
    shape |= {"vocabulary": f"{ids:,} ids, embeddings {'tied' if config.tie_embeddings else 'not tied'}"}
    shape["stored as"] = exported.dtype
    return [
        f"# {run.resolved['name']}",
        f"A language model of {size:,} parameters, a decoder-only transformer trained with `curriculum`. Here are "
        f"{what} after step {step:,} of {total:,}{gold}.",
        _table(("", ""), [(name, value) for name, value in shape.items()]),
    ]


def _training(run: Run, exported: Exported, unknown: list[str]) -> list[str]:
    plan = _plan(run)
    phases = [phase for phase in plan["phases"] if phase["start"] < exported.step]
    if not phases:
        return ["Nothing yet: these are the parameters that the run began with."]
    read: dict[str, dict[str, Any]] = {}
    if run.events:
        at = None if exported.tokens_drawn is None else (phases[-1]["name"], exported.step, exported.tokens_drawn)
        try:
            names = [phase["name"] for phase in phases]
            read = {row["phase"]: row for row in consumption(run, at) if row["phase"] in names}
        except InputError as error:
            unknown += error.problems
    rows = []
    for phase in phases:
        edits = [edit for edit in edits_of(run.events, phase) if edit["step"] < exported.step]
        tokens = read.get(phase["name"], {}).get("tokens", {})
        rows.append(
            (
                phase["name"],
                f"{phase['start']:,} to {min(phase['end'], exported.step):,}"
                + (f" of {phase['end']:,}" if exported.step < phase["end"] else "")
                + (f", a ramp over the first {phase['ramp_steps']:,}" if phase.get("ramp_steps") else ""),
                mixture_text({**phase, "edits": edits}, lambda share: f"{share:.4g}"),
                ", ".join(f"{name} {num:,}" for name, num in tokens.items()) or "not known",
            )
        )
    by_event = (event["tokens_processed"] for event in reversed(run.events) if event["step"] == exported.step)
    total = next(by_event, exported.step * plan["tokens_per_step"])
    parts = [
        f"{total:,} tokens up to step {exported.step:,}.",
        _table(("phase", "steps", "mixture", "tokens read in it"), rows),
    ]
    drawn: dict[str, int] = {}
    for row in read.values():
        for name, num in row["tokens"].items():
            drawn[name] = drawn.get(name, 0) + num
    facts = run.start["sources"] if run.events else {}
    rows = []
    for name, source in run.resolved["sources"].items():
        its, num = facts.get(name, {}), drawn.get(name, 0)
        epochs = f"{num / its['tokens_per_epoch']:.3g}" if its.get("tokens_per_epoch") else "not known"
        sizes = (f"{its[key]:,}" if key in its else "not known" for key in ("documents", "tokens"))
        rows.append(
            (name, _place(source), *sizes, f"{num:,}" if read else "not known", epochs if read else "not known")
        )
    header = ("source", "from", "documents", "tokens in it", "tokens drawn", "epochs")
    return [*parts, _table(header, rows, right=range(2, 6))]


def _evals(run: Run, exported: Exported, unknown: list[str]) -> list[str]:
    if not run.events:
        return ["The record of the run was not there when this was exported, so its evals are not known."]
    before = [event for event in run.events if event["step"] <= exported.step]
    points, about = eval_points(before), evalset_facts(before)
    suffix = {"raw": "", "ema": "@ema"}.get(exported.weights, "@phase_mean")
    worse: dict[str, list[str]] = {}
    for o in standing_regressions(before):
        worse.setdefault(o["set"], []).append(o["baseline"].replace("_", " "))
    rows, sets = [], run.resolved["evalsets"]
    for name in [name for name in points if "@" not in name]:
        key = config_name(name)
        described = sets["primary"] if key == "primary" else sets["sets"].get(key, {})
        origin = f"held out of {described['held_out_of']}" if described.get("held_out_of") else _place(described)
        documents, tokens = (f"{about.get(name, {}).get(k, 0):,}" for k in ("documents", "tokens"))
        cells = [f"{name} (primary)" if key == "primary" else name, origin, documents, tokens]
        first, last = points[name][0], (points.get(name + suffix) or [None])[-1]
        if last is None:
            rows.append((*cells, "not measured", *[""] * 5))
            continue
        half = None if last.sem is None else 1.96 * last.sem
        interval = "-" if half is None else f"{last.loss - half:.4f} to {last.loss + half:.4f}"
        regressed = f"regressed against its {' and '.join(worse[name])}" if name in worse else "no regression stands"
        change = _change(run, name, suffix, first, last, unknown)
        rows.append((*cells, f"{last.step:,}", loss(last.loss), interval, loss(last.bpb), change, regressed))
    header = ("eval set", "text", "documents", "tokens", "step", "loss", "95 %", "bits per byte")
    table = _table((*header, "change since the start", "verdict"), rows, right=(2, 3, 4, 5, 7))
    return [
        table,
        "Loss in nats per token. The intervals are over the choice of documents; the change is against the first eval "
        "of the same windows, below 0 is better. Each document comes after the token that opens one"
        + (f" (`{exported.opens_with}`)" if exported.opens_with else "")
        + f" and is cut into disjoint windows of {_eval_seq_len(run):,} tokens, every token scored once.",
    ]


def _change(run: Run, name: str, suffix: str, first: EvalPoint, last: EvalPoint, unknown: list[str]) -> str:
    """The loss against that of the first eval, paired by window where the windows of both are there."""
    if not suffix and first.step == last.step:
        return "-"
    before_file, now_file = (run.directory.results(point.step) for point in (first, last))
    key = config_name(name)
    try:
        before, now = read_arrays(before_file), read_arrays(now_file)
        fields = [now[f"{key}{suffix}.nats"], before[f"{key}.nats"], now[f"{key}.tokens"], now[f"{key}.document"]]
    except InputError as error:
        unknown += [f"The change of {name} has no interval: {problem}" for problem in error.problems]
        return signed(last.loss - first.loss)
    except KeyError as missing:
        unknown.append(f"The change of {name} has no interval: {missing} is not in the results of both evals.")
        return signed(last.loss - first.loss)
    between = paired("its start", *fields)
    return f"{signed(between.delta)} ({interval_text(between.interval)})"


def _happened(run: Run, exported: Exported) -> list[str]:
    if not run.events:
        return ["The record of the run was not there when this was exported."]
    lines = []
    for event in run.events:
        if event["step"] > exported.step or event["event"] not in _HAPPENED:
            continue
        lines.append(verdict(event))
        if event["event"] == "eval_regression":
            lines += [f"  - {offender(o)}" for o in event["offenders"] if o["first_step"] == event["step"]]
    rows = run.metrics if (run.directory.path / METRICS).exists() else []
    last = next((row for row in reversed(rows) if row["step"] <= exported.step), None)
    if last is not None and (skipped := skipped_line(last, {})):
        lines.append(skipped)
    if not lines:
        return ["No regression of an eval set, no rollback, no edit of the schedule, no skipped update."]
    return ["\n".join(line if line.startswith("  - ") else f"- {_text(line)}" for line in lines)]


def _lineage(run: Run) -> list[str]:
    lines = lineage_lines({"init_from": _beginning(run), "branched_from": run.branched_from})
    if not lines:
        return [f"From the run's own seed, {run.resolved['seed']}."]
    return ["\n".join(f"- {_text(line)}" for line in lines)]


def _loading(exported: Exported) -> list[str]:
    if exported.kind == "gguf":
        before = [
            "With llama.cpp, or in this folder with transformers:",
            _code("", "llama-cli -m model.gguf -p 'Once'"),
        ]
        where = '".", gguf_file="model.gguf"'
    else:
        before, where = [f"In this folder, with {'peft' if exported.kind == 'peft' else 'transformers'}:"], '"."'
    package, loader = "transformers", "AutoModelForCausalLM"
    if exported.kind == "peft":
        package, loader = "peft", "AutoPeftModelForCausalLM"
    together = "AutoModelForCausalLM, AutoTokenizer" if package == "transformers" else "AutoTokenizer"
    first = [] if package == "transformers" else [f"from {package} import {loader}"]
    code = [
        "import torch",
        *first,
        f"from transformers import {together}",
        "",
        f"model = {loader}.from_pretrained({where})",
        f"tokenizer = AutoTokenizer.from_pretrained({where})",
        'text = tokenizer.encode("Once upon a time", add_special_tokens=False)',
        "ids = torch.tensor([[tokenizer.bos_token_id, *text]])",
        "print(tokenizer.decode(model.generate(ids, max_new_tokens=40)[0]))",
    ]
    after = ["The prompt begins with the token that every document of training and of the evals came after."]
    if exported.kind == "peft":
        after.append(
            "`adapter_config.json` names the model that the adapters are for; with `--merge`, `curriculum export` "
            "writes that model with them folded in."
        )
    if exported.kind == "hf":
        after.append("With vllm, and for llama.cpp by its converter (or by `curriculum export RUN --format gguf`):")
        after.append(_code("", "vllm serve .\npython convert_hf_to_gguf.py ."))
    return [*before, _code("python", "\n".join(code)), *after]


def _reproducing(run: Run, exported: Exported) -> list[str]:
    name = shlex.quote(run.resolved["name"])
    options = [f"{option} {shlex.quote(value)}".rstrip() for option, _, value in
               (given.partition(" ") for given in run.directory.command_line())]  # fmt: skip
    branch = run.branched_from
    if branch is None:
        train = ["curriculum train run.yaml", f"--run-dir runs/{name}", *options]
    else:
        trunk = shlex.quote(str(branch["run"]))
        train = [f"curriculum branch {trunk}", f"--at {branch['step']}", f"--run-dir runs/{name}", *options]
    export = [f"curriculum export runs/{name}", "--format", "gguf" if exported.kind == "gguf" else "hf"]
    export += ["--merge"] if exported.merged else []
    if exported.weights.startswith("mean:"):
        export.append(f"--weights {exported.weights}")
    else:
        export.append(f"--step {exported.step} --weights {exported.weights}")
    export.append(f"--dtype {exported.dtype} -o {name}-export")
    parts = [_code("", f"{' '.join(train)}\n{' '.join(export)}")]
    if branch is not None:
        parts.append("The run is a branch: up to that step it is the run that it left, which has to be there.")
    if any(e["event"] in ("schedule_edit", "resume") for e in run.events if e["step"] <= exported.step):
        parts.append("It was taken up or edited on its way; the config is the last one. A run begun with it does not "
                     "repeat the edits.")  # fmt: skip
    if run.events:
        devices = [e["devices"] for e in run.events if "devices" in e][-1]
        mesh = " x ".join(f"{axis} {size}" for axis, size in devices["mesh"].items())
        parts.append(f"Trained on {devices['num']} x {devices['kind']} ({devices['platform']}), mesh {mesh}.")
    versions = ", ".join(f"{package} {version(package)}" for package in _PACKAGES)
    parts.append(f"Exported with Python {platform.python_version()}, {versions}.")
    given = run.directory.path / "config.yaml"
    if given.exists():
        text, which = given.read_text(encoding="utf-8"), "run.yaml, as it was given"
    else:
        config = {key: value for key, value in run.resolved.items() if key not in ("derived", "command_line")}
        text, which = yaml.safe_dump(config, sort_keys=False, allow_unicode=True), "run.yaml, every default filled in"
    return [*parts, f"<details><summary>{which}</summary>", _code("yaml", text.rstrip("\n")), "</details>"]


def _not_known(run: Run, unknown: Iterable[str]) -> list[str]:
    lines = [
        "No licence is stated here: those of the sources apply"
        + (", and that of the model it began from" if _beginning(run) else "")
        + "; the program that wrote this knows none of them.",
        "What the texts hold beyond what the eval sets measure: errors, bias, personal data.",
        "Whether text alike to a document of an eval set was trained on: equal documents were left out.",
        "How the figures would differ with another seed.",
        "The versions that it was trained with, where they are not those that exported it.",
        *unknown,
    ]
    return ["\n".join(f"- {_text(line)}" for line in lines)]


def _plan(run: Run) -> dict[str, Any]:
    return run.plan if run.events else run.resolved["derived"]


def _beginning(run: Run) -> dict[str, Any] | None:
    """The lineage of the run: what its first parameters are."""
    return run.start.get("lineage") if run.events else run.resolved["derived"].get("lineage")


def _eval_seq_len(run: Run) -> int:
    return run.resolved["evalsets"]["seq_len"] or run.resolved["train"]["seq_len"]


def _place(described: Mapping[str, Any]) -> str:
    if described.get("hf"):
        return f"hub: {described['hf']}"
    return f"`{described['path']}`" if described.get("path") else "-"


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]], right: Iterable[int] = ()) -> str:
    right = set(right)
    marks = ["---:" if i in right else "---" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(_text(str(cell)) for cell in row)} |" for row in (header, marks, *rows))


def _text(line: str) -> str:
    """One line that cannot end a cell or a list."""
    return " ".join(line.split()).replace("|", "\\|")


def _code(language: str, text: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
