"""Preparing sources: the right tokens, once, whatever they are called."""

import gzip
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import xxhash
from prepared_sources import BPE, Recorder, everything_in
from test_documents import read_documents

from curriculum.data.cache import building
from curriculum.data.chat import CHATML
from curriculum.data.encode import encode_pieces
from curriculum.data.pieces import Piece
from curriculum.data.prepare import find_store, find_tokenizer, prepare_folder, prepare_store, prepare_tokenizer
from curriculum.data.sources import SourceConfig
from curriculum.data.store import open_store
from curriculum.data.tokenizers import vocabulary
from curriculum.data.tokenizers.tokenizer import TokenizerConfig, byte_tokenizer
from curriculum.errors import InputError

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
def test_the_tokens_are_those_of_a_plain_loop(sources, store_dir, kind, piece_bytes, monkeypatch):
    monkeypatch.setattr("curriculum.data.pieces.PIECE_BYTES", piece_bytes)
    monkeypatch.setattr("curriculum.data.store_writer.SHARD_TOKENS", 97)
    config = TokenizerConfig(kind=kind, vocab_size=300 if kind == "bpe" else None)
    tokenizer = prepare_tokenizer(config, sources, store_dir)
    for name, source in sources.items():
        store = prepare_store(name, source, tokenizer, store_dir)
        texts = read_documents(source)
        expected = [token for text in texts for token in [*tokenizer.encode(text).tolist(), tokenizer.eot]]
        assert len(expected) > 300 and len(store.shards) > 3
        assert store.view()[:].tolist() == expected
        assert store.documents["bytes"].tolist() == [len(text.encode()) for text in texts]
        hashes = [high << 64 | low for high, low in store.documents["hash"].tolist()]
        assert hashes == [xxhash.xxh3_128(text.encode()).intdigest() for text in texts]
        assert tokenizer.decode_bytes(store.document_tokens(2)) == texts[2].encode()
        assert store.facts.num_empty == 1
        assert store.facts.source == source.location


def test_a_second_time_nothing_is_read(sources, store_dir):
    tokenizer = prepare_tokenizer(BPE, sources, store_dir)
    first = prepare_store("web", sources["web"], tokenizer, store_dir)
    before = everything_in(store_dir)
    progress = Recorder()
    with opened_files() as opened:
        assert prepare_tokenizer(BPE, sources, store_dir).fingerprint == tokenizer.fingerprint
        again = prepare_store("web", sources["web"], tokenizer, store_dir, progress)
    assert opened and not [path for path in opened if "sources" in Path(path).parts]
    assert again.directory == first.directory and again.facts == first.facts
    assert progress.calls == [] and everything_in(store_dir) == before


@contextmanager
def opened_files():
    """Collect the paths that are opened meanwhile."""
    opened, listening = [], True

    def hear(event, arguments):  # a hook cannot be removed
        if listening and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            opened.append(os.fsdecode(arguments[0]))

    sys.addaudithook(hear)
    yield opened
    listening = False


def test_a_rewrite_that_sets_the_time_back_is_noticed(tmp_path, store_dir):
    path = tmp_path / "a.txt"
    path.write_text("before")
    source, status = SourceConfig(path=str(path)), path.stat()
    prepare_store("a", source, byte_tokenizer(), store_dir)
    time.sleep(0.02)
    path.write_text("after!")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns and path.stat().st_size == status.st_size
    assert find_store("a", source, byte_tokenizer(), store_dir) is None
    assert bytes(prepare_store("a", source, byte_tokenizer(), store_dir).document_tokens(0).tolist()) == b"after!"


def test_touched_files_are_hashed_and_not_encoded_again(sources, store_dir):
    tokenizer = byte_tokenizer()
    first = prepare_store("web", sources["web"], tokenizer, store_dir)
    os.utime(Path(sources["web"].path) / "3.txt", ns=(1, 1))
    progress = Recorder()
    assert find_store("web", sources["web"], tokenizer, store_dir) is None
    assert prepare_store("web", sources["web"], tokenizer, store_dir, progress).directory == first.directory
    assert progress.calls == []


def test_under_another_name_the_store_that_is_there_is_taken(sources, store_dir):
    web, tokenizer, progress = sources["web"], byte_tokenizer(), Recorder()
    first = prepare_store("web", web, tokenizer, store_dir)
    stores, key = first.directory.parent, first.directory.name.removeprefix("web-")
    for name in ("prose", "eval-prose", "a"):
        assert find_store(name, web, tokenizer, store_dir).directory == first.directory
        assert prepare_store(name, web, tokenizer, store_dir, progress).directory == first.directory
    assert progress.calls == [] and list(stores.iterdir()) == [first.directory]
    # One of its own name comes first, else the first name.
    shutil.copytree(first.directory, stores / f"prose-{key}")
    assert find_store("prose", web, tokenizer, store_dir).directory.name == f"prose-{key}"
    assert find_store("zoo", web, tokenizer, store_dir).directory.name == f"prose-{key}"


def test_only_a_whole_store_is_taken_under_another_name(sources, store_dir):
    web, tokenizer = sources["web"], byte_tokenizer()
    first = prepare_store("web", web, tokenizer, store_dir)
    stores, key = first.directory.parent, first.directory.name.removeprefix("web-")
    first.directory.rename(store_dir / "aside")
    (stores / f"empty-{key}").mkdir()
    (stores / f"file-{key}").write_bytes(b"")
    with building(first.directory, store_dir / "locks" / first.directory.name) as partial:
        shutil.copytree(store_dir / "aside", partial, dirs_exist_ok=True)  # all written, and not there yet
        assert find_store("prose", web, tokenizer, store_dir) is None
        made = prepare_store("prose", web, tokenizer, store_dir)
        assert made.directory.name == f"prose-{key}" and made.facts == first.facts


def test_changed_content_another_tokenizer_and_another_key_are_other_stores(sources, store_dir, tmp_path):
    (tmp_path / "two.jsonl").write_text('{"text": "x", "body": "y"}\n')
    two = SourceConfig(path=str(tmp_path / "two.jsonl"))
    body = SourceConfig(path=str(tmp_path / "two.jsonl"), text_key="body")
    bpe = prepare_tokenizer(BPE, sources, store_dir)
    made = [
        prepare_store("two", two, byte_tokenizer(), store_dir),
        prepare_store("two", two, bpe, store_dir),
        prepare_store("two", body, byte_tokenizer(), store_dir),
    ]
    (tmp_path / "two.jsonl").write_text('{"text": "z", "body": "y"}\n')
    made.append(prepare_store("two", two, byte_tokenizer(), store_dir))
    assert len({store.directory for store in made}) == 4
    assert [bytes(store.document_tokens(0).astype(np.uint8)) for store in made[::2]] == [b"x", b"y"]
    assert made[3].document_tokens(0).tolist() == [ord("z")]

    # So do the same bytes over other files, in another order, or read in another way.
    def split_over(*contents, suffix=".txt"):
        folder = tmp_path / "split" / "-".join(contents)
        folder.mkdir(parents=True)
        for i, content in enumerate(contents):
            (folder / f"{i}{suffix}").write_text(content)
        return prepare_store("split", SourceConfig(path=str(folder)), byte_tokenizer(), store_dir).directory

    as_rows = split_over('{"text": "x"}', suffix=".jsonl")
    (tmp_path / "split" / '{"text": "x"}').rename(tmp_path / "split" / "rows")
    assert len({split_over("ab", "c"), split_over("a", "bc"), as_rows, split_over('{"text": "x"}')}) == 4
    rows, text = tmp_path / "rows.jsonl.gz", tmp_path / "rows.txt.gz"
    rows.write_bytes(gzip.compress(b'{"text": "x"}'))
    assert prepare_store("rows", SourceConfig(path=str(rows)), byte_tokenizer(), store_dir).facts.num_tokens == 2
    rows.rename(text)
    assert prepare_store("rows", SourceConfig(path=str(text)), byte_tokenizer(), store_dir).facts.num_tokens == 14
    web = sources["web"]
    first = prepare_store("web", web, byte_tokenizer(), store_dir)
    (Path(web.path) / "1.txt").rename(Path(web.path) / "9.txt")
    assert prepare_store("web", web, byte_tokenizer(), store_dir).directory != first.directory


def test_rows_that_are_told_of_are_looked_for_though_the_store_is_there(tmp_path, store_dir):
    """`text_key: text` reads what is read without it: the store is the same, but for plain text among the rows."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a row"}\n' * 3)
    keyed, tokenizer = SourceConfig(path=str(folder), text_key="text"), byte_tokenizer()
    store = prepare_store("mixed", SourceConfig(path=str(folder)), tokenizer, store_dir)
    assert find_store("mixed", keyed, tokenizer, store_dir).directory == store.directory
    (folder / "README.md").write_text("what it is")
    assert prepare_store("mixed", SourceConfig(path=str(folder)), tokenizer, store_dir).facts.num_documents == 4
    for find in (find_store, prepare_store):
        with pytest.raises(InputError, match="README.md: plain text has no rows; text_key 'text' applies to rows"):
            find("mixed", keyed, tokenizer, store_dir)


def test_find_sees_what_is_prepared_and_prepares_nothing(sources, store_dir):
    web = sources["web"]
    assert find_tokenizer(BPE, sources, store_dir) is None
    assert find_store("web", web, byte_tokenizer(), store_dir) is None
    assert not store_dir.exists()
    tokenizer = prepare_tokenizer(BPE, sources, store_dir)
    assert find_tokenizer(BPE, sources, store_dir).fingerprint == tokenizer.fingerprint
    assert find_store("web", web, tokenizer, store_dir) is None
    store = prepare_store("web", web, tokenizer, store_dir)
    assert find_store("web", web, tokenizer, store_dir).directory == store.directory
    assert find_store("web", web, byte_tokenizer(), store_dir) is None
    (Path(web.path) / "0.txt").write_text("more")
    assert find_store("web", web, tokenizer, store_dir) is None
    assert find_tokenizer(BPE, sources, store_dir) is None
    assert find_tokenizer(TokenizerConfig(), {}, store_dir).kind == "byte"


def test_finding_imports_no_heavy_library(sources, store_dir):
    prepare_store("web", sources["web"], prepare_tokenizer(BPE, sources, store_dir), store_dir)
    program = (
        "import sys\n"
        "from curriculum.data.prepare import *\n"
        "web, code, store_dir = sys.argv[1:]\n"
        "sources = {'web': SourceConfig(path=web), 'code': SourceConfig(path=code)}\n"
        "tokenizer = find_tokenizer(TokenizerConfig('bpe', 300), sources, store_dir)\n"
        "assert len(find_store('web', sources['web'], tokenizer, store_dir).view()) > 100\n"
        "print({'jax', 'tiktoken', 'tokenizers', 'datasets', 'pyarrow', 'requests'} & set(sys.modules))"
    )
    arguments = [sources["web"].path, sources["code"].path, str(store_dir)]
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_the_tokenizer_depends_on_content_not_on_names_or_order(sources, store_dir, monkeypatch):
    monkeypatch.setattr(vocabulary, "TRAIN_BYTES", 900)  # so that the sample is cut
    tokenizer = prepare_tokenizer(BPE, sources, store_dir)
    renamed = {"b": sources["code"], "a": sources["web"]}
    assert find_tokenizer(BPE, renamed, store_dir).fingerprint == tokenizer.fingerprint
    elsewhere = store_dir.with_name("elsewhere")
    assert prepare_tokenizer(BPE, renamed, elsewhere).fingerprint == tokenizer.fingerprint
    assert find_tokenizer(BPE, {"a": sources["web"]}, store_dir) is None
    assert find_tokenizer(TokenizerConfig("bpe", 301), sources, store_dir) is None


def test_the_training_sample_takes_turns_and_stops(tmp_path):
    for name, row in (("a", "a" * 10), ("b", "b" * 25)):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{row}"}}\n' * 100)
    sources = [SourceConfig(path=str(tmp_path / f"{name}.jsonl")) for name in "ab"]

    def sample(limit_bytes):
        return "".join(text[0] for text in vocabulary._sample(sources, limit_bytes, lambda *_: None, CHATML))

    # Bytes given after each turn: a 10, b 25, a 20, a 30, b 50, a 40, a 50: a hundred.
    assert sample(100) == "abaabaa"
    # When one has no more, the other goes on to the end.
    (tmp_path / "a.jsonl").write_text('{"text": "aaaaaaaaaa"}\n')
    assert sample(10**6) == "a" + "b" * 100


def test_a_char_tokenizer_meets_an_unknown_character(sources, store_dir, tmp_path):
    tokenizer = prepare_tokenizer(TokenizerConfig("char"), sources, store_dir)
    (tmp_path / "new.jsonl").write_text('{"text": "row"}\n{"text": "row €"}\n')
    with pytest.raises(InputError, match=r"new.jsonl:2: character '€' .*use tokenizer kind byte or bpe"):
        prepare_store("new", SourceConfig(path=str(tmp_path / "new.jsonl")), tokenizer, store_dir)


def test_a_tokenizer_by_path(sources, store_dir, tmp_path):
    tokenizer = prepare_tokenizer(BPE, sources, store_dir)
    tokenizer.save(tmp_path / "saved")
    config = TokenizerConfig("bpe", path=str(tmp_path / "saved"))
    for found in (prepare_tokenizer(config, {}, store_dir), find_tokenizer(config, {}, store_dir)):
        assert found.fingerprint == tokenizer.fingerprint
    with pytest.raises(InputError, match="holds a tokenizer of kind bpe; expected char: set tokenizer.kind: bpe"):
        prepare_tokenizer(TokenizerConfig("char", path=str(tmp_path / "saved")), {}, store_dir)
    with pytest.raises(InputError, match="vocab_size: 500; this bpe tokenizer has 300 ids"):
        prepare_tokenizer(TokenizerConfig("bpe", 500, path=str(tmp_path / "saved")), {}, store_dir)


def test_a_vocabulary_too_large_for_the_text_is_refused(store_dir, tmp_path):
    (tmp_path / "a.txt").write_text("abab abab")
    with pytest.raises(InputError, match="got 4096, but the sources yield only 260 "):
        prepare_tokenizer(TokenizerConfig("bpe", 4096), {"a": SourceConfig(path=str(tmp_path / "a.txt"))}, store_dir)
    assert list(store_dir.glob("tokenizers/*")) == []


def test_a_tokenizer_needs_text(store_dir, tmp_path):
    np.zeros(4, "<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(
        InputError, match="source 'a': .*a.bin holds token ids, not text; a bpe tokenizer is built from text"
    ):
        prepare_tokenizer(BPE, {"a": SourceConfig(path=str(tmp_path / "a.bin"))}, store_dir)
    with pytest.raises(InputError, match="kind char is built from the sources, but there are none"):
        find_tokenizer(TokenizerConfig("char"), {}, store_dir)


def test_paths_that_are_not_utf8(tmp_path, store_dir):
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path / os.fsdecode(b"Andr\xe9")
    folder.mkdir()
    (folder / os.fsdecode(b"M. Andr\xe9")).write_text("abc")
    (folder / os.fsdecode(b"\xff.jsonl")).write_text('{"text": "d"}')
    parquet.write_table(pyarrow.table({"text": ["e"]}), tmp_path / "x.parquet")
    (tmp_path / "x.parquet").rename(folder / os.fsdecode(b"\xff.parquet"))
    source = SourceConfig(path=str(folder))
    prepared = prepare_folder([str(folder)], byte_tokenizer(), tmp_path / os.fsdecode(b"\xe9-tokens"))
    for store in (prepared, prepare_store("web", source, byte_tokenizer(), store_dir)):
        assert store.view()[:].tolist() == [*b"abc", 256, *b"d", 256, *b"e", 256]
        assert store.facts.source == str(folder) == open_store(store.directory).facts.source
        store.verify()


def test_progress_counts_the_bytes_of_the_files(sources, store_dir, monkeypatch):
    monkeypatch.setattr("curriculum.data.pieces.PIECE_BYTES", 64)
    monkeypatch.setattr("curriculum.data.encode.GROUP_BYTES", 64)
    total_bytes = sum(path.stat().st_size for path in Path(sources["web"].path).iterdir())
    progress = Recorder()
    prepare_store("web", sources["web"], byte_tokenizer(), store_dir, progress)
    done = [done_bytes for done_bytes, _ in progress.calls]
    assert len(done) > 5 and done == sorted(done)
    assert progress.calls[-1] == (total_bytes, total_bytes) and done.count(total_bytes) == 1


def test_a_group_is_filled_by_bytes_not_by_characters(monkeypatch):
    monkeypatch.setattr("curriculum.data.encode.GROUP_BYTES", 6)
    pieces = [Piece(text, True, 0, "a") for text in ("abc", "abc", "汉字", "汉", "汉", "z")]
    groups = [[piece.text for piece in group] for group, _, _ in encode_pieces(pieces, byte_tokenizer())]
    assert groups == [["abc", "abc"], ["汉字"], ["汉", "汉"], ["z"]]


def test_hashing_and_training_show_progress(sources, store_dir, monkeypatch, capsys):
    monkeypatch.setattr("curriculum.data.progress.QUIET_SECONDS", 0.0)
    web_bytes = sum(path.stat().st_size for path in Path(sources["web"].path).iterdir())
    prepare_tokenizer(BPE, sources, store_dir)
    shown = capsys.readouterr().err
    assert re.search(f"^reading web: {web_bytes / 1e6:.1f} of .*100%", shown, re.MULTILINE)
    assert re.search(r"^training a tokenizer of 300 ids: 0.0 of 0.0 MB \(100%\)", shown, re.MULTILINE)
    prepare_tokenizer(BPE, sources, store_dir)
    assert capsys.readouterr().err == ""


def test_progress_without_a_known_total_ends_too(tmp_path, store_dir):
    import datasets

    datasets.Dataset.from_dict({"text": ["one", "three"]}).to_parquet(tmp_path / "a.parquet")
    progress = Recorder()
    prepare_store("a", SourceConfig(path=str(tmp_path / "a.parquet")), byte_tokenizer(), store_dir, progress)
    assert progress.calls == [(8, None), (8, 8)]
