"""A run's parameters in a folder that needs neither the run nor this program."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from curriculum.data.chat import Template
from curriculum.data.tokenizers.chat_template import ends_answer, opens_document
from curriculum.data.tokenizers.gguf_vocabulary import gguf_vocabulary, reads_otherwise
from curriculum.data.tokenizers.hf_writer import is_qwen, write_hf_tokenizer, write_json
from curriculum.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from curriculum.disk.append import tell
from curriculum.disk.durable import clear_killed, scratch
from curriculum.errors import InputError, check_choice, check_folder
from curriculum.find_checkpoint import architecture_at
from curriculum.model.formats.gguf import gguf_architecture, write_gguf
from curriculum.model.formats.hf import hf_tensors
from curriculum.model.formats.hf_config import HF_CONFIG
from curriculum.model.formats.hf_config_writer import hf_config_of, needs_out_bias
from curriculum.model.formats.peft import write_peft
from curriculum.model.formats.safetensors_writer import DTYPES, rounded_all, write_safetensors
from curriculum.model.presets import ModelConfig
from curriculum.record.events import EVENTS, read_events
from curriculum.record.queries import base_directory
from curriculum.run import Run, run_directory
from curriculum.run_directory import RunDirectory
from curriculum.saved_weights import Weights, chosen_again, find_weights, ledger_beside
from curriculum.schema.adaptation import LINEAGE, chat_of, lineage_at
from curriculum.train.device import own_settings
from curriculum.views.model_card import Exported, model_card

if TYPE_CHECKING:
    from curriculum.model.model import Model, Params


@chosen_again
def export(
    run: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    format: str = "safetensors",
    step: str | int | None = None,
    weights: str = "raw",
    dtype: str = "f32",
    merge: bool = False,
) -> int:
    """Write the parameters of a run into a folder that needs neither the run nor this program; return their step.

    format: one of
        "safetensors": model.safetensors, with arrays named by their dotted path (`blocks.000.attention.query.kernel`, a
            kernel as [in, out]), model.json and tokenizer/. Needs neither the run's record nor more of the checkpoint
            than its ledger and the parameters.
        "hf": what transformers and compatible libraries load: model.safetensors in their names and layout without the
            rows that pad the vocabulary, config.json, generation_config.json, the tokenizer's files, and a model card,
            README.md.
        "gguf": model.gguf for llama.cpp, tokenizer included, and the model card.
    step: "gold", "latest" or a number; by default gold, or latest if there is no gold.
    weights: "raw"; "ema", the moving average in the checkpoint of `step`; or "mean:PHASE", the mean of a phase's last
        checkpoints (`averages.phase_mean`), whose step is the phase's end.
    dtype: "f32"; "bf16" or "f16" for half the size, every value rounded to the nearest; for gguf also "q8_0", blocks
        of 8 bits.
    merge: fold the adapters of a run with `adaptation.lora`, whose checkpoints hold nothing else, into the model that
        they were trained beside, which must still be where it was. Without it hf and safetensors both write a folder
        for peft, and gguf is refused.

    For parameters that were trained on a source of format messages, hf, gguf and peft folders have the chat template
    that rendered it. Above 5 GB safetensors are split into several files with model.safetensors.index.json.

    Raises InputError for arguments that cannot be used, for a model that the format has no class for, for values that
    are not finite, and for one too large for the dtype; then nothing is written. Leftovers of a killed export into the
    same folder are removed.
    """
    check_folder("-o", output_dir)
    directory, output = run_directory(run), Path(output_dir)
    check_choice("--format", format, ("safetensors", "hf", "gguf"))
    if dtype == "q8_0" and format != "gguf":
        raise InputError(f"--dtype {dtype}: only --format gguf has it; expected one of: {', '.join(DTYPES)}")
    check_choice("--dtype", dtype, (*DTYPES, "q8_0") if format == "gguf" else DTYPES)
    # An existing folder is filled, not replaced: it may be a link, a mount, or a shell's working directory.
    new = Path(os.path.realpath(output)) if os.path.islink(output) else output
    place = output if os.path.isdir(output) else new.parent
    clear_killed(place, output)
    if os.path.exists(output) and not (place == output and not any(output.iterdir())):
        raise InputError(f"-o {output}: already exists; expected a new or an empty folder")
    begun_with = directory.architecture()
    kind = _kind(directory.path, format, has_adapters="lora" in begun_with, merge=merge)
    # A model that the format has no class for is refused before the checkpoint is looked at.
    target = None if kind == "safetensors" else _target(directory, kind, dtype, begun_with)
    step, saved = find_weights(directory, step, weights)
    ledger = ledger_beside(directory, saved)
    architecture = architecture_at(ledger, step)
    if target is not None:
        if architecture != begun_with:
            target = _target(directory, kind, dtype, architecture)
        target = replace(target, template=_template(directory, ledger, step, target.tokenizer))
    arrays = _parameters(directory, saved, architecture, ledger["lineage"] if merge else None)
    if spoilt := [name for name, array in arrays.items() if not np.isfinite(array).all()]:
        raise InputError(
            f"{saved}: {len(spoilt)} of {len(arrays)} arrays, such as {spoilt[0]}, hold values that are not finite; "
            "export an earlier step"
        )
    if target is None and not directory.tokenizer.is_dir():
        raise InputError(f"{directory.tokenizer}: is missing; restore it from a copy")

    metadata = {"step": str(step), "weights": weights}
    if kind == "hf":  # the one that a run can begin from
        metadata[LINEAGE] = json.dumps(
            _published(lineage_at(os.path.normpath(run), directory.resolved(), ledger, step))
        )
    with _refusals_told(output):
        place.mkdir(parents=True, exist_ok=True)
        with scratch(place, output) as folder:
            if target is None:
                write_safetensors(folder, rounded_all(arrays.items(), dtype), metadata)
                write_json(folder / "model.json", {k: v for k, v in architecture.items() if k != "lora"})
                shutil.copytree(directory.tokenizer, folder / "tokenizer")
            else:
                _write(folder, kind, target, arrays, dtype, metadata)
                there = (directory.path / EVENTS).exists()
                record = Run(directory, directory.resolved(), read_events(directory.path) if there else [])
                described = _described(target, kind, dtype, step, weights, ledger, merge)
                (folder / "README.md").write_text(model_card(record, described), encoding="utf-8")
            if place == output:
                for file in folder.iterdir():
                    file.replace(output / file.name)
            else:
                folder.replace(new)
    return step


def _published(lineage: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A lineage for others to read: of absolute paths, which tell of this machine and its users, the last name."""
    if lineage is None:
        return None
    given = base_directory(lineage)
    where = os.path.basename(given) if os.path.isabs(os.path.expanduser(given)) else lineage["init_from"]
    return {**lineage, "init_from": where, "lineage": _published(lineage["lineage"])}


def _kind(run: Path, format: str, *, has_adapters: bool, merge: bool) -> str:
    """What is written: a format or, for adapters that are not merged, a folder for peft."""
    if merge and not has_adapters:
        raise InputError(f"--merge: {run} trained no adapters (adaptation.lora); leave it out")
    if merge or not has_adapters:
        return format
    if format == "gguf":
        raise InputError("--format gguf: the run trained adapters only; fold them in with --merge")
    return "peft"


def _template(directory: RunDirectory, ledger: Mapping[str, Any], step: int, tokenizer: Tokenizer) -> Template | None:
    """How the conversations were rendered that the parameters of `step` were trained on; None if on none."""
    template = chat_of(directory.resolved(), ledger, step)
    if template is not None and template != Template.of(template.chat, tokenizer.special_tokens):
        tell(
            "the run was trained by older code, for which the names of special tokens in the chat section were "
            "ordinary text; what reads the exported template gives them their own ids"
        )
    return template


@contextmanager
def _refusals_told(output: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        # Of a full disk numpy says only how much it took, and safetensors has an error of its own.
        full = "; is the disk full?" if getattr(error, "errno", None) is None else ""
        raise InputError(f"-o {output}: cannot be written: {error}{full}") from None


@own_settings()
def _parameters(
    directory: RunDirectory, saved: Path, architecture: Mapping[str, Any], lineage: Mapping[str, Any] | None
) -> dict[str, np.ndarray]:
    """A checkpoint's float32 arrays by dotted path, on the host; adapters, if it has a `lineage`, folded in."""
    # Imports jax, which is slow, after all checks that do without it.
    from curriculum.model.model import by_name
    from curriculum.train.checkpoints.arrays import load_params

    if lineage is None:
        return _float32(by_name(load_params(saved)))

    from curriculum.model.lora import merged
    from curriculum.model.model import abstract_params
    from curriculum.model.transformer import transformer
    from curriculum.train.bases import whole_params
    from curriculum.train.checkpoints.arrays import abstract_on_host

    model = ModelConfig.of(architecture)
    like = abstract_on_host(abstract_params(transformer(model)))
    whole = whole_params(Run(directory, directory.resolved(), []).config, model, lineage, saved, like)
    return merged(_float32(by_name(whole)), model)


def _float32(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


@dataclass(frozen=True)
class _Target:
    """What a folder for other programs is made from, besides the parameters."""

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    hf_config: dict[str, Any]  # empty for gguf
    base: str | None  # for peft: the model that the adapters are for
    template: Template | None = None  # how conversations were rendered, None if there were none


def _target(directory: RunDirectory, kind: str, dtype: str, architecture: Mapping[str, Any]) -> _Target:
    """The target for parameters of an `architecture`. Raises InputError if the format has no such model."""
    resolved, begun_with = directory.resolved(), directory.architecture()
    if resolved["model"] is None:
        raise InputError(
            f"--format {kind}: {directory.path} was trained with a custom model, which no other program knows; "
            "expected safetensors"
        )
    config = ModelConfig.of(architecture)
    if kind == "peft" and architecture != begun_with:
        got = f"were trained with rope_theta {config.rope_theta:g}"
        raise InputError(
            f"{directory.path}: the adapters {got}, but their base model has {begun_with['rope_theta']:g}; fold them "
            "in with --merge"
        )
    tokenizer = load_tokenizer(directory.tokenizer)
    if kind == "gguf":
        gguf_architecture(config)
        gguf_vocabulary(tokenizer, config.num_ids or config.vocab_size)
        hf_config = {}
    else:
        hf_config = hf_config_of(
            config, bos=tokenizer.bos, eos=tokenizer.eot, dtype=DTYPES[dtype], qwen_tokenizer=is_qwen(tokenizer)
        )
    base = resolved["adaptation"]["init_from"] if kind == "peft" else None
    return _Target(Run(directory, resolved, []).name, config, tokenizer, hf_config, base)


def _write(
    folder: Path, kind: str, target: _Target, arrays: Mapping[str, np.ndarray], dtype: str, metadata: Mapping[str, str]
) -> None:
    if kind == "gguf":
        _write_gguf(folder / "model.gguf", target, arrays, dtype, metadata)
        return
    if kind == "peft":
        adapters = dict(rounded_all(arrays.items(), dtype))
        write_peft(folder, target.config, adapters, target.base, metadata)
    else:
        tensors = hf_tensors(target.config, arrays, out_bias=needs_out_bias(target.config, target.hf_config))
        # transformers asks for the format
        write_safetensors(folder, rounded_all(tensors, dtype), {"format": "pt", **metadata})
        write_json(folder / HF_CONFIG, target.hf_config)
        ends = _ends(target)
        ids = {"bos_token_id": target.hf_config["bos_token_id"], "eos_token_id": ends[0] if len(ends) == 1 else ends}
        write_json(folder / "generation_config.json", ids)
    write_hf_tokenizer(target.tokenizer, folder, model_max_length=target.config.max_seq_len, template=target.template)


def _ends(target: _Target) -> list[int]:
    """The ids at which a text of the model ends, end-of-text first."""
    tokenizer = target.tokenizer
    closing = None if target.template is None else ends_answer(target.template, tokenizer)[1]
    return list(dict.fromkeys([tokenizer.eot, *tokenizer.stops, *([] if closing is None else [closing])]))


def _write_gguf(
    path: Path, target: _Target, arrays: Mapping[str, np.ndarray], dtype: str, metadata: Mapping[str, str]
) -> None:
    own = {f"curriculum.{key}": value for key, value in metadata.items()}
    rest = {"dtype": dtype, "name": target.name, "template": target.template, "metadata": own}
    in_f16 = write_gguf(path, target.config, arrays, target.tokenizer, **rest)
    for told in reads_otherwise(target.tokenizer):
        tell(f"gguf: {told}")
    if in_f16:
        tell(f"q8_0: {len(in_f16)} matrices are stored as f16 (rows not a multiple of 32): {', '.join(in_f16)}")


def _described(
    target: _Target, kind: str, dtype: str, step: int, weights: str, ledger: Mapping[str, Any], merged: bool
) -> Exported:
    """What the model card says about a folder; `ledger` is that of `ledger_beside`."""
    of = Weights.parse(weights)
    drawn = None
    if of.phase is None:  # else the ledger is that of another step
        drawn = {name: source["tokens_drawn"] for name, source in ledger["sources"].items()}
    names = target.tokenizer.special_tokens.items()
    opens_with = next((text for text, token in names if token == target.tokenizer.bos), None)
    opens = target.template is not None and opens_document(target.tokenizer)
    in_gguf = {}
    if kind == "gguf":
        otherwise = tuple(reads_otherwise(target.tokenizer))
        in_gguf = {"reads_otherwise": otherwise, "ids_are_bytes": target.tokenizer.kind == "byte"}
    return Exported(step, of, kind, dtype, target.config, drawn, opens_with, merged, target.template, opens, **in_gguf)


@own_settings()
def load_exported(folder: str | os.PathLike, model: Model) -> Params:
    """A model's float32 parameters on the host, from a safetensors export. Raises InputError for other arrays."""
    import jax
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    from curriculum.model.model import abstract_params, by_name

    arrays: dict[str, np.ndarray] = {}
    for file in sorted(Path(folder).glob("model*.safetensors")):
        try:
            arrays |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{file}: cannot be read: {error}; export it again") from None
    if not arrays:
        adapters = (Path(folder) / "adapter_model.safetensors").exists()
        expected = "export the run with --merge" if adapters else "expected a folder made by `curriculum export`"
        raise InputError(f"{folder}: holds no model.safetensors{', only adapters' * adapters}; {expected}")
    shapes = abstract_params(model)
    asked = {name: array.shape for name, array in by_name(shapes).items()}
    found = {name: array.shape for name, array in arrays.items()}
    if found != asked:
        name = min(name for name in {*found, *asked} if found.get(name) != asked.get(name))
        got, expected = (str(list(shape[name])) if name in shape else "none" for shape in (found, asked))
        raise InputError(f"{folder}: {name}: got {got}, expected {expected}, as in the model; is it another model's?")
    return jax.tree.unflatten(jax.tree.structure(shapes), [np.asarray(arrays[name], np.float32) for name in asked])
