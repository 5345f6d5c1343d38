"""The held-out split and the overlap with eval sets, worked by hand."""

import numpy as np
import pytest

from curriculum.data.split import Split, drop_overlap, overlapping, parse_share, split_documents


def hashes(values):
    """Hashes whose order is that of `values`, decided by the low half."""
    return np.array([[0, value] for value in values], np.uint64)


@pytest.mark.parametrize(
    ("value", "share"),
    [("1%", 0.01), (" 2.5 % ", 0.025), (0.1, 0.1), ("0.1", 0.1), (0, 0.0), ("0%", 0.0), (None, 0.0)],
)
def test_parse_share(value, share):
    assert parse_share(value) == pytest.approx(share, abs=1e-15)


@pytest.mark.parametrize("value", ["", "one", "100%", 1, -0.1, "-1%", float("nan"), True, False, "1%%", "1_0%", "1e0%"])
def test_parse_share_refuses(value):
    with pytest.raises(ValueError, match="expected a share such as"):
        parse_share(value)


def test_share_zero_keeps_everything():
    split = split_documents(np.array([5, 5]), hashes([1, 2]), 0.0, min_tokens=100)
    assert split.keep_N.tolist() == [True, True] and split.cut is None


def test_the_smallest_hashes_are_held_out_until_the_share_is_reached():
    # 200 documents of 10 tokens, hashes falling: the last documents have the smallest. 1.2 % of 2,000 is 24
    # tokens, so three documents.
    split = split_documents(np.full(200, 10), hashes(range(200, 0, -1)), 0.012)
    assert split.held_out.tolist() == [197, 198, 199] and split.cut is None


def test_the_high_half_of_a_hash_counts_before_the_low_half():
    hashes_N2 = hashes(range(100))
    hashes_N2[:, 0] = 5
    hashes_N2[40] = [4, 2**64 - 1]
    assert split_documents(np.full(100, 10), hashes_N2, 0.01).held_out.tolist() == [40]


def test_a_share_is_of_tokens_not_of_documents():
    tokens_N = np.full(100, 10)
    tokens_N[7] = 1000  # the smallest hash is the big one: alone more than half of the 1,990
    hashes_N = np.arange(1, 101)
    hashes_N[7] = 0
    assert split_documents(tokens_N, hashes(hashes_N), 0.5).held_out.tolist() == [7]


@pytest.mark.parametrize(("num_documents", "held"), [(299, 3), (300, 30), (5000, 50)])
def test_many_documents_give_at_least_thirty(num_documents, held):
    split = split_documents(np.full(num_documents, 10), hashes(range(num_documents)), 0.01)
    assert split.held_out.tolist() == list(range(held))


def test_copies_of_a_document_stay_on_one_side():
    # The 30th smallest hash has three copies.
    values = [*range(29), 29, 29, 29, *range(32, 300)]
    assert split_documents(np.full(300, 10), hashes(values), 0.01).held_out.tolist() == list(range(32))


def test_few_documents_give_the_tail():
    # 100 tokens; a tenth is the last ten: the last document (6) and the last 4 of the one before (24).
    split = split_documents(np.array([70, 24, 6]), hashes([3, 1, 2]), 0.1)
    assert split.keep_N.tolist() == [True, True, False] and split.cut == (1, 20)
    # The cut falls between two documents.
    split = split_documents(np.array([70, 20, 10]), hashes([3, 1, 2]), 0.1)
    assert split.keep_N.tolist() == [True, True, False] and split.cut is None
    # A share that is no whole number of tokens is rounded up: 10.4 to 11.
    assert split_documents(np.array([104]), hashes([1]), 0.1).cut == (0, 93)
    # One book.
    split = split_documents(np.array([1000]), hashes([1]), 0.01)
    assert split.keep_N.tolist() == [True] and split.cut == (0, 990)


def test_copies_of_what_the_tail_reaches_are_held_out_with_it():
    tokens_N = np.array([60, 6, 10, 18, 6])
    # The last ten of 100 tokens: the last document whole, and the last 4 of the one before, from token 14 on.
    alone = split_documents(tokens_N, hashes([1, 2, 3, 4, 5]), 0.1)
    assert alone.held_out.tolist() == [4] and alone.cut == (3, 14)
    # A copy of the last one.
    split = split_documents(tokens_N, hashes([1, 5, 3, 4, 5]), 0.1)
    assert split.held_out.tolist() == [1, 4] and split.cut == (3, 14)
    # Copies of the one that would be divided, in training and in the tail: its head would be one half of a copy.
    for values, held in (([1, 2, 4, 4, 5], [2, 3, 4]), ([1, 2, 3, 4, 4], [3, 4]), ([1, 5, 4, 4, 5], [1, 2, 3, 4])):
        split = split_documents(tokens_N, hashes(values), 0.1)
        assert split.held_out.tolist() == held and split.cut is None
    # Copies that the tail does not reach stay in training, and undivided documents are held out with theirs too.
    assert split_documents(tokens_N, hashes([1, 3, 3, 4, 5]), 0.1).held_out.tolist() == [4]
    assert split_documents(tokens_N, hashes([1, 4, 3, 4, 5]), 0.1, whole=True).held_out.tolist() == [1, 3, 4]


def test_a_tail_of_end_of_text_alone_is_not_held_out():
    # The cut would leave the second document its last token, the end-of-text: it stays whole.
    split = split_documents(np.array([80, 9, 11]), hashes([1, 2, 3]), 0.12)
    assert split.keep_N.tolist() == [True, True, False] and split.cut is None


def test_a_document_is_cut_where_a_character_starts():
    starts = {(0, 990): False, (0, 991): False, (0, 992): True}
    split = split_documents(
        np.array([1000]), hashes([1]), 0.01, starts_character=lambda document, token: starts[document, token]
    )
    assert split.cut == (0, 992)


def test_too_small_for_one_window_is_refused():
    tokens_N = np.array([1000])
    assert split_documents(tokens_N, hashes([1]), 0.064, min_tokens=64).cut == (0, 936)
    with pytest.raises(ValueError, match="gives 64 of 1,000 tokens, but one eval window needs 65"):
        split_documents(tokens_N, hashes([1]), 0.064, min_tokens=65)
    with pytest.raises(ValueError, match="gives 10 of 1,000 tokens, but one eval window needs 11"):
        split_documents(np.full(100, 10), hashes(range(100)), 0.01, min_tokens=11)
    # No share of it would do.
    with pytest.raises(ValueError, match="the source has only 11 tokens, and one eval window needs 11; give more text"):
        split_documents(np.array([11]), hashes([1]), 0.5, min_tokens=11)
    assert split_documents(np.array([12]), hashes([1]), 0.9, min_tokens=11).cut == (0, 1)


def test_nothing_left_for_training_is_refused():
    with pytest.raises(
        ValueError, match="training, as all 100 are copies of one; give different ones, or set held_out: 0 if no eval"
    ):
        split_documents(np.full(100, 10), hashes([7] * 100), 0.01)
    with pytest.raises(ValueError, match="leaves no document for training, as all 2 are copies of one"):
        split_documents(np.array([10, 10]), hashes([7, 7]), 0.1)
    with pytest.raises(ValueError, match="leaves no document for training; hold out less, or set held_out: 0 if no"):
        split_documents(np.array([10, 10]), hashes([7, 8]), 1.0)


def test_overlapping_needs_both_halves_of_the_hash():
    documents = np.array([[1, 1], [1, 2], [2, 1], [3, 3]], np.uint64)
    assert overlapping(documents, np.array([[1, 2], [9, 9], [3, 4]], np.uint64)).tolist() == [
        False, True, False, False,
    ]  # fmt: skip
    assert overlapping(documents, np.empty((0, 2), np.uint64)).tolist() == [False] * 4


def test_overlap_is_dropped_and_counted_by_set():
    split = Split(np.arange(300) != 0)
    sets = {"general": hashes([0, 5, 900]), "code": hashes([5, 6]), "law": hashes([1000])}
    kept, dropped = drop_overlap(split, hashes(range(300)), "web", sets)
    # Document 0 is held out already; 5 is dropped for the set named first, and counted for both.
    assert dropped == {"general": 1, "code": 2, "law": 0}
    assert np.flatnonzero(~kept.keep_N).tolist() == [0, 5, 6]
    assert split.keep_N.sum() == 299


def test_more_than_one_percent_of_overlap_is_refused():
    split = Split(np.ones(300, bool))
    _, dropped = drop_overlap(split, hashes(range(300)), "web", {"code": hashes([1, 2, 3])})
    assert dropped == {"code": 3}
    with pytest.raises(ValueError, match="^4 of 300 documents also occur in eval set 'code'"):
        drop_overlap(split, hashes(range(300)), "web", {"code": hashes([1, 2, 3, 4])})


def test_overlap_spread_over_sets_counts_together():
    split = Split(np.ones(300, bool))
    sets = {"code": hashes([1, 2]), "law": hashes([2, 3]), "far": hashes([1000])}
    assert drop_overlap(split, hashes(range(300)), "web", sets)[1] == {"code": 2, "law": 2, "far": 0}
    sets["law"] = hashes([2, 3, 4])
    expected = "^4 of 300 documents also occur in eval sets 'code', 'law', more than 1%"
    with pytest.raises(ValueError, match=expected):
        drop_overlap(split, hashes(range(300)), "web", sets)


@pytest.mark.parametrize("seed", range(20))
def test_the_held_out_documents_are_those_of_a_full_sort(seed):
    generator = np.random.default_rng(seed)
    num_documents = int(generator.integers(100, 900))
    # Few distinct halves, so that many are equal; a few long documents with the largest hashes.
    hashes_N2 = generator.integers(0, generator.choice([3, 20, 1000]), (num_documents, 2)).astype(np.uint64)
    hashes_N2 += np.uint64(2**64 - 1000)
    tokens_N = np.where(hashes_N2[:, 0] > 2**64 - 900, 1000, generator.integers(2, 9, num_documents))
    share = float(generator.choice([0.001, 0.05, 0.4]))
    rows = sorted((*map(int, hashes_N2[i]), i) for i in range(num_documents))
    held, held_tokens = [], 0
    for place, (high, low, i) in enumerate(rows):
        enough = held_tokens >= share * tokens_N.sum() and place >= (30 if num_documents >= 300 else 1)
        if enough and (high, low) != rows[place - 1][:2]:
            break
        held.append(i)
        held_tokens += int(tokens_N[i])
    assert len(held) > 0
    if len(held) == num_documents:
        with pytest.raises(ValueError, match="leaves no document for training"):
            split_documents(tokens_N, hashes_N2, share)
    else:
        assert split_documents(tokens_N, hashes_N2, share).held_out.tolist() == sorted(held)


def test_a_divided_document_that_is_dropped_is_cut_no_more():
    split = Split(np.arange(100) < 100, cut=(99, 3))
    kept, _ = drop_overlap(split, hashes(range(100)), "web", {"code": hashes([99])})
    assert kept.cut is None and not kept.keep_N[99]
    kept, _ = drop_overlap(split, hashes(range(100)), "web", {"code": hashes([98])})
    assert kept.cut == (99, 3)


@pytest.mark.parametrize("seed", range(30))
def test_overlapping_compares_whole_hashes(seed):
    """Of 100 copies of other hashes 64 differ in one bit each, wherever in a half it stands, and ten are twice there."""
    generator = np.random.default_rng(seed)
    documents, others = generator.integers(0, 2**64, (2, 300, 2), np.uint64)
    documents[:100] = others[100:200]
    documents[:64, seed % 2] ^= np.uint64(1) << np.arange(64, dtype=np.uint64)
    documents[200:210] = documents[90:100]
    known = {(int(high), int(low)) for high, low in others}
    expected = [(int(high), int(low)) in known for high, low in documents]
    assert overlapping(documents, others).tolist() == expected and sum(expected) == 46
    assert overlapping(documents[:0], others).tolist() == [] and not overlapping(documents, others[:0]).any()


def test_what_is_held_out_moves_as_a_source_grows():
    """Documents of 500 tokens whose hashes are the even numbers, and those that come have the odd ones or the largest."""

    def held_out(hashes_N, tokens_N, share):
        return set(hashes_N[split_documents(tokens_N, hashes(hashes_N), share).held_out].tolist())

    def grown(num_before, share, more_hashes, more_tokens=500):
        before_N = np.arange(0, 2 * num_before, 2)
        after_N = np.append(before_N, more_hashes)
        tokens_N = np.append(np.full(num_before, 500), np.full(len(more_hashes), more_tokens))
        before, after = held_out(before_N, tokens_N[:num_before], share), held_out(after_N, tokens_N, share)
        assert before and after
        return len(before), len(before - after), len(after & set(before_N.tolist()) - before)

    # (held out before, of these trained on now, of those trained on before held out now)
    assert grown(5000, 0.01, np.arange(1, 10000, 2)) == (50, 0, 0)  # 0, 2 .. 98, then 0 .. 99
    assert grown(300, 0.01, np.arange(1, 600, 2)) == (30, 15, 0)  # 0, 2 .. 58, then 0 .. 29
    # 5 % of 500,000 tokens are 50 documents; of 1,500,000, of which the long ones come last, 150.
    assert grown(1000, 0.05, np.arange(5000, 5010), 100_000) == (50, 0, 100)
