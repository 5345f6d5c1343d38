"""One update: the gradient of a batch, the optimizer's move, and the sums of the next metrics row.

Shape suffixes: A micro-steps, B rows, T positions, S sources; 2 a number in two words, high and low.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from curriculum.model.presets import ModelConfig
from curriculum.model.transformer import nats_per_token
from phases.batches import Batch


class Window(NamedTuple):
    """Sums over the updates since the last metrics row, skipped ones left out.

    Each sum is a pair of float32 whose exact value is the first plus the second: a bare float32 stops counting
    tokens one by one at 16.8 million.
    """

    nats_S2: jax.Array
    tokens_S2: jax.Array
    grad_norm_2: jax.Array
    num_updates: jax.Array  # int32


class TrainState(NamedTuple):
    """All that an update reads and writes. `step` counts batches consumed, skipped updates included."""

    params: Any
    opt_state: Any
    step: jax.Array  # int32
    window: Window
    skipped_updates: jax.Array  # int32


TrainStep = Callable[[TrainState, Batch, jax.Array], TrainState]


def init_state(params: Any, optimizer: optax.GradientTransformation, num_sources: int) -> TrainState:
    """The state at step 0. It takes `params` over: a step that donates its state consumes them."""
    window = Window(
        nats_S2=np.zeros((num_sources, 2), np.float32),
        tokens_S2=np.zeros((num_sources, 2), np.float32),
        grad_norm_2=np.zeros(2, np.float32),
        num_updates=np.int32(0),
    )
    return TrainState(params, optimizer.init(params), np.int32(0), window, np.int32(0))


def make_train_step(
    config: ModelConfig, optimizer: optax.GradientTransformation, grad_clip: float, num_sources: int
) -> TrainStep:
    """The pure function train_step(state, batch, lr) -> state, to be jitted with its state donated.

    The loss is the mean nats over the valid tokens of the whole batch, however many micro-steps it is cut into.
    Its gradient is clipped to a global norm of `grad_clip` (0: not at all). `lr` is a float32 scalar and
    `optimizer` an update rule at a rate of 1. A loss or norm that is not finite, or a batch without a valid
    token, leaves parameters, optimizer state and window as they were and counts as a skipped update.
    """

    def sum_nats(params, micro: Batch):
        nats_BT, _ = nats_per_token(config, params, micro.inputs_ABT, micro.targets_ABT)
        nats_B = jnp.where(micro.loss_mask_ABT, nats_BT, 0).sum(axis=1)
        return nats_B.sum(), nats_B

    def train_step(state: TrainState, batch: Batch, lr: jax.Array) -> TrainState:
        def micro_step(sums, micro: Batch):  # the scan has taken the leading axis off each array
            (_, nats_B), grads = jax.value_and_grad(sum_nats, has_aux=True)(state.params, micro)
            tokens_B = micro.loss_mask_ABT.sum(axis=1, dtype=jnp.int32)
            nats_S = jax.ops.segment_sum(nats_B, micro.source_ids_AB, num_sources)
            tokens_S = jax.ops.segment_sum(tokens_B, micro.source_ids_AB, num_sources)
            return jax.tree.map(jnp.add, sums, (grads, nats_S, tokens_S)), None

        zeros = (
            jax.tree.map(jnp.zeros_like, state.params),
            jnp.zeros(num_sources, jnp.float32),
            jnp.zeros(num_sources, jnp.int32),
        )
        (grads, nats_S, tokens_S), _ = jax.lax.scan(micro_step, zeros, batch)

        num_tokens = tokens_S.sum()
        loss = nats_S.sum() / num_tokens
        grads = jax.tree.map(lambda g: g / num_tokens, grads)
        grad_norm = optax.tree.norm(grads)
        is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

        if grad_clip:
            shrink = grad_clip / jnp.maximum(grad_norm, grad_clip)
            grads = jax.tree.map(lambda g: g * shrink, grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p + lr * u, state.params, updates)
        window = Window(
            nats_S2=_add(state.window.nats_S2, nats_S),
            tokens_S2=_add(state.window.tokens_S2, tokens_S.astype(jnp.float32)),
            grad_norm_2=_add(state.window.grad_norm_2, grad_norm),
            num_updates=state.window.num_updates + 1,
        )

        def unless_skipped(new, old):
            return jax.tree.map(lambda n, o: jnp.where(is_finite, n, o), new, old)

        return TrainState(
            params=unless_skipped(params, state.params),
            opt_state=unless_skipped(opt_state, state.opt_state),
            step=state.step + 1,
            window=unless_skipped(window, state.window),
            skipped_updates=state.skipped_updates + jnp.where(is_finite, 0, 1),
        )

    return train_step


def read_window(window: Window, sources: Sequence[str]) -> dict[str, Any]:
    """Means over a window, on the host; waits for the updates under way.

    `loss`: nats per valid token. `source_loss`: the same by source name, None where nothing was drawn.
    `grad_norm`: mean over updates, before clipping. None where there was no update.
    """
    window = jax.device_get(window)
    nats_S, tokens_S = np.sum(window.nats_S2, -1, np.float64), np.sum(window.tokens_S2, -1, np.float64)
    num_updates, grad_norm = int(window.num_updates), float(np.sum(window.grad_norm_2, dtype=np.float64))
    return {
        "loss": float(nats_S.sum() / tokens_S.sum()) if num_updates else None,
        "source_loss": {
            name: float(nats / tokens) if tokens else None
            for name, nats, tokens in zip(sources, nats_S, tokens_S, strict=True)
        },
        "grad_norm": grad_norm / num_updates if num_updates else None,
    }


def clear_window(window: Window) -> Window:
    """The empty window, placed as `window` is."""
    return jax.tree.map(jnp.zeros_like, window)


def window_for(window: Window, sources: Sequence[str], wanted: Sequence[str]) -> Window:
    """A window over `sources` as one over `wanted`: the sums of a source that is new are 0. Arrays of the host."""
    window = jax.device_get(window)
    row_of = {name: row for row, name in enumerate(sources)}

    def rows(sums_S2):
        zero_2 = np.zeros(2, np.float32)
        return np.stack([sums_S2[row_of[name]] if name in row_of else zero_2 for name in wanted])

    return window._replace(nats_S2=rows(window.nats_S2), tokens_S2=rows(window.tokens_S2))


def tune_malloc() -> None:
    """Make glibc keep what is freed, so that XLA's temporaries cost no page faults; elsewhere do nothing.

    To be called before the process starts threads or compiles. The memory of the largest program then stays
    with the process, two to three times over as freed blocks come apart.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    m_mmap_max, m_trim_threshold, m_top_pad, m_arena_max = -4, -1, -2, -8  # malloc.h
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, -1)  # any size_t stands for a size; this one for never
    libc.mallopt(m_top_pad, 64 << 20)
    # A thread with an arena of its own would take large blocks from mmap all the same.
    libc.mallopt(m_arena_max, 1)


def _add(total_2: jax.Array, number: jax.Array) -> jax.Array:
    """A float32 added to a two-word sum, its rounding error kept in the low word (Knuth's TwoSum)."""
    high, low = total_2[..., 0], total_2[..., 1]
    total = high + number
    rounded = total - high
    error = (high - (total - rounded)) + (number - rounded)
    return jnp.stack([total, low + error], axis=-1)
