"""The quickstart's corpus: what is cut, what is dropped, and that a build is whole or absent."""

import ast
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import build_quickstart_corpus as corpus
import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "tools" / "build_quickstart_corpus.py"


def run(*arguments, **variables):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )


def test_pieces_joined_are_the_text_and_cut_before_unindented_paragraphs():
    function = "def f():\n    a = 1\n\n    return " + "a" * 41 + "\n\n\n"  # 75 characters, 20 to the inner seam
    text = function * 100
    cut = corpus.pieces(text)
    assert "".join(cut) == text
    assert cut == [function * 53, function * 47]  # 53 leave 25 of the 4,000 characters


@pytest.mark.parametrize("block", ["    a\n    " + "b" * 18 + "\n\n", "thirty characters of one line\n"])
def test_pieces_fall_back_to_finer_seams(block):
    text = block * 300
    assert corpus.pieces(text) == [block * 133, block * 133, block * 34]  # 30 characters each


def test_pieces_leave_a_long_line_whole():
    line = "x" * 5000 + "\n"
    assert corpus.pieces("short\n" + line + "short\n") == ["short\n", line, "short\n"]


def test_long_paragraphs_appear_once_and_short_ones_as_often_as_they_come():
    seen = set()
    long, other = "word " * 50 + "\n\n", "another " * 50 + "\n\n"
    assert corpus.without_repeats(long + "short\n\n", seen) == long + "short\n\n"
    indented = "".join(f"  {word}\n" for word in long.split()) + "\n"
    assert corpus.without_repeats("short\n\n" + indented + other, seen) == "short\n\n" + other


def test_licences_at_the_head_are_dropped_and_other_comments_kept():
    kept = "#pragma once\n// licence\n"
    header = "// Copyright (c) A. Person\n// All rights reserved.\n\n/* Licensed\n * to all */\n" + kept
    assert corpus.without_licence(header, corpus.CPP_COMMENT) == kept
    described = "// What this header is for.\n\n// Copyright of nobody\nint x;\n"
    assert corpus.without_licence(described, corpus.CPP_COMMENT) == described
    script = "#! /usr/bin/env python3\n# Licensed to PSF\n#\n# and more\n\n# A comment\nx = 1\n"
    assert corpus.without_licence(script, corpus.PYTHON_COMMENT) == "\n# A comment\nx = 1\n"


SOURCE = '''"""Module."""

# kept
class Empty(Exception):
    """Only a docstring."""

class Näme:
    """First line.

    Second line.
        indented
    """
    x = """not a docstring"""

    if True:
        async def nested(self, a, *, b=2):
            """Nested."""; return a  # kept
def é(): "ünï"; return 1
def plain():
    return "no docstring"
try:
    class Body: "b"
except OSError:
    class Handler: "h"
else:
    class Otherwise: "o"
finally:
    match 1:
        case 1:
            class Case: "c"
'''


def test_docstrings_stand_under_names_and_arguments():
    assert corpus.docstrings(ast.parse(SOURCE), "pkg.mod") == (
        "pkg.mod\n    Module.\n\n"
        "pkg.mod.Empty\n    Only a docstring.\n\n"
        "pkg.mod.Näme\n    First line.\n\n    Second line.\n        indented\n\n"
        "pkg.mod.Näme.nested(self, a, *, b=2)\n    Nested.\n\n"
        "pkg.mod.é()\n    ünï\n\n"
        "pkg.mod.Body\n    b\n\n"
        "pkg.mod.Handler\n    h\n\n"
        "pkg.mod.Otherwise\n    o\n\n"
        "pkg.mod.Case\n    c\n\n"
    )


def test_code_loses_its_docstrings_and_nothing_else():
    assert (
        corpus.without_docstrings(SOURCE, ast.parse(SOURCE))
        == '''
# kept
class Empty(Exception):
    pass

class Näme:
    x = """not a docstring"""

    if True:
        async def nested(self, a, *, b=2):
            return a  # kept
def é(): return 1
def plain():
    return "no docstring"
try:
    class Body: pass
except OSError:
    class Handler: pass
else:
    class Otherwise: pass
finally:
    match 1:
        case 1:
            class Case: pass
'''
    )


class DropDocstrings(ast.NodeTransformer):
    def visit(self, node):
        self.generic_visit(node)
        if isinstance(node, corpus.SCOPES) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or ([] if isinstance(node, ast.Module) else [ast.Pass()])
        return node


@pytest.mark.parametrize("module", ["argparse", "dataclasses", "typing", "asyncio/base_events", "email/message"])
def test_code_of_the_standard_library_keeps_its_syntax_tree(module):
    source = Path(sysconfig.get_path("stdlib"), f"{module}.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    bare = corpus.without_docstrings(source, tree)
    assert 1000 < len(bare) < len(source)
    assert ast.dump(ast.parse(bare)) == ast.dump(DropDocstrings().visit(tree))


def test_modules_leave_out_tests_tables_and_what_is_no_python(tmp_path):
    for name in ["a.py", "b/c.py", "b/tests/d.py", "site-packages/e.py", "encodings/f.py", "config-3/g.py"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    (tmp_path / "template.py").write_text("x = {{ no python }\n")
    (tmp_path / "latin.py").write_bytes(b"x = '\xe9'\n")
    found = [(name, source) for name, source, _ in corpus.modules(tmp_path)]
    assert sorted(found) == [("a.py", "x = 1\n"), ("b/c.py", "x = 1\n")]


def test_a_folder_holds_distinct_documents_up_to_its_budget(tmp_path):
    found = [{"text": f"{number:09}\n", "id": f"n#{number}"} for number in range(1000)]
    counts = corpus.write_folder(tmp_path / "docs", [found[0], found[0], *found], budget_bytes=4005)
    lines = (tmp_path / "docs" / "docs.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == found[:400]  # ten bytes each
    assert (counts["documents"], counts["text_bytes"]) == (400, 4000)


def test_a_folder_of_too_few_documents_is_an_error(tmp_path):
    found = ({"text": f"{number}\n", "id": f"n#{number}"} for number in range(299))
    with pytest.raises(SystemExit, match="docs: 299 documents of .*, expected at least 300; take an interpreter"):
        corpus.write_folder(tmp_path / "docs", found, budget_bytes=10**6)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_an_error():
    with pytest.raises(SystemExit, match="no_such_package: not installed in .*requirements.txt: `make install`"):
        corpus.package_root("no_such_package")


def write_manifest(output, environment, file_bytes=3):
    (output / "docs").mkdir(parents=True)
    (output / "docs" / "docs.jsonl").write_text("{}\n")
    folders = {"docs": {"file_bytes": file_bytes}}
    manifest = {"environment": environment, "folders": folders, "fingerprint": "f"}
    (output / "manifest.json").write_text(json.dumps(manifest))


def test_a_corpus_is_finished_for_its_environment_with_whole_files_only(tmp_path):
    environment = corpus.environment()
    assert environment["packages"]["numpy"] and environment["packages"]["pyarrow"]
    write_manifest(tmp_path / "same", environment)
    assert corpus.finished(tmp_path / "same")["fingerprint"] == "f"
    write_manifest(tmp_path / "other", {**environment, "packages": {**environment["packages"], "numpy": "0"}})
    assert corpus.finished(tmp_path / "other") is None
    write_manifest(tmp_path / "cut", environment, file_bytes=4)
    assert corpus.finished(tmp_path / "cut") is None
    assert corpus.finished(tmp_path / "absent") is None


@pytest.mark.parametrize("name, text", [("manifest.json", "[]"), ("manifest.json", "{}"), ("thesis.txt", "x")])
def test_a_folder_that_holds_something_else_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    result = run(SCRIPT, "--output", tmp_path)
    assert result.returncode == 2
    assert "is not a corpus that this script built" in result.stderr
    assert (tmp_path / name).read_text() == text


def test_the_text_does_not_depend_on_the_hash_seed():
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import build_quickstart_corpus as corpus\n"
        "seen = set()\n"
        "print([*corpus.headers('numpy', seen), *corpus.topics(seen), *corpus.descriptions(seen)])"
    )
    first, second = (run("-c", code, PYTHONHASHSEED=seed, PYTHONIOENCODING="utf-8") for seed in ("1", "2"))
    assert len(first.stdout) > 500_000
    assert first.stdout == second.stdout


def test_a_killed_build_leaves_nothing_and_the_next_one_is_whole_and_recognised(tmp_path):
    output = tmp_path / "quickstart"
    process = subprocess.Popen([sys.executable, SCRIPT, "--output", output])
    deadline = time.monotonic() + 300
    while not (tmp_path / ".quickstart.partial").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert (tmp_path / ".quickstart.partial").exists() and not output.exists()

    (tmp_path / ".quickstart.old" / "docs").mkdir(parents=True)  # as after a kill between two renames
    write_manifest(output, {"python": "another"})
    built = run(SCRIPT, "--output", output)
    assert built.returncode == 0, built.stderr
    assert "built in" in built.stdout and built.stdout.count("\n") == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == [".quickstart.lock", "quickstart"]
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["fingerprint"] in built.stdout
    total_bytes, licences = 0, 0
    of_this_machine = [sysconfig.get_path(name) for name in ("stdlib", "purelib")]  # text names /usr and /usr/local
    for name, budget_bytes in corpus.BUDGET_BYTES.items():
        lines = (output / name / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        assert len(found) == manifest["folders"][name]["documents"] >= 600
        assert len({document["text"] for document in found}) == len({d["id"] for d in found}) == len(found)
        assert not any(document["id"].startswith("/") for document in found)
        assert not any(place in document["text"] for document in found for place in of_this_machine)
        text_bytes = sum(len(document["text"].encode()) for document in found)
        assert 0.8 * budget_bytes < text_bytes <= budget_bytes
        total_bytes += text_bytes
        licences += sum("Licensed to the Apache Software Foundation" in document["text"] for document in found)
    assert 11e6 < total_bytes < 13e6
    assert licences <= 1

    modified = (output / "manifest.json").stat().st_mtime_ns
    again = run(SCRIPT, "--output", output)
    assert "already there" in again.stdout and manifest["fingerprint"] in again.stdout
    assert (output / "manifest.json").stat().st_mtime_ns == modified
