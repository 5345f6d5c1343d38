"""All eval sets through one compiled function of one fixed shape."""

import collections
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from evalsets.evalset import EvalSet
from evalsets.metrics import WindowResults

_WIDE = {"f": np.float64, "i": np.int64}  # types of results by the kind of what was summed on the device
ScoreTargets = Callable[[Any, jax.Array, jax.Array], dict[str, jax.Array]]
SumWindows = Callable[[Any, jax.Array, jax.Array], dict[str, jax.Array]]
_OF_THE_SET = ("tokens_N", "bytes_N", "document_N", "text_N")  # fields of WindowResults that no model decides
_SCORES = [name.removesuffix("_N") for name in WindowResults._fields if name not in _OF_THE_SET]
_NEEDED = [name for name in _SCORES if f"{name}_N" not in WindowResults._field_defaults]
_UNDER_WAY = 2  # micro-batches started and not waited for, if progress is told between them


class Suite:
    """Measures any number of eval sets at once; their windows stay on the device between evals.

    score_targets: pure and jittable, (params, inputs_BT, targets_BT) -> {"nats": nats_BT float32, "correct": correct_BT
      bool}, and an array [B, T] for each other sum of `WindowResults`. A position may see only the inputs up to itself
      in its own row: padding follows the scored tokens.
    micro_batch_size: rows of the compiled shape [B, T], for all sets. Results depend on it, and on the number
      of devices, only by rounding (below 1e-6 relative).
    put: places a host array, whose leading axis is the rows of a micro-batch, on the device or devices.
    results_sharding: the sharding of a micro-batch's results; None leaves it to the compiler. With several
      processes each must be able to read all results, so it must be replicated.
    one_at_a_time: whether to wait for each micro-batch before starting the next.

    Each set is padded on its own to whole micro-batches, so its results depend neither on its place in the
    suite nor on the other sets, bit for bit. Sets of the same content under two names are measured once.

    Raises ValueError for: two sets of one name, sets of different seq_len, micro_batch_size below 1.

    evalsets: {name: EvalSet}, in the order given.
    """

    def __init__(
        self,
        evalsets: Sequence[EvalSet],
        score_targets: ScoreTargets,
        micro_batch_size: int = 32,
        put: Callable[[np.ndarray], jax.Array] = jax.device_put,
        results_sharding: jax.sharding.Sharding | None = None,
        one_at_a_time: bool = False,
    ):
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size}, expected at least 1")
        self.evalsets = {evalset.name: evalset for evalset in evalsets}
        if len(self.evalsets) != len(evalsets):
            raise ValueError(f"eval sets {[e.name for e in evalsets]}: expected each name once; rename one")
        if len({evalset.seq_len for evalset in evalsets}) > 1:
            found = ", ".join(f"{evalset.name} {evalset.seq_len}" for evalset in evalsets)
            raise ValueError(f"eval sets of different seq_len ({found}): expected one; cut them again with it")
        self._micro_batches = {
            content_hash: [
                (put(tokens_BT1), put(scored_BT))
                for tokens_BT1, scored_BT in zip(
                    _micro_batches(evalset.tokens_NT1, micro_batch_size),
                    _micro_batches(evalset.scored_NT, micro_batch_size),
                    strict=True,
                )
            ]
            for content_hash, evalset in {evalset.content_hash: evalset for evalset in evalsets}.items()
        }

        self._results_sharding, self._one_at_a_time = results_sharding, one_at_a_time
        self._measure_by(summed_by_window(score_targets))

    def using(self, sum_windows: SumWindows) -> Self:
        """The same windows, shared on the device, measured by another function, which is compiled and traced apart."""
        other = copy.copy(self)
        other._measure_by(sum_windows)
        return other

    def compile(self, params: Any) -> None:
        """Compile for parameters like `params`, arrays or jax.ShapeDtypeStruct; from then on `run` takes no others."""
        self._sum_windows = self._sum_windows.lower(params, *self._first_arrays()).compile()

    def run_once(self, params: Any) -> None:
        """Run the function on one micro-batch, and wait for it: what a first run does beyond others is done then."""
        jax.block_until_ready(self._sum_windows(params, *self._first_arrays()))

    def _first_arrays(self) -> tuple[jax.Array, jax.Array]:
        return next(iter(self._micro_batches.values()))[0]

    def _measure_by(self, sum_windows: SumWindows) -> None:
        self._sum_windows = jax.jit(sum_windows, out_shardings=self._results_sharding)

    def run(
        self, params: Any, names: Iterable[str] | None = None, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, WindowResults]:
        """Measure the named sets (default: all), in that order; an empty `names` gives an empty result without work.

        Unless `one_at_a_time`, all micro-batches are dispatched before a single wait for the results at the end. With
        `progress` few are under way at a time, and it is called before each and at the end with the windows done and
        all windows; it ends the measurement by what it raises. Micro-batches are looped over in Python: `lax.map` would
        compile their number into the function, so that each set would need a compilation of its own, or as much padding
        as the largest set.

        Raises ValueError for a name that is not in the suite.
        """
        names = list(self.evalsets if names is None else names)
        for name in names:
            if name not in self.evalsets:
                raise ValueError(f"no eval set '{name}' in the suite (sets: {', '.join(self.evalsets)})")
        contents = {self.evalsets[name].content_hash: self.evalsets[name].num_windows for name in names}
        most = 1 if self._one_at_a_time else _UNDER_WAY if progress is not None else None
        under_way: collections.deque[tuple[Any, int]] = collections.deque()
        done, total = 0, sum(contents.values())

        def measured(arrays: tuple[jax.Array, jax.Array], num_windows: int) -> dict[str, jax.Array]:
            nonlocal done
            if len(under_way) == most:
                started, windows = under_way.popleft()
                jax.block_until_ready(started)
                done += windows
            if progress is not None:
                progress(done, total)
            sums = self._sum_windows(params, *arrays)
            if most is not None:
                under_way.append((sums, num_windows))
            return sums

        sums = jax.device_get(
            {
                content: [
                    measured(arrays, min(len(arrays[0]), num_windows - i * len(arrays[0])))
                    for i, arrays in enumerate(self._micro_batches[content])
                ]
                for content, num_windows in contents.items()
            }
        )
        if progress is not None and contents:
            progress(total, total)
        results = {}
        for name in names:
            evalset = self.evalsets[name]
            micro_batches = sums[evalset.content_hash]
            summed = {
                field: np.concatenate([of_batch[field] for of_batch in micro_batches])[: evalset.num_windows]
                for field in micro_batches[0]
            }
            results[name] = WindowResults(
                **{field: array_N.astype(_WIDE[array_N.dtype.kind]) for field, array_N in summed.items()},
                tokens_N=evalset.num_tokens_N.astype(np.int64),
                bytes_N=evalset.num_bytes_N.astype(np.int64),
                document_N=evalset.origin_N.astype(np.int64),
                text_N=evalset.text_D[evalset.document_N],
            )
        return results


def summed_by_window(score_targets: ScoreTargets) -> SumWindows:
    """The function of a micro-batch that a suite compiles; `score_targets` as in `Suite`.

    It raises ValueError for scores that `WindowResults` does not have, and without those that it needs.
    """

    def sum_windows(params: Any, tokens_BT1: jax.Array, scored_BT: jax.Array) -> dict[str, jax.Array]:
        scores = score_targets(params, tokens_BT1[:, :-1], tokens_BT1[:, 1:])
        gave = ", ".join(scores) if isinstance(scores, dict) else f"a {type(scores).__name__}"
        if not isinstance(scores, dict) or not set(_NEEDED) <= scores.keys() <= set(_SCORES):
            raise ValueError(
                f"score_targets gave {gave}, expected a dict of {', '.join(_SCORES)}; for another score, add a "
                "field with its name and _N to WindowResults in evalsets/metrics.py"
            )
        # `where`, not a product: a NaN where nothing is scored must not reach the sum.
        kept = {f"{name}_N": jnp.where(scored_BT, score_BT, 0) for name, score_BT in scores.items()}
        return {
            name: _sum_pairwise(score_BT)
            if jnp.issubdtype(score_BT.dtype, jnp.floating)
            else jnp.sum(score_BT, axis=1, dtype=jnp.int32)
            for name, score_BT in kept.items()
        }

    return sum_windows


def _micro_batches(array_N: np.ndarray, micro_batch_size: int) -> list[np.ndarray]:
    """Consecutive pieces of micro_batch_size rows, the last padded with zeros: token 0, nothing scored."""
    missing = -len(array_N) % micro_batch_size
    padded = np.pad(array_N, [(0, missing)] + [(0, 0)] * (array_N.ndim - 1))
    return np.split(padded, len(padded) // micro_batch_size)


def _sum_pairwise(terms_BT: jax.Array) -> jax.Array:
    """Sum over T in float32 as a balanced tree, in an order that neither the compiler nor the batch shape changes.

    For terms of one sign the relative error is at most ceil(log2 T) * 2^-24, 6e-7 at T = 1,024, where the
    plain loop's bound is (T - 1) * 2^-24, 6e-5.
    """
    num_levels = (terms_BT.shape[1] - 1).bit_length()
    terms_BT = terms_BT.astype(jnp.float32)
    terms_BT = jnp.pad(terms_BT, ((0, 0), (0, 2**num_levels - terms_BT.shape[1])))
    for _ in range(num_levels):
        half = terms_BT.shape[1] // 2
        terms_BT = terms_BT[:, :half] + terms_BT[:, half:]
    return terms_BT[:, 0]
