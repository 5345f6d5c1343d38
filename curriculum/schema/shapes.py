"""Checks of the phases' shapes: sequence lengths, batch sizes, micro-steps, and the base of rotary positions."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from curriculum.model.formulation import LENGTH_STEPS
from curriculum.model.presets import ModelConfig, model_problems, resolve_model
from curriculum.schema.sections import TrainSection
from phases.checks import check_lengths
from phases.schedule import Phase


class _Cut(NamedTuple):
    """How a batch is cut into micro-steps, with the config paths that say so."""

    batch_path: str
    batch_size: int
    accum_path: str
    grad_accum: int


def _cuts(train: TrainSection, phases: Sequence[Phase], of: Collection[str] | None = None) -> list[_Cut]:
    """Each distinct way in which phases cut their batches, or train's own without phases.

    `of`: the names of the phases that count; None: all. Sizes below 1 are left out: other checks report them.
    """
    cuts = [] if phases else [_Cut("train.batch_size", train.batch_size, "train.grad_accum", train.grad_accum)]
    for i, phase in enumerate(phases):
        if of is not None and phase.name not in of:
            continue
        batch, accum = ("train.batch_size", train.batch_size), ("train.grad_accum", train.grad_accum)
        if phase.batch_size is not None:
            batch = f"phases[{i}].batch_size", phase.batch_size
        if phase.grad_accum is not None:
            accum = f"phases[{i}].grad_accum", phase.grad_accum
        cuts.append(_Cut(*batch, *accum))
    return [cut for cut in dict.fromkeys(cuts) if cut.batch_size >= 1 and cut.grad_accum >= 1]


def row_problems(
    train: TrainSection, phases: Sequence[Phase], row_shards: int, of: Collection[str] | None = None
) -> Iterator[tuple[str, str]]:
    """(path, message) for each batch, of all phases or those in `of`, whose micro-steps do not split evenly."""
    for cut in _cuts(train, phases, of):
        if cut.batch_size % cut.grad_accum:
            continue
        if problem := uneven_rows(cut.batch_size, cut.grad_accum, row_shards):
            phases_own = cut.accum_path.startswith("phases") and cut.batch_path.startswith("train")
            yield (cut.accum_path if phases_own else cut.batch_path), problem


def uneven_rows(batch_size: int, grad_accum: int, row_shards: int) -> str | None:
    """Why the rows of a micro-step cannot be cut into `row_shards` equal parts; None if they can."""
    rows = batch_size // grad_accum
    if rows % row_shards == 0:
        return None
    return (
        f"got {batch_size} in {grad_accum} micro-steps of {rows} rows, expected rows that the mesh's data x fsdp "
        f"({row_shards}) divides; change batch_size, grad_accum or mesh"
    )


def _check_micro_steps(v):
    for cut in _cuts(v["train"], v.get("phases") or ()):
        if cut.batch_size % cut.grad_accum == 0:
            continue
        if cut.batch_path.startswith("phases") and cut.accum_path.startswith("train"):
            expected = f"expected a multiple of {cut.accum_path} ({cut.grad_accum}), or a grad_accum of the phase's own"
            yield cut.batch_path, f"got {cut.batch_size}, {expected}"
        else:
            expected = f"expected a divisor of {cut.batch_path} ({cut.batch_size})"
            yield cut.accum_path, f"got {cut.grad_accum}, {expected}"


def with_seq_len(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a config; if train has no seq_len but every phase has one, train gets the longest of them."""
    train, phases = data.get("train"), data.get("phases")
    if isinstance(train, dict) and "seq_len" not in train and isinstance(phases, list) and phases:
        lengths = [phase.get("seq_len") if isinstance(phase, dict) else None for phase in phases]
        if all(type(length) is int and length > 1 for length in lengths):
            return {**data, "train": {**train, "seq_len": max(lengths)}}
    return dict(data)


def _check_positions(v):
    """Sequences of training and evals must fit into the model's max_seq_len, those of training its attention too."""
    if (model := model_of(v)) is None:
        return
    trained = [(f"phases[{i}].seq_len", phase.seq_len) for i, phase in enumerate(v.get("phases") or ())]
    lengths = [length for _, length in trained]
    if None in lengths or v["train"].seq_len not in lengths:  # else train's may be made of theirs
        trained.insert(0, ("train.seq_len", v["train"].seq_len))
    for path, length in [*trained, ("evalsets.seq_len", v["evalsets"].seq_len)]:
        if length is not None and length > model.max_seq_len:
            without = [p.name for p in v.get("phases") or () if p.seq_len is None and path == "train.seq_len"]
            whose = f" for phases without their own ({', '.join(without)})" if without else ""
            yield path, f"got {length}{whose}, expected at most the model's max_seq_len ({model.max_seq_len})"
    for path, length in trained:
        if length is not None and length % (step := LENGTH_STEPS.get(model.attention, 1)):
            expected = f"expected a multiple of {step} with model.attention {model.attention}"
            yield path, f"got {length}, {expected}; change it, or leave attention out for auto"


def _check_rope_theta(v):
    turned = [f"phases[{i}].rope_theta" for i, phase in enumerate(v["phases"]) if phase.rope_theta is not None]
    if not turned or "model" not in v:
        return
    model = None if v["model"] is None else model_of(v)
    if v["model"] is None:
        message = "a custom model (model: null) does not receive it; leave it out, and set it in the model itself"
    elif model is None:
        return
    elif model.pos_encoding != "rope":
        message = f"the model's positions are {model.pos_encoding} (model.pos_encoding), not rotary: it has no theta"
        message += "; leave it out, or train a model with pos_encoding: rope"
    elif model.rope_scaling is not None:
        message = "the model's wavelengths are already scaled (model.rope_scaling), and the two would combine"
        message += "; leave one of the two out"
    else:
        return
    yield from ((path, message) for path in turned)


def model_of(v) -> ModelConfig | None:
    """The model of the section, None if a check reports it; a vocabulary not known yet counts as a large one."""
    vocab_size = known_vocab_size(v) or v["model"].vocab_size or 2**20
    return None if model_problems(v["model"], vocab_size) else resolve_model(v["model"], vocab_size)


def known_vocab_size(v) -> int | None:
    """The tokenizer's vocabulary size if the config alone determines it, else None."""
    tokenizer = v["tokenizer"]
    return {"byte": 257, "bpe": tokenizer.vocab_size}.get(tokenizer.kind)


ROW_CHECKS = [  # of a run that goes on, only phases ahead count
    ({"mesh", "train"}, lambda v: row_problems(v["train"], v.get("phases") or (), v["mesh"].row_shards))
]
SHAPE_CHECKS = [
    ({"train"}, _check_micro_steps),
    ({"phases", "train"}, lambda v: check_lengths(v["phases"], v["train"].seq_len)),
    ({"phases", "tokenizer"}, _check_rope_theta),
    ({"model", "tokenizer", "train", "evalsets"}, _check_positions),
]
