"""Cutting documents into windows: by hand, and counted over random documents."""

import numpy as np
import pytest

from evalsets.evalset import cut_windows

EOT = 0
# An end-of-text with bytes of its own, which no window may count.
TOKEN_BYTES_V = np.array([100, 1, 2, 3, 4, 5, 6, 7, 8, 9])


def cut(documents, seq_len=3, name="set", **more):
    return cut_windows(name, [np.array(d, np.int64) for d in documents], TOKEN_BYTES_V, EOT, seq_len, **more)


def pairs(*high):
    """Hashes of documents, as pairs whose second half is 0."""
    return np.array([(half, 0) for half in high], np.uint64)


def test_windows_by_hand():
    evalset = cut([[5, 6, 7, 8, 9], [1, 2, 3], [4]])
    assert evalset.tokens_NT1.tolist() == [[0, 5, 6, 7], [7, 8, 9, 0], [0, 1, 2, 3], [0, 4, 0, 0]]
    assert evalset.num_tokens_N.tolist() == [3, 2, 3, 1]
    assert evalset.num_bytes_N.tolist() == [18, 17, 6, 4]
    assert evalset.document_N.tolist() == [0, 0, 1, 2]
    assert (evalset.num_windows, evalset.num_documents, evalset.num_tokens, evalset.num_bytes) == (
        4,
        3,
        9,
        45,
    )
    assert (evalset.name, evalset.seq_len, evalset.tokens_NT1.dtype) == ("set", 3, np.int32)


def test_arrays_are_read_only():
    with pytest.raises(ValueError, match="read-only"):
        cut([[1, 2]]).tokens_NT1[0, 0] = 1


@pytest.mark.parametrize("seq_len", [1, 4, 7])
def test_every_token_is_scored_once_with_the_one_before_it(seq_len):
    rng = np.random.default_rng(seq_len)
    lengths = [1, seq_len, 2 * seq_len, 0, 5 * seq_len + 1, seq_len - 1, *rng.integers(0, 40, 60)]
    # Every token of every document has an id of its own, so that it can be counted.
    vocab_size = 1 + sum(lengths)
    documents = np.split(np.arange(1, vocab_size), np.cumsum(lengths)[:-1])
    evalset = cut_windows("set", iter(documents), np.arange(vocab_size), EOT, seq_len)

    before, document_of, bytes_of = {}, {}, {}
    for i, row in enumerate(evalset.tokens_NT1.tolist()):
        for t in range(evalset.num_tokens_N[i]):
            assert row[t + 1] not in before
            before[row[t + 1]], document_of[row[t + 1]] = row[t], evalset.document_N[i]
        d = evalset.document_N[i]
        bytes_of[d] = bytes_of.get(d, 0) + evalset.num_bytes_N[i]

    kept = [document for document in documents if len(document)]
    assert len(kept) < len(documents)
    assert sorted(before) == list(range(1, vocab_size))
    for d, document in enumerate(kept):
        tokens = document.tolist()
        assert [before[token] for token in tokens] == [EOT, *tokens[:-1]]
        assert {document_of[token] for token in tokens} == {d}
        assert bytes_of[d] == sum(tokens)
    assert evalset.num_windows == sum(-(-len(document) // seq_len) for document in kept)
    assert evalset.num_documents == len(kept) == len(bytes_of)


def test_bytes_are_the_documents_utf8_bytes():
    texts = ["naïve café", "", "数据", "x" * 5000]
    ids = [np.frombuffer(text.encode(), np.uint8) for text in texts]
    evalset = cut_windows("set", ids, np.array([1] * 256 + [0]), 256, 4)
    per_document = np.bincount(evalset.document_N, evalset.num_bytes_N).tolist()
    assert per_document == [12, 6, 5000]
    assert evalset.num_windows > 1024


def test_windows_of_answers_by_hand():
    scored = [[0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1], None, [], [0, 0]]
    documents = [[5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7], [4], [], [8, 8]]
    evalset = cut(documents, scored=[s if s is None else np.array(s, np.uint8) for s in scored])
    # The first two windows of the second document and all of the last one have nothing to measure.
    assert evalset.tokens_NT1.tolist() == [[0, 5, 6, 7], [7, 8, 9, 0], [6, 7, 0, 0], [0, 4, 0, 0]]
    assert evalset.scored_NT.tolist() == [
        [False, False, True],
        [True, False, False],
        [True, False, False],
        [True, False, False],
    ]
    assert evalset.num_tokens_N.tolist() == [1, 1, 1, 1]
    assert evalset.num_bytes_N.tolist() == [7, 8, 7, 4]
    assert evalset.document_N.tolist() == [0, 0, 1, 2]
    assert (evalset.num_windows, evalset.num_documents, evalset.num_tokens, evalset.num_bytes) == (4, 3, 4, 26)
    assert (evalset.scored_NT.dtype, evalset.num_tokens_N.dtype, evalset.scored_NT.flags.writeable) == (
        bool,
        np.int32,
        False,
    )


def test_copies_repeat_the_windows_of_the_first_of_them():
    evalset = cut([[5, 6, 7, 8], [1], [5, 6, 7, 8], [], [1, 1], [5, 6, 7, 8], [1]])
    assert evalset.document_N.tolist() == [0, 0, 1, 2, 2, 3, 4, 4, 5]
    assert evalset.origin_N.tolist() == [0, 0, 1, ~0, ~1, 3, ~0, ~1, ~2]
    assert (evalset.num_documents, evalset.num_distinct_documents) == (6, 3)
    assert evalset.origin_N.dtype == np.int64 and not evalset.origin_N.flags.writeable
    # Of conversations the answers make a copy too; windows without one are left out before.
    scored = [np.array(s, np.uint8) for s in ([0, 0, 0, 1], [0, 0, 0, 1], [1, 0, 0, 1])]
    evalset = cut([[5, 6, 7, 8]] * 3, scored=scored)
    assert evalset.origin_N.tolist() == [0, ~0, 2, 2]
    # Of a cut set, the chosen ones are numbered.
    evalset = cut([[1], [2], [2]], document_hashes=pairs(2, 1, 1), max_sequences=2)
    assert evalset.origin_N.tolist() == [0, ~0]


def test_a_document_has_the_hash_of_its_text_or_else_of_its_tokens():
    evalset = cut([[1], [], [5, 6, 7, 8], [2]], document_hashes=pairs(7, 4, 5, 6), max_sequences=3)
    assert evalset.text_D.tolist() == [5, 6]  # [1] is last in the order of hashes, and [] is no document of the set
    assert evalset.text_D.dtype == np.uint64 and not evalset.text_D.flags.writeable
    own, other, longer = cut([[1], [2]]).text_D, cut([[1], [3]]).text_D, cut([[2], [1, 1]]).text_D
    assert own[0] == other[0] and own[1] == longer[0] and len({*own, *other, *longer}) == 4


def test_the_mask_of_text_is_all_but_padding():
    evalset = cut([[5, 6, 7, 8], [1]])
    assert evalset.scored_NT.tolist() == [[True] * 3, [True, False, False], [True, False, False]]


def test_max_sequences_counts_the_windows_that_stay():
    # Of 4, 3 and 1 windows one each stays; the second in hash order has none and is passed over.
    documents, hashes = [[1] * 12, [2] * 9, [3] * 9, [4]], pairs(1, 2, 3, 4)
    scored = [np.eye(12)[5], np.zeros(9), np.eye(9)[0], np.ones(1)]
    evalset = cut(documents, scored=scored, max_sequences=2, document_hashes=hashes)
    assert evalset.tokens_NT1.tolist() == [[1, 1, 1, 1], [0, 3, 3, 3]]
    assert cut(documents, scored=scored, max_sequences=3, document_hashes=hashes).num_windows == 3


def test_content_hash_tells_which_tokens_are_scored():
    base = cut([[1, 2], [3, 4]])
    assert cut([[1, 2], [3, 4]], scored=[np.ones(2, bool), None]).content_hash == base.content_hash
    masks = [[[1, 0], [1, 1]], [[1, 1], [0, 1]], [[0, 1], [1, 1]]]
    hashes = {cut([[1, 2], [3, 4]], scored=[np.array(m) for m in mask]).content_hash for mask in masks}
    assert len(hashes) == 3 and base.content_hash not in hashes


def test_content_hash_is_of_tokens_seq_len_and_eot():
    documents = [[1, 2, 3, 4], [5, 6]]
    base = cut(documents).content_hash
    assert len(base) == 32
    assert cut(documents, name="other").content_hash == base
    assert cut([[1, 2, 3, 4], [], [5, 6]]).content_hash == base
    narrow = [np.array(d, np.uint8) for d in documents]
    assert cut_windows("set", narrow, TOKEN_BYTES_V, EOT, 3).content_hash == base
    others = [cut(documents, seq_len=4), cut([[1, 2, 3], [4, 5, 6]]), cut([[5, 6], [1, 2, 3, 4]])]
    others.append(cut_windows("set", narrow, TOKEN_BYTES_V, 9, 3))
    for d, document in enumerate(documents):
        for t in range(len(document)):
            changed = [list(tokens) for tokens in documents]
            changed[d][t] += 1
            others.append(cut(changed))
    hashes = {other.content_hash for other in others}
    assert len(hashes) == len(others) == 10 and base not in hashes


# Windows of 3: documents 0..4 have 2, 1, 3, 1 and 1 of them, and the hash order is 3, 0, 2, 4, 1.
FIVE = [[1] * 4, [2] * 3, [3] * 9, [4] * 2, [5] * 1]
PAIRS = np.array([[2, 9], [9, 0], [5, 7], [2, 8], [2**64 - 1, 0]], np.uint64)[[0, 4, 2, 3, 1]]


@pytest.mark.parametrize(
    ("max_sequences", "documents"),
    [(1, [3]), (2, [3]), (3, [0, 3]), (5, [0, 3]), (6, [0, 2, 3]), (7, [0, 2, 3, 4]), (8, [0, 1, 2, 3, 4])],
)
def test_max_sequences_takes_whole_documents_in_hash_order(max_sequences, documents):
    evalset = cut(FIVE, max_sequences=max_sequences, document_hashes=PAIRS)
    assert evalset.tokens_NT1.tolist() == cut([FIVE[d] for d in documents]).tokens_NT1.tolist()
    assert evalset.content_hash == cut([FIVE[d] for d in documents]).content_hash
    assert evalset.num_documents == len(documents)


def test_max_sequences_takes_the_first_document_however_long_and_skips_empty_ones():
    documents = [[], [1] * 30, [2]]
    evalset = cut(documents, max_sequences=2, document_hashes=pairs(1, 2, 3))
    assert evalset.num_windows == 10 and set(evalset.tokens_NT1[:, 1]) == {1}


def test_default_hash_order_is_of_content_alone():
    documents = [np.full(3, token, np.int64) for token in range(1, 10)]

    def kept(documents):
        evalset = cut_windows("set", documents, TOKEN_BYTES_V, EOT, 3, max_sequences=4)
        return evalset.tokens_NT1[:, 1].tolist()

    tokens = kept(documents)
    assert len(tokens) == 4 and tokens == sorted(tokens) and tokens != [1, 2, 3, 4]
    assert kept(documents[::-1]) == tokens[::-1]
    assert kept([document.astype(np.uint16) for document in documents]) == tokens


@pytest.mark.parametrize(
    ("documents", "more", "message"),
    [
        ([], {}, "eval set 'set': no tokens to score in 0 documents"),
        ([[], []], {}, "no tokens to score in 2 documents"),
        ([[1], [2, 3, 10]], {}, "document 1, token 2: id 10, expected 0 to 9"),
        ([[1], [], [-1, 2]], {}, "document 2, token 0: id -1, expected 0 to 9"),
        ([[1]], {"seq_len": 0}, "seq_len is 0, expected at least 1"),
        ([[1]], {"max_sequences": 0}, "max_sequences is 0, expected at least 1"),
        ([[1], [2]], {"document_hashes": pairs(1)}, r"document hashes \[1, 2\], expected \[2, 2\]"),
        ([[1], [2]], {"document_hashes": [b"a", b"b"]}, r"document hashes \[2\], expected \[2, 2\]"),
        ([[[1]]], {}, r"document 0 is int64\[1, 1\], expected 1-D integers"),
        ([[1], [2]], {"scored": [None]}, "scored is given for 1 documents, expected 2"),
        ([[1], [2, 3]], {"scored": [None, np.ones(3)]}, r"document 1: scored is \[3\], expected \[2\]"),
        ([[1], []], {"scored": [np.zeros(1), None]}, "no tokens to score in 2 documents"),
        ([[1]], {"name": "a b"}, r"eval set name 'a b': expected letters \(a-z, A-Z\), digits"),
        ([[1]], {"name": ""}, "eval set name ''"),
        ([[1]], {"name": "a\n"}, "eval set name"),
    ],
)
def test_errors(documents, more, message):
    with pytest.raises(ValueError, match=message):
        cut(documents, **more)


def test_errors_of_types_and_eot():
    with pytest.raises(ValueError, match=r"document 0 is float64\[1\], expected 1-D integers"):
        cut_windows("set", [np.array([1.0])], TOKEN_BYTES_V, EOT, 3)
    with pytest.raises(ValueError, match="the id that opens documents is 10, expected 0 to 9"):
        cut_windows("set", [np.array([1])], TOKEN_BYTES_V, 10, 3)


def test_windows_share_the_bytes_of_a_document_whose_tokens_have_others():
    # TOKEN_BYTES_V gives these windows of 2 tokens 3, 7 and 5 bytes, and the second document 2 and 3.
    bytes_V = np.array([1, 2, 3, 4, 5, 0])
    documents = [np.array([0, 1, 2, 3, 4]), np.array([0, 0, 2]), np.array([], np.int64)]
    plain = cut_windows("set", documents, bytes_V, 5, 2)
    assert plain.num_bytes_N.tolist() == [3, 7, 5, 2, 3]
    shared = cut_windows("set", documents, bytes_V, 5, 2, document_bytes=[19, 5, 0])
    # 19 * 3 // 15 = 3, 19 * 10 // 15 = 12, all 19: differences 3, 9 and 7; the second document has its own 5.
    assert shared.num_bytes_N.tolist() == [3, 9, 7, 2, 3]
    fewer = cut_windows("set", documents, bytes_V, 5, 2, document_bytes=[1, 5, 0])
    assert fewer.num_bytes_N.tolist() == [0, 0, 1, 2, 3]
    behind = cut_windows("set", documents[::-1], bytes_V, 5, 2, document_bytes=[0, 5, 19])
    assert behind.num_bytes_N.tolist() == [2, 3, 3, 9, 7]
    answers = [np.array([False, False, True, True, True]), None, None]
    part = cut_windows("set", documents, bytes_V, 5, 2, scored=answers, document_bytes=[13, 5, 0])
    assert part.num_bytes_N.tolist() == [7, 6, 2, 3]  # 13 * 7 // 12 = 7, all 13
    silent = cut_windows("set", [np.array([5, 5, 5])], bytes_V, 5, 2, document_bytes=[4])
    assert silent.num_bytes_N.tolist() == [0, 4]
    with pytest.raises(ValueError, match="2 document_bytes, expected 3, one per document"):
        cut_windows("set", documents, bytes_V, 5, 2, document_bytes=[1, 2])
