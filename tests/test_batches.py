"""The data plan, by drawing from sources whose tokens name themselves and counting everything."""

import hashlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from phases.batches import Batch, DataPlan, TokenStream, document_ids, epoch_tokens
from phases.declared import Curriculum
from phases.lr import LrSchedule
from phases.resolve import resolve
from phases.schedule import Phase, Schedule, SourceSupply

LENGTH = 8
EOT = 0


def stream(number, num_blocks):
    """Tokens number * 10,000 + 0, 1, 2 ...: each tells its source and its place."""
    return number * 10_000 + np.arange(num_blocks * LENGTH + 1)


TOKENS = {"web": stream(1, 300), "code": stream(2, 40), "law": stream(3, 7), "one": stream(4, 1)}
PHASES = (
    Phase("a", 13, {"web": 0.7, "code": 0.3}),
    Phase("b", 37, {"web": 0.3, "law": 0.6, "one": 0.1}, ramp_steps=11),
    Phase("c", "end", {"code": 0.5, "law": 0.5}, ramp_steps=5, ramp_shape="cosine"),
)


def epochs_of(tokens):
    return {name: epoch_tokens(len(t), LENGTH) for name, t in tokens.items()}


def make_plan(phases=PHASES, tokens=TOKENS, total=90, batch=6, seed=5):
    supplies = {name: SourceSupply(size) for name, size in epochs_of(tokens).items()}
    schedule = resolve(Curriculum(phases, supplies, LrSchedule(), total_steps=total, batch_size=batch, seq_len=LENGTH))
    return DataPlan(schedule, seed, epochs_of(tokens), LENGTH)


def rows(plan, first=0, steps=90, tokens=TOKENS):
    """All rows of some steps as (source name, first token)."""
    out = []
    for step in range(first, first + steps):
        batch = plan.batch(step, tokens, EOT)
        names = [plan.sources[i] for i in batch.source_ids_AB.ravel()]
        out += list(zip(names, batch.inputs_ABT[..., 0].ravel().tolist(), strict=True))
    return out


def test_a_row_is_a_block_and_its_targets_are_the_next_tokens():
    plan = make_plan()
    for step in (0, 12, 13, 40, 89):
        batch = plan.batch(step, TOKENS, EOT)
        assert batch.inputs_ABT.shape == (1, 6, LENGTH) and batch.inputs_ABT.dtype == np.int32
        assert np.array_equal(batch.targets_ABT, batch.inputs_ABT + 1)
        assert np.array_equal(np.diff(batch.inputs_ABT, axis=2), np.ones((1, 6, LENGTH - 1)))
        for name, first in rows(plan, step, 1):
            assert first - TOKENS[name][0] in range(0, len(TOKENS[name]) - 1, LENGTH)


def test_each_epoch_reads_every_sequence_exactly_once():
    drawn: dict[str, list[int]] = {}
    for name, first in rows(make_plan()):
        drawn.setdefault(name, []).append(first)
    assert set(drawn) == set(TOKENS)
    for name, firsts in drawn.items():
        blocks = (len(TOKENS[name]) - 1) // LENGTH
        for epoch in range(0, len(firsts), blocks):
            part = firsts[epoch : epoch + blocks]
            assert len(set(part)) == len(part)
        full = firsts[: len(firsts) // blocks * blocks]
        assert all(count == len(full) // blocks for count in Counter(full).values())
    assert len(drawn["law"]) > 3 * 7  # several epochs, across segments
    assert len(drawn["one"]) > 3


def test_the_order_never_changes():
    """Hashes taken of an earlier version: a run resumed with a later one reads the same data."""

    def digest(arrays):
        return hashlib.sha256(b"".join(np.ascontiguousarray(a, "<i8").tobytes() for a in arrays)).hexdigest()[:32]

    plan = make_plan()
    assert digest(a for d in plan.draws(0, 90) for a in d) == "3e16694ca0cba58cc9b6c5e7aa88fa4b"
    batches = [plan.batch(step, TOKENS, 10_003, 2, mask_boundary_loss=True) for step in range(90)]
    assert digest(a for batch in batches for a in batch) == "7c183e30cd08668545c6790a144736bc"
    sizes = {"web": 700_001, "code": 300_000, "law": 1 << 16, "one": 1}
    large = make_plan(
        (
            Phase("a", 4000, {"web": 3, "code": 2, "law": 1}),
            Phase("b", "end", {"law": 1, "one": 1, "web": 2}, ramp_steps=500),
        ),
        {n: range(b * LENGTH + 1) for n, b in sizes.items()},
        9000,
        64,
    )
    assert digest(a for d in large.draws(3500, 1500) for a in d) == "134efb6cd3e83a3092f22323d830d37f"
    assert digest(a for step in range(0, 9000, 450) for a in large.draws(step)[0]) == "f67eb3e42a257b49f917a55ed734309f"


def test_epochs_have_orders_of_their_own():
    plan = make_plan((Phase("a", "end", {"code": 1.0}),), total=40)
    firsts = [first for _, first in rows(plan, steps=40)]
    assert firsts[:40] != firsts[40:80] and sorted(firsts[:40]) == sorted(firsts[40:80])


def test_counted_shares_are_within_two_sequences_at_every_prefix_of_a_segment():
    plan = make_plan()
    drawn = rows(plan)
    for segment in plan.schedule.segments:
        count, exact = Counter(), Counter()
        for position in range(segment.start * 6, segment.end * 6):
            for name, share in segment.mixture_at(position // 6).items():
                exact[name] += share
            count[drawn[position][0]] += 1
            assert all(abs(count[name] - exact[name]) < 2 for name in exact)


def test_any_step_alone_equals_the_sequence():
    plan = make_plan()
    together = plan.draws(0, 90)
    for step in (89, 0, 37, 12, 13, 50):
        alone = plan.draws(step)[0]
        assert all(np.array_equal(a, b) for a, b in zip(alone, together[step], strict=True))


@pytest.mark.parametrize("grad_accum", [2, 3, 6])
def test_grad_accum_changes_no_data(grad_accum):
    plan = make_plan()
    whole, split = plan.batch(20, TOKENS, EOT, 1), plan.batch(20, TOKENS, EOT, grad_accum)
    assert split.inputs_ABT.shape == (grad_accum, 6 // grad_accum, LENGTH)
    for a, b in zip(whole, split, strict=True):
        assert np.array_equal(a.reshape(-1), b.reshape(-1))


@pytest.mark.parametrize("wanted", [slice(0, 1), slice(1, 3), slice(2, 3), slice(0, 3), slice(3, 3)])
@pytest.mark.parametrize("packed", [False, True])
def test_some_rows_are_those_of_the_whole_batch(wanted, packed):
    plan, options = make_plan(), {"mask_boundary_loss": True, "grad_accum": 2}
    streams = {n: TokenStream(t, 10_003) for n, t in TOKENS.items()} if packed else TOKENS
    for step in (0, 30):
        whole = plan.batch(step, streams, 10_003, **options)
        part = plan.batch(step, streams, 10_003, **options, rows=wanted)
        for a, b in zip(whole, part, strict=True):
            assert np.array_equal(a[:, wanted], b) and a.dtype == b.dtype
        assert part.inputs_ABT.shape == (2, wanted.stop - wanted.start, LENGTH)


def test_rows_that_are_not_wanted_are_not_read():
    class Counting(TokenStream):
        def read(self, offsets_R, length):
            offsets.extend(offsets_R)
            return super().read(offsets_R, length)

    plan, offsets = make_plan(), []
    streams = {n: Counting(t, EOT) for n, t in TOKENS.items()}
    part = plan.batch(20, streams, EOT, 2, rows=slice(1, 2))
    assert len(offsets) == 2 and len(part.inputs_ABT[0]) == 1


@pytest.mark.parametrize("lengths", [(8, 2, 4, 8), (4, 8, 1, 2), (2, 2, 8, 4)])
def test_segments_of_other_lengths_cut_the_blocks_evenly(lengths):
    """One source over four segments, each begun at a whole row: row by row what the epochs hold, worked out by hand."""
    plan = make_plan((Phase("a", "end", {"code": 1.0}),), total=400, batch=4)
    order = [
        int(o)
        for d in make_plan((Phase("a", "end", {"code": 1.0}),), total=400, batch=4).draws(0, 400)
        for o in d.offset
    ]
    slots = [block + slot for block in order for slot in range(LENGTH)]  # in the order in which the source is read
    segment, segments, cursor, expected = plan.schedule.segments[0], [], 0, []
    for k, length in enumerate(lengths):
        cursor = -(-cursor // length) * length
        segments.append(
            replace(segment, start=7 * k, end=7 * k + 7, seq_len=length, cursors={**segment.cursors, "code": cursor})
        )
        for _ in range(7 * 4):
            expected.append([TOKENS["code"][slot] for slot in slots[cursor : cursor + length]])
            cursor += length
    shaped = DataPlan(Schedule(tuple(segments)), 5, epochs_of(TOKENS), LENGTH)
    got = [row for step in range(28) for row in shaped.batch(step, TOKENS, EOT).inputs_ABT[0].tolist()]
    assert got == expected and len(got) == 112
    planned = shaped.draws(0, 28)
    again = [
        row
        for step in range(28)
        for row in shaped.batch(step, TOKENS, EOT, draws=planned[step]).targets_ABT[0].tolist()
    ]
    assert again == [[token + 1 for token in row] for row in expected]


def test_adding_or_reordering_sources_changes_no_row():
    more = {"aaa": stream(5, 9), **dict(reversed(TOKENS.items())), "zzz": stream(6, 9)}
    phases = tuple(
        Phase(p.name, p.until, dict(reversed(p.mixture.items())), p.ramp_steps, p.ramp_shape) for p in PHASES
    )
    expected = rows(make_plan())
    assert rows(make_plan(phases, more), tokens=more) == expected and len(expected) == 540


def test_a_later_phase_changes_nothing_before_it():
    other = (*PHASES[:2], Phase("c", "end", {"web": 1.0}))
    assert rows(make_plan(other), steps=37) == rows(make_plan(), steps=37)
    assert rows(make_plan(other), 37, 20) != rows(make_plan(), 37, 20)


def test_another_source_s_share_changes_only_when_not_what_is_read_of_a_source():
    """The stream of a source is keyed by its name: its k-th sequence is the same whatever else is drawn."""

    def sequences(plan, name):
        return [first for n, first in rows(plan) if n == name]

    a = sequences(make_plan((Phase("a", "end", {"web": 0.5, "code": 0.5}),)), "web")
    b = sequences(make_plan((Phase("a", "end", {"web": 0.3, "law": 0.7}),)), "web")
    assert len(b) > 100 and a[: len(b)] == b


def test_a_longer_run_keeps_the_rows_it_had():
    phases = (PHASES[0], PHASES[1], PHASES[2])
    assert rows(make_plan(phases, total=300), steps=90) == rows(make_plan(phases, total=90))


def test_seeds_give_other_orders():
    assert rows(make_plan(seed=5)) != rows(make_plan(seed=6))


def test_skipped_sequences_are_passed_over():
    plan = make_plan((Phase("a", "end", {"web": 1.0}),), total=10)
    segment = replace(plan.schedule.segments[0], first_sequence=6)
    later = DataPlan(Schedule((segment,)), 5, epochs_of(TOKENS), LENGTH)
    assert rows(later, 0, 9) == rows(plan, 1, 9)


def one_batch(*rows, length=LENGTH, eot=EOT, scored=None, **options):
    """The batch of one step over sources of one row each, in the order of the rows."""
    streams = {f"s{i}": np.array(row) for i, row in enumerate(rows)}
    phases = (Phase("a", "end", dict.fromkeys(streams, 1.0)),)
    plan = make_plan(phases, streams, total=1, batch=len(rows))
    if scored is not None:
        streams = {name: TokenStream(row, eot, scored.get(name), options.get("bos")) for name, row in streams.items()}
    batch = plan.batch(0, streams, eot, **options)
    order = np.argsort(batch.source_ids_AB[0])
    return Batch(*(array[0][order] for array in batch))


ROWS = ([7, 7, EOT, 8, 8, 8, EOT, 9, 9], [EOT, 7, EOT, EOT, 8, 8, 8, 8, EOT])


@pytest.mark.parametrize("scored", [None, {}], ids=["array", "stream"])
def test_end_of_text_as_an_input_opens_the_next_document(scored):
    batch = one_batch(*ROWS, scored=scored)
    assert batch.inputs_ABT.tolist() == [row[:-1] for row in ROWS]
    assert batch.targets_ABT.tolist() == [row[1:] for row in ROWS]
    assert batch.segment_ids_ABT.tolist() == [[0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 1, 2, 2, 2, 2, 2]]
    assert batch.loss_mask_ABT.all() and batch.loss_mask_ABT.shape == (2, LENGTH)
    dtypes = [array.dtype for array in batch]
    assert dtypes == [np.int32, np.int32, bool, np.int32, np.int32]


@pytest.mark.parametrize("length", [1, 7, 8, 256, 264, 1024])
@pytest.mark.parametrize("share", [0, 0.002, 0.1, 0.9, 1])
def test_documents_are_counted_slot_by_slot(length, share):
    inputs = np.where(np.random.default_rng(length).random((2, 3, length)) < share, EOT, 7).astype(np.int32)
    ids = document_ids(inputs, EOT)
    for row, found in zip(inputs.reshape(-1, length).tolist(), ids.reshape(-1, length).tolist(), strict=True):
        document, expected = 0, []
        for slot, token in enumerate(row):
            document += slot > 0 and token == EOT
            expected.append(document)
        assert found == expected
    assert ids.dtype == np.int32 and ids.shape == inputs.shape


@pytest.mark.parametrize("scored", [None, {}], ids=["array", "stream"])
def test_which_targets_are_scored(scored):
    def unscored(**options):
        return [np.flatnonzero(~row).tolist() for row in one_batch(*ROWS, scored=scored, **options).loss_mask_ABT]

    assert unscored() == [[], []]
    assert unscored(mask_boundary_loss=True) == [[2, 6], [0, 2, 3]]
    assert unscored(train_on_eos=False) == [[1, 5], [1, 2, 7]]
    assert unscored(mask_boundary_loss=True, train_on_eos=False) == [[1, 2, 5, 6], [0, 1, 2, 3, 7]]


@pytest.mark.parametrize("scored", [None, {}], ids=["array", "stream"])
def test_a_bos_of_its_own_opens_the_document_that_follows_end_of_text(scored):
    bos = 5
    rows = ([7, 7, EOT, bos, 8, 8, EOT, 9, 9], [bos, 7, EOT, bos, 8, EOT, bos, 9, EOT], [7, 7, 7, 7, 7, 7, 7, EOT, bos])

    def batch(**options):
        return one_batch(*rows, scored=scored, bos=bos, **options)

    assert batch().inputs_ABT.tolist() == [row[:-1] for row in rows]
    assert batch().targets_ABT.tolist() == [row[1:] for row in rows]
    # End-of-text closes a document where bos opens the next, and opens one that has none (the 9 of the first row).
    ids = [[0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1, 2, 2], [0] * 8]
    assert batch().segment_ids_ABT.tolist() == ids

    def unscored(**options):
        return [np.flatnonzero(~row).tolist() for row in batch(**options).loss_mask_ABT]

    assert unscored() == [[2], [2, 5], [7]]
    assert unscored(mask_boundary_loss=True) == [[2, 3, 6], [0, 2, 3, 5, 6], [7]]
    assert unscored(train_on_eos=False) == [[1, 2, 5], [1, 2, 4, 5, 7], [6, 7]]
    same, without = (one_batch(*ROWS, scored=scored, **options) for options in ({"bos": EOT}, {}))
    for found, expected in zip(same, without, strict=True):
        assert np.array_equal(found, expected)


def test_tokens_that_are_not_scored_are_unscored_as_targets():
    tokens = [5, 6, 7, 8, EOT, 4, 3, 2, 1]
    scored = np.array([1, 0, 1, 1, 1, 0, 0, 1, 0], np.uint8)
    batch = one_batch(tokens, ROWS[0], scored={"s0": scored}, train_on_eos=False)
    # Targets 6 7 8 EOT 4 3 2 1: 6, 4, 3 and 1 by `scored`, and end-of-text.
    assert batch.loss_mask_ABT[0].tolist() == [False, True, True, False, False, False, True, False]
    assert np.flatnonzero(~batch.loss_mask_ABT[1]).tolist() == [1, 5]


@pytest.mark.parametrize("bos", [None, 2])
def test_an_array_beside_a_stream_that_reads_rows(bos):
    eot, tokens = 1, {name: ids % 5 for name, ids in TOKENS.items()}
    streams = tokens | {"code": TokenStream(tokens["code"], eot, bos=bos)}
    plan = make_plan()
    for step in (0, 25, 89):
        batches = (plan.batch(step, some, eot, 2, bos=bos) for some in (streams, tokens))
        for mixed, plain in zip(*batches, strict=True):
            assert np.array_equal(mixed, plain) and mixed.dtype == plain.dtype and plain.any()


def test_an_epoch_that_is_no_whole_number_of_blocks_is_refused():
    schedule = make_plan().schedule
    with pytest.raises(ValueError, match="source web: got an epoch of 2401 tokens, expected whole blocks of 8"):
        DataPlan(schedule, 5, {name: len(t) for name, t in TOKENS.items()}, LENGTH)


def test_a_source_too_small_for_one_sequence_is_refused():
    with pytest.raises(ValueError, match="source one: got no block of 8 tokens, expected at least one"):
        make_plan(tokens={**TOKENS, "one": np.arange(8)})


def test_a_million_draws_of_fifty_sources_over_phases_and_ramps():
    rng = np.random.default_rng(0)
    names = [f"s{i:02d}" for i in range(50)]
    sizes = {name: int(rng.integers(1, 400)) for name in names}
    sizes["s00"] = 1
    phases = []
    for k, until in enumerate([311, 707, 1500, "end"]):
        mixture = {n: float(w) for n, w in zip(names, rng.exponential(size=50) ** 2, strict=True)}
        mixture["s01"] = 1e-6 * sum(mixture.values())
        phases.append(Phase(f"p{k}", until, mixture, ramp_steps=0 if k == 0 else 97))
    supplies = {n: SourceSupply(b * LENGTH) for n, b in sizes.items()}
    schedule = resolve(Curriculum(phases, supplies, LrSchedule(), total_steps=2000, batch_size=512, seq_len=LENGTH))
    plan = DataPlan(schedule, 3, {n: b * LENGTH for n, b in sizes.items()}, LENGTH)
    draws = plan.draws(0, 2000)
    source = np.concatenate([d.source for d in draws])
    epoch = np.concatenate([d.epoch for d in draws])
    offset = np.concatenate([d.offset for d in draws])
    assert len(source) == 1_024_000
    for i, name in enumerate(plan.sources):
        mine = source == i
        assert mine.sum() * LENGTH == schedule.cursors_at(2000)[name]
        seen = np.unique(epoch[mine] * 10**6 + offset[mine])
        assert len(seen) == mine.sum()  # nothing twice within an epoch
        by_epoch = np.bincount(epoch[mine])
        assert (by_epoch[:-1] == sizes[name]).all()  # and every epoch before the last one whole
    for segment in schedule.segments:
        drawn = source[segment.start * 512 : segment.end * 512]
        steps = [segment.mixture_at(step) for step in range(segment.start, segment.end)]
        for i, name in enumerate(plan.sources):
            exact = np.cumsum(np.repeat([mixture.get(name, 0.0) for mixture in steps], 512))
            assert np.abs(np.cumsum(drawn == i) - exact).max() < 2


def test_there_is_no_batch_before_the_first_step_or_after_the_last():
    plan = make_plan(batch=4)
    last = plan.schedule.total_steps - 1
    assert plan.batch(last, TOKENS, EOT).inputs_ABT.shape == (1, 4, LENGTH)
    for step in (-1, last + 1):
        with pytest.raises(IndexError, match=f"batch of step {step}: expected 0 to {last}"):
            plan.batch(step, TOKENS, EOT)


def test_a_stream_that_is_missing_is_named():
    plan = make_plan(batch=4)
    read = [plan.sources[i] for i in plan.draws(0)[0].source]
    with pytest.raises(ValueError, match=f"batch of step 0: no stream of {read[0]}"):
        plan.batch(0, {name: tokens for name, tokens in TOKENS.items() if name != read[0]}, EOT)


def test_a_batch_that_the_micro_steps_do_not_divide_is_cut_into_fewer():
    """A run that goes on with 6 rows in 3 micro-steps may train steps of 4 rows again, after a rollback or in a branch."""
    plan = make_plan(batch=4)
    for grad_accum, shape in ((1, (1, 4)), (2, (2, 2)), (3, (1, 4)), (6, (2, 2))):
        assert plan.batch(20, TOKENS, EOT, grad_accum).inputs_ABT.shape == (*shape, LENGTH)
