"""How matrices are split over a mesh, and how much of one a device holds. Nothing here imports jax."""

from __future__ import annotations

_INTO_THE_RESIDUAL_STREAM = ("out", "down")


def split_axes(
    module: str | None, name: str | None, shape: tuple[int, int], *, fsdp: int, tensor: int
) -> tuple[str | None, ...]:
    """The mesh axis that each axis of the matrix `name` of `module` is split over; None: not split.

    `fsdp` and `tensor` are the sizes of the mesh axes. A projection [in, out] has its output split over `tensor` and
    its input over `fsdp`. A projection back into the residual stream (`out`, `down`) and an embedding [V, D] are split
    the other way round, so that between two products only the residual stream is summed over `tensor`. An adapter's
    arrays are split as the matrix beside them, but never along the rank.

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
