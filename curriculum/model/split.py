"""The rule by which arrays are split over a mesh, and how much of one a device holds. Nothing here imports jax."""

from __future__ import annotations

_INTO_THE_RESIDUAL_STREAM = ("out", "down")


def split_axes(
    module: str | None, name: str | None, shape: tuple[int, int], *, fsdp: int, tensor: int
) -> tuple[str | None, ...]:
    """Over which axis of the mesh, of these sizes, each axis of the matrix `name` of `module` is split; None: whole.

    A projection [in, out] has its output over `tensor` and its input over `fsdp`; one back into the residual stream
    (`out`, `down`) and an embedding [V, D] the other way round, so that between two products only the residual stream
    is summed over `tensor`. An adapter's arrays are split as the matrix beside them, but never along the rank.

    An axis that its mesh axis does not divide stays whole. Of an embedding of GPT-2's 50,257 rows the width could be
    split over `tensor` in their place, but then logits are summed over devices: of a layer of gpt2-124m, 1,024 tokens
    over 8 devices, each would be sent 245 MB instead of 26, or, were the embedding gathered for its products, 335.
    With 50,304 rows it is sent 32, and holds and computes an eighth (`plan` tells of `model.vocab_size`).
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
    """Numbers of a matrix on one device."""
    num = shape[0] * shape[1]
    for axis in split_axes(module, name, shape, fsdp=fsdp, tensor=tensor):
        num //= {"fsdp": fsdp, "tensor": tensor, None: 1}[axis]
    return num
