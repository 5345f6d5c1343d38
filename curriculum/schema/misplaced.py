"""Where a key belongs that stands in the wrong section, or has the name that it has in another tool."""

from collections.abc import Sequence

# Keys of other tools by what they are here: of Hugging Face's Trainer and configs, nanoGPT, torchtitan and others.
_NAMES_ELSEWHERE = {
    "train.steps": "max_iters max_steps num_train_steps total_steps",
    "train.batch_size": "global_batch_size",
    "train.seq_len": "block_size context_length max_length max_seq_length",
    "train.grad_accum": "gradient_accumulation_steps",
    "optim.lr": "learning_rate",
    "optim.schedule": "lr_scheduler_type",
    "optim.warmup_steps": "warmup_iters warmup_ratio",
    "optim.grad_clip": "clip_grad max_grad_norm",
    "model.d_model": "hidden_size n_embd",
    "model.d_ff": "intermediate_size",
    "model.n_layer": "num_hidden_layers",
    "model.n_head": "num_attention_heads",
    "model.n_kv_head": "num_key_value_heads",
    "evalsets.every": "eval_every eval_freq eval_interval eval_steps",
    "logging.every": "log_every log_freq log_interval logging_steps",
    "checkpoint.every": "save_every save_interval save_steps",
    "checkpoint.keep": "save_total_limit",
}
OTHER_NAMES = {name: place for place, names in _NAMES_ELSEWHERE.items() for name in names.split()}
_MOST = 3  # places that are told


def with_places(path: str, message: str, paths: Sequence[str]) -> str:
    """`message`; if it refuses the key at `path`, with up to three of the config's `paths` that it was meant for."""
    what, keys, known = message.partition(" (keys: ")
    if not what.startswith("no such key"):
        return message
    section, _, key = path.rpartition(".")
    places = [place for place in paths if place.rpartition(".")[2] == key]
    if not places and key in OTHER_NAMES:
        places = [OTHER_NAMES[key]]
    places = [place for place in places if f"'{place.removeprefix(f'{section}.')}'" not in what]
    if key == "every":  # of which there are more
        places = [place for place in places if place.count(".") == 1]
    if not 0 < len(places) <= _MOST:
        return message
    meant = f"{what.removesuffix('?')} or " if what.endswith("?") else f"{what}; did you mean "
    return f"{meant}{' or '.join(places)}?{keys}{known}"
