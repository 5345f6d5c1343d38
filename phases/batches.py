"""Random access to the data of a run: which sequence each row of any batch is, and the batch itself.

A source is read in blocks as long as the run's longest sequence, in a new permutation each epoch. Block b holds
the tokens [b * block_tokens, (b + 1) * block_tokens], both ends included: the last one is the target of the
block's last position and also begins the next block. The order is a pure function of (segments, seed, store sizes).

A stream is an array of tokens, whose rows are consecutive tokens, or a `RowStream`, which makes its rows itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from phases.schedule import Schedule
from phases.shuffle import permute, stream_key


def num_micro_steps(grad_accum: int, batch_size: int) -> int:
    """Into how many micro-steps a batch is cut: all of `grad_accum`, but for a step that had another batch size."""
    return math.gcd(grad_accum, batch_size)


class Batch(NamedTuple):
    """One update's sequences: A micro-steps of B rows of T tokens."""

    inputs_ABT: np.ndarray  # int32
    targets_ABT: np.ndarray  # int32, the token after each input
    loss_mask_ABT: np.ndarray  # bool, True where the target is scored
    segment_ids_ABT: np.ndarray  # int32, document of each slot, counted from 0 within its row; -1 for an empty slot
    source_ids_AB: np.ndarray  # int32, index into the data plan's `sources`


class Rows(NamedTuple):
    """R rows of T slots of a stream; the batch's masks are yet to be applied to `scored_RT`."""

    inputs_RT: np.ndarray
    targets_RT: np.ndarray
    scored_RT: np.ndarray
    segment_ids_RT: np.ndarray


class RowStream(Protocol):
    """A stream that makes its rows itself, because they are more than consecutive tokens that are all scored."""

    def read(self, offsets_R: np.ndarray, length: int) -> Rows:
        """For each offset the `length` slots from there on; they never cross the end of a block."""


@dataclass(frozen=True, eq=False)
class TokenStream:
    """A `RowStream` of consecutive tokens; `scored` marks those scored (None: all); eot, bos as in `document_ids`."""

    tokens: Sequence[int]
    eot: int
    scored: Sequence[bool] | None = None
    bos: int | None = None

    def read(self, offsets_R: np.ndarray, length: int) -> Rows:
        offsets = offsets_R.tolist()
        cut = _cut(self.tokens)
        rows = _consecutive([cut(offset, offset + length + 1) for offset in offsets], length, self.eot, self.bos)
        if self.scored is None:
            return rows
        cut = _cut(self.scored)
        return rows._replace(scored_RT=np.array([cut(offset + 1, offset + length + 1) for offset in offsets], bool))


class Draws(NamedTuple):
    """Rows in order: the source (index into `sources`), its epoch, and the first token's offset in the source."""

    source: np.ndarray
    epoch: np.ndarray
    offset: np.ndarray


def epoch_tokens(num_tokens: int, block_tokens: int) -> int:
    """Tokens of one epoch of a stream: whole blocks, whose last target must exist. 0 if not even one fits."""
    return max(num_tokens - 1, 0) // block_tokens * block_tokens


def document_ids(tokens_BT: np.ndarray, eot: int, bos: int | None = None) -> np.ndarray:
    """The document of each slot of rows of consecutive tokens, counted from 0 within the row: int32.

    As an input, end-of-text opens the next document, as in evals; as a target, it closes the one before. A `bos` other
    than `eot` opens a document too, and an end-of-text right before it does not.
    """
    opens_BT = tokens_BT == eot
    if bos not in (None, eot):
        is_bos_BT = tokens_BT == bos
        opens_BT[..., :-1] &= ~is_bos_BT[..., 1:]
        opens_BT |= is_bos_BT
    opens_BT[..., 0] = True  # a row begins with its document 0
    # Documents are long: repeating each number over its document is faster than counting slot by slot.
    starts_N = opens_BT.reshape(-1).nonzero()[0]
    ends_N = np.empty_like(starts_N)
    ends_N[:-1], ends_N[-1:] = starts_N[1:], opens_BT.size
    length = opens_BT.shape[-1]
    first_B = starts_N.searchsorted(np.arange(0, opens_BT.size, length))
    ids_N = np.arange(len(starts_N), dtype=np.int32)
    ids_N -= first_B[starts_N // length]
    return ids_N.repeat(ends_N - starts_N).reshape(opens_BT.shape)


class DataPlan:
    """The order of all sequences of a run.

    `tokens_per_epoch` is the size of each source in tokens, a multiple of `block_tokens` (`epoch_tokens` of a plain
    stream). A source may be missing as long as no requested batch draws from it.
    """

    def __init__(self, schedule: Schedule, seed: int, tokens_per_epoch: Mapping[str, int], block_tokens: int):
        self.schedule, self.seed, self.block_tokens = schedule, seed, block_tokens
        self.sources = tuple(sorted(schedule.segments[0].cursors))
        self.tokens_per_epoch = dict(tokens_per_epoch)
        for name, num_tokens in tokens_per_epoch.items():
            if num_tokens % block_tokens:
                got = f"got an epoch of {num_tokens} tokens"
                raise ValueError(f"source {name}: {got}, expected whole blocks of {block_tokens}")
        self._num_blocks = {name: n // block_tokens for name, n in tokens_per_epoch.items()}
        self._keys = {name: stream_key(seed, name) for name in self.sources}
        for segment in schedule.segments:
            for name in segment.quotas.sources:
                if self._num_blocks.get(name, 1) < 1:
                    raise ValueError(f"source {name}: got no block of {block_tokens} tokens, expected at least one")

    def draws(self, first_step: int, num_steps: int = 1) -> list[Draws]:
        """The rows of `num_steps` batches from `first_step` on, at random access; far cheaper than step by step."""
        by_step: list[Draws] = []
        step, end = first_step, first_step + num_steps
        while step < end:
            segment = self.schedule.segment_at(step)
            until = min(end, segment.end) if step < segment.end else end
            begin = segment.position(step)
            positions = np.arange(begin, begin + (until - step) * segment.batch_size)
            columns = (column.reshape(until - step, -1) for column in self._draws(segment, positions))
            by_step += [Draws(*rows) for rows in zip(*columns, strict=True)]
            step = until
        return by_step

    def _draws(self, segment, positions) -> Draws:
        drawn, before = segment.quotas.locate(positions)
        names = segment.quotas.sources
        cursor = np.array([segment.cursors[n] for n in names])[drawn] + before * segment.seq_len
        num_blocks = np.array([self._num_blocks.get(n, 0) for n in names])[drawn]
        if not num_blocks.all():
            raise ValueError(f"the segment from step {segment.start} on draws from a source without tokens")
        block, within = np.divmod(cursor, self.block_tokens)
        epoch, index = np.divmod(block, num_blocks)
        keys = np.array([self._keys[n] for n in names], np.uint64)[drawn]
        offset = permute(index, num_blocks, keys, epoch) * self.block_tokens + within
        return Draws(np.array([self.sources.index(n) for n in names])[drawn], epoch, offset)

    def batch(
        self,
        step: int,
        streams: Mapping[str, Sequence[int] | RowStream],
        eot: int,
        grad_accum: int = 1,
        draws: Draws | None = None,
        *,
        mask_boundary_loss: bool = False,
        train_on_eos: bool = True,
        bos: int | None = None,
        rows: slice | None = None,
    ) -> Batch:
        """The batch of update `step`, from each source's stream: an array or memory map of tokens, or a RowStream.

        It has `grad_accum` micro-steps or, where they do not divide its rows, as many as divide both.

        `mask_boundary_loss` leaves the first token of each document, the target of an end-of-text, unscored. Without
        `train_on_eos`, targets that are end-of-text are not scored. A `bos` other than `eot` opens documents and is
        never scored, since nothing before it predicts it; `mask_boundary_loss` then also leaves the token after it
        unscored. `draws` are this step's rows, if they were computed already, many steps at a time.

        `rows` selects among the B rows of each micro-step: only those are read, and the batch is `[:, rows]` of the
        whole one. Raises IndexError for a step that the schedule does not have, and ValueError if a stream is missing.
        """
        if not 0 <= step < self.schedule.total_steps:
            raise IndexError(f"batch of step {step}: expected 0 to {self.schedule.total_steps - 1}")
        segment = self.schedule.segment_at(step)
        draws = self.draws(step)[0] if draws is None else draws
        num_micro = num_micro_steps(grad_accum, segment.batch_size)
        if rows is not None:
            draws = Draws(*(column.reshape(num_micro, -1)[:, rows].reshape(-1) for column in draws))
        by_source = [streams.get(name) for name in self.sources]
        if missing := [self.sources[i] for i in np.unique(draws.source) if by_source[i] is None]:
            raise ValueError(f"batch of step {step}: no stream of {', '.join(missing)}")
        read = _rows if any(hasattr(stream, "read") for stream in by_source) else _plain_rows
        inputs_BT, targets_BT, scored_BT, segment_ids_BT = read(by_source, draws, segment.seq_len, eot, bos)
        own_bos = bos not in (None, eot)
        if own_bos:
            scored_BT &= targets_BT != bos
        if mask_boundary_loss:
            scored_BT &= inputs_BT != eot
            if own_bos:
                scored_BT &= inputs_BT != bos
        if not train_on_eos:
            scored_BT &= targets_BT != eot
        shape = (num_micro, len(draws.source) // num_micro, segment.seq_len)
        return Batch(
            inputs_BT.reshape(shape),
            targets_BT.reshape(shape),
            scored_BT.reshape(shape),
            segment_ids_BT.reshape(shape),
            draws.source.astype(np.int32).reshape(shape[:2]),
        )


def _plain_rows(streams: Sequence, draws: Draws, length: int, eot: int, bos: int | None) -> Rows:
    """The rows of a batch whose streams are all arrays: at once, whatever their sources."""
    cuts = [_cut(stream) for stream in streams]
    spans = zip(draws.source.tolist(), draws.offset.tolist(), strict=True)
    return _consecutive([cuts[source](offset, offset + length + 1) for source, offset in spans], length, eot, bos)


def _rows(streams: Sequence, draws: Draws, length: int, eot: int, bos: int | None) -> Rows:
    shape = len(draws.source), length
    rows = Rows(*(np.empty(shape, dtype) for dtype in (np.int32, np.int32, bool, np.int32)))
    for source in np.unique(draws.source).tolist():
        stream = streams[source]
        stream = stream if hasattr(stream, "read") else TokenStream(stream, eot, bos=bos)
        of_source_R = np.flatnonzero(draws.source == source)
        for column, read_RT in zip(rows, stream.read(draws.offset[of_source_R], length), strict=True):
            column[of_source_R] = read_RT
    return rows


def _consecutive(tokens_R: Sequence[np.ndarray], length: int, eot: int, bos: int | None) -> Rows:
    """Rows of which all is scored, from the `length` tokens of each and the one after them, in the stream's type."""
    tokens_RT1 = (np.concatenate(tokens_R) if tokens_R else np.empty(0, np.int32)).reshape(-1, length + 1)
    segment_ids_RT = document_ids(tokens_RT1, eot, bos)[:, :-1]
    tokens_RT1 = tokens_RT1.astype(np.int32, casting="same_kind")
    return Rows(tokens_RT1[:, :-1], tokens_RT1[:, 1:], np.ones((len(tokens_RT1), length), bool), segment_ids_RT)


def _cut(stream: Sequence) -> Callable[[int, int], np.ndarray]:
    """The function that gives the items [start, stop) of a stream: its own `between`, or a slice of the array.

    A memory map is sliced through a plain array view, which is ten times as fast.
    """
    if isinstance(stream, np.memmap):
        stream = stream.view(np.ndarray)
    return getattr(stream, "between", None) or (lambda start, stop: stream[start:stop])
