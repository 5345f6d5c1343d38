"""One update: the gradient of a batch, the optimizer's update, and the sums for the next metrics row.

Shape suffixes: A micro-steps, B rows, T positions, S sources; 2 for a number in two words, high and low.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from curriculum.model.formulation import BY_BACKEND, backend
from curriculum.model.lora import joined
from curriculum.model.loss import sample_targets, sum_nats
from curriculum.model.model import Model, Params
from curriculum.schema.sections import SkipUpdates
from curriculum.train.guard import Guard, guarded, new_guard
from curriculum.train.mesh import constrain
from phases.batches import Batch


class Window(NamedTuple):
    """Sums over the updates since the last metrics row, without skipped ones.

    Each float sum is a pair of float32 whose exact value is the first plus the second: a single float32 cannot count
    tokens one by one beyond 16.8 million.
    """

    nats_S2: jax.Array
    tokens_S2: jax.Array
    filled_2: jax.Array  # slots that hold a token of a document
    grad_norm_2: jax.Array
    num_updates: jax.Array  # int32


class TrainState(NamedTuple):
    """All that an update reads and writes. `step` counts batches consumed, including those of skipped updates."""

    params: Params
    opt_state: Any
    step: jax.Array  # int32
    window: Window
    skipped_updates: jax.Array  # int32, whatever the reason
    guard: Guard
    ema: Params | None = None  # exponential moving average of the parameters, if one is kept


class UpdateKnobs(NamedTuple):
    """What an update is given beside its state and batch: values, so that none of them compiles anything.

    The fields are in the order of `train_step`'s arguments. The defaults have the types that updates are compiled for.
    """

    lr: np.float32 = np.float32(0)
    judged_from: np.int32 = np.int32(0)  # as in `guarded`
    seed: np.uint32 = np.uint32(0)


_SAMPLED = 0x5A3D1ED  # folded into a row's key to sample targets from the model


def init_state(
    params: Params,
    optimizer: optax.GradientTransformation,
    num_sources: int,
    *,
    ema: bool = False,
    window_steps: int = 128,
) -> TrainState:
    """The state at step 0. It takes `params` over: a step that donates its state consumes them.

    `window_steps`: how many updates the guard looks back.
    """
    window = Window(
        nats_S2=np.zeros((num_sources, 2), np.float32),
        tokens_S2=np.zeros((num_sources, 2), np.float32),
        filled_2=np.zeros(2, np.float32),
        grad_norm_2=np.zeros(2, np.float32),
        num_updates=np.int32(0),
    )
    average = jax.tree.map(jnp.copy, params) if ema else None
    guard = new_guard(window_steps)
    return TrainState(params, optimizer.init(params), np.int32(0), window, np.int32(0), guard, average)


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformationExtraArgs,
    num_sources: int,
    *,
    grad_clip: float = 0.0,
    document_mask: bool = False,
    deterministic: bool = False,
    ema_decay: float | None = None,
    skip_updates: SkipUpdates | None = SkipUpdates(),  # noqa: B008
    diverged_after: int = 128,
    mesh: Mesh | None = None,
) -> Callable[..., TrainState]:
    """Make train_step(state, batch, lr, judged_from=0, seed=0, frozen=None) -> state, to be jitted, its state donated.

    The function is pure. Its loss is the mean nats over the valid tokens of the whole batch, however many micro-steps
    it is cut into. Its gradient is clipped to a global norm of `grad_clip` (0: no clipping). `lr` is a float32 scalar.
    `optimizer` is an update rule for a learning rate of 1; it also gets `hessian_diagonal`, a function without
    arguments that estimates that diagonal.

    An update is skipped if its loss or gradient norm is not finite, if the guard rejects it, or if its batch has no
    valid token. It then leaves parameters, optimizer state, moving average and window unchanged, and counts in
    `skipped_updates`. `guarded` explains `skip_updates` and the int32 `judged_from`. After `diverged_after` bad updates
    in a row, `guard.diverged_at` tells the first of them.

    Random keys come from (seed, step, row of the batch); a `deterministic` step gives the model none. With
    `document_mask` a token sees its own document only.

    The decay of the moving average `state.ema` is min(ema_decay, (1 + step) / (10 + step)), so that the first
    parameters are forgotten. Gradients are pinned to the devices of `mesh` that hold the parameters. If only adapters
    are trained, `frozen` are the model's other parameters: they have no gradient, and stay with the caller.
    """

    batch_gradient = _make_batch_gradient(model, num_sources, document_mask, deterministic, mesh)

    def train_step(
        state: TrainState,
        batch: Batch,
        lr: jax.Array,
        judged_from: jax.Array | int = 0,
        seed: jax.Array | int = 0,
        frozen: Params | None = None,
    ) -> TrainState:
        keys_AB = _row_keys(seed, state.step, batch.source_ids_AB.shape)
        grads, nats_S, tokens_S = batch_gradient(state.params, frozen, batch, keys_AB)
        num_tokens = tokens_S.sum()
        loss = nats_S.sum() / num_tokens
        grads = jax.tree.map(lambda g: g / num_tokens, grads)
        grad_norm = optax.tree.norm(grads)
        taken, guard = guarded(
            state.guard,
            state.step,
            loss,
            grad_norm,
            num_tokens > 0,
            judged_from,
            skip_updates=skip_updates,
            diverged_after=diverged_after,
        )

        def hessian_diagonal() -> Params:
            """Gauss-Newton-Bartlett: tokens x the squared gradient of the mean loss of sampled targets."""
            sampled, _, _ = batch_gradient(state.params, frozen, batch, keys_AB, sampled=True)
            return jax.tree.map(lambda g: g * g / num_tokens, sampled)

        def moved() -> TrainState:
            shrink = grad_clip / jnp.maximum(grad_norm, grad_clip) if grad_clip else 1.0
            clipped = jax.tree.map(lambda g: g * shrink, grads)
            updates, opt_state = optimizer.update(
                clipped, state.opt_state, state.params, hessian_diagonal=hessian_diagonal
            )
            params = jax.tree.map(lambda p, u: p + lr * u, state.params, updates)
            ema = state.ema
            if ema_decay is not None:
                decay = jnp.minimum(ema_decay, (1 + state.step) / (10 + state.step))
                ema = jax.tree.map(lambda average, p: decay * average + (1 - decay) * p, ema, params)
            window = Window(
                nats_S2=_add(state.window.nats_S2, nats_S),
                tokens_S2=_add(state.window.tokens_S2, tokens_S.astype(jnp.float32)),
                filled_2=_add(state.window.filled_2, (batch.segment_ids_ABT >= 0).sum().astype(jnp.float32)),
                grad_norm_2=_add(state.window.grad_norm_2, grad_norm),
                num_updates=state.window.num_updates + 1,
            )
            return state._replace(params=params, opt_state=opt_state, ema=ema, window=window)

        def skipped() -> TrainState:
            return state._replace(skipped_updates=state.skipped_updates + 1)

        if BY_BACKEND[backend()].skip == "branch":
            chosen = jax.lax.cond(taken, moved, skipped)
        else:
            chosen = jax.tree.map(lambda new, old: jnp.where(taken, new, old), moved(), skipped())
        return chosen._replace(step=state.step + 1, guard=guard)

    return train_step


def read_window(window: Window, sources: Sequence[str]) -> dict[str, Any]:
    """Means over a window, on the host; waits for the updates under way.

    `loss`: nats per valid token. `source_loss`: the same by source name, None if nothing was drawn. `grad_norm`: mean
    over updates, before clipping. `filled_tokens`: slots per update that hold a document's token. `scored_tokens`:
    valid tokens per update. All are None if there was no update.
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
        "filled_tokens": float(np.sum(window.filled_2, dtype=np.float64)) / num_updates if num_updates else None,
        "scored_tokens": float(tokens_S.sum()) / num_updates if num_updates else None,
    }


def clear_window(window: Window) -> Window:
    """An empty window with the placement of `window`."""
    return jax.tree.map(jnp.zeros_like, window)


def window_for(window: Window, sources: Sequence[str], wanted: Sequence[str]) -> Window:
    """A window over `sources` converted to one over `wanted`, with sums of 0 for new sources; arrays on the host."""
    window = jax.device_get(window)
    row_of = {name: row for row, name in enumerate(sources)}

    def rows(sums_S2):
        zero_2 = np.zeros(2, np.float32)
        return np.stack([sums_S2[row_of[name]] if name in row_of else zero_2 for name in wanted])

    return window._replace(nats_S2=rows(window.nats_S2), tokens_S2=rows(window.tokens_S2))


def _make_batch_gradient(
    model: Model, num_sources: int, document_mask: bool, deterministic: bool, mesh: Mesh | None
) -> Callable[..., tuple[Params, jax.Array, jax.Array]]:
    """Make the gradient of a batch, summed over its micro-steps; arguments as in `make_train_step`."""

    def pinned(grads: Params) -> Params:
        return grads if mesh is None else constrain(mesh, grads)

    def batch_gradient(
        params: Params, frozen: Params | None, batch: Batch, keys_AB: jax.Array, *, sampled: bool = False
    ):
        """(gradient, nats_S, tokens_S), summed over a batch's valid tokens; with `sampled`, of sampled targets."""

        def whole(params):
            return params if frozen is None else joined(frozen, params)

        def summed(params, *inputs):
            return sum_nats(model, whole(params), *inputs)

        def micro_step(sums, micro_and_keys):  # the scan has taken the leading axis off each array
            micro, keys_B = micro_and_keys
            segment_ids_BT = micro.segment_ids_ABT if document_mask else None
            targets_BT = micro.targets_ABT
            if sampled:
                # Independent of dropout, which uses the same keys.
                draws_B = jax.vmap(partial(jax.random.fold_in, data=_SAMPLED))(keys_B)
                targets_BT = sample_targets(model, whole(params), micro.inputs_ABT, segment_ids_BT, draws_B)
            if sampled or deterministic:
                keys_B = None
            (_, nats_B), grads = jax.value_and_grad(summed, has_aux=True)(
                params, micro.inputs_ABT, targets_BT, micro.loss_mask_ABT, segment_ids_BT, keys_B
            )
            tokens_B = micro.loss_mask_ABT.sum(axis=1, dtype=jnp.int32)
            nats_S = jax.ops.segment_sum(nats_B, micro.source_ids_AB, num_sources)
            tokens_S = jax.ops.segment_sum(tokens_B, micro.source_ids_AB, num_sources)
            own = (pinned(grads), nats_S, tokens_S)
            return own if sums is None else jax.tree.map(jnp.add, sums, own), None

        if keys_AB.shape[0] == 1:  # nothing to add to
            return micro_step(None, jax.tree.map(lambda array: array[0], (batch, keys_AB)))[0]
        zeros = (
            pinned(jax.tree.map(jnp.zeros_like, params)),
            jnp.zeros(num_sources, jnp.float32),
            jnp.zeros(num_sources, jnp.int32),
        )
        return jax.lax.scan(micro_step, zeros, (batch, keys_AB))[0]

    return batch_gradient


def _row_keys(seed: jax.Array | int, step: jax.Array, shape_AB: tuple[int, int]) -> jax.Array:
    """keys_AB, one random key per row: the same however the rows are cut into micro-steps."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    rows_AB = jnp.arange(shape_AB[0] * shape_AB[1]).reshape(shape_AB)
    return jax.vmap(jax.vmap(partial(jax.random.fold_in, key)))(rows_AB)


def _add(total_2: jax.Array, number: jax.Array) -> jax.Array:
    """Add a float32 to a two-word sum, keeping its rounding error in the low word (Knuth's TwoSum)."""
    high, low = total_2[..., 0], total_2[..., 1]
    total = high + number
    rounded = total - high
    error = (high - (total - rounded)) + (number - rounded)
    return jnp.stack([total, low + error], axis=-1)
