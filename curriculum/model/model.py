"""A language model as the trainer sees it: pure functions over nested dicts of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import SequenceKey, keystr

from curriculum.errors import InputError

Params = Any  # nested dicts, keyed by strings, and lists of float32 arrays


class Placement(NamedTuple):
    """How parameters are placed on devices, for a model that gathers them part by part as it uses them.

    `gather(params)` gives parameters, all of them or those of some modules, as matrix products use them: whole, except
    for the axes that stay split (heads, feed-forward, vocabulary). `heads_split`: whether heads are split over devices.
    `on_each(attend, num_groups)`: the same function of query, key, value and mask, [B, T, heads, ...], by which each
    device computes its own rows; its own heads as well, if the groups of heads that share a key split evenly.
    """

    gather: Callable[[Params], Params] = lambda params: params
    heads_split: bool = False
    on_each: Callable[[Callable[..., jax.Array], int], Callable[..., jax.Array]] = lambda attend, num_groups: attend


@dataclass(frozen=True, eq=False)
class Model:
    """The interface of a model: all that training, evals and checkpoints use of it.

    `init(seed)`: the initial parameters, float32 arrays on the host; arrays on a device are copied.

    `forward(params, tokens_BT, segment_ids_BT, keys_B)`: features_BTD. Position t may depend only on tokens 0..t of its
    row. `segment_ids_BT` is None, or the mask of `packing.document_mask`: neighbours of equal id are one document, and
    position t may depend only on its own document. `keys_B` is one random key per row in training, and None in evals.

    `head(params)`: kernel_VD; logits are features_BTD @ kernel_VD.T, computed a few positions at a time. Without `head`
    the features are the logits.

    `num_ids`: rows of the head, or logits, from this one on are padding and never predicted; None: there are none.

    `architecture`: a description of the model as plain JSON, kept with the run; a resumed run must have an equal one.

    `shapes()`: the parameters as jax.ShapeDtypeStruct, if that is cheaper than `init`.

    To generate text, a model also needs these two:

    `empty_cache(num_rows, num_positions)`: a cache that holds no tokens yet and has room for `num_positions` in each
    row, as a tree of arrays whose first axis is the row.

    `extend(params, cache, tokens_BT, starts_B, lengths_B)`: (features_BTD, cache) for tokens that follow those in the
    cache; the features are those that `forward` gives for the whole row. Row b's first token is at position
    starts_B[b], counted from 0. Tokens from lengths_B[b] on are padding and must not affect what comes later.

    `max_seq_len`: the largest number of positions; None: no limit.

    `placed(placement)`: the same model, gathering its parameters part by part where it uses them; without it all
    parameters are gathered first.

    `row_shards`, `vocab_shards`: the numbers of devices that the rows of a batch, and the ids of the vocabulary, are
    split over.
    """

    init: Callable[[int], Params]
    forward: Callable[[Params, jax.Array, jax.Array | None, jax.Array | None], jax.Array]
    head: Callable[[Params], jax.Array] | None = None
    num_ids: int | None = None
    architecture: Mapping[str, Any] = field(default_factory=dict)
    shapes: Callable[[], Params] | None = None
    empty_cache: Callable[[int, int], Any] | None = None
    extend: Callable[[Params, Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]] | None = None
    max_seq_len: int | None = None
    placed: Callable[[Placement], Model] | None = None
    row_shards: int = 1
    vocab_shards: int = 1


def abstract_params(model: Model) -> Params:
    """The parameters' shapes and types, as jax.ShapeDtypeStruct."""
    return model.shapes() if model.shapes is not None else jax.eval_shape(lambda: model.init(0))


def parameter_name(path: tuple) -> str:
    """The dotted name of a parameter, from its key path: `blocks.000.mlp.up.kernel`."""
    return keystr(path, simple=True, separator=".")


def by_name(params: Params) -> dict[str, Any]:
    """The leaves of a parameter tree by dotted name, in the order of the tree."""
    return {parameter_name(path): array for path, array in jax.tree.leaves_with_path(params)}


def shapes_by_name(params: Params) -> dict[str, list[int]]:
    """The shape of each parameter by dotted name."""
    return {name: list(array.shape) for name, array in by_name(params).items()}


def check_model(model: Model, vocab_size: int, num_rows: int, seq_len: int) -> None:
    """Raise InputError if shapes and types show that a model does not satisfy `Model`.

    Nothing is computed, except `init` if it is plain numpy. That position t sees no later token is not checked.
    """
    if not isinstance(model, Model):
        raise InputError(f"make_model: gave {type(model).__name__}, expected a curriculum.model.model.Model")
    params = abstract_params(model)
    if problems := _parameter_problems(params):
        raise InputError(*(f"make_model: {problem}" for problem in problems))

    tokens_BT = jax.ShapeDtypeStruct((num_rows, seq_len), np.int32)
    keys_B = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_rows))
    for keys in (None, keys_B):  # of evals, of training
        features = jax.eval_shape(model.forward, params, tokens_BT, None, keys)
        if getattr(features, "shape", ())[:2] != tokens_BT.shape or features.ndim != 3:
            got = f"forward gave {_brief(features)} for tokens {_brief(tokens_BT)}"
            raise InputError(f"make_model: {got}, expected [{num_rows}, {seq_len}, D]")
    width = features.shape[2]
    _check_logits(model, params, width, vocab_size)
    if model.empty_cache is not None and model.extend is not None:
        _check_generation(model, params, width)


def _parameter_problems(params: Params) -> list[str]:
    names: set[str] = set()
    problems = []
    for path, array in jax.tree.leaves_with_path(params):
        name = parameter_name(path)
        named = [isinstance(key, SequenceKey) or isinstance(getattr(key, "key", None), str) for key in path]
        if not named or not all(named):
            problems.append(f"parameter {name}: expected nested lists and dicts with string keys")
        if name in names:
            problems.append(f"parameter {name}: two have this name; expected keys without a dot")
        if array.dtype != np.float32:
            fix = "keep float32 and convert inside forward"
            problems.append(f"parameter {name}: got {array.dtype}, expected float32; {fix}")
        if 0 in array.shape:
            problems.append(f"parameter {name}: got shape {list(array.shape)}, expected no empty array; leave it out")
        names.add(name)
    if not names:
        problems.append("init gave no parameters, expected at least one array")
    return problems


def _check_logits(model: Model, params: Params, width: int, vocab_size: int) -> None:
    """Raise InputError if there are not logits for all ids of the tokenizer; `width` is that of the features."""
    if model.head is None:
        num_logits, where = width, "forward, without a head, gave logits"
    else:
        kernel = jax.eval_shape(model.head, params)
        if getattr(kernel, "ndim", 0) != 2 or kernel.shape[1] != width:
            raise InputError(f"make_model: head gave {_brief(kernel)}, expected [V, {width}], D as in forward")
        num_logits, where = kernel.shape[0], "head gave a kernel"
    if model.num_ids is not None and not vocab_size <= model.num_ids <= num_logits:
        expected = f"from the tokenizer's {vocab_size} to the logits' {num_logits}"
        raise InputError(f"make_model: num_ids: got {model.num_ids}, expected {expected}")
    if num_logits < vocab_size:
        raise InputError(f"make_model: {where} for {num_logits} ids, expected at least the tokenizer's {vocab_size}")


def _check_generation(model: Model, params: Params, width: int) -> None:
    num_rows, num_positions = 2, min(4, model.max_seq_len or 4)
    cache = jax.eval_shape(lambda: model.empty_cache(num_rows, num_positions))
    if wrong := [array for array in jax.tree.leaves(cache) if array.shape[:1] != (num_rows,)]:
        got = f"empty_cache gave {_brief(wrong[0])} for {num_rows} rows"
        raise InputError(f"make_model: {got}, expected arrays whose first axis is the row")
    tokens_BT, row_B = (jax.ShapeDtypeStruct((num_rows, *shape), np.int32) for shape in ((num_positions,), ()))
    given = jax.eval_shape(model.extend, params, cache, tokens_BT, row_B, row_B)
    if not isinstance(given, tuple) or len(given) != 2:
        raise InputError(f"make_model: extend gave {_brief(given)}, expected two: features and the cache")
    features, extended = given
    if getattr(features, "shape", None) != (expected := (*tokens_BT.shape, width)):
        got = f"extend gave {_brief(features)} for tokens {_brief(tokens_BT)}"
        raise InputError(f"make_model: {got}, expected {list(expected)}, as from forward")
    (were, tree), (are, other) = jax.tree.flatten(cache), jax.tree.flatten(extended)
    if tree != other:
        raise InputError(f"make_model: extend gave a cache like {other}, expected one like that of empty_cache, {tree}")
    for was, array in zip(were, are, strict=True):
        if (array.shape, array.dtype) != (was.shape, was.dtype):
            got = f"extend changed {_brief(was)} in the cache to {_brief(array)}"
            raise InputError(f"make_model: {got}, expected the same shape and type")


def _brief(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{value.dtype}{list(shape)}"


def num_parameters(model: Model) -> int:
    return count(abstract_params(model))


def count(params: Params) -> int:
    """The number of elements in a tree of arrays, or of anything with shapes."""
    return sum(int(np.prod(array.shape)) for array in jax.tree.leaves(params))
