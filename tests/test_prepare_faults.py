"""Preparing beside other processes, killed half way, from text that changes, and onto what is damaged."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prepared_sources import BPE, Recorder, everything_in, make_text
from test_documents import read_documents

from curriculum.data import prepare
from curriculum.data.cache import building, content_of
from curriculum.data.prepare import find_store, find_tokenizer, prepare_folder, prepare_store, prepare_tokenizer
from curriculum.data.sources import SourceConfig
from curriculum.data.store import open_store
from curriculum.data.tokenizers.tokenizer import byte_tokenizer, load_tokenizer
from curriculum.errors import InputError

ROOT = Path(__file__).parents[1]


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


def test_who_waits_for_another_process_is_told_and_finds_the_folder(tmp_path, capsys):
    target, found = tmp_path / "target", []

    def build():
        with building(target, tmp_path / "lock") as partial:
            found.append(partial)

    waiting, told, deadline = threading.Thread(target=build), "", time.monotonic() + 60
    with building(target, tmp_path / "lock"):
        waiting.start()
        while (told := told + capsys.readouterr().err) != f"waiting for another process that builds {target}\n":
            assert time.monotonic() < deadline
            time.sleep(0.001)
    waiting.join()
    assert found == [None] and target.is_dir()


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
    file, folder = forced
    assert (file.st_ino, file.st_size) == (noted.stat().st_ino, 32) and folder.st_ino == noted.parent.stat().st_ino


def test_a_content_key_that_cannot_be_written_leaves_nothing(sources, store_dir, monkeypatch):
    def refuse(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(InputError, match=r"prepared: cannot write here \(No space left on device\)"):
        content_of("web", sources["web"], store_dir)
    assert os.listdir(store_dir / "contents") == []


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
                InputError, match="source 'web': the store folder .*s3.* lies in .*s3, so .*--store-dir"
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
        with pytest.raises(InputError, match="file/contents/.*: Not a directory; .*fix that or choose another"):
            go("web", sources["web"], byte_tokenizer(), tmp_path / "file")
    for go in (find_tokenizer, prepare_tokenizer):
        with pytest.raises(InputError, match="file/contents/.*: Not a directory; .*fix that or choose another"):
            go(BPE, sources, tmp_path / "file")
    with pytest.raises(InputError, match=r"file: cannot write here \(File exists\); fix that or choose another folder"):
        prepare_folder([sources["web"].path], byte_tokenizer(), tmp_path / "file" / "out")
    for path in ("contents", "stores"):
        (tmp_path / "half").mkdir(exist_ok=True)
        (tmp_path / "half" / path).write_text("")
        with pytest.raises(InputError, match=f"half/{path}.*Not a directory; .*fix that or choose another"):
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
    refused(
        documents,
        "documents.bin: cannot be read: Permission denied",
        lambda: find_store("web", web, tokenizer, store_dir),
    )


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
        for go in (find_store, prepare_store):
            with pytest.raises(InputError, match="store.json: its checksum does not match its content; delete the fo"):
                go("web", sources["web"], byte_tokenizer(), store_dir)


def test_of_two_that_write_the_same_folder_the_first_to_finish_has_it(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    folder, made = tmp_path / "new", []

    def prepare_a(output, progress=None):
        return prepare_folder([str(tmp_path / "a.txt")], byte_tokenizer(), folder / output, progress=progress)

    def prepare_beside(done_bytes, total_bytes):
        made.extend(prepare_a(output).facts for output in ("b", "a"))

    with pytest.raises(InputError, match="new/a: exists already; name a new folder"):
        prepare_a("a", prepare_beside)
    assert [open_store(folder / name).facts for name in "ba"] == made
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b"]


def test_what_was_left_of_a_new_folder_is_cleared_by_the_next_try(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    program = (
        "import os, sys; from curriculum.data.prepare import *\n"
        "prepare_folder([sys.argv[1]], byte_tokenizer(), sys.argv[2], progress=lambda *_: os.kill(os.getpid(), 9))"
    )
    new = tmp_path / "new" / "a"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "a.txt"), str(new)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL and not new.exists() and len(list(new.parent.iterdir())) == 1
    prepare_folder([str(tmp_path / "a.txt")], byte_tokenizer(), new)
    assert list(new.parent.iterdir()) == [new]


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
