"""Checksums of a folder: every way in which it may differ from what was written."""

import json
import shutil

import pytest
import xxhash
from tiny_run import flip_bit

from curriculum.disk.manifest import MANIFEST, damage, update_manifest, write_manifest


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "7"
    (folder / "params/d").mkdir(parents=True)
    (folder / "ledger").mkdir()
    (folder / "params/d/x").write_bytes(bytes(range(256)) * 20)
    (folder / "params/d/none").write_bytes(b"")
    (folder / "ledger/metadata").write_text('{"step": 7}')
    write_manifest(folder, 7)
    return folder


def test_a_manifest_names_size_and_checksum_of_every_file(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["step"] == 7 and sorted(manifest["files"]) == ["ledger/metadata", "params/d/none", "params/d/x"]
    content = (folder / "params/d/x").read_bytes()
    assert manifest["files"]["params/d/x"] == {"bytes": 5120, "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    rest = {key: manifest[key] for key in ("files", "step")}
    assert manifest["checksum"] == xxhash.xxh3_128_hexdigest(
        json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    )
    assert damage(folder) is None and not list(folder.glob("*.tmp"))


def test_a_file_of_many_chunks_has_one_checksum(tmp_path):
    (tmp_path / "big").write_bytes(bytes(range(251)) * 40_000)  # 10 MB, no multiple of a chunk
    write_manifest(tmp_path)
    entry = json.loads((tmp_path / MANIFEST).read_text())["files"]["big"]
    assert entry["xxh3_128"] == xxhash.xxh3_128_hexdigest((tmp_path / "big").read_bytes())
    flip_bit(tmp_path / "big", 9_999_999)
    assert damage(tmp_path) == "big has another checksum than the manifest says"


@pytest.mark.parametrize("byte", [0, 1000, 5119])
def test_a_flipped_bit_is_told(folder, byte):
    flip_bit(folder / "params/d/x", byte)
    assert damage(folder) == "params/d/x has another checksum than the manifest says"
    assert damage(folder, "ledger/") is None
    flip_bit(folder / "params/d/x", byte)
    flip_bit(folder / "ledger/metadata")
    assert damage(folder, "ledger/") == "ledger/metadata has another checksum than the manifest says"


def test_no_bit_of_the_manifest_can_flip(folder):
    whole = (folder / MANIFEST).read_bytes()
    for byte in range(len(whole)):
        flip_bit(folder / MANIFEST, byte)
        if json.loads(whole) != _parsed(folder / MANIFEST):  # a blank may turn into another
            assert damage(folder) == f"{MANIFEST} does not have the checksum that it was written with"
        flip_bit(folder / MANIFEST, byte)
    assert damage(folder) is None and len(whole) > 300
    for content in (b"", b"[]", b"null", b"{}", whole[:-9], b"[" * 100_000):
        (folder / MANIFEST).write_bytes(content)
        assert damage(folder) == f"{MANIFEST} does not have the checksum that it was written with"


def _parsed(path):
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


def test_what_is_missing_short_or_too_much_is_told(folder):
    (folder / "params/d/x").write_bytes(b"12345")
    assert damage(folder) == "params/d/x has 5 bytes, the checksum manifest says 5120"
    (folder / "params/d/x").unlink()
    assert damage(folder) == "params/d/x is missing: the checksum manifest lists it"
    shutil.rmtree(folder / "params")
    assert damage(folder) == "params/d/none is missing: the checksum manifest lists it (1 more)"
    (folder / MANIFEST).unlink()
    assert damage(folder) == "manifest.json is missing: no checksum to verify it by"
    shutil.rmtree(folder)
    assert damage(folder) == "manifest.json is missing: no checksum to verify it by"
    folder.mkdir()
    assert damage(folder) == "the folder is empty: no checksum to verify it by"


def test_a_file_too_much_and_another_name_are_told(folder):
    shutil.copytree(folder, folder.with_name("8"))
    assert damage(folder.with_name("8")) == "its checksum manifest is of step 7"
    (folder / "params/more").write_text("")
    assert damage(folder) == "params/more is not in the checksum manifest"


def test_a_file_that_cannot_be_read_is_told(folder):
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()
    assert damage(folder) == f"{folder / MANIFEST}: no checksum can be taken: Is a directory"


def test_a_change_that_is_taken_up_hides_no_other_damage(folder):
    (folder / "ledger/metadata").write_text('{"step": 7, "more": 1}')
    assert damage(folder) == "ledger/metadata has 22 bytes, the checksum manifest says 11"
    flip_bit(folder / "params/d/x")
    update_manifest(folder, ["ledger/metadata"])
    assert damage(folder) == "params/d/x has another checksum than the manifest says"
    flip_bit(folder / "params/d/x")
    assert damage(folder) is None
    flip_bit(folder / MANIFEST)
    update_manifest(folder, ["ledger/metadata"])
    assert damage(folder) == "manifest.json does not have the checksum that it was written with"
