"""The number of parameters of a config's model, in all and by part, and how its matrices are split over a mesh.

With `fsdp` and `tensor`, the sizes of mesh axes, it is the number that one device holds. Nothing here imports jax.
"""

from curriculum.model.presets import ModelConfig

_INTO_THE_RESIDUAL_STREAM = ("out", "down")


def split_axes(
    module: str | None, name: str | None, shape: tuple[int, int], *, fsdp: int, tensor: int
) -> tuple[str | None, ...]:
    """The mesh axis that each axis of the matrix `name` of `module` is split over; None: not split.

    A projection [in, out] has its output split over `tensor` and its input over `fsdp`. A projection back into the
    residual stream (`out`, `down`) and an embedding [V, D] are split the other way round, so that between two products
    only the residual stream is summed over `tensor`. An adapter's arrays are split as the matrix beside them, but never
    along the rank.

    An axis whose size is not a multiple of its mesh axis stays whole. For an embedding of GPT-2's 50,257 rows the width
    could be split over `tensor` instead, but then logits are summed over devices: for a layer of gpt2-124m, 1,024
    tokens over 8 devices, each would be sent 245 MB instead of 26, or 335 if the embedding were gathered for its
    products. With 50,304 rows it is sent 32, and holds and computes an eighth (`plan` tells of `model.vocab_size`).
    """
    sizes = {"fsdp": fsdp, "tensor": tensor}
    leads_back = name == "embedding" or module in _INTO_THE_RESIDUAL_STREAM
    inputs, outputs = ("tensor", "fsdp") if leads_back else ("fsdp", "tensor")
    axes = (None if name == "lora_b" else inputs, None if name == "lora_a" else outputs)
    return tuple(
        axis if axis and sizes[axis] > 1 and size % sizes[axis] == 0 else None
        for size, axis in zip(shape, axes, strict=True)
    )


def num_held(module: str, name: str, shape: tuple[int, int], *, fsdp: int, tensor: int) -> int:
    """The number of elements of a matrix that one device holds."""
    num = shape[0] * shape[1]
    for axis in split_axes(module, name, shape, fsdp=fsdp, tensor=tensor):
        num //= {"fsdp": fsdp, "tensor": tensor, None: 1}[axis]
    return num


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


def num_head(config: ModelConfig, *, fsdp: int, tensor: int) -> int:
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
