"""Reading documents from files: what is a document, in which order, and what is refused."""

import json
import os
import re
import time
import tracemalloc

import numpy as np
import pytest

from curriculum.data.chat import AS_TEXT, ChatConfig, Template
from curriculum.data.documents import documents_of
from curriculum.data.pieces import MOST_BAD_ROWS, PIECE_BYTES, parts_of, read_pieces
from curriculum.data.sources import SourceConfig, source_files
from curriculum.errors import InputError

AWKWARD = "naïve — 汉字。\r\nline two\r\n\t\x01 \x7f 👩‍👩‍👧 <|endoftext|> e\u0301\u2028end  \n\n"


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read_documents(source):
    """The documents that are not empty, each in one string."""
    found, parts = [], []
    for piece in read_pieces(source):
        parts.append(piece.text)
        if piece.ends_document:
            found.append("".join(parts))
            parts = []
    return [text for text in found if text]


def read(path, **options):
    return read_documents(SourceConfig(path=str(path), **options))


def refused(path, **options):
    with pytest.raises(InputError) as error:
        read(path, **options)
    return str(error.value)


def test_a_text_file_is_one_document_unchanged(tmp_path):
    assert read(write(tmp_path / "a.txt", AWKWARD)) == [AWKWARD]


def test_a_byte_order_mark_is_dropped_once(tmp_path, monkeypatch):
    assert read(write(tmp_path / "a.txt", "\ufeffa\ufeffb")) == ["a\ufeffb"]
    assert read(write(tmp_path / "a.jsonl", '\ufeff{"text": "\ufeffx"}\n')) == ["\ufeffx"]
    joined = '{"text": "x"}\n\ufeff{"text": "y"}\n'  # of two files, each with its own
    assert read(write(tmp_path / "b.jsonl", joined)) == ["x", "y"]
    monkeypatch.setattr("curriculum.data.pieces.PIECE_BYTES", 8)
    assert read(write(tmp_path / "b.txt", "eight...\ufeffb")) == ["eight...\ufeffb"]


def test_bad_rows_of_a_file_are_named_together(tmp_path):
    rows = ['{"text": "x"}', "not json", '{"text": 7}', "", '{"text": "y"}', '{"body": "z"}']
    told = refused(write(tmp_path / "a.jsonl", "\n".join(rows))).splitlines()
    assert [line.partition(": ")[0] for line in told] == [f"{tmp_path}/a.jsonl:{number}" for number in (2, 3, 6)]
    pieces = read_pieces(SourceConfig(path=str(tmp_path / "a.jsonl")))
    assert next(pieces).text == "x"
    with pytest.raises(InputError):  # nothing of the rows behind a bad one
        next(pieces)
    many = refused(write(tmp_path / "b.jsonl", "[]\n" * 30)).splitlines()
    assert len(many) == MOST_BAD_ROWS + 1 and many[-1] == f"{tmp_path}/b.jsonl: its other rows were not looked at"


def test_a_file_without_rows_is_an_empty_document(tmp_path):
    write(tmp_path / "a.jsonl", '{"text": "x"}\n')
    write(tmp_path / "b.jsonl", "")
    write(tmp_path / "c.jsonl", "\n \n")
    pieces = [(piece.text, piece.ends_document) for piece in read_pieces(SourceConfig(path=str(tmp_path)))]
    assert pieces == [("x", True), ("", True), ("", True)]


def test_a_folder_is_read_in_order_of_relative_path_without_hidden_files(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/b/c.md", "a.txt", ".hidden.txt", ".git/config", "a/.DS_Store"):
        write(tmp_path / name, name)
    assert read(tmp_path) == ["a.txt", "a/b/c.md", "a/z.txt", "b.txt"]


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("**/*", ["a.txt", "b/c.txt", "b/d/e.txt", "b/d/f.md"]),
        ("*.txt", ["a.txt"]),
        ("**/*.txt", ["a.txt", "b/c.txt", "b/d/e.txt"]),
        ("b/**/*.txt", ["b/c.txt", "b/d/e.txt"]),
        ("b/d/?.md", ["b/d/f.md"]),
    ],
)
def test_glob_is_relative_to_the_folder(tmp_path, glob, expected):
    for name in ("a.txt", "b/c.txt", "b/d/e.txt", "b/d/f.md"):
        write(tmp_path / name, name)
    assert read(tmp_path, glob=glob) == expected


def test_links_are_followed_and_a_loop_is_read_once(tmp_path):
    write(tmp_path / "elsewhere" / "far.txt", "far")
    write(tmp_path / "root" / "near.txt", "near")
    (tmp_path / "root" / "loop").symlink_to(tmp_path / "root")
    (tmp_path / "root" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root" / "again").symlink_to(tmp_path / "elsewhere")
    assert read(tmp_path / "root") == ["far", "near"]


def test_a_folder_goes_by_its_own_name_not_by_that_of_a_link(tmp_path):
    write(tmp_path / "data" / "v2" / "deep" / "a.txt", "a")
    write(tmp_path / "data" / "early" / "b.txt", "b")
    write(tmp_path / "elsewhere" / "c.txt", "c")
    for link, target in (
        ("current", "data/v2"),
        ("early/x", "data/v2/deep"),
        ("z", "elsewhere"),
        ("v2/y", "elsewhere"),
    ):
        (tmp_path / "data" / link).symlink_to(tmp_path / target)
    names = [file.relative for file in source_files(SourceConfig(path=str(tmp_path / "data")))]
    assert names == ["early/b.txt", "v2/deep/a.txt", "v2/y/c.txt"]
    assert read(tmp_path / "data", glob="v2/**/a.txt") == ["a"]
    # A source that is a link itself is read as any other.
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert [file.relative for file in source_files(SourceConfig(path=str(tmp_path / "link")))] == names


def test_source_files_tells_size_and_times(tmp_path):
    path = write(tmp_path / "a.txt", "12345")
    os.utime(path, ns=(7, 11))
    assert source_files(SourceConfig(path=str(tmp_path))) == [(str(path), "a.txt", 5, 11, path.stat().st_ctime_ns)]


def test_of_a_key_that_a_json_row_has_twice_the_last_value_counts(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a", "text": "b"}\n')
    assert [piece.text for piece in read_pieces(SourceConfig(path=str(path)))] == ["b"]


def test_a_json_row_is_a_document_and_empty_ones_are_passed_over(tmp_path):
    rows = [{"text": AWKWARD}, {"text": ""}, {"text": None}, {"other": 1, "text": "two"}]
    lines = "\n\n".join(json.dumps(row) for row in rows)
    path = write(tmp_path / "a.jsonl", lines)
    assert read(path) == [AWKWARD, "two"]
    assert [piece.text for piece in read_pieces(SourceConfig(path=str(path)))] == [AWKWARD, "", "", "two"]
    assert read(write(tmp_path / "b.ndjson", '{"body": "x"}'), text_key="body") == ["x"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.ndjson.zst", "A.JSON.GZ", "c4-train.00000.json.zst"])
def test_compressed_lines_are_read_as_they_are(tmp_path, name):
    import pyarrow

    lines = [json.dumps({"text": text}) + "\n" for text in (AWKWARD, "two", "three" * 40_000)]
    packed = [pyarrow.compress(part.encode(), "gzip", asbytes=True) if name.lower().endswith("gz") else
              pyarrow.compress(part.encode(), "zstd", asbytes=True) for part in (lines[0], "".join(lines[1:]))]  # fmt: skip
    (tmp_path / name).write_bytes(b"".join(packed))  # parts that follow each other, as parallel writers leave them
    assert read(tmp_path / name) == [AWKWARD, "two", "three" * 40_000]
    pieces = list(read_pieces(SourceConfig(path=str(tmp_path / name))))
    assert [piece.where for piece in pieces] == [f"{tmp_path / name}:{number}" for number in (1, 2, 3)]
    assert [piece.source_bytes for piece in pieces] == [len(line.encode()) for line in lines]
    assert documents_of([SourceConfig(path=str(tmp_path))], AS_TEXT).total_bytes is None
    kind = "gzip" if name.lower().endswith("gz") else "zstd"
    for damaged in (packed[1][:-4], packed[1] + b"junk", b"plain text\n"):
        (tmp_path / name).write_bytes(damaged)
        assert (
            f"{tmp_path / name}: " in (told := refused(tmp_path / name))
            and f"; expected a complete {kind} file" in told
        )


@pytest.mark.parametrize("name, kind", [("a.txt.gz", "gzip"), ("a.md.ZST", "zstd"), ("README.gz", "gzip")])
def test_compressed_text_is_one_document(tmp_path, monkeypatch, name, kind):
    import pyarrow

    monkeypatch.setattr("curriculum.data.pieces.PIECE_BYTES", 64)
    text = "\ufeff" + (AWKWARD + "some words in between. ") * 40
    packed = pyarrow.compress(text.encode(), kind, asbytes=True)
    (tmp_path / name).write_bytes(packed)
    assert read(tmp_path / name) == [text.removeprefix("\ufeff")]
    pieces = list(read_pieces(SourceConfig(path=str(tmp_path))))
    assert len(pieces) > 30 and sum(piece.source_bytes for piece in pieces) == len(text.encode())
    assert documents_of([SourceConfig(path=str(tmp_path))], AS_TEXT).total_bytes is None
    (tmp_path / name).write_bytes(packed[:-4])
    assert f"{tmp_path / name}: " in (told := refused(tmp_path / name)) and f"a complete {kind} file" in told
    (tmp_path / name).write_bytes(pyarrow.compress(b"a\0b", kind, asbytes=True))  # such as a .tar.gz
    assert f"{tmp_path / name}: byte 1 is NUL" in refused(tmp_path / name)


def test_a_number_that_nobody_reads_may_have_any_number_of_digits(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"n": %s, "text": "x"}\n' % ("9" * 10_000))
    assert read(path) == ["x"]
    assert ":1: 'n' holds a number; expected text" in refused(path, text_key="n")


def test_a_long_file_comes_in_pieces_that_join_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr("curriculum.data.pieces.PIECE_BYTES", 64)
    text = (AWKWARD + "some words in between. ") * 40
    path = write(tmp_path / "a.txt", text)
    pieces = list(read_pieces(SourceConfig(path=str(path))))
    assert len(pieces) > 30
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert sum(piece.source_bytes for piece in pieces) == len(text.encode())
    assert max(len(piece.text) for piece in pieces) < 3 * 64
    short = write(tmp_path / "c.txt", "a b c d e\nf")
    assert [piece.text for piece in read_pieces(SourceConfig(path=str(short)))] == ["a b c d e\nf"]
    # No place to cut: the text comes whole.
    unbroken = write(tmp_path / "b.txt", "x" * 1000)
    assert [piece.text for piece in read_pieces(SourceConfig(path=str(unbroken)))] == ["x" * 1000]


def test_a_long_text_is_cut_as_a_file_is_or_anywhere_without_words(monkeypatch):
    monkeypatch.setattr("curriculum.data.pieces.PIECE_BYTES", 64)
    text = (AWKWARD + "some words in between. ") * 40
    parts = list(parts_of(text))
    assert "".join(parts) == text and len(parts) > 30 and max(map(len, parts)) <= 64
    assert any(part.startswith(" words") or part.startswith(" in") for part in parts)
    assert [len(part) for part in parts_of("x" * 150)] == [64, 64, 22]
    assert list(parts_of("")) == [""] and list(parts_of("short text")) == ["short text"]


def test_a_long_text_is_cut_between_its_last_two_words_however_far_back_they_are():
    first, *parts, last = parts_of("some words " * 20_000)
    assert len(parts) == 2 and all(PIECE_BYTES - 7 <= len(part) <= PIECE_BYTES for part in (first, *parts))
    assert all(part.startswith((" some", " words")) for part in (*parts, last))
    assert [len(part) for part in parts_of("some words" + "x" * 70_000)] == [4, PIECE_BYTES, 70_006 - PIECE_BYTES]


def test_a_long_file_is_not_held_in_memory(tmp_path):
    path = write(tmp_path / "a.txt", b"some words on a line\n" * 1_000_000)
    tracemalloc.start()
    total = sum(len(piece.text) for piece in read_pieces(SourceConfig(path=str(path))))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 21_000_000
    assert peak_bytes < 8 * PIECE_BYTES  # block, text and the joined piece, with room


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columnar_rows_are_documents(tmp_path, kind):
    import datasets

    table = datasets.Dataset.from_dict({"id": [1, 2, 3, 4], "text": [AWKWARD, "", None, "fourth"], "none": [None] * 4})
    if kind == "parquet":
        table.to_parquet(tmp_path / "a.parquet")
    else:
        table.save_to_disk(tmp_path)
    assert read(tmp_path) == [AWKWARD, "fourth"] and read(tmp_path, text_key="none") == []
    assert "row 1: 'id' holds a number; expected text" in refused(tmp_path, text_key="id")
    message = refused(tmp_path, text_key="texts")
    assert "no key 'texts'; found 'id', 'text', 'none'; did you mean text_key: text?" in message


def saved_splits(path):
    from datasets import Dataset, DatasetDict

    DatasetDict({name: Dataset.from_dict({"text": [name]}) for name in ("test", "train")}).save_to_disk(path)


def test_of_a_saved_dataset_only_the_files_that_it_lists_are_read(tmp_path):
    from datasets import load_from_disk

    saved_splits(tmp_path / "saved")
    train = load_from_disk(tmp_path / "saved" / "train")
    train.map(lambda row: {"text": row["text"] + " changed"})
    train.filter(lambda row: True)
    names = sorted(os.listdir(tmp_path / "saved" / "train"))
    assert [name[:6] for name in names] == ["cache-", "cache-", "data-0", "datase", "state."]
    assert read(tmp_path / "saved" / "train") == read(tmp_path / "saved", glob="train/**") == ["train"]
    (tmp_path / "saved" / "train" / names[2]).unlink()
    where = tmp_path / "saved" / "train" / "state.json"
    lacks = f"{where}: lists {names[2]}, which is not there; expected the whole folder; save it again"
    assert refused(tmp_path / "saved" / "train") == lacks
    for name, note in (("state", '{"_data_files": []}'), ("dataset_info", "{}")):
        write(tmp_path / "empty" / f"{name}.json", note)
    assert "no file in this folder matches" in refused(tmp_path / "empty")
    write(tmp_path / "odd" / "state.json", '{"_data_files": [{"filename": 3}]}')
    assert read(tmp_path / "odd") == ['{"_data_files": [{"filename": 3}]}']
    write(tmp_path / "own" / "state.json", "[1]")  # of somebody else
    write(tmp_path / "own" / "dataset_dict.json", '{"a": 1}')
    assert read(tmp_path / "own") == ['{"a": 1}', "[1]"]


def test_splits_that_were_saved_together_are_not_read_as_one_text(tmp_path):
    saved_splits(tmp_path / "saved")
    several = "holds several splits (test, train), which would be read as one text; give the folder of one of them"
    for root in (tmp_path, tmp_path / "saved"):
        expected = f"{tmp_path / 'saved'}: {several}, such as {tmp_path / 'saved' / 'train'}"
        assert refused(root) == refused(root, glob="**/*.arrow") == expected


def test_rows_of_a_table_are_numbered_from_its_first_on(tmp_path):
    write_arrow(tmp_path / "a.arrow", ["x"] * 1000)  # more than are read at once
    places = [piece.where for piece in read_pieces(SourceConfig(path=str(tmp_path)))]
    assert places == [f"{tmp_path / 'a.arrow'}: row {number}" for number in range(1, 1001)]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_the_names_of_columnar_files_are_no_patterns(tmp_path, kind):
    import datasets

    names = ["a*", "a[1]", "a?", "ab", "[!b]", "{a,b}"]
    for name in names:
        if kind == "parquet":
            datasets.Dataset.from_dict({"text": [name]}).to_parquet(tmp_path / f"{name}.parquet")
        else:
            write_arrow(tmp_path / f"{name}.arrow", [name])
    assert read(tmp_path) == sorted(names, key=lambda name: f"{name}.{kind}")


def write_arrow(path, texts):
    import pyarrow

    table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())})
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_refused_where_they_would_be_read(tmp_path, kind):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table([["x"], ["y"], ["z"]], names=["text", "text", "body"])
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    assert refused(path) == f"{path}: 2 columns are named 'text'; expected one; rename the others"
    assert read(path, text_key="body") == ["z"]


def test_columnar_files_without_rows_are_empty(tmp_path):
    import pyarrow
    from pyarrow import parquet

    none = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    parquet.write_table(none, tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({}), tmp_path / "b.parquet")
    write_arrow(tmp_path / "c.arrow", [])
    assert read(tmp_path) == []
    with parquet.ParquetWriter(tmp_path / "d.parquet", none.schema) as writer:  # its first row group is empty
        writer.write_table(none)
        writer.write_table(pyarrow.table({"text": ["one", "two"]}))
    write_arrow(tmp_path / "e.arrow", ["three"])
    assert read(tmp_path) == ["one", "two", "three"]


def test_an_arrow_file_with_an_index_is_read_as_a_stream_is(tmp_path):
    import pyarrow

    table = pyarrow.table({"text": [f"row {i}" for i in range(600)]})
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=400)
    assert read(tmp_path) == table["text"].to_pylist()


@pytest.mark.parametrize("form", ["new_stream", "new_file"])
def test_an_arrow_file_with_damaged_offsets_is_refused(tmp_path, form):
    import pyarrow

    offsets = pyarrow.py_buffer(np.array([0, 4, 2], np.int32))  # the second text would have -2 bytes
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(b"abcd")])
    whole, damaged = (pyarrow.table({"text": column}) for column in (["one"], texts))
    path = tmp_path / "a.arrow"
    with getattr(pyarrow.ipc, form)(str(path), whole.schema) as writer:
        writer.write_table(whole)
        writer.write_table(damaged)
    assert re.fullmatch(rf"{path}: .*offset.*; expected a complete arrow file", refused(path))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_objects_that_datasets_keeps_as_json_are_read_as_such(tmp_path, kind):
    from datasets import Dataset, Features, Json, List

    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tools": {"n": 1}}]
    table = Dataset.from_list([{"messages": turns}], features=Features({"messages": List(Json())}))
    table.to_parquet(tmp_path / "a.parquet") if kind == "parquet" else table.save_to_disk(tmp_path)
    pieces = read_pieces(SourceConfig(path=str(tmp_path), format="messages"), SHORT)
    assert [(piece.text, piece.scored) for piece in pieces] == [("U:a.A:", False), ("b;", True)]


def test_text_of_a_table_that_is_not_utf_8_is_told_as_that(tmp_path):
    import pyarrow
    from pyarrow import parquet

    broken = pyarrow.array([b"good", b"ab\xffcd"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    told = refused(tmp_path / "a.parquet")
    assert "a text of columns text is not valid UTF-8" in told and "ab\\xffcd" in told and "complete" not in told


@pytest.mark.parametrize("num_groups", [64, 1])
def test_a_parquet_file_is_not_read_ahead(tmp_path, num_groups):
    """Also where what takes the rows is slow: 64 MB in row groups of 1 MB, or in one, of which a part is asked for."""
    import pyarrow
    from pyarrow import parquet

    rows = pyarrow.table({"text": ["x" * 4096] * 256, "other": ["y" * 4096] * 256})
    group = pyarrow.concat_tables([rows] * (64 // num_groups))
    options = {"use_dictionary": False, "compression": "none"}
    with parquet.ParquetWriter(tmp_path / "a.parquet", rows.schema, **options) as writer:
        for _ in range(num_groups):
            writer.write_table(group)
    pieces = read_pieces(SourceConfig(path=str(tmp_path)))
    before = pyarrow.total_allocated_bytes()
    for _ in range(1000):
        next(pieces)
    time.sleep(0.2)  # in which a scanner of pyarrow's would have read the whole file
    assert pyarrow.total_allocated_bytes() - before < 8 << 20
    pieces.close()


def test_a_folder_named_like_a_flat_file_is_a_folder(tmp_path):
    write(tmp_path / "dir.bin" / "a.txt", "a")
    write(tmp_path / "dir.bin" / "b.txt", "b")
    source = SourceConfig(path=str(tmp_path / "dir.bin"))
    assert not source.is_flat and read_documents(source) == ["a", "b"]
    assert SourceConfig(path=str(write(tmp_path / "a.bin", "ab"))).is_flat
    with pytest.raises(ValueError, match="dtype applies to a flat .bin file only"):
        SourceConfig(path=source.path, dtype="u16")


CONVERSATIONS = [
    [{"role": "user", "content": "汉\n"}, {"role": "assistant", "content": "a"}],
    [
        {"role": "system", "content": ""},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "v"},
    ],
]
SHORT = Template(ChatConfig(system="S{content}/", user="U:{content}.", assistant="A:{content};"))
PIECES = [  # text, ends document, scored
    ("U:汉\n.A:", False, False), ("a;", True, True),
    ("S/U:u.A:", False, False), ("b;", False, True), ("U:v.", True, False),
]  # fmt: skip


def conversation_pieces(path, **options):
    options = {"format": "messages"} | options
    pieces = list(read_pieces(SourceConfig(path=str(path), **options), SHORT))
    return pieces, [(piece.text, piece.ends_document, piece.scored) for piece in pieces]


def test_a_json_row_is_a_conversation(tmp_path):
    lines = [json.dumps({"messages": messages, "id": 7}) for messages in CONVERSATIONS]
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    pieces, found = conversation_pieces(path)
    assert found == PIECES
    assert [piece.where for piece in pieces] == [f"{path}:1"] * 2 + [f"{path}:2"] * 3
    assert [piece.source_bytes for piece in pieces] == [len(lines[0]) + 1, 0, len(lines[1]), 0, 0]
    renamed = write(tmp_path / "b.jsonl", "\n".join(json.dumps({"chat": messages}) for messages in CONVERSATIONS))
    assert conversation_pieces(renamed, text_key="chat")[1] == PIECES


def test_a_json_row_is_a_prompt_and_its_completion(tmp_path):
    rows = [
        {"prompt": "2 + 2 =", "completion": " 4", "messages": None},
        {"prompt": CONVERSATIONS[0], "completion": CONVERSATIONS[0]},
    ]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert conversation_pieces(path, format="completion")[1] == [
        ("2 + 2 =", False, False), (" 4", True, True),
        ("U:汉\n.A:a;U:汉\n.A:", False, False), ("a;", True, True),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["parquet", "arrow", "hub"])
def test_columnar_rows_are_conversations(tmp_path, kind):
    import datasets

    rows = [{"messages": messages, "prompt": "p", "completion": "c"} for messages in CONVERSATIONS]
    rows[0]["messages"] = [message | {"name": "n"} for message in rows[0]["messages"]]  # null in the other row
    table = datasets.Dataset.from_list(rows)
    if kind == "arrow":
        table.save_to_disk(tmp_path)
    else:
        table.to_parquet(tmp_path / "train.parquet")
    place = {"hf": str(tmp_path)} if kind == "hub" else {"path": str(tmp_path)}
    pieces = list(read_pieces(SourceConfig(**place, format="messages"), SHORT))
    assert [(piece.text, piece.ends_document, piece.scored) for piece in pieces] == PIECES
    assert [piece.where.rpartition(": ")[2] for piece in pieces] == ["row 1"] * 2 + ["row 2"] * 3
    assert [piece.source_bytes for piece in pieces] == [9, 0, 14, 0, 0]
    pieces = list(read_pieces(SourceConfig(**place, format="completion"), SHORT))
    assert [(piece.text, piece.scored) for piece in pieces] == [("p", False), ("c", True)] * 2


@pytest.mark.parametrize(
    ("options", "row", "expected"),
    [
        ({}, {"messages": []}, "no key 'text'; found 'messages'; is a row a conversation? set format: messages"),
        ({"text_key": "body"}, {"text": "x", "messages": []}, "no key 'body'; found 'text', 'messages'; is a row a conv"),
        ({}, {"prompt": "", "completion": ""}, "no key 'text'; found 'prompt', 'completion'; is a row a prompt and its completion? set format: completion"),
        ({}, {"prompt": ""}, "no key 'text'; found 'prompt'; name the key of the text with text_key:"),
        ({"format": "messages"}, {"message": []}, "no key 'messages'; found 'message'; did you mean text_key: message?"),
        ({"format": "messages", "text_key": "prompt"}, {"messages": []}, "no key 'prompt'; found 'messages'; name the key of the messages"),
        ({"format": "messages"}, {"talk": []}, "no key 'messages'; found 'talk'; name the key of the messages with text_key:"),
        ({"format": "messages"}, {"prompt": "", "completion": ""}, "no key 'messages'; found 'prompt', 'completion'; is a row a prompt"),
        ({"format": "completion"}, {"prompt": "", "response": ""}, "no key 'completion'; found 'prompt', 'response'; rename the keys of the data to 'prompt' and 'completion'"),
        ({"format": "completion"}, {"messages": []}, "no key 'prompt'; found 'messages'; is a row a conversation? set format: messages"),
        ({"format": "completion"}, [], "a list; expected a JSON object with key 'prompt' and 'completion'"),
        ({"format": "messages"}, {"messages": "x"}, "'messages' holds text; expected a list of messages"),
        ({"format": "messages"}, {"messages": [{"role": "human", "content": "x"}]}, "messages[0].role is 'human'; expected system, user, assistant"),
        ({"format": "messages", "text_key": "prompt"}, {"prompt": [{"role": "user"}]}, "prompt[0] has no key 'content'; found 'role'"),
        ({"format": "messages"}, {"messages": []}, "no answer, so nothing to score; expected an assistant turn (without weight: 0) or a completion that is not empty; remove it"),
        ({"format": "messages"}, {"messages": [{"role": "user", "content": "x"}]}, "no answer"),
        ({"format": "completion"}, {"prompt": "x", "completion": ""}, "no answer"),
        ({"format": "completion"}, {"prompt": "x", "completion": []}, "'prompt' holds text and 'completion' a list; expected"),
        ({"format": "messages"}, {"messages": None}, "'messages' holds null; expected a list of messages"),
        ({"format": "completion"}, {"prompt": "x", "completion": None}, "'completion' holds null; expected text"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_conversation_is_refused_with_its_place(tmp_path, options, row, expected):
    good = {"text": "", "body": "", "prompt": "", "completion": "x", "messages": CONVERSATIONS[0]}
    if options.get("text_key") == "prompt":
        good["prompt"] = CONVERSATIONS[0]
    path = write(tmp_path / "a.jsonl", f"{json.dumps(good)}\n{json.dumps(row)}")
    assert refused(path, **options).startswith(f"{path}:2: {expected}")


@pytest.mark.parametrize(
    ("text_key", "keys", "found"),
    [
        ("w" * 45, ["w" * 46], f"'{'w' * 37}...'"),
        ("body", [*"abcdefghijklm", "boddy"], ", ".join(map(repr, "abcdefghijkl"))),
    ],
)
def test_the_hint_names_a_key_that_exists(tmp_path, text_key, keys, found):
    path = write(tmp_path / "a.jsonl", json.dumps(dict.fromkeys(keys, "x")))
    hint = f"did you mean text_key: {keys[-1]}?"
    assert refused(path, text_key=text_key) == f"{path}:1: no key {text_key!r}; found {found}; {hint}"


def test_the_hint_for_another_format_comes_from_columns_too(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"prompt": ["a"], "completion": ["b"]}).to_parquet(tmp_path / "a.parquet")
    message = refused(tmp_path)
    assert message.endswith(
        "a.parquet: no key 'text'; found 'prompt', 'completion'; is a row a prompt and its completion? set format: completion"
    )
    assert "row 1: 'prompt' holds text; expected a list" in refused(tmp_path, format="messages", text_key="prompt")


def test_plain_text_has_no_rows(tmp_path):
    write(tmp_path / "a.jsonl", json.dumps({"messages": CONVERSATIONS[0], "body": "ab"}))
    path = write(tmp_path / "b.txt", "text")
    assert f"{path}: plain text has no rows; format messages reads .jsonl, .ndjson, .parquet, .arrow" in refused(
        tmp_path, format="messages"
    )
    assert read(tmp_path, format="messages", glob="*.jsonl") == [
        "<|im_start|>user\n汉\n<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    ]
    assert refused(tmp_path, text_key="body") == (
        f"{path}: plain text has no rows; text_key 'body' applies to rows of .jsonl, .ndjson, .parquet, .arrow, and JSON lines compressed as .gz or .zst;"
        " leave the file out with glob:, or leave text_key out"
    )
    assert read(tmp_path, text_key="body", glob="*.jsonl") == ["ab"]
    with pytest.raises(InputError, match="b.txt: plain text has no rows"):
        next(read_pieces(SourceConfig(path=str(tmp_path), text_key="body")))  # not only after the rows of a.jsonl


def test_a_hub_name_reads_its_train_split(tmp_path):
    # A folder of parquet is to `datasets` what a name on the hub is.
    import datasets

    datasets.Dataset.from_dict({"text": ["one", "two"]}).to_parquet(tmp_path / "train.parquet")
    assert read_documents(SourceConfig(hf=str(tmp_path))) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"ab\0c", "byte 2 is NUL; expected plain UTF-8 text"),
        ("a.txt", b"abc\xffd", "byte 3 is not valid UTF-8"),
        ("a.txt", "汉".encode()[:2], "byte 0 is not valid UTF-8 (unexpected end of data)"),
        ("a.jsonl", b'{"text": "x"}\n{"txet": "y"}', ":2: no key 'text'; found 'txet'; did you mean text_key: txet"),
        ("a.jsonl", b'{"body": "y"}', ":1: no key 'text'; found 'body'; name the key of the text with text_key"),
        ("a.jsonl", b"{}", ":1: no key 'text'; found no keys"),
        ("a.jsonl", b'\n{"text": "x"\n', ":2: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "a\tb"}\n', ":2: not JSON (Invalid control character, column 12); "),
        ("a.jsonl", b"[" * 100_000, ":1: not JSON"),
        ("a.jsonl", b'{"text": "\xff"}', ":1: not JSON ('utf-8' codec can't decode byte 0xff in position 10: invalid"),
        ("a.jsonl", '{"text": "x"}'.encode("utf-16"), "expected one object per line, in UTF-8; convert the file, or leave"),
        ("a.jsonl", '{"text": "x"}'.encode("utf-16-le"), ":1: not JSON (NUL bytes: UTF-16?); expected one object per line, in UTF-8"),
        ("a.jsonl", b'["text"]', ":1: a list; expected a JSON object with key 'text'"),
        ("a.jsonl", b'{"text": 3}', ":1: 'text' holds a number; expected text"),
        ("a.jsonl", b'{"text": "a\\ud800"}', ":1: 'text' holds half a surrogate pair at character 1"),
        ("a.parquet", b"PAR1 and no more", "expected a complete parquet file"),
        ("a.arrow", b"no arrow", "expected a complete arrow file"),
    ],
)  # fmt: skip
def test_unreadable_text_is_refused_with_its_place(tmp_path, name, content, expected):
    path = write(tmp_path / name, content)
    message = refused(path)
    assert message.startswith(str(path))
    assert expected in message
    assert "\n" not in message.replace(str(path), "")


def test_offsets_of_bad_bytes_count_from_the_start_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("curriculum.data.pieces.PIECE_BYTES", 8)
    assert "byte 21 is not valid UTF-8" in refused(write(tmp_path / "a.txt", b"a" * 21 + b"\xff rest"))
    # The character that is cut short begins in the block before.
    assert "byte 7 is not valid UTF-8" in refused(write(tmp_path / "b.txt", b"a" * 7 + b"\xe6\xb1 rest"))
    assert "byte 19 is NUL" in refused(write(tmp_path / "c.txt", b"a" * 19 + b"\0"))


def test_missing_and_strange_paths_are_refused(tmp_path):
    assert "nowhere: No such file or directory" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no file in this folder matches glob '**/*'" in refused(tmp_path / "empty")
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in refused(tmp_path / "pipe")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "dangling.txt").symlink_to(tmp_path / "nothing")
    assert "dangling.txt: No such file or directory" in refused(tmp_path / "links")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_is_refused(tmp_path):
    path = write(tmp_path / "a.txt", "x")
    path.chmod(0)
    assert "a.txt: Permission denied" in refused(path)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "exactly one of path and hf"),
        ({"path": "a", "hf": "b"}, "exactly one of path and hf"),
        ({"path": "a.txt", "dtype": "u16"}, "dtype applies to a flat .bin file only"),
        ({"path": ""}, "path is empty; expected a file or a folder"),
        ({"hf": ""}, "hf is ''; expected a dataset of the hub, NAME or NAME:CONFIGURATION"),
        ({"hf": ":en"}, "hf is ':en'; expected a dataset of the hub"),
        (
            {"path": "a.bin", "format": "messages"},
            "format messages needs rows of JSONL, parquet or arrow; got path 'a.bin'",
        ),
        ({"path": "a.bin", "text_key": "x"}, "text_key applies to rows of JSONL, parquet or arrow; got path 'a.bin'"),
        ({"path": "a", "format": "completion", "text_key": "x"}, "text_key applies to formats text and messages"),
        ({"path": "a", "held_out": "120%"}, 'expected a share such as "1%"'),
    ],
)
def test_contradictory_fields_are_refused(fields, expected):
    with pytest.raises(ValueError, match=expected):
        SourceConfig(**fields)
