"""How a transformer is computed on each backend: its attention, its layers, its loss and its skipped updates.

All formulations compute the same function, up to the rounding of sums taken in another order. `tools/bench_step.py
--variants step step:layers=scanned step:attention=xla step:qkv=apart step:skip=select` measures them side by side;
docs/gpu.md says what ran on a card. All backends share two choices. Tokens are the rows of one matrix [B*T, D]: with
[B, T, D], XLA on a CPU copies a transposed cotangent for each weight's gradient. And glibc keeps freed memory
(`tune_malloc`).

Importing this module does not import jax, since configs are checked with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from curriculum.model.presets import ModelConfig


@dataclass(frozen=True)
class Formulation:
    """How a backend computes what the config leaves open.

    `attention`: `plain`, two batched products [B*J, G*t, K] x [B*J, S, K] with the softmax between them, for each of
    `query_blocks`; `xla`, jax.nn.dot_product_attention in its portable form; `cudnn`, NVIDIA's flash attention through
    the same function; `splash`, jax's flash attention for TPUs.

    `qkv`: query, key and value by one product with their three kernels side by side (`joined`), or by three (`apart`).

    `layers`: `unrolled`, one after the other in the program; `scanned`, one layer in a loop over stacked parameters,
    which compiles in the time of one.

    `skip`, how a skipped update leaves the state unchanged: `branch` computes the new state only if the update is
    taken; `select` always computes it, and selects the old or the new of each array.
    """

    attention: Literal["plain", "xla", "cudnn", "splash"]
    qkv: Literal["joined", "apart"]
    layers: Literal["unrolled", "scanned"]
    skip: Literal["branch", "select"]
    loss_tokens: int
    """Tokens of a device whose logits are worked out at once, at least (`loss_positions`)."""
    head_rows: int
    """The loss fills the head up to a multiple of so many rows."""
    block_ids: int | None = 128
    """Evals fill the head up to blocks of so many ids, and reduce the logits block by block; None: all at once."""
    padding: Literal["sliced", "masked"] = "sliced"
    """How the loss's sums leave those rows out: by a slice, which is read in place, or by logits of -inf."""


# With a small vocabulary, more than `loss_tokens` tokens at a time: as many as have this many logits.
LOSS_LOGITS = 1 << 22
BY_BACKEND = {
    # Speeds relative to these choices, with two cores, 0.8M parameters, three rounds of one run: scanned layers 0.83;
    # xla attention 1.03 and select 1.09, which is how much two equal runs differ there. With select the compiler copies
    # each moment: 84 copies in an update of 4 layers, with branch 10. Query, key and value apart: 0.97 to 0.99, with
    # 1.05 of the processor's time; no difference with 10.7M parameters. The loss of 2,048 tokens with D = 512, V =
    # 16,384, computed 512 tokens at a time, took 1.0x the time of all at once; 64 at a time 2.2x; recomputing logits in
    # the backward pass 1.3x. Block by block an eval of `tiny` has 1.05 times its speed with 4,096 ids, 1.4 times with
    # 50,257, and the same with 257 (tools/bench_eval.py).
    "cpu": Formulation(attention="plain", qkv="joined", layers="unrolled", skip="branch", loss_tokens=512, head_rows=1),
    # Chosen by what the compiler makes of it for an H100 (tools/check_gpu_program.py), and run on an H200; docs/gpu.md
    # has the figures. What scanned layers keep for the backward pass is copied twice more; plain attention keeps its
    # scores; and each chunk of the loss adds to the head's gradient. A branch would make the host wait for each update.
    # head_rows: with GPT-2's 50,257 ids no row of logits would begin at a multiple of 16 bytes, as tensor cores want.
    "gpu": Formulation(
        attention="cudnn", qkv="apart", layers="unrolled", skip="select", loss_tokens=4096, head_rows=128
    ),
    # Chosen by what the compiler expects on a TPU v5e (tools/check_tpu_program.py), never run on one; docs/tpu.md has
    # the figures. Padding that is cut off keeps it from taking the largest logit as the product writes them.
    "tpu": Formulation(
        attention="splash",
        qkv="apart",
        layers="unrolled",
        skip="select",
        loss_tokens=4096,
        head_rows=128,
        block_ids=None,
        padding="masked",
    ),
    # Nothing is known of these; a loop compiles in the time of one layer.
    "other": Formulation(
        attention="plain", qkv="apart", layers="scanned", skip="select", loss_tokens=4096, head_rows=128
    ),
}

# Of a block of queries of plain attention, and of a sequence.
LEAST_QUERIES, MOST_BLOCKS = 64, 8
CUDNN_LARGEST_HEAD, CUDNN_HEAD_STEP = 128, 8  # widths that it takes on every card
# The number of positions has to be a multiple of it: jax refuses the gradient of cuDNN's attention for odd ones, and a
# TPU's registers have 128 lanes.
LENGTH_STEPS = {"cudnn": 2, "splash": 128}


def backend() -> str:
    """The key of BY_BACKEND for jax's default backend. Starts the jax backend."""
    import jax

    platform = jax.default_backend()
    if platform == "gpu" and "cuda" not in jax.devices()[0].client.platform_version:
        return "other"  # cuDNN is NVIDIA's
    return platform if platform in BY_BACKEND else "other"


def attention_of(config: ModelConfig, backend: str, *, seq_len: int, heads_split: bool = False) -> str:
    """The attention of a config on a backend: its own choice, or the backend's if the config is within its limits.

    `deterministic` is the backend's too, but never cuDNN's.

    With heads split over devices, plain attention, whose one batch axis joins rows and heads, would gather all heads on
    each device (tests/test_scaling.py counts). xla attention has an axis for each, and takes its place.
    """
    if config.attention not in ("auto", "deterministic"):
        return config.attention
    chosen = BY_BACKEND[backend].attention
    unfit = chosen == "cudnn" and (config.attention == "deterministic" or cudnn_problem(config) is not None)
    if unfit or seq_len % LENGTH_STEPS.get(chosen, 1):
        chosen = "plain"
    return "xla" if chosen == "plain" and heads_split else chosen


def qkv_of(config: ModelConfig, backend: str, *, heads_split: bool = False) -> str:
    """`joined` or `apart`: the backend's choice; adapters, and heads split over devices, have a product each."""
    return "apart" if config.lora is not None or heads_split else BY_BACKEND[backend].qkv


def query_blocks(seq_len: int, sliding_window: int | None) -> list[tuple[int, int, int]]:
    """The blocks of queries that plain attention takes one after the other, as (first key, first query, end of both).

    Outside of first key..end no key is seen by any query of the block, so that of long sequences close to half of all
    scores, those of later positions, are never computed. On two cores with 10.7M parameters an update took 0.92 of its
    time with 16 x 256 tokens, and 0.55 with 4 x 1,024; there 4 blocks instead of 8 took 1.25 times as long. The program
    grows with the number of blocks.
    """
    length = max(LEAST_QUERIES, -(-seq_len // MOST_BLOCKS))
    window = seq_len if sliding_window is None else sliding_window
    return [(max(0, first - window + 1), first, min(first + length, seq_len)) for first in range(0, seq_len, length)]


def layers_of(config: ModelConfig, backend: str) -> str:
    """`unrolled` or `scanned`: the config's choice, or the backend's; layers that differ are not scanned."""
    if config.layers != "auto":
        return config.layers
    return "unrolled" if scan_problem(config) is not None else BY_BACKEND[backend].layers


def loss_positions(rows: int, seq_len: int, vocab_size: int, backend: str) -> int:
    """The number of positions, in all of a device's `rows`, whose logits the loss computes at a time."""
    tokens = max(BY_BACKEND[backend].loss_tokens, LOSS_LOGITS // vocab_size)
    num_chunks = min(seq_len, -(-rows * seq_len // tokens))
    return -(-seq_len // num_chunks)


def cudnn_problem(config: ModelConfig) -> str | None:
    """Why cuDNN's flash attention cannot compute a config's attention; None if it can."""
    if config.compute_dtype != "bfloat16":
        return f"got cudnn with compute_dtype {config.compute_dtype}, expected compute_dtype bfloat16"
    if config.head_width > CUDNN_LARGEST_HEAD or config.head_width % CUDNN_HEAD_STEP:
        expected = f"a multiple of {CUDNN_HEAD_STEP} up to {CUDNN_LARGEST_HEAD}"
        return f"got cudnn with a head width of {config.head_width}, expected {expected}"
    return None


def scan_problem(config: ModelConfig) -> str | None:
    """Why a config's layers cannot be scanned; None if they are alike."""
    if config.no_rope_every is not None and config.pos_encoding == "rope":
        return f"got scanned, expected identical layers, but no_rope_every {config.no_rope_every} makes them differ"
    return None
