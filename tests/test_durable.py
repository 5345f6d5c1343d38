"""What is on the disk before a file or a folder has its name, and what an error leaves."""

import errno
import os

import pytest

from curriculum.data.tokenizers.tokenizer import byte_tokenizer
from curriculum.disk.durable import rename_whole, write_whole
from curriculum.run_directory import RunDirectory, write_tokenizer


@pytest.fixture
def forced(tmp_path, monkeypatch):
    """(inode, names in the folder) at each fsync."""
    forced = []

    def fsync(descriptor):
        forced.append((os.fstat(descriptor).st_ino, sorted(os.listdir(tmp_path))))

    monkeypatch.setattr(os, "fsync", fsync)
    return forced


@pytest.mark.parametrize("content", ["né\n", b"\xff\x00"])
def test_a_file_is_on_the_disk_before_it_has_its_name_and_then_the_name(tmp_path, forced, content):
    path, folder = tmp_path / "a.json", tmp_path.stat().st_ino
    write_whole(path, content)
    assert path.read_bytes() == (content if isinstance(content, bytes) else b"n\xc3\xa9\n")
    assert forced == [(path.stat().st_ino, ["a.json.tmp"]), (folder, ["a.json"])]
    write_whole(path, "new", suffix=".mine")
    assert path.read_text() == "new"
    assert forced[2:] == [(path.stat().st_ino, ["a.json", "a.json.mine"]), (folder, ["a.json"])]
    (tmp_path / "plain").write_text("")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_need_not_be_durable_waits_for_no_disk(tmp_path, forced):
    write_whole(tmp_path / "a", "old", durable=False)
    write_whole(tmp_path / "a", "new", durable=False)
    assert (tmp_path / "a").read_text() == "new" and forced == [] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_of_a_file_that_cannot_be_written_the_old_content_stays_and_nothing_else(tmp_path, monkeypatch, error):
    def refuse(_):
        raise error

    (tmp_path / "a").write_text("old")
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(type(error)):
        write_whole(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_a_folder_is_on_the_disk_before_it_has_its_name_and_then_the_name(tmp_path, forced):
    made = tmp_path / "made"
    (made / "in").mkdir(parents=True)
    for name in ("a", "in/b"):
        (made / name).write_text("x")
    rename_whole(made, tmp_path / "folder")
    paths = [tmp_path / "folder" / name for name in ("in/b", "in", "a", ".")]
    assert forced == [*((path.stat().st_ino, ["made"]) for path in paths), (tmp_path.stat().st_ino, ["folder"])]


def test_the_tokenizer_of_a_run_is_on_the_disk_before_it_has_its_name(tmp_path, forced):
    """Whatever folder has the name is never written again."""
    write_tokenizer(RunDirectory(tmp_path), byte_tokenizer())
    (file,) = (tmp_path / "tokenizer").iterdir()
    made, there = ["tokenizer.tmp"], ["tokenizer"]
    assert [at for at in forced if at[0] == file.stat().st_ino][-1:] == [(file.stat().st_ino, made)]
    assert forced[-2:] == [((tmp_path / "tokenizer").stat().st_ino, made), (tmp_path.stat().st_ino, there)]
