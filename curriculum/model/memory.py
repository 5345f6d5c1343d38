"""The device memory that one update of the transformer needs, estimated from its shape. Nothing here imports jax.

The estimate is of the peak: the forward pass of a micro-step is done, and the loss has its first chunk of logits at
hand. In the backward pass gradients take the place of activations; what that of a block needs while it runs is not
counted. Of a block it counts what is kept for the backward pass, by automatic differentiation and by the backward
passes of attention, norms and feed-forward. If only adapters are trained, a matrix without an adapter keeps no input,
and the first block is counted like the others, although the backward pass ends at its first adapter.

Shape suffixes: B rows of a micro-step, T positions, M = B*T, D width, F ffn, H query heads, V vocabulary.
"""

from dataclasses import asdict, dataclass, replace

from curriculum.model.counts import num_adapters, num_head, num_parameters, num_projections, num_trained
from curriculum.model.formulation import attention_of, layers_of, loss_positions, query_blocks
from curriculum.model.presets import ModelConfig

FLOAT32_BYTES = 4
BYTES_OF = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device, by what they are for."""

    params: int
    """Float32 parameters, trained or not."""
    gradients: int
    """A micro-step's own, the head's among them, and with more than one micro-step the sum over them. This and what
    follows up to the average is of trained parameters alone."""
    moments: int
    """The optimizer's numbers."""
    ema: int
    """The moving average of the parameters."""
    activations: int
    """Kept from the forward to the backward pass; and what of one block computed again does not fit into the room of
    the logits, which is free by then."""
    logits: int
    """The loss: a chunk of logits and its exponentials, the features cut into chunks, their gradient, and in bfloat16
    the head in that type."""
    stacked: int
    """Where layers are scanned: the copy of the blocks' matrices in compute_dtype that the loop runs over."""
    gathered: int
    """Under fsdp: parameters whole while the model uses them, and their gradient before it is split. Of blocks that are
    computed again, one at a time."""
    update: int
    """The optimizer's own temporaries, so far as they do not fit into the room of activations and logits."""
    batch: int
    """Tokens, targets, loss mask, segments and sources of the whole update."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def to_json(self) -> dict[str, int]:
        """The parts and their total, in bytes."""
        return {**asdict(self), "total": self.total}


def memory_estimate(
    model: ModelConfig,
    *,
    rows: int,
    seq_len: int,
    backend: str = "cpu",
    grad_accum: int = 1,
    moments_per_parameter: float = 2,
    ema: bool = False,
    document_mask: bool = False,
    fsdp: int = 1,
    tensor: int = 1,
    update_bytes: int = 0,
) -> MemoryEstimate:
    """Bytes of one update on one device of a `backend`, a key of BY_BACKEND, with that backend's formulation.

    `rows`: rows of one micro-step on this device, batch_size / grad_accum / (devices the rows are split over).
    `moments_per_parameter`: float32 numbers that the optimizer keeps for each trained parameter on the device, 2 for
    AdamW; the mean if parameters differ. `fsdp`, `tensor`: sizes of the mesh axes, over which parameters, gradients,
    moments and average are split as `curriculum.model.counts` says; activations are counted whole. `update_bytes`:
    temporaries of the optimizer's update.
    """
    attention = attention_of(model, backend, seq_len=seq_len, heads_split=tensor > 1)
    model = replace(model, attention=attention, layers=layers_of(model, backend))
    split, used = {"fsdp": fsdp, "tensor": tensor}, {"tensor": tensor}  # how a device stores parameters, and uses them
    params, trained = (FLOAT32_BYTES * num(model, **split) for num in (num_parameters, num_trained))
    num_tokens, width_bytes = rows * seq_len, BYTES_OF[model.compute_dtype]

    chunk = 2 * FLOAT32_BYTES * rows * loss_positions(rows, seq_len, model.vocab_size, backend) * model.vocab_size
    loss = 2 * num_tokens * model.d_model * width_bytes
    if model.compute_dtype != "float32":
        loss += width_bytes * num_head(model, **split)
    computed_again = 0 if model.remat == "none" else block_bytes(model, rows, seq_len, "none")
    if document_mask and model.attention == "cudnn":
        computed_again += _cudnn_workspace_bytes(model, rows, seq_len)
    activations = kept_bytes(model, rows, seq_len, document_mask) + max(computed_again - chunk, 0)
    gathered = FLOAT32_BYTES * (num_parameters(model, **used) + num_trained(model, **used)) if fsdp > 1 else 0
    if model.remat != "none":  # only one block is gathered at a time
        others = num_projections(model, **used) * (1 - 1 / model.n_layer)
        gathered = round(gathered * (1 - others / num_parameters(model, **used)))
    stacked = num_projections(model, **split) + num_adapters(model, **split) if model.layers == "scanned" else 0
    return MemoryEstimate(
        params=params,
        gradients=trained * (1 if grad_accum == 1 else 2),
        moments=round(trained * moments_per_parameter),
        ema=trained if ema else 0,
        activations=activations,
        logits=loss + chunk,
        stacked=width_bytes * stacked,
        gathered=gathered,
        update=max(update_bytes - activations - loss - chunk, 0),
        batch=grad_accum * (num_tokens * (3 * 4 + 1) + rows * 4),
    )


def kept_bytes(model: ModelConfig, rows: int, seq_len: int, document_mask: bool = False) -> int:
    """Bytes that the forward pass keeps for the backward pass, parameters apart.

    Besides the blocks: the tokens; the input of the last norm (its output is counted with the loss); for the
    embedding's dropout as much as for each of the two of a block. If blocks are recomputed, also the mask of visible
    positions that they share, [B, T, T] with a document mask and [T, T] without. For cuDNN a document mask is an array
    of compute_dtype. A loop over scanned layers keeps once what is the same in all of them.
    """
    num_tokens = rows * seq_len
    outside = num_tokens * (4 + _norm_bytes(model) + _dropout_bytes(model))
    if document_mask and model.pos_encoding == "rope":
        # Cosines and sines of each row's own positions, which all rotations share.
        outside += num_tokens * 2 * (model.head_width // 2) * FLOAT32_BYTES
    if model.remat != "none":
        outside += (rows if document_mask else 1) * seq_len**2
    if document_mask and model.attention == "cudnn":
        outside += rows * seq_len**2 * BYTES_OF[model.compute_dtype]
    blocks = model.n_layer * block_bytes(model, rows, seq_len, model.remat)
    if model.layers == "scanned" and model.remat == "none":
        blocks -= (model.n_layer - 1) * _alike_bytes(model, rows, seq_len)
    return outside + blocks


def _cudnn_workspace_bytes(model: ModelConfig, rows: int, seq_len: int) -> int:
    """Bytes that cuDNN takes for the backward pass of one block's attention with a mask, which is a bias to it.

    It computes the bias's gradient as well, though nothing asks for it, and needs all scores for that: [B, H, T, T] in
    two bytes, T filled up to a multiple of 64 (cudnn-frontend, sdpa_bwd). Not compared: the compiler counts this
    workspace only where there is a card.
    """
    length = -(-seq_len // 64) * 64
    return 2 * rows * model.n_head * length**2


def _alike_bytes(model: ModelConfig, rows: int, seq_len: int) -> int:
    """Bytes of a block that are the same in all: dropouts' zeros; of xla attention visible positions, scores' zeros."""
    scores = model.n_head * seq_len**2 * (FLOAT32_BYTES + 1) if model.attention == "xla" else 0
    zeros = seq_len * 2 * model.d_model * BYTES_OF[model.compute_dtype] if model.dropout else 0
    return rows * (scores + zeros)


def _bytes_of_scores(model: ModelConfig, seq_len: int) -> int:
    """What one head keeps for the scores of a row. Here and below, `auto` attention is plain."""
    width_bytes = BYTES_OF[model.compute_dtype]
    if model.attention in ("cudnn", "splash"):
        return seq_len * FLOAT32_BYTES
    if model.attention == "xla":
        return seq_len**2 * (2 * FLOAT32_BYTES + width_bytes + 1) + seq_len * 2 * FLOAT32_BYTES
    blocks = query_blocks(seq_len, model.sliding_window)
    num_scores = sum((end - first) * (end - first_key) for first_key, first, end in blocks)
    return num_scores * width_bytes + seq_len * FLOAT32_BYTES


def block_bytes(model: ModelConfig, rows: int, seq_len: int, remat: str) -> int:
    """Bytes that one block keeps for the backward pass. In compute_dtype unless stated otherwise:

    | remat | [M, D] | [M, K n_kv_head] | [M, F] | [B, H, scores] |
    |---|---|---|---|---|
    | full | block input | | | |
    | dots | block input, query, attention's out | key, value | up; swiglu: gate as well | |
    | none | query, mixed; input and output of each norm | key, value | up; swiglu: gate as well; \
    and the input of down | plain: exponentials; xla: exponentials and the scores' other branch (zeros) in float32, \
    shares, and a byte for whether it is visible; cudnn, splash: none |

    With none it also keeps small float32 numbers for each row of these arrays, dropout's mask and zeros, and in
    bfloat16 a copy of each weight, unless layers are scanned (their copy is `stacked`). With adapters, the output of a
    norm, the input of down, and xla's mixed are kept only if an adapter reads them. Each adapter adds its inner
    [M, rank] and its result: with dots for all but down; with none for gate and up only.
    """
    num_tokens, width_bytes = rows * seq_len, BYTES_OF[model.compute_dtype]
    query_width, kv_width = model.n_head * model.head_width, model.n_kv_head * model.head_width
    gated = model.mlp_type == "swiglu"
    if remat == "full":
        return num_tokens * width_bytes * model.d_model
    targets, rank = (model.lora.targets, model.lora.rank) if model.lora is not None else ((), 0)
    inner = rank * len(targets)
    if remat == "dots":
        shapes = model.projections()
        results = sum(shapes[name][1] for name in (*shapes, *targets) if name != "down")
        return num_tokens * width_bytes * (model.d_model + results + inner)

    def is_kept(*readers: str) -> bool:
        return model.lora is None or not set(readers).isdisjoint(targets)

    low = model.compute_dtype != "float32"
    num_normed = is_kept("query", "key", "value") + is_kept("gate", "up")
    attention = (1 + (model.attention != "xla" or is_kept("out"))) * query_width * width_bytes
    attention += 2 * kv_width * width_bytes
    if model.qk_norm:
        # The input of each query's and key's norm, and each head's deviation.
        attention += (query_width + kv_width) * width_bytes
        attention += (model.n_head + model.n_kv_head) * FLOAT32_BYTES
    num_inner = 1 + gated + is_kept("down") + sum(name in targets for name in ("gate", "up"))
    mlp = num_inner * model.d_ff * width_bytes
    weights = (num_projections(model) + num_adapters(model)) // model.n_layer
    per_token = 2 * _norm_bytes(model) + attention + mlp + 2 * _dropout_bytes(model)
    per_token += (num_normed * model.d_model + inner) * width_bytes
    kept = num_tokens * per_token + rows * model.n_head * _bytes_of_scores(model, seq_len)
    return kept + (weights * width_bytes if low and model.layers != "scanned" else 0)


def _norm_bytes(model: ModelConfig) -> int:
    """Bytes for one position at one norm over the width: its input, its mean (layernorm only), its deviation."""
    num_sums = 2 if model.norm_type == "layernorm" else 1
    return model.d_model * BYTES_OF[model.compute_dtype] + num_sums * FLOAT32_BYTES


def _dropout_bytes(model: ModelConfig) -> int:
    """Bytes for one position at one dropout: a byte per number for whether it is kept, and the zeros in its place."""
    return model.d_model * (1 + BYTES_OF[model.compute_dtype]) if model.dropout else 0
