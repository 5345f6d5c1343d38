"""Reading documents from files: what is a document, in which order, and what is refused."""

import json
import os
import tracemalloc

import pytest

from curriculum.data import documents
from curriculum.data.documents import SourceConfig, read_pieces, source_files
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


def test_a_byte_order_mark_is_dropped_once(tmp_path):
    assert read(write(tmp_path / "a.txt", "\ufeffa\ufeffb")) == ["a\ufeffb"]
    assert read(write(tmp_path / "a.jsonl", '\ufeff{"text": "\ufeffx"}\n')) == ["\ufeffx"]


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


def test_source_files_tells_size_and_times(tmp_path):
    path = write(tmp_path / "a.txt", "12345")
    os.utime(path, ns=(7, 11))
    assert source_files(SourceConfig(path=str(tmp_path))) == [(str(path), "a.txt", 5, 11, path.stat().st_ctime_ns)]


def test_a_json_row_is_a_document_and_empty_ones_are_passed_over(tmp_path):
    rows = [{"text": AWKWARD}, {"text": ""}, {"other": 1, "text": "two"}]
    lines = "\n\n".join(json.dumps(row) for row in rows)
    path = write(tmp_path / "a.jsonl", lines)
    assert read(path) == [AWKWARD, "two"]
    assert [piece.text for piece in read_pieces(SourceConfig(path=str(path)))] == [AWKWARD, "", "two"]
    assert read(write(tmp_path / "b.ndjson", '{"body": "x"}'), text_key="body") == ["x"]


def test_a_long_file_comes_in_pieces_that_join_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)
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


def test_a_long_file_is_not_held_in_memory(tmp_path):
    path = write(tmp_path / "a.txt", b"some words on a line\n" * 1_000_000)
    tracemalloc.start()
    total = sum(len(piece.text) for piece in read_pieces(SourceConfig(path=str(path))))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 21_000_000
    assert peak_bytes < 8 * documents.PIECE_BYTES  # block, text and the joined piece, with room


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columnar_rows_are_documents(tmp_path, kind):
    import datasets

    table = datasets.Dataset.from_dict({"id": [1, 2, 3], "text": [AWKWARD, "", "third"]})
    if kind == "parquet":
        table.to_parquet(tmp_path / "a.parquet")
    else:
        table.save_to_disk(tmp_path)
    assert read(tmp_path) == [AWKWARD, "third"]
    assert "row 1: 'id' holds a number; expected text" in refused(tmp_path, text_key="id")
    message = refused(tmp_path, text_key="texts")
    assert "no key 'texts'; found 'id', 'text'; did you mean text_key: text?" in message


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


def test_a_folder_named_like_a_flat_file_is_a_folder(tmp_path):
    write(tmp_path / "dir.bin" / "a.txt", "a")
    write(tmp_path / "dir.bin" / "b.txt", "b")
    source = SourceConfig(path=str(tmp_path / "dir.bin"))
    assert not source.is_flat and read_documents(source) == ["a", "b"]
    assert SourceConfig(path=str(write(tmp_path / "a.bin", "ab"))).is_flat
    with pytest.raises(ValueError, match="dtype belongs to a flat .bin file only"):
        SourceConfig(path=source.path, dtype="u16")


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
        ("a.jsonl", b"[" * 100_000, ":1: not JSON"),
        ("a.jsonl", b'{"text": "\xff"}', ":1: not JSON"),
        ("a.jsonl", b'["text"]', ":1: a list; expected a JSON object with key 'text'"),
        ("a.jsonl", b'{"text": null}', ":1: 'text' holds null; expected text"),
        ("a.jsonl", b'{"text": 3}', ":1: 'text' holds a number; expected text"),
        ("a.jsonl", b'{"text": "a\\ud800"}', ":1: 'text' holds half a surrogate pair at character 1"),
        ("a.parquet", b"PAR1 and no more", "expected a whole parquet file"),
        ("a.arrow", b"no arrow", "expected a whole arrow file"),
    ],
)  # fmt: skip
def test_unreadable_text_is_refused_with_its_place(tmp_path, name, content, expected):
    path = write(tmp_path / name, content)
    message = refused(path)
    assert message.startswith(str(path))
    assert expected in message
    assert "\n" not in message.replace(str(path), "")


def test_offsets_of_bad_bytes_count_from_the_start_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PIECE_BYTES", 8)
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
        ({"path": "a.txt", "dtype": "u16"}, "dtype belongs to a flat .bin file only"),
        ({"path": ""}, "path is empty; expected a file or a folder"),
        ({"hf": ""}, "hf is ''; expected a dataset of the hub, NAME or NAME:CONFIGURATION"),
        ({"hf": ":en"}, "hf is ':en'; expected a dataset of the hub"),
        ({"path": "a", "held_out": "120%"}, 'expected a share such as "1%"'),
    ],
)
def test_contradictory_fields_are_refused(fields, expected):
    with pytest.raises(ValueError, match=expected):
        SourceConfig(**fields)
