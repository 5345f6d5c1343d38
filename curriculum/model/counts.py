"""The number of parameters of a config's model, in all and by part. Nothing here imports jax or makes an array.

With `fsdp` and `tensor`, the sizes of mesh axes, it is the number that one device holds.
"""

from curriculum.model.presets import ModelConfig
from curriculum.model.split import num_held


def num_trained(config: ModelConfig, *, fsdp: int = 1, tensor: int = 1) -> int:
    """Parameters that training changes: all of the model, or its adapters alone."""
    counted = num_parameters if config.lora is None else num_adapters
    return counted(config, fsdp=fsdp, tensor=tensor)


def num_adapters(config: ModelConfig, *, fsdp: int = 1, tensor: int = 1) -> int:
    """Parameters of the adapters, 0 without any."""
    if config.lora is None:
        return 0
    shapes, rank, num = config.projections(), config.lora.rank, 0
    for target in config.lora.targets:
        inputs, outputs = shapes[target]
        num += num_held(target, "lora_a", (inputs, rank), fsdp=fsdp, tensor=tensor)
        num += num_held(target, "lora_b", (rank, outputs), fsdp=fsdp, tensor=tensor)
    return config.n_layer * num


def num_parameters(config: ModelConfig, *, fsdp: int = 1, tensor: int = 1) -> int:
    """Parameters of the model, tied embeddings counted once, adapters included."""
    d_model, shapes, split = config.d_model, config.projections(), {"fsdp": fsdp, "tensor": tensor}
    norm = d_model * (2 if config.norm_type == "layernorm" and config.bias else 1)
    vectors = 2 * norm + (2 * config.head_width if config.qk_norm else 0)
    biased = shapes if config.bias else ("query", "key", "value") if config.qkv_bias else ()
    vectors += sum(shapes[name][1] for name in biased)
    embeddings = num_held("embed", "embedding", (config.vocab_size, d_model), **split)
    embeddings += 0 if config.tie_embeddings else num_head(config, **split)
    if config.pos_encoding == "learned":
        embeddings += num_held("positions", "embedding", (config.max_seq_len, d_model), **split)
    of_blocks = num_projections(config, **split) + config.n_layer * vectors
    return embeddings + of_blocks + norm + num_adapters(config, **split)


def num_head(config: ModelConfig, *, fsdp: int = 1, tensor: int = 1) -> int:
    """Parameters of the matrix that features are multiplied by, which is the embedding if the two are tied."""
    shape = (config.d_model, config.vocab_size)
    if config.tie_embeddings:
        return num_held("embed", "embedding", shape[::-1], fsdp=fsdp, tensor=tensor)
    return num_held("head", "kernel", shape, fsdp=fsdp, tensor=tensor)


def num_projections(config: ModelConfig, *, fsdp: int = 1, tensor: int = 1) -> int:
    """Parameters of the blocks' matrices, without embeddings, head, norms, biases and adapters."""
    return config.n_layer * sum(
        num_held(name, "kernel", shape, fsdp=fsdp, tensor=tensor) for name, shape in config.projections().items()
    )
