"""Token stores and views: what was written is what is read, and what does not fit is refused."""

import json
import os
import re
from pathlib import Path

import numpy as np
import processor
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from curriculum.data.held_out import eval_documents, split_store
from curriculum.data.split import Split
from curriculum.data.store import TokenView, open_store
from curriculum.data.store_writer import StoreWriter
from curriculum.data.tokenizers.tokenizer import byte_tokenizer
from curriculum.errors import InputError

EOT = 256
TEXTS = ["ab", "cdefg", "é汉", "h", "ijklmnop", "qr"]
NOTHING_KEPT = Split(np.zeros(len(TEXTS), bool))


def write_store(directory, texts=TEXTS, shard_tokens=7):
    directory.mkdir()
    writer = StoreWriter(directory, "u16", shard_tokens)
    for text in texts:
        tokens = [*text.encode(), EOT]
        writer.add_tokens(np.array(tokens))
        writer.add_text(text.encode())
        writer.end_document(len(tokens))
    writer.finish("test", byte_tokenizer())
    return open_store(directory)


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "store")


def resident_kb(path):
    """What of a file this process has in its memory."""
    mappings = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    assert mappings
    return sum(int(re.search(r"^Rss:\s+(\d+) kB", mapping, re.M)[1]) for mapping in mappings)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="only Linux tells what of a file is resident")
def test_eval_documents_leave_no_pages_of_the_store_behind(tmp_path):
    """1,200 documents of 1,000 tokens, every second one held out: what is read of 2.4 MB is given back."""
    texts = [chr(97 + i % 26) * 999 for i in range(1200)]
    store = write_store(tmp_path / "store", texts, shard_tokens=1 << 20)
    path = tmp_path / "store/tokens-00000.bin"
    assert store.document_tokens(3)[0] == ord("d") and 0 < resident_kb(path) <= 2400
    held_out = Split(np.arange(1200) % 2 == 0)
    most_kb = 0
    documents = []
    for document in eval_documents(store, byte_tokenizer(), held_out):
        documents.append(document)
        most_kb = max(most_kb, resident_kb(path)) if len(documents) % 50 == 0 else most_kb
    assert 0 < most_kb and resident_kb(path) == 0
    assert [bytes(d.tokens.astype(np.uint8)).decode() for d in documents] == texts[1::2]
    assert resident_kb(path) == 0  # they are copies


@pytest.mark.parametrize("shard_tokens", [1, 3, 7, 100])
def test_a_store_of_conversations_says_of_each_token_if_it_is_scored(tmp_path, shard_tokens):
    tmp_path.joinpath("store").mkdir()
    writer = StoreWriter(tmp_path / "store", "u16", shard_tokens, marks_scored=True)
    marks = [[0, 0, 1], [0, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 1], [0, 1, 0, 1, 0, 1, 0, 1, 0], [0, 0, 1]]
    for text, scored in zip(TEXTS, marks, strict=True):
        tokens = [*text.encode(), EOT]
        writer.add_tokens(np.array(tokens[:2]), np.array(scored[:2], bool))
        writer.add_tokens(np.array(tokens[2:]), np.array(scored[2:], bool))
        writer.add_text(text.encode())
        writer.end_document(len(tokens))
    writer.finish("test", byte_tokenizer())
    store = open_store(tmp_path / "store")
    assert store.facts.num_scored == 1 + 2 + 6 + 1 + 4 + 1
    sizes = [path.stat().st_size for path in sorted((tmp_path / "store").glob("scored-*.bin"))]
    assert sizes == [shard.num_tokens for shard in store.facts.shards] and sum(sizes) == 29
    assert store.view()[:].tolist() == stream_of(TEXTS)
    assert store.scored_view()[:].tolist() == sum(marks, [])
    assert store.scored_view()[:].dtype == np.uint8
    keep = [True, False, True, True, True, False]
    kept = sum([marks[i] for i in (0, 2, 3)], []) + marks[4][:6]
    assert store.scored_view(keep, (4, 6))[:].tolist() == kept
    assert len(store.view(keep, (4, 6))) == len(store.scored_view(keep, (4, 6))) == 17
    documents = list(eval_documents(store, byte_tokenizer(), Split(np.array(keep), (4, 6))))
    # The tail of "ijklmnop", then "cdefg" and "qr", each without its end-of-text.
    assert [bytes(d.tokens.tolist()) for d in documents] == [b"op", b"cdefg", b"qr"]
    assert [d.scored.tolist() for d in documents] == [[0, 1], [0, 1, 1, 0, 0], [0, 0]]
    # The same text with another answer is other content; without marks there is no view of them.
    plain = write_store(tmp_path / "plain")
    assert plain.scored_view() is None and plain.facts.num_scored is None and plain.scored_stream is None
    assert list(eval_documents(plain, byte_tokenizer(), NOTHING_KEPT))[0].scored is None
    assert store.facts.content_hash != plain.facts.content_hash
    digests = b"".join(xxhash.xxh3_128(text.encode()).digest() for text in TEXTS)
    digests += xxhash.xxh3_128(bytes(sum(marks, []))).digest()
    assert store.facts.content_hash == xxhash.xxh3_128(digests).hexdigest()


def conversation_store(directory, conversations):
    """A store of documents given as (prompt, answer, more prompt)."""
    directory.mkdir()
    writer = StoreWriter(directory, "u16", marks_scored=True)
    for before, answer, after in conversations:
        tokens = [*before.encode(), *answer.encode(), *after.encode(), EOT]
        scored = [0] * len(before) + [1] * len(answer) + [0] * len(after) + [not after]
        writer.add_tokens(np.array(tokens), np.array(scored))
        writer.add_text((before + answer + after).encode())
        writer.end_document(len(tokens))
    writer.finish("test", byte_tokenizer())
    return open_store(directory)


def test_no_conversation_is_divided(tmp_path):
    # 4, 6, 4 and 6 tokens of 20.
    store = conversation_store(
        tmp_path / "four", [("p", "aa", ""), ("pp", "aaa", ""), ("q", "aa", ""), ("q", "aa", "rr")]
    )
    expected = {0.01: [3], 0.3: [3], 0.31: [2, 3], 0.5: [2, 3], 0.51: [1, 2, 3], 0.8: [1, 2, 3], 0.99: [1, 2, 3]}
    for share, held_out in expected.items():
        split = split_store(store, byte_tokenizer(), share)
        assert split.cut is None and split.held_out.tolist() == held_out
        assert [document.tokens[0] for document in eval_documents(store, byte_tokenizer(), split)][-1] == ord("q")
    with pytest.raises(ValueError, match="held_out of 0.01 gives 6 of 20 tokens, but one eval window needs 7"):
        split_store(store, byte_tokenizer(), 0.01, 7)
    one = conversation_store(tmp_path / "one", [("p" * 8, "aaaa", "q" * 7)])
    with pytest.raises(ValueError, match="held_out of 0.4 would cut the only conversation; give more"):
        split_store(one, byte_tokenizer(), 0.4)
    assert split_store(one, byte_tokenizer(), 0).keep_N.tolist() == [True]


@pytest.mark.parametrize(
    ("alter", "expected"),
    [
        (lambda d: os.truncate(d / "scored-00000.bin", 4), "scored-00000.bin: 4 bytes; the sidecar says 5"),
        (lambda d: (d / "scored-00000.bin").unlink(), "scored-00000.bin: No such file"),
        (lambda d: altered(num_scored=3)(d), "store.json: its checksum does not match"),
        (lambda d: altered(num_scored=True)(d), "num_scored: got true, expected an integer"),
    ],
)
def test_a_damaged_store_of_conversations_is_refused(tmp_path, alter, expected):
    conversation_store(tmp_path / "store", [("p", "aaa", "")])
    alter(tmp_path / "store")
    with pytest.raises(InputError, match=expected) as error:
        open_store(tmp_path / "store")
    assert "delete the folder, and it is prepared again" in str(error.value)


def stream_of(texts):
    return [token for text in texts for token in [*text.encode(), EOT]]


def test_a_store_holds_the_documents_and_their_ends(store, tmp_path):
    stream = stream_of(TEXTS)
    files = sorted((tmp_path / "store").glob("tokens-*.bin"))
    assert [path.stat().st_size for path in files] == [14, 14, 14, 14, 2]  # 29 tokens, 7 a shard, 2 bytes each
    on_disk = np.concatenate([np.fromfile(path, "<u2") for path in files])
    assert on_disk.tolist() == stream
    assert store.view()[:].tolist() == stream
    for i, text in enumerate(TEXTS):
        assert store.document_tokens(i).tolist() == list(text.encode())
        assert store.documents["bytes"][i] == len(text.encode())
        high, low = store.documents["hash"][i].tolist()
        assert high << 64 | low == xxhash.xxh3_128(text.encode()).intdigest()
    assert store.documents["end"].tolist() == [3, 9, 15, 17, 26, 29]
    assert store.document_tokens_N.tolist() == [3, 6, 6, 2, 9, 3]
    assert (store.facts.num_tokens, store.facts.num_documents, store.facts.num_bytes) == (29, 6, 23)
    assert store.facts.tokenizer_fingerprint == byte_tokenizer().fingerprint
    digests = b"".join(xxhash.xxh3_128(text.encode()).digest() for text in TEXTS)
    assert store.facts.content_hash == xxhash.xxh3_128(digests).hexdigest()


@pytest.mark.parametrize("shard_tokens", [1, 2, 3, 7, 26, 100])
def test_every_slice_of_every_view_is_that_of_the_concatenated_documents(tmp_path, shard_tokens):
    store = write_store(tmp_path / "store", shard_tokens=shard_tokens)
    num_slices = 0
    for bits in range(1 << len(TEXTS)):
        keep = [bool(bits >> i & 1) for i in range(len(TEXTS))]
        expected = np.array(stream_of([text for text, kept in zip(TEXTS, keep, strict=True) if kept]), np.int64)
        view = store.view(keep)
        assert len(view) == len(expected)
        for start in range(len(expected) + 1):
            for stop in {start, start + 1, start + 4, len(expected)}:
                assert view[start:stop].tolist() == expected[start:stop].tolist()
                assert view[start:stop].dtype == np.uint16
                num_slices += 1
    assert num_slices > 3000


@pytest.mark.parametrize("shard_tokens", [2, 100])
def test_a_cut_document_gives_its_head_only(tmp_path, shard_tokens):
    store = write_store(tmp_path / "store", shard_tokens=shard_tokens)
    keep = [True, False, True, True, True, False]
    heads = [1, 3, 6]
    for head in heads:  # of the fifth document, its 9 tokens
        expected = stream_of([TEXTS[0], TEXTS[2], TEXTS[3]]) + stream_of([TEXTS[4]])[:head]
        assert store.view(keep, (4, head))[:].tolist() == expected
    middle = store.view(keep, (2, 4))[:].tolist()
    assert middle == stream_of(TEXTS[:1]) + stream_of([TEXTS[2]])[:4] + stream_of(TEXTS[3:5])


def test_a_slice_inside_one_file_is_not_copied(store):
    view = store.view()
    assert np.shares_memory(view[1:6], store.shards[0])
    assert np.shares_memory(view[1:7], store.shards[0])  # up to its end
    assert not np.shares_memory(view[5:9], store.shards[0])
    assert view[5:9].tolist() == stream_of(TEXTS)[5:9]
    with pytest.raises(ValueError, match="read-only"):
        view[1:6][0] = 1
    with pytest.raises(ValueError, match="contiguous"):
        view[1:6:2]


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=12),
    st.data(),
)
def test_views_over_any_spans_and_files(shard_lengths, runs, data):
    total = sum(shard_lengths)
    stream = np.arange(total, dtype=np.uint16)
    keep = np.concatenate([np.full(length, kept) for length, kept in runs])[:total]
    keep = np.append(keep, np.zeros(total - len(keep), bool))
    shards = np.split(stream, np.cumsum(shard_lengths)[:-1])
    # Spans that touch stay apart: a table need not be the shortest possible.
    edges = np.flatnonzero(np.diff(keep.astype(int), prepend=0, append=0))
    view = TokenView(shards, edges[::2], edges[1::2])
    expected = stream[keep]
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(0, len(expected) + 2))
    assert len(view) == len(expected)
    assert view[start:stop].tolist() == expected[start:stop].tolist()
    assert view[:].tolist() == expected.tolist()


def test_a_slice_costs_microseconds(tmp_path):
    # 2,000 documents, every third excluded: 667 spans over 10 files.
    store = write_store(tmp_path / "store", ["x" * 99] * 2000, shard_tokens=20_000)
    view = store.view(np.arange(2000) % 3 != 0)
    starts = np.random.default_rng(0).integers(0, len(view) - 50, 10_000).tolist()

    def slices():
        for start in starts:
            view[start : start + 50]

    assert processor.seconds(slices) < processor.loop_seconds(400 * len(starts))  # a slice takes as long as about 32


def altered(**fields):
    def alter(directory):
        path = directory / "store.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return alter


def resized(name, num_bytes):
    return lambda directory: os.truncate(directory / name, num_bytes)


@pytest.mark.parametrize(
    ("alter", "expected"),
    [
        (lambda directory: (directory / "store.json").unlink(), "store.json: No such file"),
        (lambda directory: (directory / "store.json").write_text("[" * 100_000), "store.json: Invalid JSON"),
        (lambda directory: (directory / "store.json").write_text("{}"), "format_version: missing; this key is needed"),
        (altered(format_version=1), "format_version 1; this version reads 3"),
        (altered(num_tokens="29"), 'num_tokens: got "29", expected an integer'),
        (altered(dtype="u64"), "dtype: got \"u64\", expected 'u16' or 'u32'"),
        (altered(num_tokens=30), "store.json: its checksum does not match its content"),
        (resized("tokens-00003.bin", 13), "tokens-00003.bin: 13 bytes; the sidecar says 14"),
        (lambda d: ((d / "tokens-00003.bin").unlink(), (d / "tokens-00003.bin").mkdir()), "tokens-00003.bin: is a folder; the sidecar says 14 bytes"),
        (lambda directory: (directory / "tokens-00004.bin").unlink(), "tokens-00004.bin: No such file"),
        (resized("documents.bin", 239), "documents.bin: 239 bytes; the sidecar says 240"),
        (lambda d: (d / "documents.bin").write_bytes(bytes(240)), "the last document ends at token 0; expected 29"),
    ],
)  # fmt: skip
def test_a_damaged_store_is_refused(store, tmp_path, alter, expected):
    alter(tmp_path / "store")
    with pytest.raises(InputError, match=expected) as error:
        open_store(tmp_path / "store")
    assert "delete the folder, and it is prepared again" in str(error.value)


def test_a_damaged_index_is_refused(store, tmp_path):
    documents = store.documents.copy()
    documents["end"][2] = documents["end"][1]
    documents.tofile(tmp_path / "store" / "documents.bin")
    with pytest.raises(InputError, match="documents.bin: document 2 has no tokens"):
        open_store(tmp_path / "store").view()


def test_a_store_without_documents_is_none(tmp_path):
    writer = StoreWriter(tmp_path, "u16")
    writer.num_empty = 3
    with pytest.raises(InputError, match=r"nothing.txt: no text in it \(3 empty documents\)"):
        writer.finish("nothing.txt", byte_tokenizer())
    assert not (tmp_path / "store.json").exists()


def test_the_cut_of_a_divided_document_falls_between_characters(tmp_path):
    tokenizer = byte_tokenizer()
    store = write_store(tmp_path / "store", ["abc", "汉" * 30])  # 4 and 91 tokens
    # A fifth of 95 tokens is 19: the cut would be at token 91 - 19 = 72 = 24 x 3, the start of a character.
    assert split_store(store, tokenizer, 0.2).cut == (1, 72)
    # 18 tokens: 73 is inside the 25th character, whose end is at 75.
    split = split_store(store, tokenizer, 18 / 95)
    assert split.cut == (1, 75) and split.held_out.tolist() == []

    train = store.view(split.keep_N, split.cut)[:]
    assert tokenizer.decode_bytes(train[4:]).decode() == "汉" * 25
    (document,) = eval_documents(store, tokenizer, split)
    assert tokenizer.decode_bytes(document.tokens).decode() == "汉" * 5
    assert EOT not in document.tokens
    assert document.num_bytes == 15
    high, low = document.hash
    assert high << 64 | low == xxhash.xxh3_128(("汉" * 5).encode()).intdigest()


def test_training_and_held_out_documents_are_the_whole_and_disjoint(tmp_path):
    tokenizer = byte_tokenizer()
    texts = [f"document {i} " + "x" * (i % 7) for i in range(400)]
    store = write_store(tmp_path / "store", texts, shard_tokens=500)
    split = split_store(store, tokenizer, 0.05)
    held = [tokenizer.decode_bytes(document.tokens).decode() for document in eval_documents(store, tokenizer, split)]
    train = tokenizer.decode_bytes(np.where((t := store.view(split.keep_N)[:]) == EOT, ord("\n"), t)).decode()
    train = train.split("\n")[:-1]
    assert len(held) >= 30 and set(held).isdisjoint(train)
    assert sorted(held + train) == sorted(texts)
    assert [document.num_bytes for document in eval_documents(store, tokenizer, split)] == [len(t) for t in held]
    digests = {text: xxhash.xxh3_128(text.encode()).intdigest() for text in texts}
    assert sorted(held, key=digests.get) == sorted(texts, key=digests.get)[: len(held)]


def test_of_a_store_of_which_nothing_is_kept_every_document_is_measured(store):
    documents = list(eval_documents(store, byte_tokenizer(), NOTHING_KEPT))
    assert [bytes(document.tokens.tolist()).decode() for document in documents] == TEXTS
    assert [document.num_bytes for document in documents] == [len(text.encode()) for text in TEXTS]
    assert documents[2].hash == tuple(store.documents["hash"][2].tolist())
