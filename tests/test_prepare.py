"""Preparing sources: the right tokens, once, whatever dies or runs beside it."""

import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from test_documents import read_documents

from curriculum.data import documents, flat, prepare
from curriculum.data.cache import building, content_of, digest
from curriculum.data.chat import CHATML, ChatConfig
from curriculum.data.prepare import (
    find_store,
    find_tokenizer,
    prepare_documents,
    prepare_folder,
    prepare_store,
    prepare_tokenizer,
)
from curriculum.data.progress import WINDOWS, ConsoleProgress, progress_text
from curriculum.data.sources import SourceConfig
from curriculum.data.store import FORMAT_VERSION as STORE_VERSION
from curriculum.data.store import open_store
from curriculum.data.store_writer import StoreWriter
from curriculum.data.tokenizers import vocabulary
from curriculum.data.tokenizers.tokenizer import NUM_THREADS, TokenizerConfig, byte_tokenizer, load_tokenizer
from curriculum.errors import InputError

ROOT = Path(__file__).parents[1]
WORDS = ["the", "tree", "grows", "naïve", "汉字", "👩‍👧", "<|endoftext|>", "it's", "2026", "\r\n", "\n\n", "\t"]


def make_text(seed, num_words):
    generator = random.Random(seed)
    return " ".join(generator.choice(WORDS) for _ in range(num_words))


@pytest.fixture
def sources(tmp_path):
    """Two sources: a folder of texts, one of them empty, and a file of JSON rows, one of them empty."""
    folder = tmp_path / "sources" / "web"
    folder.mkdir(parents=True)
    for i in range(5):
        (folder / f"{i}.txt").write_bytes(make_text(i, 40 * i).encode())
    rows = [f'{{"text": "row {i} {"word " * i}"}}\n' for i in range(30)] + ['{"text": ""}\n']
    (tmp_path / "sources" / "code.jsonl").write_text("".join(rows))
    return {
        "web": SourceConfig(path=str(folder)),
        "code": SourceConfig(path=str(tmp_path / "sources" / "code.jsonl")),
    }


@pytest.fixture
def store_dir(tmp_path):
    return tmp_path / "prepared"


BPE = TokenizerConfig(kind="bpe", vocab_size=300)


class Recorder:
    """Notes how often and how far a job reported."""

    def __init__(self):
        self.calls = []

    def __call__(self, done_bytes, total_bytes):
        self.calls.append((done_bytes, total_bytes))


def everything_in(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
def test_the_tokens_are_those_of_a_plain_loop(sources, store_dir, kind, piece_bytes, monkeypatch):
    monkeypatch.setattr("curriculum.data.pieces.PIECE_BYTES", piece_bytes)
    config = TokenizerConfig(kind=kind, vocab_size=300 if kind == "bpe" else None)
    tokenizer = prepare_tokenizer(config, sources, store_dir)
    for name, source in sources.items():
        store = prepare_store(name, source, tokenizer, store_dir, shard_tokens=97)
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
    web = sources["web"]
    first = prepare_store("web", web, byte_tokenizer(), store_dir)
    (Path(web.path) / "1.txt").rename(Path(web.path) / "9.txt")
    assert prepare_store("web", web, byte_tokenizer(), store_dir).directory != first.directory


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


# --- several processes, killed processes --------------------------------------------------------------------


def _prepare_beside_others(barrier, results, source, tokenizer_dir, store_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    progress = Recorder()
    barrier.wait()
    store = prepare_store("web", source, tokenizer, store_dir, progress)
    results.put((str(store.directory), (store.directory / "store.json").stat().st_ino, len(progress.calls)))


def test_three_processes_at_once_do_the_work_once(tmp_path, store_dir, sources):
    tokenizer = prepare_tokenizer(BPE, sources, store_dir)
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "big.txt").write_text(make_text(0, 200_000), newline="")
    source = SourceConfig(path=str(tmp_path / "big.txt"))
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    arguments = (barrier, results, source, tmp_path / "tokenizer", store_dir)
    processes = [context.Process(target=_prepare_beside_others, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    assert len({(directory, inode) for directory, inode, _ in outcomes}) == 1
    assert sorted(calls > 0 for _, _, calls in outcomes) == [False, False, True]
    (text,) = read_documents(source)
    store = open_store(outcomes[0][0])
    assert store.document_tokens(0).tolist() == tokenizer.encode(text).tolist()
    assert [name for name in everything_in(store_dir) if "partial" in name] == []


def test_killed_half_way_it_starts_again_and_leaves_nothing(tmp_path, store_dir, sources):
    tokenizer = prepare_tokenizer(BPE, sources, store_dir)
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "big.txt").write_text(make_text(0, 1_500_000), newline="")
    source = SourceConfig(path=str(tmp_path / "big.txt"))
    program = (
        "from curriculum.data.prepare import *\n"
        f"tokenizer = load_tokenizer({str(tmp_path / 'tokenizer')!r})\n"
        f"prepare_store('big', SourceConfig({source.path!r}), tokenizer, {str(store_dir)!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    deadline = time.monotonic() + 300
    while not any(path.stat().st_size for path in store_dir.glob("stores/*.partial/tokens-*.bin")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (partial,) = store_dir.glob("stores/*")
    assert partial.name.endswith(".partial") and not (partial / "store.json").exists()
    assert find_store("big", source, tokenizer, store_dir) is None

    store = prepare_store("big", source, tokenizer, store_dir)
    assert [path for path in store_dir.glob("stores/*")] == [store.directory]
    (text,) = read_documents(source)
    assert store.document_tokens(0).tolist() == tokenizer.encode(text).tolist()


def test_what_another_source_left_half_way_is_swept(sources, store_dir):
    left = store_dir / "stores" / "gone-0123456789abcdef.partial"
    left.mkdir(parents=True)
    (left / "tokens-00000.bin").write_bytes(b"x")
    busy = store_dir / "stores" / "busy-0123456789abcdef"
    with building(busy, store_dir / "locks" / busy.name) as partial:
        prepare_store("web", sources["web"], byte_tokenizer(), store_dir)
        assert not left.exists()
        assert partial.exists()  # somebody holds its lock


def test_all_of_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    forced, target = [], tmp_path / "target"
    monkeypatch.setattr(os, "fsync", lambda descriptor: forced.append((os.fstat(descriptor).st_ino, target.exists())))
    with building(target, tmp_path / "lock") as partial:
        (partial / "hf" / "more").mkdir(parents=True)
        for name in ("tokenizer.json", "hf/vocab.json", "hf/more/merges.txt"):
            (partial / name).write_text("x")
    names = (".", "tokenizer.json", "hf", "hf/vocab.json", "hf/more", "hf/more/merges.txt")
    expected = [*((os.stat(target / name).st_ino, False) for name in names), (os.stat(tmp_path).st_ino, True)]
    assert sorted(forced) == sorted(expected)


def test_a_content_key_is_on_the_disk_before_it_has_its_name(sources, store_dir, monkeypatch):
    forced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: forced.append(os.fstat(descriptor)))
    content_of("web", sources["web"], store_dir)
    (noted,) = (store_dir / "contents").iterdir()
    assert [(status.st_ino, status.st_size) for status in forced] == [(noted.stat().st_ino, 32)]


def test_a_source_that_changes_meanwhile_is_refused(tmp_path, store_dir):
    path = tmp_path / "a.txt"
    path.write_text("before")

    def rewrite(done_bytes, total_bytes):
        path.write_text("after it")

    with pytest.raises(InputError, match="source 'a': .*a.txt changed while it was prepared"):
        prepare_store("a", SourceConfig(path=str(path)), byte_tokenizer(), store_dir, rewrite)
    assert list(store_dir.glob("stores/*")) == []


def test_a_store_folder_that_its_own_source_would_hold_is_refused(tmp_path):
    folder = tmp_path / "s3"
    folder.mkdir()
    (folder / "a.json").write_text("abc")
    for glob, inside in (("**/*", "stores"), ("**/*", "."), ("**/*.json", "stores")):
        source = SourceConfig(path=str(folder), glob=glob)
        for go in (lambda s, d: prepare_store("web", s, byte_tokenizer(), d), lambda s, d: make_bpe({"web": s}, d)):
            with pytest.raises(
                InputError, match="source 'web': the store folder .*s3.* lies in .*s3, so that .*--store-dir"
            ):
                go(source, folder / inside)
    assert everything_in(folder) == ["a.json"]
    for glob, inside in (("**/*", ".curriculum"), ("**/a.json", "stores"), ("*", "others")):
        store = prepare_store("web", SourceConfig(path=str(folder), glob=glob), byte_tokenizer(), folder / inside)
        assert store.document_tokens(0).tolist() == list(b"abc") and store.facts.num_documents == 1


def make_bpe(sources, store_dir):
    return prepare_tokenizer(BPE, sources, store_dir)


def test_a_source_that_changes_while_a_tokenizer_is_made_of_it_is_refused(sources, store_dir, monkeypatch):
    class Trained:
        def save(self, folder):
            (folder / "tokenizer.json").write_text("{}")
            (Path(sources["web"].path) / "1.txt").write_text("after it")

    monkeypatch.setattr(prepare, "make_tokenizer", lambda *arguments: Trained())
    with pytest.raises(InputError, match="tokenizer: .*web changed while it was prepared"):
        prepare_tokenizer(BPE, sources, store_dir)
    assert list(store_dir.glob("tokenizers/*")) == []


@pytest.mark.parametrize("bad", [b"\xff", b"\0"])
def test_bad_input_leaves_nothing_behind(tmp_path, store_dir, bad):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.txt").write_text("good")
    (tmp_path / "a" / "2.txt").write_bytes(bad)
    source = SourceConfig(path=str(tmp_path / "a"))
    with pytest.raises(InputError, match="2.txt: byte 0"):
        prepare_store("a", source, byte_tokenizer(), store_dir)
    assert list(store_dir.glob("stores/*")) == []
    with pytest.raises(InputError, match="2.txt: byte 0"):
        prepare_tokenizer(BPE, {"a": source}, store_dir)
    assert list(store_dir.glob("tokenizers/*")) == []


def test_an_empty_source_is_refused(tmp_path, store_dir):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(InputError, match=r"a.txt: no text in it \(1 empty documents\)"):
        prepare_store("a", SourceConfig(path=str(tmp_path / "a.txt")), byte_tokenizer(), store_dir)
    assert list(store_dir.glob("stores/*")) == []


def test_a_store_folder_that_cannot_be_written_is_refused(sources, tmp_path):
    (tmp_path / "file").write_text("")
    for go in (find_store, prepare_store):
        with pytest.raises(InputError, match="file/contents/.*: Not a directory; .*name another store folder"):
            go("web", sources["web"], byte_tokenizer(), tmp_path / "file")
    for go in (find_tokenizer, prepare_tokenizer):
        with pytest.raises(InputError, match="file/contents/.*: Not a directory; .*name another store folder"):
            go(BPE, sources, tmp_path / "file")
    with pytest.raises(
        InputError, match=r"file: cannot write here \(File exists\); mend that or choose another folder"
    ):
        prepare_folder([sources["web"].path], byte_tokenizer(), tmp_path / "file" / "out")
    for path in ("contents", "stores"):
        (tmp_path / "half").mkdir(exist_ok=True)
        (tmp_path / "half" / path).write_text("")
        with pytest.raises(InputError, match=f"half/{path}.*Not a directory; .*name another store folder"):
            find_store("web", sources["web"], byte_tokenizer(), tmp_path / "half")
        (tmp_path / "half" / path).unlink()
        prepare_store("web", sources["web"], byte_tokenizer(), tmp_path / "half")
        shutil.rmtree(tmp_path / "half" / "stores")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_folders_that_may_not_be_read_are_refused(sources, tmp_path, store_dir):
    def refused(closed, expected, go):
        closed.chmod(0)
        try:
            with pytest.raises(InputError, match=expected):
                go()
        finally:
            closed.chmod(0o700)

    web, tokenizer = sources["web"], byte_tokenizer()
    prepare_store("web", web, tokenizer, store_dir)
    for closed in (store_dir, store_dir / "contents", store_dir / "stores"):
        refused(closed, "Permission denied; ", lambda: find_store("web", web, tokenizer, store_dir))
    refused(Path(web.path), "web: Permission denied; ", lambda: find_store("web", web, tokenizer, store_dir))
    refused(tmp_path / "sources", "web: Permission denied; ", lambda: find_store("web", web, tokenizer, store_dir))
    documents = next(store_dir.glob("stores/*/documents.bin"))
    refused(documents, "documents.bin: Permission denied; ", lambda: find_store("web", web, tokenizer, store_dir))


def test_a_damaged_store_is_refused_not_used(sources, store_dir):
    store = prepare_store("web", sources["web"], byte_tokenizer(), store_dir)
    os.truncate(store.directory / "tokens-00000.bin", 10)
    with pytest.raises(InputError, match="tokens-00000.bin: 10 bytes; .*delete the folder"):
        prepare_store("web", sources["web"], byte_tokenizer(), store_dir)


def test_a_store_is_held_against_its_checksums_once_after_each_touch(sources, store_dir):
    store = prepare_store("web", sources["web"], byte_tokenizer(), store_dir)
    verified = [path.name for path in (store_dir / "verified").iterdir()]
    assert prepare_store("web", sources["web"], byte_tokenizer(), store_dir).facts == store.facts
    assert [path.name for path in (store_dir / "verified").iterdir()] == verified != []

    tokens = store.directory / "tokens-00000.bin"
    content = tokens.read_bytes()
    tokens.write_bytes(b"\1" + content[1:])
    assert find_store("web", sources["web"], byte_tokenizer(), store_dir) is not None  # a plan reads no tokens
    for _ in range(2):
        with pytest.raises(InputError, match="tokens-00000.bin: checksum .*delete the folder"):
            prepare_store("web", sources["web"], byte_tokenizer(), store_dir)
    tokens.write_bytes(content)
    prepare_store("web", sources["web"], byte_tokenizer(), store_dir)
    assert len(list((store_dir / "verified").iterdir())) == 2


@pytest.mark.parametrize(
    "noted",
    [b"", b"abc", bytes(32), b"\xff\xfe" * 16, b"0" * 32 + b"\n"],
    ids=["empty", "short", "nul", "not_utf8", "longer"],
)
def test_a_file_that_holds_no_content_key_counts_as_none(sources, store_dir, noted):
    made = {name: prepare_store(name, source, byte_tokenizer(), store_dir) for name, source in sources.items()}
    notes = {path: path.read_bytes() for path in (store_dir / "contents").iterdir()}
    assert len(notes) == 2
    for path in notes:
        path.write_bytes(noted)
    for name, source in sources.items():
        assert find_store(name, source, byte_tokenizer(), store_dir) is None
    for name, source in sources.items():
        assert prepare_store(name, source, byte_tokenizer(), store_dir).directory == made[name].directory
    assert {path: path.read_bytes() for path in (store_dir / "contents").iterdir()} == notes


def test_a_sidecar_that_says_something_else_is_refused(sources, store_dir):
    store = prepare_store("web", sources["web"], byte_tokenizer(), store_dir)
    path = store.directory / "store.json"
    facts = json.loads(path.read_text())
    for change in ({"eot": 3}, {"num_bytes": facts["num_bytes"] + 1}, {"checksums": {}}, {"checksum": None}):
        path.write_text(json.dumps(facts | change))
        with pytest.raises(InputError, match="store.json: its checksum does not fit what it says; delete the folder"):
            prepare_store("web", sources["web"], byte_tokenizer(), store_dir)


def test_a_store_in_the_folder_of_another_is_refused(sources, store_dir):
    web, code = (prepare_store(name, source, byte_tokenizer(), store_dir) for name, source in sources.items())
    own, other = ((store.directory / "key").read_text() for store in (web, code))
    assert (web.directory.name, code.directory.name) == (f"web-{own[:16]}", f"code-{other[:16]}") and len(own) == 32
    web.directory.rename(store_dir / "aside")
    code.directory.rename(web.directory)
    (store_dir / "aside").rename(code.directory)
    for go in (find_store, prepare_store):
        with pytest.raises(InputError, match=f"/key: b'{other}'; expected {own}: the store of other .*; delete the fo"):
            go("web", sources["web"], byte_tokenizer(), store_dir)
    (web.directory / "key").unlink()  # as in a store of a version that wrote none
    assert prepare_store("web", sources["web"], byte_tokenizer(), store_dir).facts == code.facts
    (web.directory / "key").mkdir()
    with pytest.raises(InputError, match="/key: Is a directory; delete the folder, and it is prepared again"):
        find_store("web", sources["web"], byte_tokenizer(), store_dir)


# --- tokenizers by path and by size -------------------------------------------------------------------------


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
    with pytest.raises(InputError, match="4096 asked, and the sources yield 260 "):
        prepare_tokenizer(TokenizerConfig("bpe", 4096), {"a": SourceConfig(path=str(tmp_path / "a.txt"))}, store_dir)
    assert list(store_dir.glob("tokenizers/*")) == []


def test_a_tokenizer_needs_text(store_dir, tmp_path):
    np.zeros(4, "<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(InputError, match="source 'a': .*a.bin holds ids of a tokenizer that exists already"):
        prepare_tokenizer(BPE, {"a": SourceConfig(path=str(tmp_path / "a.bin"))}, store_dir)
    with pytest.raises(InputError, match="kind char is made from the sources, and there are none"):
        find_tokenizer(TokenizerConfig("char"), {}, store_dir)


# --- tokens that exist already ------------------------------------------------------------------------------


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
    assert sorted(path.name for path in store.directory.iterdir()) == ["documents.bin", "key", "store.json"]
    assert find_store("flat", source, byte_tokenizer(), store_dir).directory == store.directory


def test_a_flat_file_of_wide_ids(tmp_path, store_dir):
    source = flat_source(tmp_path, [97, 256, 98], dtype="u32")
    store = prepare_store("flat", source, byte_tokenizer(), store_dir)
    assert store.facts.dtype == "u32" and store.view()[:].tolist() == [97, 256, 98]
    # The same bytes read as u16 are other tokens, and another store.
    narrow = SourceConfig(path=source.path, dtype="u16")
    assert len(prepare_store("flat", narrow, byte_tokenizer(), store_dir).view()) == 6


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
        (b"", "0 bytes; expected a multiple of 2"),
        (b"abc", "3 bytes; expected a multiple of 2, the size of a u16 token"),
        (np.array([0, 256, 257, 300], "<u2").tobytes(), r"token 2 \(byte 4\) is id 257; expected ids below 257"),
        (np.array([256, 256], "<u2").tobytes(), "no text in it, only end-of-text"),
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


def test_a_prepared_folder_is_a_source_and_a_tokenizer(sources, store_dir, tmp_path):
    tokenizer = prepare_tokenizer(BPE, sources, store_dir)
    output = tmp_path / "out" / "folder"
    store = prepare_folder([source.path for source in sources.values()], tokenizer, output)
    texts = [text for source in sources.values() for text in read_documents(source)]
    expected = [token for text in texts for token in [*tokenizer.encode(text).tolist(), tokenizer.eot]]
    assert np.fromfile(output / "tokens-00000.bin", "<u2").tolist() == expected
    assert load_tokenizer(output).fingerprint == tokenizer.fingerprint
    files = ["documents.bin", "ranks.tiktoken", "store.json", "tokenizer.json", "tokens-00000.bin"]
    assert everything_in(output) == files
    assert everything_in(output.parent) == ["folder", *(f"folder/{name}" for name in files)]

    source = SourceConfig(path=str(output))
    for found in (find_store("x", source, tokenizer, store_dir), prepare_store("x", source, tokenizer, store_dir)):
        assert found.directory == output and found.facts == store.facts
    with pytest.raises(InputError, match="source 'x': .*folder was prepared with") as error:
        prepare_store("x", source, byte_tokenizer(), store_dir)
    assert tokenizer.fingerprint in str(error.value) and byte_tokenizer().fingerprint in str(error.value)


def test_a_prepared_folder_is_written_whole_or_not_at_all(sources, tmp_path):
    output = tmp_path / "out"
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    for was_there in (False, True):
        if was_there:
            output.mkdir()
        with pytest.raises(InputError, match="bad.txt: byte 0"):
            prepare_folder([str(tmp_path / "bad.txt")], byte_tokenizer(), output)
        assert output.exists() == was_there and not output.with_name("out.partial").exists()
    prepare_folder([sources["web"].path], byte_tokenizer(), output)
    with pytest.raises(InputError, match="text: path is empty; expected a file or a folder"):
        prepare_folder([""], byte_tokenizer(), tmp_path / "none")
    with pytest.raises(InputError, match="out: exists already; name a new folder"):
        prepare_folder([sources["web"].path], byte_tokenizer(), output)


def test_a_prepared_folder_does_not_replace_the_one_that_a_shell_stands_in(sources, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for output in (".", here):
        with pytest.raises(InputError, match="is the folder that this runs in; name a new folder"):
            prepare_folder([sources["web"].path], byte_tokenizer(), output)
    assert here.samefile(".") and not list(here.iterdir())


def test_only_who_builds_the_same_folder_waits(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("abc")
    folder, outcomes = tmp_path / "new", []

    def prepare_a(output):
        return prepare_folder([str(tmp_path / "a.txt")], byte_tokenizer(), folder / output)

    def prepare_the_same():
        try:
            prepare_a("a")
        except InputError as error:
            outcomes.append(str(error))

    def build_beside(done_bytes, total_bytes):
        threads.extend(threading.Thread(target=go) for go in (lambda: prepare_a("b"), prepare_the_same))
        threads[0].start()
        threads[0].join(timeout=30)
        assert (folder / "b" / "store.json").exists() and capsys.readouterr().err == ""
        threads[1].start()
        deadline = time.monotonic() + 60
        while f"waiting for another process that builds {folder / 'a'}\n" not in (told := capsys.readouterr().err):
            assert told == "" and time.monotonic() < deadline
            time.sleep(0.001)

    threads = []
    prepare_folder([str(tmp_path / "a.txt")], byte_tokenizer(), folder / "a", progress=build_beside)
    threads[1].join()
    assert outcomes == [f"{folder / 'a'}: another process has just written it; name a new folder"]
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("num_threads", [8])
def test_after_failures_one_still_builds_at_a_time(tmp_path, num_threads):
    """Who waited for a lock whose file is gone by then does not build beside who holds a new one."""
    target, inside, most = tmp_path / "out", [], []

    def fail_often():
        for _ in range(20):
            with suppress(KeyError), building(target) as partial:
                inside.append(1)
                most.append(len(inside))
                (partial / "x").write_text("x")
                time.sleep(0.0002)
                inside.pop()
                raise KeyError

    threads = [threading.Thread(target=fail_often) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 20 * num_threads and list(tmp_path.iterdir()) == []


def test_an_output_that_its_own_text_would_hold_is_refused(tmp_path, monkeypatch):
    text = tmp_path / "data" / "web"
    text.mkdir(parents=True)
    (text / "a.txt").write_text("abc")
    (tmp_path / "linked").symlink_to(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    for output in ("data/tokens", "data/web/new/tokens", tmp_path / "linked" / "tokens", "data/none/../tokens"):
        with pytest.raises(InputError, match="the output lies in data, so that it would be read as text; name a new"):
            prepare_folder(["data"], byte_tokenizer(), output)
    assert everything_in(tmp_path / "data") == ["web", "web/a.txt"]
    # Hidden folders are no text, and a name that begins alike is another folder.
    for output in ("data/.tokens", "data-tokens"):
        assert prepare_folder(["data"], byte_tokenizer(), output).document_tokens(0).tolist() == list(b"abc")


@pytest.mark.parametrize("rewritten", ["a.txt", "added.txt"])
def test_text_that_changes_while_a_folder_is_made_of_it_is_refused(tmp_path, rewritten):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("before")

    def rewrite(done_bytes, total_bytes):
        (tmp_path / "text" / rewritten).write_text("after it")

    with pytest.raises(InputError, match="text changed while it was prepared; start again when it is complete"):
        prepare_folder([str(tmp_path / "text")], byte_tokenizer(), tmp_path / "out", progress=rewrite)
    assert everything_in(tmp_path) == ["text", *sorted({"text/a.txt", f"text/{rewritten}"})]


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


# --- conversations ------------------------------------------------------------------------------------------


SHORT = ChatConfig(system="S{content}/", user="U:{content}.", assistant="A:{content};")
TALKS = [
    [{"role": "user", "content": "é"}, {"role": "assistant", "content": "ab"}],
    [
        {"role": "user", "content": "<|endoftext|>"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ],
]
# The same by hand: (text, scored) and what end-of-text is.
BY_HAND = [
    ([("U:é.A:", 0), ("ab;", 1)], 1),
    ([("U:<|endoftext|>.A:", 0), ("c;", 1), ("U:d.", 0)], 0),
]


def talks(tmp_path, name="talks.jsonl", **options):
    path = tmp_path / name
    if not path.exists():
        path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    return SourceConfig(path=str(path), **({"format": "messages"} | options))


def assert_by_hand(store, tokenizer):
    tokens, scored = [], []
    for stretches, end in BY_HAND:
        for text, mark in stretches:
            ids = tokenizer.encode(text).tolist()
            tokens += ids
            scored += [mark] * len(ids)
        tokens, scored = [*tokens, tokenizer.eot], [*scored, end]
    assert store.view()[:].tolist() == tokens
    assert store.scored_view()[:].tolist() == scored
    assert store.facts.num_scored == sum(scored) > 0
    texts = ["".join(text for text, _ in stretches).encode() for stretches, _ in BY_HAND]
    assert store.documents["bytes"].tolist() == [len(text) for text in texts]
    hashes = [high << 64 | low for high, low in store.documents["hash"].tolist()]
    assert hashes == [xxhash.xxh3_128(text).intdigest() for text in texts]
    return tokens


def test_the_ids_of_conversations_by_hand(tmp_path, store_dir):
    store = prepare_store("talks", talks(tmp_path), byte_tokenizer(), store_dir, shard_tokens=5, chat=SHORT)
    tokens = assert_by_hand(store, byte_tokenizer())
    assert tokens == [*"U:é.A:ab;".encode(), 256, *b"U:<|endoftext|>.A:c;U:d.", 256]
    assert len(store.shards) == 8 and store.facts.num_documents == 2
    found = find_store("talks", talks(tmp_path), byte_tokenizer(), store_dir, SHORT)
    assert found.directory == store.directory and found.facts == store.facts


def test_a_tokenizer_is_made_from_what_the_template_gives(tmp_path, store_dir):
    sources = {"talks": talks(tmp_path)}
    char = prepare_tokenizer(TokenizerConfig("char"), sources, store_dir, SHORT)
    assert b"".join(char.tokens).decode() == "".join(sorted(set("U:é.A:ab;U:<|endoftext|>.A:c;U:d.")))
    assert find_tokenizer(TokenizerConfig("char"), sources, store_dir, SHORT).fingerprint == char.fingerprint
    assert find_tokenizer(TokenizerConfig("char"), sources, store_dir) is None
    assert_by_hand(prepare_store("talks", sources["talks"], char, store_dir, chat=SHORT), char)
    bpe = prepare_tokenizer(TokenizerConfig("bpe", 262), sources, store_dir, SHORT)
    assert_by_hand(prepare_store("talks", sources["talks"], bpe, store_dir, chat=SHORT), bpe)


def test_two_templates_two_stores_and_text_is_left_alone(tmp_path, store_dir):
    (tmp_path / "both.jsonl").write_text(
        json.dumps({"text": "x", "messages": TALKS[0], "prompt": "p", "completion": "c"})
    )
    options = [{"format": "messages"}, {"format": "completion"}, {"format": "text"}]
    made = {}
    for chat in (SHORT, ChatConfig(), ChatConfig(tool="{content}")):
        for option in options:
            source = SourceConfig(path=str(tmp_path / "both.jsonl"), **option)
            store = prepare_store("both", source, byte_tokenizer(), store_dir, chat=chat)
            made.setdefault(option["format"], []).append(store.directory)
    assert [len(set(directories)) for directories in made.values()] == [3, 3, 1]
    assert len({directory for directories in made.values() for directory in directories}) == 7
    assert not list(made["text"][0].glob("scored-*")) and list(made["messages"][0].glob("scored-*"))
    # Of text the key holds nothing of conversations.
    content = (store_dir / "contents").iterdir().__next__().read_text()
    key = digest(STORE_VERSION, content, byte_tokenizer().fingerprint, "text", None, None)
    assert made["text"][0].name == f"both-{key[:16]}"


def test_a_conversation_that_cannot_be_read_leaves_no_store(tmp_path, store_dir):
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": TALKS[0]}) + "\n" + json.dumps({"messages": TALKS[0][:1]}) + "\n")
    with pytest.raises(InputError, match="talks.jsonl:2: no answer in it, so nothing to score"):
        prepare_store("talks", talks(tmp_path), byte_tokenizer(), store_dir)
    assert list(store_dir.glob("stores/*")) == []


def test_documents_from_an_iterator(tmp_path, sources, store_dir):
    texts = [text for source in sources.values() for text in read_documents(source)]
    bpe = prepare_tokenizer(BPE, sources, store_dir)
    progress = Recorder()
    store = prepare_documents(iter([*texts, ""]), bpe, tmp_path / "out", progress=progress, shard_tokens=97)
    assert store.view()[:].tolist() == [t for text in texts for t in [*bpe.encode(text).tolist(), bpe.eot]]
    assert store.facts.num_documents == len(texts) > 30 and store.facts.num_empty == 1
    assert store.facts.source == "documents" and store.scored_view() is None
    # It is the folder that the same texts in files give.
    folder = prepare_folder([source.path for source in sources.values()], bpe, tmp_path / "same", shard_tokens=97)
    assert store.facts.content_hash == folder.facts.content_hash
    assert [p.name for p in sorted(store.directory.iterdir())] == [p.name for p in sorted(folder.directory.iterdir())]
    assert load_tokenizer(store.directory).fingerprint == bpe.fingerprint
    source = SourceConfig(path=str(tmp_path / "out"))
    assert find_store("x", source, bpe, store_dir).directory == store.directory
    assert progress.calls[-1] == (sum(map(len, texts)),) * 2
    with pytest.raises(InputError, match="source 'x': format messages, and .*out was prepared from plain text"):
        find_store("x", SourceConfig(path=str(tmp_path / "out"), format="messages"), bpe, store_dir)


def test_conversations_from_an_iterator(tmp_path, store_dir):
    store = prepare_documents((talk for talk in TALKS), byte_tokenizer(), tmp_path / "out", chat=SHORT, shard_tokens=5)
    assert_by_hand(store, byte_tokenizer())
    from_file = prepare_store("talks", talks(tmp_path), byte_tokenizer(), store_dir, chat=SHORT)
    assert store.facts.content_hash == from_file.facts.content_hash
    for option in ({"format": "messages"}, {"format": "completion"}):
        source = SourceConfig(path=str(tmp_path / "out"), **option)
        assert_by_hand(prepare_store("x", source, byte_tokenizer(), store_dir, chat=SHORT), byte_tokenizer())


def test_what_a_prepared_folder_cannot_follow_is_refused(tmp_path, store_dir):
    prepare_documents(TALKS, byte_tokenizer(), tmp_path / "out", chat=SHORT)
    prepare_documents(["a"], byte_tokenizer(), tmp_path / "text")
    chat = {"format": "messages"}
    refused = [
        ("out", {}, SHORT, "format text, and .*out was prepared from conversations, .*; set format: messages or"),
        ("out", chat | {"glob": "*.x"}, SHORT, r"glob '\*\.x' says how files are read, and .*out holds tokens already"),
        ("out", chat | {"text_key": "turns"}, SHORT, "text_key 'turns' says .*; leave text_key out"),
        ("text", {"text_key": "text"}, SHORT, "text_key 'text' says"),
        ("text", chat, SHORT, "format messages, and .*text was prepared from plain text"),
        ("out", chat, replace(SHORT, user="Q{content}"), r"chat\.user is 'Q{content}', and .*out was prepared with 'U:{content}\.'"),
        ("out", chat, replace(SHORT, tool="T{content}"), r"chat\.tool is 'T{content}', and .*out was prepared with None"),
    ]  # fmt: skip
    for folder, options, template, expected in refused:
        source = SourceConfig(path=str(tmp_path / folder), **options)
        for find in (find_store, prepare_store):
            with pytest.raises(InputError, match=f"source 'x': {expected}"):
                find("x", source, byte_tokenizer(), store_dir, chat=template)
    assert find_store("x", SourceConfig(path=str(tmp_path / "text")), byte_tokenizer(), store_dir, SHORT) is not None
    # A folder written before sidecars had the template is not held against any.
    sidecar = json.loads((tmp_path / "out" / "store.json").read_text())
    assert sidecar.pop("chat")["user"] == SHORT.user
    (tmp_path / "out" / "store.json").write_text(json.dumps(sidecar))
    assert_by_hand(find_store("x", talks(tmp_path, "out"), byte_tokenizer(), store_dir), byte_tokenizer())


def broken():
    yield "one"
    yield "two"
    raise OSError("the line went dead")


@pytest.mark.parametrize(
    ("given", "chat", "expected"),
    [
        (["a", 3], None, "document 2 holds a number; expected text"),
        (["a", b"b"], None, "document 2 holds bytes; expected text"),
        (["a\ud800"], None, "document 1 holds half a surrogate pair at character 1"),
        ([TALKS[0]], None, "document 1 holds a list; expected text; for a conversation give chat, its template"),
        (["a"], SHORT, "document 1: 'messages' holds text; expected a list of messages"),
        ([TALKS[0], TALKS[0][:1]], SHORT, "document 2: no answer in it, so nothing to score"),
        ([[{"role": "human", "content": "x"}]], SHORT, r"document 1: messages\[0\].role is 'human'; expected system"),
        ("a single text", None, "documents: a single text; expected an iterable of documents"),
        (None, None, "documents: null; expected an iterable of documents, such as a list"),
        (7, SHORT, "documents: a number; expected an iterable of documents"),
        ({"messages": TALKS[0]}, SHORT, "documents: an object; expected an iterable"),
        (
            [TALKS[0], {"messages": TALKS[0]}],
            SHORT,
            "document 2 holds an object; expected a list .*: give its 'messages'",
        ),
        ([], None, "documents: no text in it; expected at least one document"),
        ([""], None, r"documents: no text in it \(1 empty documents\)"),
        (broken(), None, "documents: after 2 of them: the line went dead"),
    ],
)
def test_what_is_no_document_is_refused_and_leaves_nothing(tmp_path, given, chat, expected):
    with pytest.raises(InputError, match=expected):
        prepare_documents(given, byte_tokenizer(), tmp_path / "out", chat=chat)
    assert list(tmp_path.iterdir()) == []


def test_only_a_store_that_marks_scored_tokens_is_given_marks(tmp_path, monkeypatch):
    class Recording(StoreWriter):
        def add_tokens(self, tokens, scored=None):
            given.append(None if scored is None else scored.tolist())
            super().add_tokens(tokens, scored)

    monkeypatch.setattr(documents, "StoreWriter", Recording)
    given = []
    prepare_documents(["abc"], byte_tokenizer(), tmp_path / "text")
    prepare_documents([TALKS[0]], byte_tokenizer(), tmp_path / "talk", chat=SHORT)
    # Of "U:é.A:" seven bytes, then "ab;" and end-of-text.
    assert given == [None, [False] * 7 + [True] * 4]


def test_the_name_of_a_tokenizer_is_none(tmp_path):
    for tokenizer, given in (("gpt2", "text"), (None, "null")):
        with pytest.raises(InputError, match=f"tokenizer: {given}; expected a Tokenizer, as byte_tokenizer"):
            prepare_documents(["a"], tokenizer, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_iterator_of_documents_is_not_asked_where_the_folder_is_taken(tmp_path):
    asked = []
    (tmp_path / "x").write_text("")
    with pytest.raises(InputError, match="exists already; name a new folder"):
        prepare_documents((asked.append(i) for i in range(3)), byte_tokenizer(), tmp_path)
    assert asked == []


def test_an_iterator_of_documents_is_not_held_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("curriculum.data.encode.GROUP_BYTES", 1 << 14)
    talk = [{"role": "user", "content": "u" * 500}, {"role": "assistant", "content": "a" * 500}]
    tokenizer = byte_tokenizer()
    tokenizer.encode("")
    tracemalloc.start()
    store = prepare_documents((talk for _ in range(5_000)), tokenizer, tmp_path / "out", chat=SHORT)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert store.facts.num_tokens == 5_000 * (500 + 500 + len("U:.A:;") + 1)
    # At most 2 groups a thread and one more, each its text and tokens, and one more being written.
    assert peak_bytes < 8 * (2 * NUM_THREADS + 2) * (1 << 14) + (1 << 19)


# --- progress -----------------------------------------------------------------------------------------------


def test_progress_counts_the_bytes_of_the_files(sources, store_dir, monkeypatch):
    monkeypatch.setattr("curriculum.data.pieces.PIECE_BYTES", 64)
    monkeypatch.setattr("curriculum.data.encode.GROUP_BYTES", 64)
    total_bytes = sum(path.stat().st_size for path in Path(sources["web"].path).iterdir())
    progress = Recorder()
    prepare_store("web", sources["web"], byte_tokenizer(), store_dir, progress)
    done = [done_bytes for done_bytes, _ in progress.calls]
    assert len(done) > 5 and done == sorted(done)
    assert progress.calls[-1] == (total_bytes, total_bytes) and done.count(total_bytes) == 1


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


class Terminal(io.StringIO):
    def isatty(self):
        return True


def play(stream, calls):
    clock = [100.0]
    progress = ConsoleProgress("web", stream, lambda: clock[0])
    for at_seconds, done_bytes, total_bytes in calls:
        clock[0] = 100.0 + at_seconds
        progress(done_bytes, total_bytes)
    return stream.getvalue()


def test_progress_on_the_console():
    calls = [(1, 10e6, 100e6), (2.5, 25e6, 100e6), (2.6, 26e6, 100e6), (5, 50e6, 100e6), (10, 100e6, 100e6)]
    assert play(io.StringIO(), calls) == (
        "web: 25.0 of 100.0 MB (25%), 10.0 MB/s, ETA 8s\nweb: 100.0 of 100.0 MB (100%), 10.0 MB/s, 10s\n"
    )
    renewed = play(Terminal(), calls)
    assert renewed.count("\r\x1b[K") == 3 and renewed.count("\n") == 1 and renewed.endswith("10s\n")
    assert play(Terminal(), [(0.1, 1e6, 2e6), (1.5, 2e6, 2e6)]) == ""


def test_progress_text():
    assert progress_text(5_000_000, None, 2.0) == "5.0 MB, 2.5 MB/s"
    assert progress_text(1_000_000, 7_201_000_000, 1.0) == "1.0 of 7,201.0 MB (0%), 1.0 MB/s, ETA 2h00m"
    assert progress_text(0, 10, 1.0) == "0.0 of 0.0 MB (0%), 0.0 MB/s"
    assert progress_text(1500, 6000, 100.0, WINDOWS) == "1,500 of 6,000 windows (25%), 15.0 windows/s, ETA 5m00s"


def test_two_starts_may_note_the_same_content_at_once(tmp_path, monkeypatch):
    """Threads, which have one process id as two machines that share a folder may have; both write, then both rename."""
    (tmp_path / "web.txt").write_text("text")
    source, both, rename = SourceConfig(path=str(tmp_path / "web.txt")), threading.Barrier(2, timeout=60), Path.replace

    def rename_together(path, target):
        both.wait()
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", rename_together)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: content_of("web", source, tmp_path / "store"), range(2))
    (noted,) = (tmp_path / "store/contents").iterdir()
    assert first == second == noted.read_text()
    assert noted.stat().st_mode == (tmp_path / "web.txt").stat().st_mode  # whoever shares the folder may read it
