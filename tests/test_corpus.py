"""All the data of a run: eval sets that are what they are whatever stands beside them, and training without them."""

import json

import numpy as np
import pytest

from curriculum.config import build_config
from curriculum.data.corpus import find_sizes, load_corpus
from curriculum.data.tokenizer import byte_tokenizer, load_tokenizer
from curriculum.errors import InputError

PRIMARY = {"path": "val.jsonl"}


def rows(name, count):
    return [f"{name} {i} " + "abcdefghij" * (i % 5) for i in range(count)]


def write_rows(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """web: 400 documents; book: one, divided; law: 300, one of them the book and one of them of web."""
    monkeypatch.chdir(tmp_path)
    web, book = rows("web", 400), " ".join(rows("book", 100))
    write_rows(tmp_path / "web.jsonl", web)
    write_rows(tmp_path / "law.jsonl", [*rows("law", 298), book, web[7]])
    (tmp_path / "book.txt").write_text(book)
    write_rows(tmp_path / "val.jsonl", ["something else " * 20])
    return tmp_path


def config_of(held_out=None, primary=PRIMARY, sets=None, files=None, **changes):
    files = files or {"web": "web.jsonl", "book": "book.txt"}
    sources = {name: {"path": path, "held_out": (held_out or {}).get(name)} for name, path in files.items()}
    data = {
        "sources": sources,
        "phases": [{"name": "a", "until": "end", "mixture": dict.fromkeys(files, 1.0)}],
        "evalsets": {"primary": primary, "sets": sets or {}},
        "train": {"steps": 10, "batch_size": 2, "seq_len": 20},
        "optim": {"lr": 1e-3, "schedule": "constant"},
    }
    return build_config(data | changes)


def assert_same(one, other):
    for name in ("tokens_NT1", "num_tokens_N", "num_bytes_N", "document_N"):
        assert len(getattr(one, name)) > 0
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert one.content_hash == other.content_hash


def test_an_eval_set_is_the_same_whatever_other_sets_there_are(folder):
    write_rows(folder / "some.jsonl", [rows("web", 400)[i] for i in (3, 200, 390)])  # what web trains on too
    sets = {
        "general": {"held_out_of": "web"},
        "tail": {"held_out_of": "book"},
        "some": {"path": "some.jsonl"},
        "few": {"held_out_of": "web", "max_sequences": 10},
    }
    held_out = {"web": "10%", "book": "10%"}
    together = load_corpus(config_of(held_out, sets=sets), folder / "store")
    assert 0 < together.details["web"]["dropped_documents"]["some"] <= 3
    for count in range(1, len(sets) + 1):
        chosen = dict(list(sets.items())[:count])
        corpus = load_corpus(config_of(held_out, sets=chosen), folder / "store")
        assert list(corpus.evalsets) == ["primary", *chosen]
        for name, evalset in corpus.evalsets.items():
            assert_same(evalset, together.evalsets[name])
    for name in sets:
        alone = load_corpus(config_of(held_out, sets={name: sets[name]}), folder / "store")
        assert_same(alone.evalsets[name], together.evalsets[name])


def test_a_divided_document_that_stands_in_another_set_is_refused(folder):
    # So few documents that the tail is held out, and one of them is above 1 %.
    texts = [*rows("short", 98), "long " * 200]
    write_rows(folder / "web.jsonl", texts)
    config = config_of({"web": "10%"}, sets={"tail": {"held_out_of": "web"}})
    assert load_corpus(config, folder / "store").evalsets["tail"].num_documents == 1
    write_rows(folder / "some.jsonl", texts[-1:])
    sets = {"tail": {"held_out_of": "web"}, "some": {"path": "some.jsonl"}}
    with pytest.raises(InputError, match="source 'web': 1 of 99 documents stand in eval set 'some'"):
        load_corpus(config_of({"web": "10%"}, sets=sets), folder / "store")


def test_a_divided_document_is_dropped_from_other_sources(folder):
    files = {"book": "book.txt", "law": "law.jsonl"}
    book = (folder / "book.txt").read_text()
    sets = {"tail": {"held_out_of": "book"}}
    corpus = load_corpus(config_of({"book": "10%"}, sets=sets, files=files), folder / "store")
    # The source that was divided still trains on the head; the other one has lost the document.
    assert corpus.details["book"]["dropped_documents"] == {}
    assert corpus.details["law"]["dropped_documents"] == {"tail": 1}
    assert corpus.warnings == ("1 document of law dropped from training: eval set tail has them too",)
    assert bytes(corpus.tokens["book"][:].tolist()).decode() == book[: len(corpus.tokens["book"])]
    law = corpus.tokens["law"][:]
    assert bytes(law[law != corpus.tokenizer.eot].tolist()).decode().count("book 99") == 0
    assert find_sizes(config_of({"book": "10%"}, sets=sets, files=files), folder / "store").details == corpus.details
    # Without a set that measures the tail the document is nobody's.
    corpus = load_corpus(config_of({"book": "10%"}, files=files), folder / "store")
    assert corpus.details["law"]["dropped_documents"] == {}


def test_the_tail_itself_counts_as_a_document(folder):
    files = {"book": "book.txt", "law": "law.jsonl"}
    config = config_of({"book": "10%"}, sets={"tail": {"held_out_of": "book"}}, files=files)
    corpus = load_corpus(config, folder / "store")
    tail = (folder / "book.txt").read_text()[len(corpus.tokens["book"]) :]
    assert corpus.evalsets["tail"].num_bytes == len(tail) > 100
    write_rows(folder / "law.jsonl", [*rows("law", 299), tail])
    assert load_corpus(config, folder / "store").details["law"]["dropped_documents"] == {"tail": 1}


def test_the_same_file_as_another_source_is_refused(folder):
    config = config_of({"book": "10%"}, {"held_out_of": "book"}, files={"book": "book.txt", "again": "book.txt"})
    with pytest.raises(InputError, match="source 'again': 1 of 1 documents stand in eval set 'primary'"):
        load_corpus(config, folder / "store")


def test_a_given_tokenizer_is_used(folder):
    config = config_of(tokenizer={"kind": "bpe", "vocab_size": 300})
    made = load_corpus(config, folder / "store").tokenizer
    assert made.vocab_size == 300
    made.save(folder / "snapshot")
    given = load_tokenizer(folder / "snapshot")
    (folder / "web.jsonl").write_text(json.dumps({"text": "other text now"}))
    assert load_corpus(config, folder / "store", given).tokenizer is given
    assert load_corpus(config, folder / "store", byte_tokenizer()).tokens["book"].dtype == np.uint16
    assert not (folder / "elsewhere").exists()
    load_corpus(config, folder / "elsewhere", given)
    assert not (folder / "elsewhere" / "tokenizers").exists()


def test_a_model_that_does_not_fit_the_tokenizer_is_told_before_anything_is_prepared(folder):
    config = config_of(model={"preset": "tiny", "vocab_size": 290}, tokenizer={"kind": "char"})
    (folder / "book.txt").write_text("".join(map(chr, range(1000, 1500))))
    with pytest.raises(InputError, match="model.vocab_size: got 290, expected at least"):
        load_corpus(config, folder / "store")
    assert not (folder / "store" / "stores").exists()


@pytest.mark.parametrize(("name", "place"), [("primary", "evalsets.primary"), ("some", "evalsets.sets.some")])
def test_an_eval_set_without_a_place_is_refused(folder, name, place):
    empty = {"hf": ":en"}
    config = config_of(primary=empty) if name == "primary" else config_of(sets={name: empty})
    for go in (load_corpus, find_sizes):
        with pytest.raises(InputError, match=f"{place}: hf is ':en'; expected a dataset of the hub"):
            go(config, folder / "store")


def test_a_set_whose_first_document_alone_is_too_long_is_taken_whole_and_said(folder):
    write_rows(folder / "long.jsonl", ["x" * 1000])
    config = config_of(sets={"long": {"path": "long.jsonl", "max_sequences": 2}})
    corpus = load_corpus(config, "store")
    windows = corpus.evalsets["long"].num_windows
    assert windows > 2 and corpus.evalsets["long"].num_tokens == 1000
    assert f"eval set long has {windows} windows, more than its max_sequences of 2" in "".join(corpus.warnings)
