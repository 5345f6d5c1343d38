"""Text generation: one compiled function that reads a prompt, and one that continues several rows at once.

Shapes depend only on a prompt's own length and its largest number of tokens, in powers of two. A prompt is read alone,
and continued in one of NUM_ROWS rows, whatever the others hold: its text is the same, bit for bit, alone, among others
and in another order. The settings of `Sampling` are arguments, so nothing is compiled for them.

Shape suffixes: B rows, T positions, D width, V vocabulary, N steps of one dispatch.
"""

import hashlib
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from curriculum.data.chat import Stretch, Template, render_question
from curriculum.data.encode import encode_beginning
from curriculum.data.tokenizers.chat_template import ends_answer
from curriculum.data.tokenizers.tokenizer import Tokenizer
from curriculum.errors import InputError
from curriculum.model.continuation import Continuation, Generation, NewText, Prompt
from curriculum.model.draw import DrawKnobs, draw
from curriculum.model.loss import next_logits
from curriculum.model.model import Model, Params
from curriculum.sampling import Sampling

NUM_ROWS = 8  # a multiple of 4: the products of XLA on a CPU then treat every row alike
SMALLEST_BUCKET = 16  # positions
# The tokens of one dispatch appear together. Many steps save the time between dispatches, few make the text flow.
MOST_STEPS, DISPATCH_SECONDS = 32, 0.05


class Rows(NamedTuple):
    """The texts being generated, on the device."""

    cache: Any
    tokens_B: jax.Array  # the newest token of each row, which is not in the cache yet
    positions_B: jax.Array  # its position
    last_B: jax.Array  # the last position that the row may reach
    keys_B2: jax.Array  # uint32
    going_B: jax.Array  # bool: the row has not ended


class Generator:
    """Generates text with any parameters of one model.

    num_prefill_traces, num_decode_traces: how often the two functions were traced, once per shape. Raises InputError if
    the model lacks `empty_cache` or `extend`.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, mesh: Mesh):
        if model.empty_cache is None or model.extend is None:
            raise InputError(
                "make_model: gave a model that cannot generate; expected Model.empty_cache and Model.extend too "
                "(docs/library.md)"
            )
        # Ids that the model has beyond the tokenizer's stand for no text.
        num_ids = min(model.num_ids or tokenizer.vocab_size, tokenizer.vocab_size)
        self.model, self.tokenizer = replace(model, num_ids=num_ids), tokenizer
        self.num_prefill_traces = self.num_decode_traces = 0
        whole = NamedSharding(mesh, PartitionSpec())  # the rows are few: every device has all of them
        self._no_rows = jax.jit(self._trace_no_rows, static_argnums=0, out_shardings=whole)
        self._prefill = jax.jit(self._trace_prefill, static_argnums=0, donate_argnums=2, out_shardings=whole)
        self._decode = jax.jit(self._trace_decode, donate_argnums=1, out_shardings=whole)
        self._whole, self._compiled = whole, {}  # what `compile` made, by function and shape

    def prompt(self, text: str, template: Template | None = None) -> Prompt:
        """The prompt of a text, all of it ordinary; with `template` of what a user says, up to where an answer begins.

        Its continuation ends where texts of the model do, and at the special token with which `template` closes an
        answer.
        Raises InputError if the tokenizer cannot represent the text, or it is none.
        """
        if not isinstance(text, str):
            raise InputError(f"got {text!r}, expected text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"got {text[:60]!r}, expected text that UTF-8 can encode: {error.reason}") from None
        tokenizer, stretches, ends = self.tokenizer, [Stretch(text, False)], self.tokenizer.stops
        if template is not None:
            stretches = render_question(text, template)
            _, closing = ends_answer(template, tokenizer)
            ends = ends if closing is None else (*ends, closing)
        ids = np.concatenate([[tokenizer.bos], encode_beginning(stretches, tokenizer)])
        last = stretches[-1] if stretches else Stretch("", False)
        prefixed = last.special and tokenizer.puts_prefix_after(last.text, special=True)
        return Prompt("".join(stretch.text for stretch in stretches), ids.astype(np.int32), ends, prefixed)

    def check(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Raise InputError that lists all that is wrong with the settings, and every prompt that is too long."""
        problems = [f"{name}: {message}" for name, message in sampling.problems()]
        for number, prompt in enumerate(prompts, start=1):
            try:
                self.check_length(prompt)
            except InputError as error:
                problems += [f"prompt {number}: {problem}" for problem in error.problems]
        if problems:
            raise InputError(*problems)

    def check_length(self, prompt: Prompt) -> None:
        """Raise InputError for a prompt that is longer than the model's positions."""
        longest = self.model.max_seq_len
        if longest is not None and len(prompt.ids) > longest:
            got = f"got {len(prompt.ids)} tokens, the one that opens a document included"
            raise InputError(f"{got}, expected at most the model's max_seq_len {longest}")

    def compile(self, params: Params, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Compile what these prompts need for parameters like `params`, arrays or jax.ShapeDtypeStruct.

        Afterwards, prompts of these shapes run only with parameters of the same shapes, types and shardings.
        """
        knobs, number = DrawKnobs.of(sampling), np.int32(0)
        for num_positions, texts in self._by_room(prompts, sampling).items():
            self._compiled["no rows", num_positions] = self._no_rows.lower(num_positions).compile()
            rows = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self._whole),
                jax.eval_shape(self._no_rows, num_positions),
            )
            for num_tokens in {self._bucket(len(text.prompt.ids)) for text in texts}:
                place, tokens_BT = (number, number, number), np.zeros((1, num_tokens), np.int32)
                prefill = self._prefill.lower(num_positions, params, rows, tokens_BT, *place, texts[0].key, knobs)
                self._compiled["prefill", num_positions, num_tokens] = prefill.compile()
            decode = self._decode.lower(params, rows, np.zeros(NUM_ROWS, bool), number, knobs)
            self._compiled["decode", num_positions] = decode.compile()

    def generate(self, params: Params, prompts: Sequence[Prompt], sampling: Sampling) -> list[Generation]:
        """The continuation of each prompt, in order. Raises InputError as `check` does."""
        whole = {piece.index: piece.whole for piece in self.stream(params, prompts, sampling) if piece.whole}
        return [whole[index] for index in range(len(prompts))]

    def stream(self, params: Params, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[NewText]:
        """The continuations as they come, several at a time. Raises InputError as `check` does, before all else."""
        self.check(prompts, sampling)
        return self._stream(params, self._by_room(prompts, sampling), DrawKnobs.of(sampling))

    def _by_room(self, prompts: Sequence[Prompt], sampling: Sampling) -> dict[int, deque[Continuation]]:
        """A continuation for each prompt, in order, grouped by the number of positions that its row needs."""
        met: Counter[bytes] = Counter()
        by_room: dict[int, deque[Continuation]] = {}
        for index, prompt in enumerate(prompts):
            ids = prompt.ids.astype("<i4").tobytes()
            key, last = _key(sampling.seed, ids, met[ids]), len(prompt.ids) - 1 + int(sampling.max_tokens)
            met[ids] += 1
            # The last token is never fed to the model, so it may lie one beyond the model's positions.
            limited = self.model.max_seq_len is not None and last > self.model.max_seq_len
            last, ends_as = (self.model.max_seq_len, "max_seq_len") if limited else (last, "length")
            text = Continuation(index, prompt, key, last, ends_as, sampling.stop)
            by_room.setdefault(self._bucket(last), deque()).append(text)
        return by_room

    def _stream(self, params: Params, by_room: dict[int, deque[Continuation]], knobs: DrawKnobs) -> Iterator[NewText]:
        for num_positions, waiting in by_room.items():
            rows = self._compiled.get(("no rows", num_positions), partial(self._no_rows, num_positions))()
            decode, num_steps = self._compiled.get(("decode", num_positions), self._decode), 1
            under_way: dict[int, Continuation] = {}  # by row
            while waiting or under_way:
                begun = {}
                for row in [row for row in range(NUM_ROWS) if row not in under_way][: len(waiting)]:
                    under_way[row] = text = waiting.popleft()
                    rows, begun[row] = self._begin(params, rows, num_positions, row, text, knobs)
                for row, token in begun.items():
                    yield under_way[row].add([int(token)], self.tokenizer)
                under_way = {row: text for row, text in under_way.items() if text.whole is None}
                if under_way:
                    started = time.perf_counter()
                    stays_B = np.isin(np.arange(NUM_ROWS), list(under_way))
                    rows, drawn_NB, num_drawn = decode(params, rows, stays_B, np.int32(num_steps), knobs)
                    drawn_NB = np.asarray(drawn_NB)[: int(num_drawn)]
                    step_seconds = (time.perf_counter() - started) / len(drawn_NB)
                    num_steps = int(np.clip(DISPATCH_SECONDS / step_seconds, 1, MOST_STEPS))
                    if jax.process_count() > 1:  # clocks differ between processes, and all must run the same steps
                        num_steps = MOST_STEPS
                    for row, text in under_way.items():
                        yield text.add(drawn_NB[:, row], self.tokenizer)
                    under_way = {row: text for row, text in under_way.items() if text.whole is None}

    def _begin(
        self, params: Params, rows: Rows, num_positions: int, row: int, text: Continuation, knobs: DrawKnobs
    ) -> tuple[Rows, jax.Array]:
        """Read a prompt into a row: (the rows, the first token)."""
        length = len(text.prompt.ids)
        tokens_BT = np.zeros((1, self._bucket(length)), np.int32)
        tokens_BT[0, :length] = text.prompt.ids
        place = (np.int32(length), np.int32(row), np.int32(text.last))
        made = self._compiled.get(("prefill", num_positions, tokens_BT.shape[1]))
        prefill = made or partial(self._prefill, num_positions)
        return prefill(params, rows, tokens_BT, *place, text.key, knobs)

    def _bucket(self, num_positions: int) -> int:
        """`num_positions` rounded up to a power of two, within SMALLEST_BUCKET and the model's max_seq_len."""
        bucket = max(SMALLEST_BUCKET, 1 << (num_positions - 1).bit_length())
        return bucket if self.model.max_seq_len is None else min(bucket, self.model.max_seq_len)

    def _trace_no_rows(self, num_positions: int) -> Rows:
        def zeros(dtype: Any, *shape: int) -> jax.Array:
            return jnp.zeros((NUM_ROWS, *shape), dtype)

        cache = self.model.empty_cache(NUM_ROWS, num_positions)
        return Rows(cache, zeros(jnp.int32), zeros(jnp.int32), zeros(jnp.int32), zeros(jnp.uint32, 2), zeros(bool))

    def _trace_prefill(
        self,
        num_positions: int,
        params: Params,
        rows: Rows,
        tokens_BT: jax.Array,
        length: jax.Array,
        row: jax.Array,
        last: jax.Array,
        key_2: jax.Array,
        knobs: DrawKnobs,
    ) -> tuple[Rows, jax.Array]:
        """The rows with a prompt of `length` tokens read into `row`, and the first token after it."""
        self.num_prefill_traces += 1
        cache, start_B = self.model.empty_cache(1, num_positions), jnp.zeros(1, jnp.int32)
        features_BTD, cache = self.model.extend(params, cache, tokens_BT, start_B, length[None])
        features_BD = jax.lax.dynamic_index_in_dim(features_BTD, length - 1, axis=1, keepdims=False)
        token_B = draw(next_logits(self.model, params, features_BD), key_2[None], length[None], knobs)
        going_B = (token_B != self.tokenizer.eot) & (length < last)
        begun = Rows(cache, token_B, length[None], last[None], key_2[None], going_B)
        return jax.tree.map(lambda of_rows, of_row: of_rows.at[row].set(of_row[0]), rows, begun), token_B[0]

    def _trace_decode(
        self, params: Params, rows: Rows, stays_B: jax.Array, num_steps: jax.Array, knobs: DrawKnobs
    ) -> tuple[Rows, jax.Array, jax.Array]:
        """(rows, drawn_NB, how many of the N steps were taken) after `num_steps`, or once all rows have ended.

        A row ends if stays_B is False, at end-of-text and at its last position; what is drawn for it after that is to
        be ignored.
        """
        self.num_decode_traces += 1
        one_B = jnp.ones(NUM_ROWS, jnp.int32)

        def step(carry):
            i, rows, drawn_NB = carry
            tokens_BT = rows.tokens_B[:, None]
            features_BTD, cache = self.model.extend(params, rows.cache, tokens_BT, rows.positions_B, one_B)
            positions_B = rows.positions_B + 1
            logits_BV = next_logits(self.model, params, features_BTD[:, 0])
            tokens_B = draw(logits_BV, rows.keys_B2, positions_B, knobs)
            going_B = rows.going_B & (tokens_B != self.tokenizer.eot) & (positions_B < rows.last_B)
            positions_B = jnp.where(going_B, positions_B, rows.positions_B)
            rows = Rows(cache, tokens_B, positions_B, rows.last_B, rows.keys_B2, going_B)
            return i + 1, rows, drawn_NB.at[i].set(tokens_B)

        rows = rows._replace(going_B=rows.going_B & stays_B)
        carry = (jnp.int32(0), rows, jnp.zeros((MOST_STEPS, NUM_ROWS), jnp.int32))
        num_drawn, rows, drawn_NB = jax.lax.while_loop(
            lambda carry: (carry[0] < num_steps) & carry[1].going_B.any(), step, carry
        )
        return rows, drawn_NB, num_drawn


def _key(seed: int, ids: bytes, occurrence: int) -> np.ndarray:
    """uint32 [2] for the draws after a prompt; equal prompts get different keys."""
    digest = hashlib.blake2b(b"%d %d " % (seed, occurrence) + ids, digest_size=8).digest()
    return np.frombuffer(digest, "<u4").astype(np.uint32)
