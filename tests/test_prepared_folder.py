"""Prepared folders: made of files or of documents in memory, and read as sources."""

import errno
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prepared_sources import BPE, SHORT, TALKS, Recorder, assert_by_hand, everything_in, talks
from test_documents import read_documents

from curriculum.data import documents
from curriculum.data.prepare import find_store, prepare_documents, prepare_folder, prepare_store, prepare_tokenizer
from curriculum.data.sources import SourceConfig
from curriculum.data.store import open_store
from curriculum.data.store_writer import StoreWriter
from curriculum.data.tokenizers.tokenizer import NUM_THREADS, byte_tokenizer, load_tokenizer
from curriculum.errors import InputError


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
    with pytest.raises(
        InputError, match=r"out: exists already; name a new folder with --output \(in Python output_dir\)"
    ):
        prepare_folder([sources["web"].path], byte_tokenizer(), output)


def test_a_prepared_folder_does_not_replace_the_one_that_a_shell_stands_in(sources, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for output in (".", here):
        with pytest.raises(InputError, match="is the working folder; name a new folder"):
            prepare_folder([sources["web"].path], byte_tokenizer(), output)
    assert here.samefile(".") and not list(here.iterdir())


@pytest.mark.parametrize("there", [True, False])
def test_an_output_that_is_a_link_is_where_it_leads_to(sources, tmp_path, there):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere/tokens")
    if there:
        (tmp_path / "elsewhere/tokens").mkdir()
    before = everything_in(tmp_path)
    store = prepare_folder([sources["web"].path], byte_tokenizer(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "elsewhere/tokens").samefile(store.directory)
    assert open_store(tmp_path / "link").facts == store.facts
    found = {path for path in everything_in(tmp_path) if not path.startswith("elsewhere/tokens/")}
    assert found == {*before, "elsewhere/tokens"}


def test_an_output_that_cannot_be_put_in_its_place_is_told_by_its_name(sources, tmp_path, monkeypatch):
    def refused(path, to):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path), None, str(to))

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(InputError, match=f"^{tmp_path}/out: cannot write here .Device or resource busy.; fix"):
        prepare_folder([sources["web"].path], byte_tokenizer(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_that_its_own_text_would_hold_is_refused(tmp_path, monkeypatch):
    text = tmp_path / "data" / "web"
    text.mkdir(parents=True)
    (text / "a.txt").write_text("abc")
    (tmp_path / "linked").symlink_to(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    for output in ("data/tokens", "data/web/new/tokens", tmp_path / "linked" / "tokens", "data/none/../tokens"):
        with pytest.raises(InputError, match="the output lies in data and would be read as text; name a new"):
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


def test_documents_from_an_iterator(tmp_path, sources, store_dir, monkeypatch):
    monkeypatch.setattr("curriculum.data.store_writer.SHARD_TOKENS", 97)
    texts = [text for source in sources.values() for text in read_documents(source)]
    bpe = prepare_tokenizer(BPE, sources, store_dir)
    progress = Recorder()
    store = prepare_documents(iter([*texts, ""]), bpe, tmp_path / "out", progress=progress)
    assert store.view()[:].tolist() == [t for text in texts for t in [*bpe.encode(text).tolist(), bpe.eot]]
    assert store.facts.num_documents == len(texts) > 30 and store.facts.num_empty == 1
    assert store.facts.source == "documents" and store.scored_view() is None
    # It is the folder that the same texts in files give.
    folder = prepare_folder([source.path for source in sources.values()], bpe, tmp_path / "same")
    assert store.facts.content_hash == folder.facts.content_hash
    assert [p.name for p in sorted(store.directory.iterdir())] == [p.name for p in sorted(folder.directory.iterdir())]
    assert load_tokenizer(store.directory).fingerprint == bpe.fingerprint
    source = SourceConfig(path=str(tmp_path / "out"))
    assert find_store("x", source, bpe, store_dir).directory == store.directory
    assert progress.calls[-1] == (sum(map(len, texts)),) * 2
    with pytest.raises(InputError, match="source 'x': format messages, but .*out was prepared from plain text"):
        find_store("x", SourceConfig(path=str(tmp_path / "out"), format="messages"), bpe, store_dir)


def test_conversations_from_an_iterator(tmp_path, store_dir, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("curriculum.data.store_writer.SHARD_TOKENS", 5)
        store = prepare_documents((talk for talk in TALKS), byte_tokenizer(), tmp_path / "out", chat=SHORT)
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
        ("out", {}, SHORT, "format text, but .*out was prepared from conversations, .*; set format: messages or"),
        ("out", chat | {"glob": "*.x"}, SHORT, r"glob '\*\.x' says how files are read, but .*out holds tokens already"),
        ("out", chat | {"text_key": "turns"}, SHORT, "text_key 'turns' says .*; leave text_key out"),
        ("text", {"text_key": "text"}, SHORT, "text_key 'text' says"),
        ("text", chat, SHORT, "format messages, but .*text was prepared from plain text"),
        ("out", chat, replace(SHORT, user="Q{content}"), r"chat\.user is 'Q{content}', but .*out was prepared with 'U:{content}\.'"),
        ("out", chat, replace(SHORT, tool="T{content}"), r"chat\.tool is 'T{content}', but .*out was prepared with None"),
    ]  # fmt: skip
    for folder, options, template, expected in refused:
        source = SourceConfig(path=str(tmp_path / folder), **options)
        for find in (find_store, prepare_store):
            with pytest.raises(InputError, match=f"source 'x': {expected}"):
                find("x", source, byte_tokenizer(), store_dir, chat=template)
    assert find_store("x", SourceConfig(path=str(tmp_path / "text")), byte_tokenizer(), store_dir, SHORT) is not None


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
        ([TALKS[0]], None, "document 1 holds a list; expected text; for conversations give their template as chat"),
        (["a"], SHORT, "document 1: 'messages' holds text; expected a list of messages"),
        ([TALKS[0], TALKS[0][:1]], SHORT, "document 2: no answer, so nothing to score"),
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
        (broken(), None, "documents: after 2 documents: the line went dead"),
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
        with pytest.raises(InputError, match=f"tokenizer: {given}; expected a Tokenizer, such as byte_tokenizer"):
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
