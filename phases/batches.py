"""Which sequence every row of every batch is, at random access, and the batch itself.

A source is read in blocks of the longest sequence of the run, in a fresh permutation each epoch. Block b holds
the tokens [b * block_tokens, (b + 1) * block_tokens] with the last one shared with the next block: it is the
target of the block's last position. Everything here is a pure function of (segments, seed, store sizes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from phases.schedule import Schedule
from phases.shuffle import permute, stream_key


class Batch(NamedTuple):
    """One update's sequences: A micro-steps of B rows of T tokens."""

    inputs_ABT: np.ndarray  # int32
    targets_ABT: np.ndarray  # int32, the token after each input
    loss_mask_ABT: np.ndarray  # bool, True where the target is scored
    segment_ids_ABT: np.ndarray  # int32, document of each input within its row, counted from 0
    source_ids_AB: np.ndarray  # int32, index into the data plan's `sources`


class Draws(NamedTuple):
    """Rows in order: the source (index into `sources`), its epoch, and the first token's offset in the source."""

    source: np.ndarray
    epoch: np.ndarray
    offset: np.ndarray


def epoch_tokens(num_tokens: int, block_tokens: int) -> int:
    """Tokens of one epoch of a stream: whole blocks, whose last target must exist. 0 if not even one fits."""
    return max(num_tokens - 1, 0) // block_tokens * block_tokens


class DataPlan:
    """The order of all sequences of a run.

    `num_tokens` gives each source's stream length. Sources that are never drawn may be absent.
    """

    def __init__(self, schedule: Schedule, seed: int, num_tokens: Mapping[str, int], block_tokens: int):
        self.schedule, self.block_tokens = schedule, block_tokens
        self.sources = tuple(sorted(schedule.segments[0].cursors))
        self._num_blocks = {name: epoch_tokens(n, block_tokens) // block_tokens for name, n in num_tokens.items()}
        self.tokens_per_epoch = {name: n * block_tokens for name, n in self._num_blocks.items()}
        self._keys = {name: stream_key(seed, name) for name in self.sources}
        for segment in schedule.segments:
            for name in segment.quotas.sources:
                if self._num_blocks.get(name, 0) < 1:
                    got = f"got {num_tokens.get(name, 0)} tokens"
                    raise ValueError(f"source {name}: {got}, expected at least one block of {block_tokens} + 1")

    def draws(self, first_step: int, num_steps: int = 1) -> list[Draws]:
        """The rows of each of `num_steps` batches from `first_step` on; any step, no state.

        Many steps at a time cost a fraction of one by one.
        """
        by_step: list[Draws] = []
        step, end = first_step, first_step + num_steps
        while step < end:
            segment = self.schedule.segment_at(step)
            until = min(end, segment.end) if step < segment.end else end
            begin = segment.skipped + (step - segment.start) * segment.batch_size
            positions = np.arange(begin, begin + (until - step) * segment.batch_size)
            columns = (column.reshape(until - step, -1) for column in self._draws(segment, positions))
            by_step += [Draws(*rows) for rows in zip(*columns, strict=True)]
            step = until
        return by_step

    def _draws(self, segment, positions) -> Draws:
        drawn, before = segment.quotas.locate(positions)
        names = segment.quotas.sources
        cursor = np.array([segment.cursors[n] for n in names])[drawn] + before * segment.seq_len
        num_blocks = np.array([self._num_blocks[n] for n in names])[drawn]
        block, within = np.divmod(cursor, self.block_tokens)
        epoch, index = np.divmod(block, num_blocks)
        keys = np.array([self._keys[n] for n in names], np.uint64)[drawn]
        offset = permute(index, num_blocks, keys, epoch) * self.block_tokens + within
        return Draws(np.array([self.sources.index(n) for n in names])[drawn], epoch, offset)

    def batch(
        self,
        step: int,
        tokens: Mapping[str, Sequence[int]],
        eot: int,
        grad_accum: int = 1,
        draws: Draws | None = None,
        scored: Mapping[str, Sequence[int]] | None = None,
    ) -> Batch:
        """The batch of update `step`, from `tokens`: for each source an array (or memory map) of its stream.

        `scored`: for the sources of which only some tokens are targets of the loss, an array parallel to the
        stream that says which. `draws` may hand in this step's rows where they were worked out many steps at a time.
        """
        segment = self.schedule.segment_at(step)
        draws = self.draws(step)[0] if draws is None else draws
        length = segment.seq_len
        rows_BT1 = np.empty((segment.batch_size, length + 1), np.int32)
        streams = [tokens.get(name) for name in self.sources]
        for row, (source, offset) in enumerate(zip(draws.source.tolist(), draws.offset.tolist(), strict=True)):
            rows_BT1[row] = streams[source][offset : offset + length + 1]
        scored_BT = np.ones((segment.batch_size, length), bool)
        for row, (source, offset) in enumerate(zip(draws.source.tolist(), draws.offset.tolist(), strict=True)):
            if (marks := (scored or {}).get(self.sources[source])) is not None:
                scored_BT[row] = marks[offset + 1 : offset + length + 1]
        shape = (grad_accum, segment.batch_size // grad_accum, length)
        inputs = rows_BT1[:, :-1]
        ended = np.cumsum(inputs == eot, axis=1, dtype=np.int32)
        documents = np.concatenate([np.zeros((len(ended), 1), np.int32), ended[:, :-1]], axis=1)
        return Batch(
            inputs.reshape(shape),
            rows_BT1[:, 1:].reshape(shape),
            scored_BT.reshape(shape),
            documents.reshape(shape),
            draws.source.astype(np.int32).reshape(shape[:2]),
        )
