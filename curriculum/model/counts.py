"""How many numbers a model of a config has, in all and by part. Nothing here imports jax or makes an array."""

from curriculum.model.presets import ModelConfig


def num_trained(config: ModelConfig) -> int:
    """Numbers that training changes: all of the model, or its adapters alone."""
    return num_parameters(config) if config.lora is None else num_adapters(config)


def num_adapters(config: ModelConfig) -> int:
    """Numbers of the adapters, 0 without any."""
    if config.lora is None:
        return 0
    shapes = config.projections()
    return config.n_layer * config.lora.rank * sum(sum(shapes[target]) for target in config.lora.targets)


def num_parameters(config: ModelConfig) -> int:
    """Numbers of the model, tied embeddings counted once, adapters included."""
    query_width, kv_width = config.n_head * config.head_width, config.n_kv_head * config.head_width
    d_model, d_ff = config.d_model, config.d_ff

    qkv_bias = query_width + 2 * kv_width
    mlp_bias = (2 if config.mlp_type == "swiglu" else 1) * d_ff + d_model
    norm = d_model * (2 if config.norm_type == "layernorm" and config.bias else 1)

    vectors = 2 * norm + (2 * config.head_width if config.qk_norm else 0)
    if config.bias:
        vectors += qkv_bias + d_model + mlp_bias
    elif config.qkv_bias:
        vectors += qkv_bias
    embeddings = config.vocab_size * d_model * (1 if config.tie_embeddings else 2)
    positions = config.max_seq_len * d_model if config.pos_encoding == "learned" else 0
    of_blocks = num_projections(config) + config.n_layer * vectors
    return embeddings + positions + of_blocks + norm + num_adapters(config)


def num_projections(config: ModelConfig) -> int:
    """Numbers of the blocks' matrices, without embeddings, head, norms, biases and adapters."""
    return config.n_layer * sum(inputs * outputs for inputs, outputs in config.projections().values())
