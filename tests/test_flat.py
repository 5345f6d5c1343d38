"""Tokens that exist already, in a flat file."""

import time

import numpy as np
import pytest
import xxhash

from curriculum.data import flat
from curriculum.data.prepare import find_store, prepare_store
from curriculum.data.sources import SourceConfig
from curriculum.data.tokenizers.tokenizer import byte_tokenizer
from curriculum.errors import InputError


def flat_source(tmp_path, tokens, **options):
    np.array(tokens, "<u4" if options.get("dtype") == "u32" else "<u2").tofile(tmp_path / "flat.bin")
    return SourceConfig(path=str(tmp_path / "flat.bin"), **options)


@pytest.mark.parametrize("scan_tokens", [1, 2, 3, 5, 1 << 20])
@pytest.mark.parametrize(
    ("tokens", "ends", "texts"),
    [
        ("ab|汉c|", [3, 8], ["ab", "汉c"]),
        ("ab|汉c", [3, 7], ["ab", "汉c"]),  # the last document is not ended
        ("|ab|c|", [4, 6], ["ab", "c"]),  # end-of-text as the mark of a beginning
        ("||ab|||c||", [7, 10], ["ab", "c"]),
        ("abc", [3], ["abc"]),
    ],
)
def test_a_flat_file_is_used_where_it_lies(tmp_path, store_dir, monkeypatch, scan_tokens, tokens, ends, texts):
    monkeypatch.setattr(flat, "SCAN_TOKENS", scan_tokens)
    ids = [256 if byte == ord("|") else byte for byte in tokens.encode()]
    source = flat_source(tmp_path, ids)
    store = prepare_store("flat", source, byte_tokenizer(), store_dir)
    assert store.view()[:].tolist() == ids
    assert store.documents["end"].tolist() == ends
    assert [bytes(store.document_tokens(i).tolist()).decode() for i in range(len(texts))] == texts
    assert store.documents["bytes"].tolist() == [len(text.encode()) for text in texts]
    hashes = [high << 64 | low for high, low in store.documents["hash"].tolist()]
    assert hashes == [xxhash.xxh3_128(text.encode()).intdigest() for text in texts]
    assert sorted(path.name for path in store.directory.iterdir()) == ["documents.bin", "store.json"]
    assert find_store("flat", source, byte_tokenizer(), store_dir).directory == store.directory


def test_a_flat_file_of_wide_ids(tmp_path, store_dir):
    source = flat_source(tmp_path, [97, 256, 98], dtype="u32")
    store = prepare_store("flat", source, byte_tokenizer(), store_dir)
    assert store.facts.dtype == "u32" and store.view()[:].tolist() == [97, 256, 98]
    # The same bytes read as u16 are other tokens, and another store.
    narrow = SourceConfig(path=source.path, dtype="u16")
    assert len(prepare_store("flat", narrow, byte_tokenizer(), store_dir).view()) == 6


def test_wide_ids_are_not_taken_for_narrow_ones(tmp_path, store_dir):
    wide = flat_source(tmp_path, [97, 98] * 8, dtype="u32").path
    with pytest.raises(InputError, match="every second u16 is 0, which suggests u32 ids; set the source's dtype"):
        prepare_store("flat", SourceConfig(path=wide), byte_tokenizer(), store_dir)
    assert len(prepare_store("flat", SourceConfig(path=wide, dtype="u16"), byte_tokenizer(), store_dir).view()) == 32
    narrow = flat_source(tmp_path, [0] * 40)
    assert len(prepare_store("flat", narrow, byte_tokenizer(), store_dir).view()) == 40


def test_a_flat_file_that_changes_is_indexed_again(tmp_path, store_dir):
    source = flat_source(tmp_path, [97, 256, 98, 256])
    prepare_store("flat", source, byte_tokenizer(), store_dir)
    time.sleep(0.02)
    flat_source(tmp_path, [97, 98, 99, 256])
    assert find_store("flat", source, byte_tokenizer(), store_dir) is None
    assert prepare_store("flat", source, byte_tokenizer(), store_dir).facts.num_documents == 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "0 bytes; expected a positive multiple of 2"),
        (b"abc", "3 bytes; expected a positive multiple of 2, the size of a u16 token"),
        (np.array([0, 256, 257, 300], "<u2").tobytes(), r"token 2 \(byte 4\) is id 257; expected ids below 257"),
        (np.array([256, 256], "<u2").tobytes(), "holds only end-of-text"),
    ],
)
def test_a_flat_file_that_does_not_fit_is_refused(tmp_path, store_dir, content, expected):
    (tmp_path / "flat.bin").write_bytes(content)
    with pytest.raises(InputError, match="flat.bin: " + expected):
        prepare_store("flat", SourceConfig(path=str(tmp_path / "flat.bin")), byte_tokenizer(), store_dir)
    assert list(store_dir.glob("stores/*")) == []


def test_the_offset_of_a_bad_id_counts_from_the_start_of_the_file(tmp_path, store_dir, monkeypatch):
    monkeypatch.setattr(flat, "SCAN_TOKENS", 4)
    with pytest.raises(InputError, match=r"token 9 \(byte 18\) is id 999"):
        prepare_store("flat", flat_source(tmp_path, [1] * 9 + [999] * 2), byte_tokenizer(), store_dir)
