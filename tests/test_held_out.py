"""The documents read for a small eval set: as few as make the set that all of them would make."""

import tracemalloc

import numpy as np
import pytest
from test_corpus import config_of, write_rows

from curriculum.data.corpus import load_evalsets
from curriculum.data.held_out import eval_documents, first_eval_documents
from curriculum.data.split import Split
from curriculum.data.store import open_store
from curriculum.data.store_writer import StoreWriter
from curriculum.data.tokenizers.tokenizer import byte_tokenizer
from evalsets.evalset import cut_windows

TOKENIZER = byte_tokenizer()
NUM_DOCUMENTS = 60


def written_store(directory, generator, marks_scored):
    """Documents of 0 to 30 letters; some are copies, and end-of-text opens or closes some more than once."""
    directory.mkdir()
    writer = StoreWriter(directory, "u16", shard_tokens=300, marks_scored=marks_scored)
    texts = [bytes(generator.integers(97, 123, generator.integers(0, 31))) for _ in range(NUM_DOCUMENTS)]
    for i, text in enumerate(texts):
        text = texts[i - 5] if i % 9 == 8 else text
        before, after = generator.integers(0, 2), generator.integers(1, 3)
        tokens = [*[TOKENIZER.eot] * before, *text, *[TOKENIZER.eot] * after]
        # Answers so short that most windows of a conversation have none.
        scored = generator.random(len(tokens)) < 0.1 if marks_scored else None
        writer.add_tokens(np.array(tokens), scored)
        writer.add_text(text)
        writer.end_document(len(tokens))
    writer.finish("test", TOKENIZER)
    return open_store(directory)


def evalset_of(documents, seq_len, max_sequences):
    return cut_windows(
        "set",
        [document.tokens for document in documents],
        TOKENIZER.token_bytes_V,
        TOKENIZER.bos,
        seq_len,
        max_sequences,
        np.array([document.hash for document in documents], np.uint64).reshape(-1, 2),
        [document.scored for document in documents],
        [document.num_bytes for document in documents],
    )


@pytest.mark.parametrize("marks_scored", [False, True], ids=["text", "conversations"])
@pytest.mark.parametrize("seed", range(8))
def test_the_first_documents_make_the_set_that_all_of_them_make(tmp_path, seed, marks_scored):
    generator = np.random.default_rng(seed)
    store = written_store(tmp_path / "store", generator, marks_scored)
    long = int(np.argmax(store.document_tokens_N))
    keep_N = generator.random(NUM_DOCUMENTS) < 0.3
    whole, divided = Split(keep_N), Split(keep_N | (np.arange(NUM_DOCUMENTS) == long), (long, 8))
    num_read, num_all = 0, 0
    for split in (Split(np.zeros(NUM_DOCUMENTS, bool)), whole, divided):
        documents = list(eval_documents(store, TOKENIZER, split))
        for seq_len in (1, 4, 40):
            for max_sequences in (1, 2, 7, 30, 10_000):
                first = first_eval_documents(store, TOKENIZER, split, seq_len, max_sequences)
                found, expected = (evalset_of(some, seq_len, max_sequences) for some in (first, documents))
                assert found.content_hash == expected.content_hash and found.num_windows > 0
                for name in ("tokens_NT1", "scored_NT", "num_bytes_N", "document_N"):
                    assert np.array_equal(getattr(found, name), getattr(expected, name)), name
                if max_sequences == 2 and not marks_scored:
                    # The two that fit, the one that does not, the tail, and those without a token.
                    empty = sum(len(document.tokens) == 0 for document in first)
                    assert len(first) - empty <= 4
                num_read, num_all = num_read + len(first), num_all + len(documents)
    assert num_read < 0.7 * num_all


def test_a_small_set_reads_little_of_a_large_source(tmp_path, monkeypatch):
    """400 documents of 20,000 tokens, half of them held out: 4 million tokens, of which a set wants two windows."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "web.jsonl", [f"{i} " + "x" * 20_000 for i in range(400)])
    write_rows(tmp_path / "own.jsonl", [f"{i} " + "y" * 20_000 for i in range(200)])
    few = {"max_sequences": 2}
    sets = {"held": {"held_out_of": "web", **few}, "own": {"path": "own.jsonl", **few}}
    config = config_of({"web": "50%"}, files={"web": "web.jsonl"}, primary={"held_out_of": "web", **few}, sets=sets)
    load_evalsets(config, "store", TOKENIZER, ["held", "own"])
    tracemalloc.start()
    try:
        evalsets = load_evalsets(config, "store", TOKENIZER, ["held", "own"])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The first document alone has 1,001 windows of 20, and is taken whole.
    assert [evalset.num_windows for evalset in evalsets.values()] == [1001, 1001]
    assert peak_bytes < 2e6
