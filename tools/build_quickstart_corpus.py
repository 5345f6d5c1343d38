"""Build the quickstart's corpus: about 12 MB of real text that every installed environment already holds.

    python tools/build_quickstart_corpus.py --output data/quickstart

Three folders of JSONL, one document a line (`{"text": ..., "id": ...}`):

    docs    the interpreter's reference topics, the standard library's docstrings, the descriptions of the
            pinned packages, numpy's docstrings
    python  the standard library's code without its docstrings
    cpp     the headers that numpy and pyarrow ship

The files depend only on this script, the interpreter and the versions of the pinned packages: no module is imported for
its text, no machine path is written, and the order comes from hashes of relative paths. A finished corpus of the same
environment is recognised by its manifest and left as it is. A new one is made in a temporary folder and renamed into
place.
"""

import argparse
import ast
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import sys
import sysconfig
import time
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

BUDGET_BYTES = {"docs": 4_500_000, "python": 4_500_000, "cpp": 3_500_000}
DOCUMENT_CHARS = 4_000  # longer texts are cut: with more documents, a held-out share represents its source
SHORTEST_CHARS = 200
FEWEST_DOCUMENTS = 300
REPEAT_CHARS = 200  # paragraphs from this length on appear once: a copy in training would flatter the held-out loss
DESCRIPTION_CHARS = 30_000  # a longer description continues with its change log

PINS = Path(__file__).resolve().parent.parent / "requirements.txt"
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Tables rather than text; the paths of the interpreter's build; the reference topics, which stand in `docs`.
SKIPPED_MODULES = re.compile(r"encodings/|config-|_sysconfigdata|_sysconfig_vars|pydoc_data/")

UNINDENTED_PARAGRAPH = re.compile(r"(?<=\n\n)(?=\S)")
PARAGRAPH = re.compile(r"(?<=\n\n)(?=[^\n])")
LINE = re.compile(r"(?<=\n)")
CPP_COMMENT = re.compile(r"\s*(/\*.*?\*/|//[^\n]*(\n[ \t]*//[^\n]*)*)\n?", re.DOTALL)
PYTHON_COMMENT = re.compile(r"\s*#[^\n]*(\n#[^\n]*)*\n?")
LICENCE = re.compile(r"copyright|licen[cs]e|all rights reserved", re.IGNORECASE)

SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Document = dict[str, str]


# Text


def pieces(text: str, seams: tuple[re.Pattern, ...] = (UNINDENTED_PARAGRAPH, PARAGRAPH, LINE)) -> list[str]:
    """Cut a text at the coarsest seams that give pieces of at most DOCUMENT_CHARS; a longer line stays whole.

    The pieces, joined, are the text.
    """
    if len(text) <= DOCUMENT_CHARS or not seams:
        return [text]
    cut = [""]
    for block in seams[0].split(text):
        if len(cut[-1]) + len(block) <= DOCUMENT_CHARS:
            cut[-1] += block
        else:
            cut += pieces(block, seams[1:])
    return [piece for piece in cut if piece]


def without_repeats(text: str, seen: set[bytes]) -> str:
    """The text without the longer paragraphs in `seen`, compared up to white space; `seen` gets the rest."""
    kept = []
    for paragraph in PARAGRAPH.split(text):
        digest = hashlib.sha256(" ".join(paragraph.split()).encode()).digest()
        if len(paragraph) < REPEAT_CHARS or digest not in seen:
            kept.append(paragraph)
            seen.add(digest)
    return "".join(kept)


def without_licence(text: str, comment: re.Pattern) -> str:
    """The text without the comments at its head that speak of copyright or a licence."""
    while (match := comment.match(text)) and LICENCE.search(match[0]):
        text = text[match.end() :]
    return text


def documents(name: str, text: str, seen: set[bytes]) -> Iterator[Document]:
    """The documents `name#0`, `name#1`, ... of one text, repeats and scraps dropped."""
    clean = without_repeats(text.replace("\r\n", "\n"), seen)
    for number, piece in enumerate(pieces(clean)):
        if len(piece.strip()) >= SHORTEST_CHARS:
            yield {"text": piece.strip("\n") + "\n", "id": f"{name}#{number}"}


# Python


def scopes(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    """The dotted name and the node of a module and of every class and function in it, in source order."""
    if isinstance(node, SCOPES):
        yield name, node
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            yield from scopes(child, f"{name}.{child.name}" if isinstance(child, SCOPES) else name)


def docstrings(tree: ast.Module, module: str) -> str:
    """A module's docstrings as one text: each under the name and arguments of what it documents."""
    sections = []
    for name, node in scopes(tree, module):
        if text := ast.get_docstring(node):
            arguments = f"({ast.unparse(node.args)})" if hasattr(node, "args") else ""
            body = "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())
            sections.append(f"{name}{arguments}\n{body}\n")
    return "".join(sections)


def without_docstrings(source: str, tree: ast.Module) -> str:
    """The code without its docstrings, the rest as it is; `pass` replaces a body that held nothing else."""
    lines = source.encode().splitlines(keepends=True)  # ast counts columns in UTF-8 bytes
    bare = [node for _, node in scopes(tree, "") if ast.get_docstring(node, clean=False) is not None]
    for node in sorted(bare, key=lambda node: node.body[0].lineno, reverse=True):
        doc = node.body[0]
        first, last = doc.lineno - 1, doc.end_lineno - 1
        before, after = lines[first][: doc.col_offset], lines[last][doc.end_col_offset :]
        if len(node.body) == 1 and not isinstance(node, ast.Module):
            lines[first : last + 1] = [before + b"pass" + after]
        elif before.strip() or after.strip():
            lines[first : last + 1] = [before + after.lstrip(b" ;")]
        else:
            lines[first : last + 1] = []
    return b"".join(lines).decode()


def hashed_order(root: Path, patterns: Iterable[str]) -> list[tuple[str, Path]]:
    """The files below `root` with their relative names, tests left out, in the order of the names' hashes.

    Hash order lets a budget cut a fair sample instead of the end of the alphabet.
    """
    found = {path.relative_to(root).as_posix(): path for pattern in patterns for path in root.rglob(pattern)}
    kept = [item for item in found.items() if not SKIPPED_FOLDERS.intersection(Path(item[0]).parts)]
    return sorted(kept, key=lambda item: hashlib.sha256(item[0].encode()).digest())


def modules(root: Path) -> Iterator[tuple[str, str, ast.Module]]:
    """(relative name, source, syntax tree) of each file below `root` that is valid Python."""
    for name, path in hashed_order(root, ["*.py"]):
        if SKIPPED_MODULES.match(name):
            continue
        try:
            with tokenize.open(path) as file:
                source = file.read()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                warnings.simplefilter("ignore", DeprecationWarning)
                tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue  # templates and samples that are not meant to run
        yield name, source, tree


def dotted(name: str) -> str:
    """`a/b/__init__.py` -> `a.b`."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# Sources


def package_root(package: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        sys.exit(f"{package}: not installed in {sys.prefix}; expected the packages of {PINS.name}: `make install`")
    return Path(spec.submodule_search_locations[0])


def pinned_versions() -> dict[str, str]:
    """Name and version of each pinned package that is installed; environment markers exclude some on every machine."""
    versions = {}
    for name in re.findall(r"^([\w.-]+)==", PINS.read_text(), re.MULTILINE):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def descriptions(seen: set[bytes]) -> Iterator[Document]:
    """What each pinned package says of itself on the package index."""
    for name in pinned_versions():
        text = importlib.metadata.metadata(name).get_payload()
        yield from documents(f"descriptions/{name}", text[:DESCRIPTION_CHARS], seen)


def topics(seen: set[bytes]) -> Iterator[Document]:
    """The language reference as `help()` shows it."""
    from pydoc_data.topics import topics as texts

    for name in sorted(texts):
        yield from documents(f"topics/{name}", texts[name], seen)


def package_docstrings(package: str, seen: set[bytes]) -> Iterator[Document]:
    """The docstrings of an installed package."""
    for name, _, tree in modules(package_root(package)):
        yield from documents(f"{package}/{name}", docstrings(tree, dotted(f"{package}/{name}")), seen)


def headers(package: str, seen: set[bytes]) -> Iterator[Document]:
    """The C and C++ headers of an installed package, without licences at their head; UTF-8 only."""
    for name, path in hashed_order(package_root(package), ["*.h", "*.hpp"]):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # prose in another encoding, of no use to a byte-pair tokenizer
        yield from documents(f"{package}/{name}", without_licence(text, CPP_COMMENT), seen)


def standard_library(seen: set[bytes]) -> tuple[list[Document], list[Document]]:
    """The standard library's documents: (docstrings, code). One pass for both, since parsing is what takes time."""
    texts, code = [], []
    for name, source, tree in modules(Path(sysconfig.get_path("stdlib"))):
        texts += documents(f"stdlib/{name}", docstrings(tree, dotted(name)), seen)
        bare = without_licence(without_docstrings(source, tree), PYTHON_COMMENT)
        code += documents(f"stdlib/{name}", bare, seen)
    return texts, code


def docs(library: list[Document], seen: set[bytes]) -> Iterator[Document]:
    """The documents of `docs`, the most readable first, so that the budget cuts numpy's docstrings."""
    yield from topics(seen)
    yield from library
    yield from descriptions(seen)
    yield from package_docstrings("numpy", seen)


def cpp(seen: set[bytes]) -> Iterator[Document]:
    """The documents of `cpp`."""
    yield from headers("numpy", seen)
    yield from headers("pyarrow", seen)


# The corpus on disk


def write_folder(folder: Path, found: Iterable[Document], budget_bytes: int) -> dict[str, int | str]:
    """Write the distinct documents to `folder`/`folder`.jsonl until the next one would exceed the budget.

    Returns the counts: documents, bytes of text, the file's size and sha256. Exits with fewer than
    FEWEST_DOCUMENTS: the environment lacks the text.
    """
    text_bytes, written, lines = 0, set(), []
    for document in found:
        size = len(document["text"].encode())
        if text_bytes + size > budget_bytes:
            break
        if document["text"] not in written:
            written.add(document["text"])
            text_bytes += size
            lines.append(json.dumps(document, ensure_ascii=False) + "\n")
    if len(lines) < FEWEST_DOCUMENTS:
        sys.exit(
            f"{folder.name}: {len(lines)} documents of {sys.prefix}, expected at least {FEWEST_DOCUMENTS}; "
            f"take an interpreter with its whole standard library and install the packages of {PINS.name}"
        )
    content = "".join(lines).encode()
    folder.mkdir(parents=True)
    (folder / f"{folder.name}.jsonl").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    return {"documents": len(lines), "text_bytes": text_bytes, "file_bytes": len(content), "sha256": digest}


def environment() -> dict:
    """Everything that the corpus depends on."""
    builder = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return {"builder": builder, "python": sys.version, "packages": pinned_versions()}


def build(folder: Path) -> dict:
    """Write the corpus into an empty folder and return its manifest."""
    seen: set[bytes] = set()
    library, code = standard_library(seen)
    found = {"docs": docs(library, seen), "python": code, "cpp": cpp(seen)}
    folders = {name: write_folder(folder / name, found[name], BUDGET_BYTES[name]) for name in found}
    digests = "".join(folders[name]["sha256"] for name in sorted(folders))
    fingerprint = hashlib.sha256(digests.encode()).hexdigest()
    manifest = {"environment": environment(), "folders": folders, "fingerprint": fingerprint}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def read_manifest(output: Path) -> dict | None:
    """The manifest of the corpus in `output`; None if this script wrote none there."""
    try:
        manifest = json.loads((output / "manifest.json").read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    keys = {"environment", "folders", "fingerprint"}
    return manifest if isinstance(manifest, dict) and keys <= manifest.keys() else None


def finished(output: Path) -> dict | None:
    """The manifest if `output` holds this environment's corpus with files of the right sizes, else None."""
    manifest = read_manifest(output)
    if manifest is None or manifest["environment"] != environment():
        return None
    files = {output / name / f"{name}.jsonl": folder for name, folder in manifest["folders"].items()}
    whole = all(path.is_file() and path.stat().st_size == folder["file_bytes"] for path, folder in files.items())
    return manifest if whole else None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process in at a time; the lock is released when the process that holds it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ensure(output: Path) -> tuple[dict, bool]:
    """Make `output` hold this environment's corpus. Returns its manifest, and whether it had to be built.

    A kill leaves the old corpus, the new one or none, but never a partial one.
    """
    partial, old = (output.with_name(f".{output.name}.{word}") for word in ("partial", "old"))
    with locked(output.with_name(f".{output.name}.lock")):
        if manifest := finished(output):
            return manifest, False
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        manifest = build(partial)
        if output.exists():
            output.rename(old)
        partial.rename(output)
        shutil.rmtree(old, ignore_errors=True)
    return manifest, True


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="the folder that will hold docs, python and cpp")
    output = parser.parse_args(argv).output
    used = output.exists() and (not output.is_dir() or any(output.iterdir()))
    if used and read_manifest(output) is None:
        parser.error(f"{output}: is not a corpus that this script built; give a new folder, or remove it")
    start = time.monotonic()
    manifest, built = ensure(output)
    seconds = time.monotonic() - start
    print(f"{output}: " + (f"built in {seconds:.1f} s" if built else "already there for this environment"))
    print(f"  {'folder':8}{'documents':>10}{'MB':>8}")
    for name, folder in manifest["folders"].items():
        print(f"  {name:8}{folder['documents']:>10,}{folder['text_bytes'] / 1e6:>8.2f}")
    print(f"  sha256 {manifest['fingerprint']}")


if __name__ == "__main__":
    main()
