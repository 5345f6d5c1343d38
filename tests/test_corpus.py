"""All the data of a run: eval sets that are what they are whatever stands beside them, and training without them."""

import json
import os

import numpy as np
import pytest
from hf_folders import write_folder

from curriculum.config import build_config
from curriculum.data.chat import CHATML, Template
from curriculum.data.corpus import find_sizes, load_corpus
from curriculum.data.prepare import prepare_folder
from curriculum.data.tokenizers.chat_template import chat_template
from curriculum.data.tokenizers.tokenizer import byte_tokenizer, load_tokenizer
from curriculum.data.tokenizers.vocabulary import char_tokenizer
from curriculum.errors import InputError

PRIMARY = {"path": "val.jsonl"}
ONE_PHASE = {"phases": [{"name": "a", "until": "end", "mixture": {"web": 1}}]}


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


def test_what_is_wrong_with_folders_and_eval_sets_is_told_before_a_source_is_tokenized(folder):
    (folder / "bad.jsonl").write_text('{"text": "fine"}\n{"body": "x"}\n')
    prepare_folder(["val.jsonl"], char_tokenizer(["abc ehilmnostg"]), folder / "other")
    for path, message in (
        ("bad.jsonl", "bad.jsonl:2: no key 'text'"),
        ("other", "source 'evalsets.sets.dom': other was prepared with tokenizer"),
    ):
        with pytest.raises(InputError, match=message):
            load_corpus(config_of(sets={"dom": {"path": path}}), folder / "store")
    with pytest.raises(InputError, match="source 'book': other was prepared with tokenizer"):
        load_corpus(config_of(files={"web": "web.jsonl", "book": "other"}), folder / "store")
    # val.jsonl stands before bad.jsonl; no source was, and nothing before a folder.
    assert [path.name.rpartition("-")[0] for path in (folder / "store/stores").iterdir()] == ["evalsets.primary"]
    corpus = load_corpus(config_of(sets={"dom": {"path": "val.jsonl"}}), folder / "store")
    assert list(corpus.details) == ["web", "book"] and list(corpus.evalsets) == ["primary", "dom"]


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_text_that_will_be_refused_is_told_before_it_is_prepared(folder, tokenizer):
    """By its first row, or the columns of its first table; the rest is not looked at."""
    import pyarrow
    from pyarrow.parquet import write_table

    chats = folder / "chats"
    chats.mkdir()
    (chats / "a.jsonl").write_text('{"messages": [{"role": "bot", "content": "x"}]}\n')
    (chats / "b.jsonl").write_text("no row\n")
    (folder / "later.jsonl").write_text('{"text": "a row"}\nno row\n')
    (folder / "zeros").write_bytes(b"\0" * 9)
    write_table(pyarrow.table({"body": ["a", "b"]}), "rows.parquet")
    (folder / "cut.parquet").write_bytes((folder / "rows.parquet").read_bytes()[:-1])
    for source, refused in (
        (
            {"path": "web.jsonl", "text_key": "texts"},
            "web.jsonl:1: no key 'texts'; found 'text'; did you mean text_key",
        ),
        ({"path": "rows.parquet"}, "rows.parquet: no key 'text'; found 'body'"),
        ({"path": "cut.parquet", "text_key": "body"}, "expected a complete parquet file"),
        ({"path": "chats", "format": "messages"}, "a.jsonl:1: messages.0..role"),
        ({"path": "zeros"}, "zeros: byte 0 is NUL"),
        ({"path": "later.jsonl"}, None),
        ({"path": "rows.parquet", "text_key": "body"}, None),
    ):
        as_source = {"sources": {"web": source}, **ONE_PHASE}
        as_evalset = {"evalsets": {"primary": PRIMARY, "sets": {"dom": source}}}
        for change in (as_source, as_evalset):
            config = config_of(tokenizer={"kind": tokenizer}, **change)
            if refused is None:
                assert find_sizes(config, folder / "store").tokens_per_epoch["web"] is None
            else:
                with pytest.raises(InputError, match=refused):
                    find_sizes(config, folder / "store")
                if tokenizer == "byte":  # the characters of val.jsonl are not all in web
                    with pytest.raises(InputError, match=refused):
                        load_corpus(config, folder / "other")
    assert not (folder / "store").exists()


def test_an_eval_set_with_all_text_of_a_source_is_told_before_it_is_prepared(folder):
    (folder / "link.jsonl").symlink_to("web.jsonl")
    sets = {"dom": {"path": str(folder / "web.jsonl")}, "other": {"path": "link.jsonl", "max_sequences": 2}}
    config = config_of({"web": "10%"}, sets=sets)
    told = r"sources.web: web.jsonl is the text of eval sets 'dom', 'other' too, .*; use held_out_of: web there"
    with pytest.raises(InputError, match=told):
        find_sizes(config, folder / "store")
    with pytest.raises(InputError, match="sources.web: .* occur in eval sets 'dom', 'other', more than 1%"):
        load_corpus(config, folder / "store")
    write_rows(folder / "again.jsonl", rows("again", 3))
    other_key = config_of(sets={"dom": {"path": "web.jsonl", "text_key": "text"}, "key": {"path": "again.jsonl"}})
    with pytest.raises(InputError, match="sources.web: .* eval set 'dom' too"):
        find_sizes(other_key, folder / "new")
    find_sizes(config_of(sets={"key": {"path": "again.jsonl"}}), folder / "new")


def test_files_that_look_like_rows_and_are_read_as_text_are_told(folder):
    (folder / "web.json").write_text((folder / "web.jsonl").read_text())  # JSON lines under another name
    for name in ("tables/a.CSV", "tables/b/c.tsv", "mixed/a.json", "mixed/b.txt", "val.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name}, read as it stands " * 9)
    files = {"web": "web.json", "tables": "tables", "mixed": "mixed", "law": "law.jsonl"}
    config = config_of(files=files, primary={"path": "val.json"}, sets={"rows": {"path": "val.jsonl"}})
    remedy = "if it holds rows, convert them to .jsonl (one object per line) or .parquet"
    warnings = (
        f"source web: each .json file is read as one document of plain text; {remedy}",
        f"source tables: each .csv or .tsv file is read as one document of plain text; {remedy}",
        f"eval set primary: each .json file is read as one document of plain text; {remedy}",
    )
    assert find_sizes(config, folder / "store").warnings == warnings  # before anything is prepared
    corpus = load_corpus(config, folder / "store")
    assert corpus.warnings == find_sizes(config, folder / "store").warnings == warnings
    assert [details["documents"] for details in corpus.details.values()] == [1, 2, 2, 300]
    keyed = build_config({**config.to_json(), "sources": {"web": {"path": "web.json", "text_key": "text"}}} | ONE_PHASE)
    with pytest.raises(InputError, match="web.json: plain text has no rows; text_key 'text' applies to rows"):
        find_sizes(keyed, folder / "new")


def test_plain_text_beside_rows_is_told(folder):
    for source, names in (("med", ["README.md"]), ("law", ["a.json", "b/LICENSE"]), ("web", ["a", "b", "c"])):
        (folder / source).mkdir()
        write_rows(folder / source / "rows.jsonl", rows(source, 40))
        for name in names:
            (folder / source / name).parent.mkdir(exist_ok=True)
            (folder / source / name).write_text(f"{source} {name}, read as it stands " * 9)
    (folder / "rows").mkdir()
    write_rows(folder / "rows" / "a.jsonl", rows("a", 40))
    write_rows(folder / "rows" / "b.NDJSON", rows("b", 40))
    write_rows(folder / "med" / "more.JSONL", rows("more", 40))  # of two spellings no simple glob leaves out the rest
    config = config_of(files={name: name for name in ("web", "law", "rows")}, sets={"med": {"path": "med"}})
    leaves = 'a glob such as "**/*.jsonl" leaves'
    warnings = (
        f"source web: a and 2 more files are plain text beside rows and are read as a document each; {leaves} them out",
        f"source law: a.json and b/LICENSE are plain text beside rows and are read as a document each; {leaves} them out",
        "eval set med: README.md is plain text beside rows and is read as a document; a glob that only the files of "
        "rows match leaves it out",
    )
    assert find_sizes(config, folder / "store").warnings == warnings  # before anything is prepared
    corpus = load_corpus(config, folder / "store")
    assert corpus.warnings == warnings
    assert [details["documents"] for details in corpus.details.values()] == [43, 42, 80]
    with_glob = {"path": "med", "glob": "**/*.jsonl"}
    config = config_of(files={"web": "rows"}, sets={"med": with_glob})
    assert load_corpus(config, folder / "store").warnings == ()


def test_copies_among_training_documents_are_told(folder):
    write_rows(folder / "twice.jsonl", [*rows("a", 40), *rows("a", 5)])
    write_rows(folder / "hardly.jsonl", [*rows("b", 40), *rows("b", 4)])
    config = config_of(files={"twice": "twice.jsonl", "hardly": "hardly.jsonl"}, primary={"path": "book.txt"})
    assert not any("copies" in warning for warning in find_sizes(config, folder / "store").warnings)
    warnings = load_corpus(config, folder / "store").warnings
    assert [warning for warning in warnings if "copies" in warning] == [
        "source twice: 5 of 45 training documents are exact copies of others in it, so one epoch reads their text "
        "several times; remove the copies if that is not meant"
    ]
    assert find_sizes(config, folder / "store").warnings == warnings


def test_an_arrow_stream_without_its_end_is_told(folder):
    import pyarrow

    table = pyarrow.table({"text": rows("web", 40)})
    for name, form in (("stream", "new_stream"), ("file", "new_file"), ("cut", "new_stream")):
        with getattr(pyarrow.ipc, form)(f"{name}.arrow", table.schema) as writer:
            writer.write_table(table)
    os.truncate("cut.arrow", os.path.getsize("cut.arrow") - 8)
    before_0_15 = pyarrow.ipc.IpcWriteOptions(use_legacy_format=True)
    with pyarrow.ipc.new_stream("legacy.arrow", table.schema, options=before_0_15) as writer:
        writer.write_table(table)
    config = config_of(files={name: f"{name}.arrow" for name in ("stream", "file", "cut", "legacy")})
    doubt = "its writer may have been stopped; if rows are missing, write it again"
    warnings = (f"source cut: cut.arrow has no end mark: {doubt}",)
    assert find_sizes(config, "store").warnings == load_corpus(config, "store").warnings == warnings


def test_a_divided_document_that_stands_in_another_set_is_refused(folder):
    # So few documents that the tail is held out, and one of them is above 1 %.
    texts = [*rows("short", 98), "long " * 200]
    write_rows(folder / "web.jsonl", texts)
    config = config_of({"web": "10%"}, sets={"tail": {"held_out_of": "web"}})
    assert load_corpus(config, folder / "store").evalsets["tail"].num_documents == 1
    write_rows(folder / "some.jsonl", texts[-1:])
    sets = {"tail": {"held_out_of": "web"}, "some": {"path": "some.jsonl"}}
    with pytest.raises(InputError, match="sources.web: 1 of 99 documents also occur in eval set 'some'"):
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
    assert bytes(corpus.streams["book"][:].tolist()).decode() == book[: len(corpus.streams["book"])]
    law = corpus.streams["law"][:]
    assert bytes(law[law != corpus.tokenizer.eot].tolist()).decode().count("book 99") == 0
    assert find_sizes(config_of({"book": "10%"}, sets=sets, files=files), folder / "store").details == corpus.details
    # Without a set that measures the tail the document is nobody's.
    corpus = load_corpus(config_of({"book": "10%"}, files=files), folder / "store")
    assert corpus.details["law"]["dropped_documents"] == {}


def test_the_tail_itself_counts_as_a_document(folder):
    files = {"book": "book.txt", "law": "law.jsonl"}
    config = config_of({"book": "10%"}, sets={"tail": {"held_out_of": "book"}}, files=files)
    corpus = load_corpus(config, folder / "store")
    tail = (folder / "book.txt").read_text()[len(corpus.streams["book"]) :]
    assert corpus.evalsets["tail"].num_bytes == len(tail) > 100
    write_rows(folder / "law.jsonl", [*rows("law", 299), tail])
    assert load_corpus(config, folder / "store").details["law"]["dropped_documents"] == {"tail": 1}


def test_a_small_source_with_a_copy_can_be_measured(folder):
    """Of 50 documents the last is the first once more: held out, and never read."""
    texts = rows("law", 49)
    write_rows(folder / "law.jsonl", [*texts, texts[0]])
    config = config_of({"law": "10%"}, {"held_out_of": "law"}, files={"law": "law.jsonl"})
    corpus = load_corpus(config, folder / "store")
    assert corpus.details["law"]["dropped_documents"] == {} and corpus.warnings == ()
    stream = corpus.streams["law"][:].tolist()
    eot = corpus.tokenizer.eot
    read = bytes(token if token != eot else 10 for token in stream).decode().split("\n")
    assert texts[0] not in read and texts[1] in read
    assert sum(corpus.evalsets["primary"].num_bytes_N) > 2 * len(texts[0])
    assert find_sizes(config, folder / "store").details == corpus.details


def test_the_same_file_as_another_source_is_refused(folder):
    config = config_of({"book": "10%"}, {"held_out_of": "book"}, files={"book": "book.txt", "again": "book.txt"})
    with pytest.raises(InputError, match="sources.again: 1 of 1 documents also occur in eval set 'primary'"):
        load_corpus(config, folder / "store")


def test_a_given_tokenizer_is_used(folder):
    config = config_of(tokenizer={"kind": "bpe", "vocab_size": 300})
    made = load_corpus(config, folder / "store").tokenizer
    assert made.vocab_size == 300
    made.save(folder / "snapshot")
    given = load_tokenizer(folder / "snapshot")
    (folder / "web.jsonl").write_text(json.dumps({"text": "other text now"}))
    assert load_corpus(config, folder / "store", given).tokenizer is given
    assert load_corpus(config, folder / "store", byte_tokenizer()).streams["book"].dtype == np.uint16
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
    with pytest.raises(InputError, match=f"{place}.hf: hf is ':en'; expected a dataset of the hub"):
        config_of(primary=empty) if name == "primary" else config_of(sets={name: empty})


def test_a_set_of_which_whole_documents_are_little_is_said(folder):
    """Where the short document comes first, by its hash, the long one has no room beside it."""

    def loaded(short, max_sequences):
        write_rows(folder / "long.jsonl", [short, "x" * 1000])
        corpus = load_corpus(config_of(sets={"long": {"path": "long.jsonl", "max_sequences": max_sequences}}), "store")
        told = [warning for warning in corpus.warnings if "evalsets.sets.long" in warning]
        return corpus.evalsets["long"], told

    found = (loaded(f"short {n}", 50) for n in range(40))
    evalset, told = next((evalset, told) for evalset, told in found if evalset.num_windows == 1)
    assert evalset.num_left_out == 1
    assert told[0].startswith("evalsets.sets.long has 1 of the 50 windows that its max_sequences allows: the next")
    evalset, told = loaded("short", 200)
    assert (evalset.num_left_out, evalset.num_documents, told) == (0, 2, [])


def test_a_set_whose_first_document_alone_is_too_long_is_taken_whole_and_said(folder):
    def told(of):
        return [warning for warning in of.warnings if warning.startswith("evalsets.")]

    write_rows(folder / "long.jsonl", ["x" * 1000, "", *["y" * n for n in range(1000, 1019)]])
    long = {"path": "long.jsonl", "max_sequences": 2}
    write_rows(folder / "one.jsonl", ["x" * 1000])
    config = config_of(primary=long, sets={"long": long, "one": {**long, "path": "one.jsonl"}})
    assert told(find_sizes(config, "store")) == []
    corpus = load_corpus(config, "store")
    windows = corpus.evalsets["long"].num_windows
    assert windows > 2 and corpus.evalsets["one"].num_tokens == 1000
    many = (
        f"measures 1 of its 20 documents: the first alone has {windows} windows, more than max_sequences of 2, which "
        f"cuts none; raise it well above {windows}, or split long documents"
    )
    one = corpus.evalsets["one"].num_windows
    assert told(corpus) == [
        f"evalsets.primary {many}",
        f"evalsets.sets.long {many}",
        f"evalsets.sets.one has {one} windows, more than its max_sequences of 2, which cuts no document: it is a "
        "single one; split it",
    ]
    assert told(find_sizes(config, "store")) == told(corpus)
    write_rows(folder / "long.jsonl", ["x" * n for n in range(1, 40)])
    write_rows(folder / "one.jsonl", ["x"])
    load_corpus(config, "store")
    assert told(find_sizes(config, "store")) == []


def talk(i, num_words=3):
    """A conversation of two answers."""
    words = " ".join(["word"] * num_words)
    turns = [("user", f"ask {i}"), ("assistant", f"say {i} {words}"), ("user", "more"), ("assistant", f"é{i}")]
    return [{"role": role, "content": content} for role, content in turns]


def write_talks(path, talks):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in talks))


CHAT = {"user": "U:{content}.", "assistant": "A:{content};"}


def chat_config(sets=None, chat=CHAT, **changes):
    return config_of(
        sources={
            "web": {"path": "web.jsonl"},
            "talks": {"path": "talks.jsonl", "format": "messages", "held_out": "10%"},
        },
        phases=[{"name": "a", "until": "end", "mixture": {"web": 0.5, "talks": 0.5}}],
        evalsets={"primary": {"held_out_of": "talks"}, "sets": sets or {}},
        chat=chat,
        **changes,
    )


def scored_text(evalset):
    """The scored bytes of each document, as text."""
    found = [b""] * evalset.num_documents
    for row in range(evalset.num_windows):
        targets = evalset.tokens_NT1[row, 1:][evalset.scored_NT[row]]
        found[evalset.document_N[row]] += bytes(targets.tolist())
    return [text.decode() for text in found]


def test_a_chat_template_that_is_not_the_configs_is_warned_of(folder):
    write_talks(folder / "talks.jsonl", [talk(i) for i in range(400)])
    brought = write_folder("gpt2", folder / "brought")
    about = (
        "conversations are written as ChatML, not by the chat template that the tokenizer brings along; to train on "
    )

    def warned(**changes):
        config = chat_config(tokenizer={"kind": "hf", "path": "brought"}, **changes)
        sizes, corpus = find_sizes(config, folder / "store"), load_corpus(config, folder / "store")
        found = [[warning for warning in one.warnings if about in warning] for one in (sizes, corpus)]
        assert found[0] == found[1]
        return len(found[0])

    assert warned(chat={}) == 0  # it brings none
    (brought / "chat_template.jinja").write_text("{{ messages }}")
    assert warned(chat={}) == 1 and warned() == 0
    (brought / "chat_template.jinja").write_bytes(b"\xff")
    assert warned(chat={}) == 1
    for chatml in (chat_template(Template(CHATML), load_tokenizer(brought)), "{{ '<|im_start|>' + message['role'] }}"):
        (brought / "chat_template.jinja").write_text(chatml)
        assert warned(chat={}) == 0


def test_an_eval_set_of_conversations_measures_answers(folder):
    write_talks(folder / "talks.jsonl", [talk(i) for i in range(400)])
    write_talks(folder / "other.jsonl", [talk(i) for i in range(1000, 1003)])
    pairs = [{"prompt": "2 + 2 =" * 9, "completion": " 4"}, {"prompt": "3 + 3 =", "completion": " 6"}]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    sets = {
        "other": {"path": "other.jsonl", "format": "messages"},
        "pairs": {"path": "pairs.jsonl", "format": "completion"},
    }
    corpus = load_corpus(chat_config(sets), folder / "store")
    assert scored_text(corpus.evalsets["other"]) == [f"say {i} word word word;é{i};" for i in range(1000, 1003)]
    assert scored_text(corpus.evalsets["pairs"]) == [" 4", " 6"]
    pairs = corpus.evalsets["pairs"]
    # The prompt of 63 bytes fills three windows of 20, which have nothing to measure.
    assert (pairs.num_windows, pairs.num_tokens, pairs.num_bytes) == (2, 4, 4)
    held_out = scored_text(corpus.evalsets["primary"])
    assert len(held_out) >= 30
    numbers = [int(text.split()[1]) for text in held_out]
    assert held_out == [f"say {i} word word word;é{i};" for i in numbers]
    assert corpus.evalsets["primary"].num_bytes == sum(len(text.encode()) for text in held_out)
    train = bytes(t if t < 256 else 10 for t in corpus.streams["talks"].tokens[:].tolist()).decode().split("\n")
    assert {line.split(".")[0] for line in train if line} == {f"U:ask {i}" for i in set(range(400)) - set(numbers)}
    sizes = find_sizes(chat_config(sets), folder / "store")
    assert sizes.details == corpus.details and sizes.tokens_per_epoch["talks"] == corpus.tokens_per_epoch["talks"] > 0
    assert sizes.warnings == corpus.warnings == ()
    # Another template: other stores, which are not there yet; web is.
    sizes = find_sizes(chat_config(sets, chat=CHAT | {"user": "Q:{content}."}), folder / "store")
    assert sizes.tokens_per_epoch == {"talks": None, "web": corpus.tokens_per_epoch["web"]}
    assert sizes.warnings[-1].endswith("not counted: eval sets other, pairs")


def test_a_tokenizer_of_conversations_knows_the_template(folder):
    write_talks(folder / "talks.jsonl", [talk(i) for i in range(400)])
    config = chat_config(chat=CHAT | {"user": "¿{content}?"}, tokenizer={"kind": "char"})
    corpus = load_corpus(config, folder / "store")
    assert {"¿".encode(), b"?", b";"} < set(corpus.tokenizer.tokens)
    assert find_sizes(config, folder / "store").tokens_per_epoch["talks"] == corpus.tokens_per_epoch["talks"] > 0
    assert find_sizes(chat_config(tokenizer={"kind": "char"}), folder / "store").tokenizer is None


def test_a_conversation_that_an_eval_set_has_is_dropped_from_training(folder):
    talks = [talk(i) for i in range(400)]
    write_talks(folder / "talks.jsonl", talks)
    kept = load_corpus(chat_config(), folder / "store").evalsets["primary"].tokens_NT1
    numbers = [i for i in range(400) if f"ask {i}." in bytes(t for t in kept.flatten().tolist() if t < 256).decode()]
    other = next(i for i in range(400) if i not in numbers)
    write_talks(folder / "some.jsonl", [talks[other]])
    sets = {"some": {"path": "some.jsonl", "format": "messages"}}
    corpus = load_corpus(chat_config(sets), folder / "store")
    assert corpus.details["talks"]["dropped_documents"] == {"some": 1}


def test_a_single_conversation_cannot_be_held_out_of(folder):
    messages = [{"role": "user", "content": "x" * 500}, {"role": "assistant", "content": "y" * 40}]
    write_talks(folder / "talks.jsonl", [messages])
    with pytest.raises(InputError, match="sources.talks.held_out: .*would cut the only conversation"):
        load_corpus(chat_config(), folder / "store")
