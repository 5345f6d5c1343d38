"""Where a key belongs that stands in the wrong section, or has the name that it has in another tool."""

from collections.abc import Sequence

# Names of Hugging Face's Trainer and configs, nanoGPT, torchtitan and others.
OTHER_NAMES = {
    "block_size": "train.seq_len",
    "clip_grad": "optim.grad_clip",
    "context_length": "train.seq_len",
    "eval_every": "evalsets.every",
    "eval_freq": "evalsets.every",
    "eval_interval": "evalsets.every",
    "eval_steps": "evalsets.every",
    "global_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.grad_accum",
    "hidden_size": "model.d_model",
    "intermediate_size": "model.d_ff",
    "learning_rate": "optim.lr",
    "log_every": "logging.every",
    "log_freq": "logging.every",
    "log_interval": "logging.every",
    "logging_steps": "logging.every",
    "lr_scheduler_type": "optim.schedule",
    "max_grad_norm": "optim.grad_clip",
    "max_iters": "train.steps",
    "max_length": "train.seq_len",
    "max_seq_length": "train.seq_len",
    "max_steps": "train.steps",
    "n_embd": "model.d_model",
    "num_attention_heads": "model.n_head",
    "num_hidden_layers": "model.n_layer",
    "num_key_value_heads": "model.n_kv_head",
    "num_train_steps": "train.steps",
    "save_every": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "total_steps": "train.steps",
    "warmup_iters": "optim.warmup_steps",
    "warmup_ratio": "optim.warmup_steps",
}
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
