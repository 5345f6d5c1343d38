"""Wrong inputs of every kind, one a row: exit code 2, a line that names place and fix, and nothing is made.

A row: what is wrong, how it is made in a folder that holds good data and a good run, the command line, the words of
the message that name the place, and those that name the fix.
"""

import ctypes
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from curriculum.cli.main import run_command
from curriculum.config import load_config
from curriculum.data.prepare import prepare_folder
from curriculum.data.tokenizers.tokenizer import byte_tokenizer
from curriculum.data.tokenizers.vocabulary import char_tokenizer, train_bpe
from curriculum.train.trainer import train

GOOD = """\
name: small
tokenizer: {kind: byte}
model: {preset: tiny, n_layer: 1, d_model: 16, n_head: 2, n_kv_head: 1, d_ff: 16}
sources:
  web: {path: web.jsonl, held_out: 10%}
  law: {path: law.jsonl}
phases:
  - {name: a, until: 2, mixture: {web: 1.0}}
  - {name: b, until: end, mixture: {law: 1.0}}
evalsets:
  primary: {held_out_of: web}
  every: 2
  sets: {extra: {path: extra}}
train: {steps: 4, batch_size: 4, seq_len: 32}
optim: {schedule: constant}
checkpoint: {every: 2}
logging: {every: 2, tensorboard: false}
"""
STORES = ".curriculum"


# --- how a wrong input is made ------------------------------------------------------------------------------


def write(path, content):
    """A file of these bytes, this text, or what a call gives when the row is made."""

    def make():
        given = content() if callable(content) else content
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(given if isinstance(given, bytes) else given.encode("utf-8", "surrogatepass"))

    return make


def config(old, new):
    """The good config with one piece replaced."""
    return replace("c.yaml", old, new)


def replace(path, old, new):
    def make():
        text = Path(path).read_text()
        assert old in text, f"{path} has no {old!r}"
        Path(path).write_text(text.replace(old, new, 1))

    return make


def rows(*lines):
    """law.jsonl with these lines after 20 good ones."""
    as_bytes = [line if isinstance(line, bytes) else line.encode() for line in lines]
    return write("law.jsonl", lambda: b"".join([Path("law.jsonl").read_bytes(), *(line + b"\n" for line in as_bytes)]))


def source(content, name="bad", **fields):
    """The source law read from a file of this content, or from what is at `name` already."""
    fields = {"path": name, **fields}

    def make():
        if content is not None:
            write(name, content)()
        config("law: {path: law.jsonl}", f"law: {json.dumps(fields)}")()

    return make


def both(*makes):
    return lambda: [make() for make in makes]


def cut(path):
    return lambda: os.truncate(path, os.path.getsize(path) // 2)


def remove(path):
    return lambda: shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def link(path, target):
    return lambda: os.symlink(target, path)


def fields_of(path, **changes):
    """A JSON file with other values."""
    return write(path, lambda: json.dumps(json.loads(Path(path).read_text()) | changes))


def mode(path, bits):
    return lambda: os.chmod(path, bits)


def parquet(**columns):
    def make():
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), "bad.parquet")

    return make


def damaged_arrays(item):
    return lambda: [os.truncate(p, p.stat().st_size // 2) for p in Path(item).rglob("d/*")]


def nothing():
    """The command line alone is wrong."""


DEEP = "[" * 100_000
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))


class Row(NamedTuple):
    what: str
    make: object
    command: str
    place: str
    fix: str
    without_privileges: bool = False  # root, too, is held to the permissions of files


class Pickled:
    """Makes the file `pwned` where it is unpickled."""

    def __reduce__(self):
        return (open, ("pwned", "w"))


# --- the table ----------------------------------------------------------------------------------------------

TRAIN, PLAN, PREPARE = "train c.yaml", "plan c.yaml", "prepare c.yaml"
EVAL, EXPORT, BRANCH = "eval run", "export run --format safetensors -o out", "branch run --at 2 --run-dir new"
RESUME = "train c.yaml --run-dir run --resume"

CONFIGS = [
    Row("no config", nothing, "train none.yaml", "none.yaml", "no such file; expected the path of a YAML config"),
    Row("config is a folder", nothing, "plan extra", "extra", "is a directory; expected the path"),
    Row("config is empty", write("c.yaml", ""), PLAN, "c.yaml", "is empty; expected a YAML config with sources"),
    Row("config is a list", write("c.yaml", "[1, 2]"), PLAN, "c.yaml:1:1", "expected a mapping of sections"),
    Row("config in Latin-1", write("c.yaml", GOOD.replace("small", "é").encode("latin-1")), PLAN, "byte 6", "UTF-8"),
    Row("config with NUL", config("name: small", "name: sm\0all"), PLAN, "c.yaml", "not YAML: "),
    Row("config links to itself", both(remove("c.yaml"), link("c.yaml", "c.yaml")), PLAN, "c.yaml", "symbolic links"),
    Row("config may not be read", mode("c.yaml", 0), PLAN, "c.yaml", "Permission denied", True),
    Row("name of a config too long", nothing, "plan " + "x" * 300, "xxx", "File name too long"),
    Row("YAML bomb", write("c.yaml", LAUGHS), PLAN, "c.yaml:", "are aliases nested?"),
    Row("YAML nested deeply", write("c.yaml", "sources: " + DEEP), PLAN, "c.yaml", "nested too deeply"),
    Row("alias of nothing", config("name: small", "name: *x"), PLAN, "c.yaml:1:7", "undefined alias"),
    Row("tag that calls", config("name: small", "name: !!python/object/apply:os.system ['touch pwned']"), PLAN, "c.yaml:1:7", "expected plain YAML without tags"),
    Row("tag of one's own", config("name: small", "name: !include secret.yaml"), PLAN, "c.yaml:1:7", "expected plain YAML without tags"),
    Row("two documents", config("name: small", "name: small\n---\nname: other"), PLAN, "c.yaml:2", "not YAML: expected a single document"),
    Row("line separator in a comment", config("name: small", "name: small  # a note\u2028seed: 5"), PLAN, "c.yaml:1:22", "got the character U+2028, at which some readers of YAML end a line; remove it, or write \\u2028 in double quotes"),
    Row("next line in a text", config("name: small", 'name: "sm\x85all"'), PLAN, "c.yaml:1:10", "got the character U+0085"),
    Row("variable in braces without quotes", config("name: small", "adaptation: {replay: {web: ${variables.n}%}}"), PLAN, "c.yaml:1:", "; a value with ${variables.n} in it needs quotes"),
    Row("tab for blanks", config("  web:", "\tweb:"), PLAN, "c.yaml:5:1", "; it is a tab: indent with blanks"),
    Row("quote without end", config("name: small", "name: 'small"), PLAN, "c.yaml:1:7", "found unexpected end of stream; this quote is not closed\n     1 | name: 'small\n"),
    Row("quote that another one ends", config("name: small", "name: 'small\ntokenizer: {kind: 'byte'}"), PLAN, "c.yaml:2:20", "is a quote before it not closed?"),
    Row("bracket without end", config("every: 2}", "every: 2"), PLAN, "c.yaml:", "or the bracket opened in line 16, column 13 not closed?"),
    Row("indented too little", config("  primary:", " primary:"), PLAN, "c.yaml:12:3", "; is it indented like the lines before"),
    Row("no blank after a colon", config("steps: 4,", "steps:4,"), PLAN, "c.yaml:14:9", "the key 'steps:4' has no value; put a blank after its colon: steps: 4"),
    Row("name with ..", config("name: small", "name: ../small"), TRAIN, "c.yaml:1:1: name", "expected letters (a-z, A-Z), digits"),
    Row("name of 5,000 letters", config("name: small", "name: " + "x" * 5000), TRAIN, "c.yaml:1:1: name", "at most 100"),
    Row("seed of 50 digits", config("name: small", "seed: " + "9" * 50), PLAN, "c.yaml:1:7", "expected at most 40"),
    Row("section missing", config("train: {steps: 4, batch_size: 4, seq_len: 32}", ""), PLAN, "c.yaml:1:1: train", "this section is needed"),
    Row("sources empty", nothing, PLAN + " --set sources={}", "sources", "expected at least one source"),
    Row("phases empty", nothing, PLAN + " --set phases=[]", "phases", "expected at least one"),
]  # fmt: skip

VALUES = [
    Row(f"{setting[:60]}", nothing, f"plan c.yaml --set {shlex.quote(setting)}", place, fix)
    for setting, place, fix in [
        ("train.steps=0", "train.steps", "expected at least 1"),
        ("train.steps=1e30", "train.steps", "expected an integer"),
        ("train.steps=-.inf", "train.steps", "expected a finite number"),
        ("train.steps=1e999", "train.steps", "expected a finite number"),
        ("optim.name=adamv", "optim.name", "did you mean 'adamw'"),
        ("optim.warmup_steps=-5", "optim.warmup_steps", "expected"),
        ("optim.warmup_steps=150%", "optim.warmup_steps", "shorten them"),
        ("model.n_layer=1001", "model.n_layer", "at most 1000"),
        ("model.d_model=1000000000000", "model.d_model", "at most 16777216"),
        ("model.dropout=1", "model.dropout", "expected"),
        ("model.dropout=-0.1", "model.dropout", "expected"),
        ("tokenizer={kind: sentencepiece}", "tokenizer.kind", "expected 'byte'"),
        ("tokenizer={kind: bpe, vocab_size: 3}", "tokenizer", "is too small"),
        ("tokenizer={kind: bpe, vocab_size: 1000000000000}", "tokenizer", "expected at most"),
        ("tokenizer={kind: byte, path: bpe}", "tokenizer", "leave path out"),
        ("tokenizer={kind: hf, path: bpe}", "tokenizer.path: bpe holds a tokenizer of kind bpe", "set tokenizer.kind: bpe"),
        ("tokenizer={kind: hf}", "tokenizer", "kind hf needs path"),
        ("tokenizer={kind: hf, path: nowhere}", "tokenizer.path: 'nowhere' does not exist", "relative to the working folder"),
        ("phases[0].until=0", "phases[0].until", "ends must increase"),
        ("phases[0].until=0%", "phases[0].until", "ends must increase"),
        ("phases[0].until=101%", "phases[0].until", "after the run's end at step 4 (train.steps)"),
        ("phases[0].until=nan%", "phases[0].until", "expected"),
        ("phases[0].until=1e400 tokens", "phases[0].until", "expected"),
        ("phases[0].until=-5 tokens", "phases[0].until", "expected"),
        ("phases[0].until=2 epochs of wbe", "phases[0].until", "did you mean 'web'?"),
        ("phases[1].name=a/b", "phases[1].name", "expected letters (a-z, A-Z), digits"),
        ("phases[1].ramp_steps=-1", "phases[1].ramp_steps", "expected"),
        ("sources.web.held_out=-1", "sources.web", 'expected a share such as "1%"'),
        ("sources.web.path=''", "sources.web", "expected a file or a folder"),
        ("sources.web.path=../../nowhere/else", "sources.web.path", "does not exist"),
        ('sources.web.path="a\\0b"', "sources.web.path", "cannot be accessed"),
        ("sources.web.path=" + "x" * 5000, "sources.web.path", "expected a readable path"),
        ("sources.web.path=~nobody-here/x", "sources.web.path", "does not exist"),
        ("sources={a/b: {path: law.jsonl}}", "sources.a/b", "expected letters (a-z, A-Z), digits"),
        ("evalsets.gold={gate: \"'\"}", "evalsets.gold.gate", "expected"),
        ("mesh.data=0", "mesh.data", "expected"),
        ("logging.wandb={project: a/b}", "logging.wandb.project", "expected 1 to 128 characters"),
        ("chat={user: hello}", "chat", "expected it exactly once"),
        ("adaptation.init_from=nowhere", "adaptation.init_from", "does not exist"),
        ("adaptation.init_from=extra", "adaptation.init_from", "expected a run"),
        ("adaptation.init_from=run/checkpoints/3", "adaptation.init_from", "available: "),
        ("train.steps.more=1", "train.steps", "expected a section to look up 'more' in"),
        ("=3", "--set =3", "expected KEY=VALUE"),
        ("train={steps: [}", "--set train={steps: [}:1:", "not YAML"),
        ("sources.web.glob=*.jsonl", "--set sources.web.glob=*.jsonl:1:", """put text in quotes: --set 'sources.web.glob="*.jsonl"'"""),
        ("name=!!python/object/apply:os.system ['touch pwned']", "--set name=", "expected plain YAML without tags"),
        ("sources.web.path=" + DEEP, "--set sources.web.path", "nested too deeply"),
    ]
]  # fmt: skip

COMMAND_LINES = [
    Row("command unknown", nothing, "tarin c.yaml", "tarin", "Did you mean 'train'"),
    Row("option unknown", nothing, TRAIN + " --resum latest", "--resum", "--resume"),
    Row("argument missing", nothing, "train", "CONFIG", "Missing argument"),
    Row("option without value", nothing, TRAIN + " --run-dir", "--run-dir", "requires an argument"),
    Row("argument too many", nothing, "inspect run run", "run", "unexpected extra argument"),
    Row("--resume of 5,000 digits", nothing, RESUME + " " + "9" * 5000, "--resume", "expected"),
    Row("--resume with nothing there", nothing, TRAIN + " --resume 2", "small", "holds no run; expected a directory made by"),
    Row("--resume in a dry run", nothing, TRAIN + " --dry-run --resume latest", "--dry-run", "leave one out"),
    Row("run directory holds a run", nothing, TRAIN + " --run-dir run", "run", "continue it with --resume latest"),
    Row("run directory that is not UTF-8", nothing, TRAIN + " --run-dir new\udcff", "new\\xff: the path is not read as UTF-8", "choose another folder"),
    Row("run directory without a name", nothing, TRAIN + " --run-dir ''", "--run-dir", "is a shell variable not set?"),
    Row("run directory is a checkpoint", nothing, TRAIN + " --run-dir run/checkpoints/2 --resume latest", "--run-dir run/checkpoints/2: lies in checkpoints/ of the run", "/run --resume 2, or choose a folder of its own"),
    Row("run directory beside checkpoints", nothing, TRAIN + " --run-dir run/checkpoints --resume latest", "--run-dir run/checkpoints: lies in checkpoints/ of the run", "/run --resume latest, or choose"),
    Row("run directory among results", nothing, TRAIN + " --run-dir run/evals/2", "--run-dir run/evals/2: lies in evals/ of the run", "/run --resume latest, or choose"),
    Row("run directory linked to checkpoints", link("lnk", "run/checkpoints"), TRAIN + " --run-dir lnk/9", "--run-dir lnk/9: lies in checkpoints/ of the run", "or choose a folder of its own"),
    Row("run directory linked to nothing", link("lnk", "../away"), TRAIN + " --run-dir lnk/9", "lnk is a link to ../away, which does not exist", "make that folder, or choose another"),
    Row("run directory with another config", write("other/config.yaml", "name: other\n"), TRAIN + " --run-dir other", "--run-dir other: holds no run, but config.yaml, which a run here would replace", "choose another folder"),
    Row("run directory with a record of others", write("other/metrics.jsonl", "1\n"), TRAIN + " --run-dir other", "--run-dir other: holds no run, but metrics.jsonl,", "or move what is there away"),
    Row("run directory among a set's files", nothing, TRAIN + " --run-dir extra/new", "--run-dir extra/new: lies in extra, whose files are the text of extra", "choose another folder, or leave it out with a glob"),
    Row("branch among a set's files", nothing, "branch run --at 2 --run-dir extra/new", "--run-dir extra/new: lies in extra", "choose another folder"),
    Row("run directory is a file", nothing, TRAIN + " --run-dir web.jsonl", "--run-dir web.jsonl", "choose another"),
    Row("run directory too long", nothing, TRAIN + " --run-dir " + "x" * 300, "--run-dir", "choose another"),
    Row("run directory to resume too long", nothing, TRAIN + " --resume latest --run-dir " + "x" * 300, "--run-dir", "choose another"),
    Row("run directory may not be written", both(lambda: os.mkdir("locked"), mode("locked", 0o555)), TRAIN + " --run-dir locked/new", "--run-dir locked/new", "choose another", True),
    Row("--dataset-dir without a folder", nothing, TRAIN + " --dataset-dir law=", "--dataset-dir law=", "expected DIR or NAME=DIR"),
    Row("--eval-dataset-dir of a file", nothing, TRAIN + " --eval-dataset-dir web.jsonl", "--eval-dataset-dir web.jsonl", "give another: --eval-dataset-dir NAME=web.jsonl"),
    Row("--eval-dataset-dir of a name with a space", nothing, TRAIN + " --eval-dataset-dir 'My Set'", "--eval-dataset-dir My Set", "give another: --eval-dataset-dir NAME='My Set'"),
    Row("--store-dir is a file", nothing, PREPARE + " --store-dir web.jsonl", "web.jsonl", "fix that or choose another"),
    Row("--store-dir links to itself", link("loop", "loop"), PREPARE + " --store-dir loop", "loop", "another"),
    Row("--store-dir may not be written", both(lambda: os.mkdir("locked"), mode("locked", 0o555)), PREPARE + " --store-dir locked/s", "locked", "choose another folder", True),
    Row("--store-dir too long", nothing, TRAIN + " --store-dir " + "x" * 300, "File name too long", "another"),
    Row("prepare of nothing", nothing, "prepare", "prepare", "expected either CONFIG, or --text"),
    Row("prepare without output", nothing, "prepare --text web.jsonl", "--text", "needs --tokenizer T and --output DIR"),
    Row("prepare of two kinds", nothing, PREPARE + " --tokenizer byte", "--tokenizer", "go with --text"),
    Row("prepare of text not there", nothing, "prepare --text nowhere --tokenizer byte --output o", "nowhere", "expected a readable path"),
    Row("prepare of an empty path", nothing, "prepare --text '' --tokenizer byte --output o", "text", "expected a file or a folder"),
    Row("prepare into a home that is not replaced", nothing, "prepare --text web.jsonl --tokenizer byte --output '~/o'", '--output: got "~/o"', "write it out"),
    Row("prepare into what exists", nothing, "prepare --text web.jsonl --tokenizer byte --output extra", "extra", "name a new folder"),
    Row("prepare into a file", nothing, "prepare --text web.jsonl --tokenizer byte --output web.jsonl/o", "web.jsonl", "choose another folder"),
    Row("prepare with no such tokenizer", nothing, "prepare --text web.jsonl --tokenizer gpt7 --output o", "tokenizer", "it has "),
    Row("prepare with a tokenizer's name too long", nothing, "prepare --text web.jsonl --output o --tokenizer " + "x" * 300, "tokenizer", "it has "),
    Row("prepare with a folder that is no tokenizer", nothing, "prepare --text web.jsonl --tokenizer extra --output o", "extra/tokenizer.json", "expected a tokenizer's folder"),
    Row("eval of no run", nothing, "eval nowhere", "nowhere", "expected a directory made by `curriculum train`"),
    Row("eval of a folder that is no run", nothing, "eval extra", "extra", "expected a directory made by `curriculum train`"),
    Row("eval of sets not there", nothing, EVAL + " --sets extar", "--sets extar", "did you mean 'extra'?"),
    Row("eval of no sets", nothing, EVAL + " --sets ,", "--sets", "expected names of eval sets"),
    Row("eval of weights not there", nothing, EVAL + " --weights ema", "--weights ema", "averages.ema_decay"),
    Row("eval of a set not there", nothing, EVAL + " --eval-dataset-dir nowhere", "--eval-dataset-dir nowhere=nowhere: evalsets.sets.nowhere: does not exist", "relative to the working folder"),
    Row("eval of a set with a slip", nothing, EVAL + " --eval-dataset-dir new=extr", "evalsets.sets.new: does not exist", "did you mean 'extra'?"),
    Row("eval of an empty set", lambda: os.mkdir("empty"), EVAL + " --eval-dataset-dir empty", "empty", "name another glob or path"),
    Row("inspect of no run", nothing, "inspect nowhere", "nowhere", "expected a directory made by `curriculum train`"),
    Row("inspect of a loop", link("loop", "loop"), "inspect loop", "loop", "expected a directory made by `curriculum train`"),
    Row("inspect of a name too long", nothing, "inspect " + "x" * 300, "xxx", "expected a directory made by `curriculum train`"),
    Row("a key with two dots", nothing, "plan c.yaml --set train..steps=5", "--set train..steps=5", "KEY=VALUE"),
    Row("a key with half a bracket", nothing, "plan c.yaml --set phases[0.until=3", "phases[0.until", "KEY=VALUE"),
    Row("report of no run", nothing, "report nowhere -o r.html", "nowhere", "expected a directory made by `curriculum train`"),
    Row("report into a folder", nothing, "report run -o extra", "extra", "expected"),
    Row("report into a name too long", nothing, "report run -o " + "x" * 300, "-o xxx", "cannot be written: File name too long"),
    Row("report into a folder too long", nothing, f"report run -o {'x' * 300}/r.html", "-o xxx", "expected a file path in an existing folder"),
    Row("report that may not be written", both(lambda: os.mkdir("locked"), mode("locked", 0o555)), "report run -o locked/r.html", "locked/r.html", "Permission denied", True),
    Row("branch of no run", nothing, "branch nowhere --at 2 --run-dir new", "nowhere", "expected a directory made by `curriculum train`"),
    Row("branch at no step", nothing, "branch run --at now --run-dir new", "--at now", "expected a step"),
    Row("branch beyond the run", nothing, "branch run --at 99 --run-dir new", "--at 99", "give a step up to "),
    Row("branch into a run", nothing, "branch run --at 2 --run-dir run", "--run-dir run", "choose another"),
    Row("branch within a run", nothing, "branch run --at 2 --run-dir run/new", "--run-dir run/new", "choose a folder outside it"),
    Row("branch into a folder that is not empty", nothing, "branch run --at 2 --run-dir extra", "--run-dir extra", "choose a new folder"),
    Row("branch with a wrong option", nothing, BRANCH + " --set train.stepz=3", "train.stepz", "did you mean 'steps'?"),
    Row("export of no run", nothing, "export nowhere --format safetensors -o out", "nowhere", "expected a directory made by"),
    Row("export into a home that is not replaced", nothing, "export run --format safetensors -o '~/out'", '-o: got "~/out"', "write it out"),
    Row("export into an empty name", nothing, "export run --format safetensors -o ''", "'-o' / '--output'", "got an empty name; is a shell variable not set?"),
    Row("export into a name too long", nothing, "export run --format safetensors -o " + "x" * 300, "-o xxx", "File name too long"),
    Row("export to no format", nothing, "export run --format onnx -o out", "--format onnx", "safetensors"),
    Row("export to no dtype", nothing, EXPORT + " --dtype f8", "--dtype f8", "f32"),
    Row("export of weights not there", nothing, EXPORT + " --weights mean:c", "no mean of phase 'c'", "averages.phase_mean"),
    Row("export into a folder that is not empty", nothing, "export run --format safetensors -o extra", "-o extra", "expected a new or an empty folder"),
    Row("export into a file's folder", nothing, "export run --format safetensors -o web.jsonl/out", "-o web.jsonl/out", "cannot be written"),
    Row("export that may not be written", both(lambda: os.mkdir("locked"), mode("locked", 0o555)), "export run --format safetensors -o locked/out", "-o locked/out", "cannot be written", True),
]  # fmt: skip

DATA = [
    Row("JSONL that is no JSON", rows("hello"), TRAIN, "law.jsonl:31", "expected one object per line"),
    Row("JSONL cut in its last line", rows('{"text": "never clos'), TRAIN, "law.jsonl:31", "expected one object per line"),
    Row("JSONL of a list", rows('["text"]'), TRAIN, "law.jsonl:31: a list", "expected a JSON object with key 'text'"),
    Row("JSONL of null", rows("null"), PREPARE, "law.jsonl:31: null", "expected a JSON object with key 'text'"),
    Row("JSONL nested deeply", rows('{"text": ' + DEEP), PREPARE, "law.jsonl:31", "expected one object per line"),
    Row("JSONL in one huge line", write("law.jsonl", "9" * 5_000_000), TRAIN, "law.jsonl:1", "expected a JSON object"),
    Row("JSONL with half a surrogate pair", rows('{"text": "a\\ud83d"}'), TRAIN, "law.jsonl:31: 'text' holds half a surrogate pair at character 1", "expected Unicode text"),
    Row("JSONL with half a surrogate pair, raw", rows(b'{"text": "a\xed\xa0\xbd"}'), TRAIN, "law.jsonl:31", "expected"),
    Row("JSONL with NUL", rows(b'{"text": "a\0b"}'), TRAIN, "law.jsonl:31", "expected one object per line"),
    Row("JSONL of NUL", write("law.jsonl", bytes(4096)), TRAIN, "law.jsonl:1", "expected one object per line"),
    Row("JSONL in Latin-1", rows('{"text": "é"}'.encode("latin-1")), TRAIN, "law.jsonl:31", "expected one object per line"),
    Row("JSONL in UTF-16", write("law.jsonl", '{"text": "a"}\n'.encode("utf-16")), TRAIN, "law.jsonl:1", "expected one object per line"),
    Row("JSONL that is gzip", write("law.jsonl", b"\x1f\x8b\x08\0" + bytes(100)), TRAIN, "law.jsonl:1", "expected one object per line"),
    Row("JSONL with Windows lines and a wrong one", rows('{"text": "a"}\r', "{\r"), TRAIN, "law.jsonl:32", "expected one object per line"),
    Row("JSONL of numbers", rows('{"text": 3}'), TRAIN, "law.jsonl:31: 'text' holds a number", "expected text"),
    Row("JSONL of NaN", rows('{"text": NaN}'), TRAIN, "law.jsonl:31: 'text' holds a number", "expected text"),
    Row("JSONL of a list of text", rows('{"text": ["a"]}'), TRAIN, "law.jsonl:31: 'text' holds a list", "expected text"),
    Row("JSONL with another key", rows('{"txet": "a"}'), TRAIN, "law.jsonl:31: no key 'text'", "did you mean text_key: txet?"),
    Row("JSONL with a key of a megabyte", rows('{"' + "x" * 1_000_000 + '": 1}'), TRAIN, "law.jsonl:31: no key 'text'", "text_key:"),
    Row("JSONL with a million keys", rows(json.dumps({str(i): 1 for i in range(100_000)})), TRAIN, "law.jsonl:31: no key 'text'", "text_key:"),
    Row("JSONL of empty texts", write("law.jsonl", '{"text": ""}\n' * 9), TRAIN, "law.jsonl", "expected at least one document"),
    Row("JSONL of null texts", write("law.jsonl", '{"text": null}\n' * 9), TRAIN, "law.jsonl", "expected at least one document"),
    Row("JSONL of blank lines", write("law.jsonl", " \n\n\t\n"), TRAIN, "law.jsonl", "expected at least one document"),
    Row("JSONL that is empty", write("law.jsonl", ""), TRAIN, "law.jsonl", "expected at least one document"),
    Row("conversation of text", source('{"messages": "hi"}', "bad.jsonl", format="messages"), TRAIN, "bad.jsonl:1: 'messages' holds text", "expected a list of messages"),
    Row("conversation that is null", source('{"messages": null}', "bad.jsonl", format="messages"), TRAIN, "bad.jsonl:1: 'messages' holds null", "expected a list of messages"),
    Row("conversation of an unknown role", source('{"messages": [{"role": "alien", "content": "a"}]}', "bad.jsonl", format="messages"), TRAIN, "bad.jsonl:1: messages[0].role is 'alien'", "expected system, user, assistant"),
    Row("conversation of a role that is a list", source('{"messages": [{"role": ["user"], "content": "a"}]}', "bad.jsonl", format="messages"), TRAIN, "bad.jsonl:1: messages[0].role", "expected system, user, assistant"),
    Row("conversation with a role of a megabyte", source('{"messages": [{"role": "' + "x" * 1_000_000 + '", "content": "a"}]}', "bad.jsonl", format="messages"), TRAIN, "bad.jsonl:1: messages[0].role", "expected system, user, assistant"),
    Row("conversation without content", source('{"messages": [{"role": "user"}]}', "bad.jsonl", format="messages"), TRAIN, "bad.jsonl:1: messages[0] has no key 'content'", "rename it in the data"),
    Row("conversation without an answer", source('{"messages": [{"role": "user", "content": "a"}]}', "bad.jsonl", format="messages"), TRAIN, "bad.jsonl:1: no answer", "remove it from the data"),
    Row("completion of two kinds", source('{"prompt": "a", "completion": []}', "bad.jsonl", format="completion"), TRAIN, "bad.jsonl:1: 'prompt' holds text", "expected two texts, or two lists"),
    Row("plain text with NUL", source(b"abc\0def", "bad.txt"), TRAIN, "bad.txt: byte 3 is NUL", "leave it out with glob:"),
    Row("plain text in Latin-1", source("é".encode("latin-1"), "bad.txt"), TRAIN, "bad.txt: byte 0 is not valid UTF-8", "convert the file to UTF-8"),
    Row("plain text that is empty", source("", "bad.txt"), TRAIN, "bad.txt", "expected at least one document"),
    Row("parquet that is none", source("hello", "bad.parquet"), PREPARE, "bad.parquet", "expected a complete parquet file"),
    Row("parquet that is cut", both(parquet(text=["a" * 99] * 99), cut("bad.parquet"), source(None, "bad.parquet")), TRAIN, "bad.parquet", "expected a complete parquet file"),
    Row("parquet without the column", both(parquet(txet=["a"]), source(None, "bad.parquet")), TRAIN, "bad.parquet: no key 'text'", "did you mean text_key: txet?"),
    Row("parquet of numbers", both(parquet(text=[1, 2]), source(None, "bad.parquet")), TRAIN, "bad.parquet: row 1", "expected text"),
    Row("parquet of nulls", both(parquet(text=[None, None]), source(None, "bad.parquet")), TRAIN, "bad.parquet: no text in it (2 empty documents)", "expected at least one document"),
    Row("parquet without rows", both(parquet(text=[]), source(None, "bad.parquet")), TRAIN, "bad.parquet", "expected"),
    Row("arrow that is none", source(b"ARROW1\0\0" + bytes(50), "bad.arrow"), TRAIN, "bad.arrow", "expected a complete arrow file"),
    Row("flat file of half a token", source(b"abc", "bad.bin"), TRAIN, "bad.bin: 3 bytes", "expected a positive multiple of 2"),
    Row("flat file that is empty", source(b"", "bad.bin"), TRAIN, "bad.bin: 0 bytes", "expected a positive multiple of 2"),
    Row("flat file of ids too large", source(b"\xff\xff" * 9, "bad.bin"), TRAIN, "bad.bin: token 0 (byte 0) is id 65535", "check tokenizer and dtype"),
    Row("flat file of end-of-text", source(b"\0\1" * 9, "bad.bin"), TRAIN, "bad.bin", "expected at least one document"),
    Row("folder that is empty", both(lambda: os.mkdir("empty"), source(None, "empty")), TRAIN, "empty", "name another glob or path"),
    Row("folder of hidden files", both(write("hidden/.a.txt", "x"), source(None, "hidden")), TRAIN, "hidden", "name another glob or path"),
    Row("glob that matches nothing", source(None, "extra", glob="*.md"), TRAIN, "extra", "name another glob or path"),
    Row("glob that leaves the folder", source(None, "extra", glob="../*.jsonl"), TRAIN, "extra", "name another glob or path"),
    Row("folder with a link to nothing", both(link("extra/b.txt", "gone.txt"), source(None, "extra")), TRAIN, "extra/b.txt", "expected a readable path"),
    Row("folder with a link to itself", both(link("extra/b.txt", "b.txt"), source(None, "extra")), TRAIN, "extra/b.txt", "expected a readable path"),
    Row("folder with a pipe", both(lambda: os.mkfifo("extra/pipe.txt"), source(None, "extra")), TRAIN, "extra/pipe.txt", "expected files of text"),
    Row("pipe for a source", both(lambda: os.mkfifo("pipe.jsonl"), source(None, "pipe.jsonl")), PLAN, "pipe.jsonl", "expected files of text"),
    Row("source links to itself", both(link("loop", "loop"), source(None, "loop")), TRAIN, "sources.law.path", "cannot be accessed"),
    Row("source may not be read", mode("law.jsonl", 0), TRAIN, "sources.law.path", "check its permissions", True),
    Row("file of a folder may not be read", both(mode("extra/a.txt", 0), source(None, "extra")), TRAIN, "extra/a.txt", "expected a readable", True),
    Row("folder may not be listed", both(mode("extra", 0o300), source(None, "extra")), PLAN, "sources.law.path", "check its permissions", True),
    Row("eval set that is no text", write("extra/a.txt", b"\xff\xfe"), TRAIN, "extra/a.txt: byte 0 is not valid UTF-8", "convert the file to UTF-8"),
    Row("eval set of a source's own text", lambda: shutil.copy("law.jsonl", "extra/law.jsonl"), TRAIN, "c.yaml:6:3: sources.law: 30 of 30 documents also occur in eval set 'extra'", "remove them from one side"),
    Row("eval set of blanks", write("extra/a.txt", ""), TRAIN, "extra", "expected at least one document"),
    Row("held-out text too short", nothing, TRAIN + " --set sources.web.held_out=0.0001 --set evalsets.seq_len=512", "held_out of 0.0001", "hold out more"),
    Row("data-set folder with a script, as of the hub", both(write("scripted/scripted.py", "open('pwned', 'w')"), config("law: {path: law.jsonl}", "law: {hf: ./scripted}")), TRAIN, "hf:./scripted", "give its folder as path:"),
    Row("data-set folder with a script", both(write("scripted/scripted.py", "open('pwned', 'w')"), source(None, "scripted", format="messages")), TRAIN, "scripted/scripted.py", "leave the file out with glob:"),
]  # fmt: skip

TOKENIZERS = [
    Row("tokenizer not there", nothing, TRAIN + " --set 'tokenizer={kind: bpe, path: nowhere}'", "tokenizer.path", "does not exist"),
    Row("tokenizer in a folder of text", nothing, TRAIN + " --set 'tokenizer={kind: bpe, path: extra}'", "tokenizer.path: extra/tokenizer.json", "expected a tokenizer's folder"),
    Row("tokenizer is a file", nothing, TRAIN + " --set 'tokenizer={kind: bpe, path: web.jsonl}'", "web.jsonl/tokenizer.json", "expected a tokenizer's folder"),
    Row("tokenizer of another program", write("bpe/tokenizer.json", '{"version": "1.0", "auto_map": {"AutoTokenizer": "evil.py"}, "model": {"type": "BPE"}}'), TRAIN + " --set 'tokenizer={kind: bpe, path: bpe}'", "bpe/tokenizer.json: not a tokenizer", "restore it"),
    Row("tokenizer of another kind", nothing, TRAIN + " --set 'tokenizer={kind: bpe, path: char}'", "tokenizer.path", "set tokenizer.kind: char"),
    Row("tokenizer of another size", nothing, TRAIN + " --set 'tokenizer={kind: bpe, path: bpe, vocab_size: 300}'", "tokenizer.vocab_size: 300", "leave vocab_size out"),
    Row("tokenizer of another version", fields_of("bpe/tokenizer.json", format_version=99), TRAIN + " --set 'tokenizer={kind: bpe, path: bpe}'", "bpe/tokenizer.json: format_version 99", "save it again"),
    Row("tokenizer with ranks cut", cut("bpe/ranks.tiktoken"), PREPARE + " --set 'tokenizer={kind: bpe, path: bpe}'", "bpe: ", "restore them"),
    Row("tokenizer with ranks that are none", write("bpe/ranks.tiktoken", "a b c\n"), TRAIN + " --set 'tokenizer={kind: bpe, path: bpe}'", "bpe: ", "restore them"),
    Row("tokenizer with negative ranks", write("bpe/ranks.tiktoken", "YQ== -1\n"), TRAIN + " --set 'tokenizer={kind: bpe, path: bpe}'", "bpe: ", "restore them"),
    Row("tokenizer without ranks", remove("bpe/ranks.tiktoken"), TRAIN + " --set 'tokenizer={kind: bpe, path: bpe}'", "bpe/ranks.tiktoken", "expected the ranks"),
    Row("tokenizer with a pattern that is none", fields_of("bpe/tokenizer.json", pattern="(("), TRAIN + " --set 'tokenizer={kind: bpe, path: bpe}'", "bpe: ", "restore them"),
    Row("tokenizer of a billion ids", fields_of("bpe/tokenizer.json", vocab_size=10**9), PLAN + " --set 'tokenizer={kind: bpe, path: bpe}'", "bpe: ", "restore them"),
    Row("tokenizer of text instead of numbers", fields_of("bpe/tokenizer.json", vocab_size="300"), PLAN + " --set 'tokenizer={kind: bpe, path: bpe}'", "bpe/tokenizer.json: vocab_size", "expected a tokenizer's folder"),
    Row("tokenizer nested deeply", write("bpe/tokenizer.json", DEEP), PLAN + " --set 'tokenizer={kind: bpe, path: bpe}'", "bpe/tokenizer.json", "expected a tokenizer's folder"),
    Row("char tokenizer with long characters", fields_of("char/tokenizer.json", characters=["abc"]), TRAIN + " --set 'tokenizer={kind: char, path: char}'", "char: ", "restore them"),
    Row("char tokenizer without characters", fields_of("char/tokenizer.json", characters=None), TRAIN + " --set 'tokenizer={kind: char, path: char}'", "char", "expected the ranks"),
    Row("character that the tokenizer lacks", rows('{"text": "☃"}'), TRAIN + " --set 'tokenizer={kind: char, path: char}'", "law.jsonl:31: character '☃' (U+2603)", "use tokenizer kind byte or bpe"),
    Row("more merges than the text has", nothing, TRAIN + " --set 'tokenizer={kind: bpe, vocab_size: 60000}'", "tokenizer.vocab_size: got 60000", "set vocab_size: "),
    Row("tiktoken without such a name", nothing, TRAIN + " --set 'tokenizer={kind: tiktoken, name: gpt7}'", "tokenizer.name: tiktoken has no 'gpt7'", "it has "),
    Row("tiktoken without such a name, planned", nothing, PLAN + " --set 'tokenizer={kind: tiktoken, name: gpt7}'", "tokenizer.name: tiktoken has no 'gpt7'", "it has "),
]  # fmt: skip

TOKENS = "--dataset-dir law=tokens"
STORED = [
    Row("token store of another tokenizer", nothing, f"{TRAIN} {TOKENS} --set 'tokenizer={{kind: char, path: char}}'", "source 'law': tokens", "prepare it again"),
    Row("token store with a glob", nothing, f"{TRAIN} {TOKENS} --set sources.law.glob=x.txt", "source 'law': glob", "leave glob out"),
    Row("token store as conversations", nothing, f"{TRAIN} {TOKENS} --set sources.law.format=messages", "source 'law': format messages", "leave format out"),
    Row("sidecar that is no JSON", write("tokens/store.json", "hello"), f"{TRAIN} {TOKENS}", "tokens/store.json", "delete the folder"),
    Row("sidecar that is empty", write("tokens/store.json", ""), f"{TRAIN} {TOKENS}", "tokens/store.json", "delete the folder"),
    Row("sidecar in UTF-16", write("tokens/store.json", "{}".encode("utf-16")), f"{PLAN} {TOKENS}", "tokens/store.json", "delete the folder"),
    Row("sidecar nested deeply", write("tokens/store.json", DEEP), f"{TRAIN} {TOKENS}", "tokens/store.json", "delete the folder"),
    Row("sidecar without fields", write("tokens/store.json", "{}"), f"{TRAIN} {TOKENS}", "tokens/store.json: format_version", "delete the folder"),
    Row("sidecar of another version", fields_of("tokens/store.json", format_version=99), f"{PLAN} {TOKENS}", "tokens/store.json: format_version 99", "delete the folder"),
    Row("sidecar with a negative count", fields_of("tokens/store.json", num_tokens=-1), f"{TRAIN} {TOKENS}", "tokens/store.json", "delete the folder"),
    Row("sidecar with a count of NaN", write("tokens/store.json", lambda: Path("tokens/store.json").read_text().replace('"num_tokens": ', '"num_tokens": NaN, "x": ')), f"{TRAIN} {TOKENS}", "tokens/store.json", "delete the folder"),
    Row("sidecar without shards", fields_of("tokens/store.json", shards=[]), f"{TRAIN} {TOKENS}", "tokens/store.json", "delete the folder"),
    Row("sidecar that leads out of its folder", fields_of("tokens/store.json", shards=[{"path": "../web.jsonl", "num_tokens": 10**6}]), f"{TRAIN} {TOKENS}", "tokens/store.json", "delete the folder"),
    Row("sidecar may not be read", mode("tokens/store.json", 0), f"{TRAIN} {TOKENS}", "tokens/store.json", "delete the folder", True),
    Row("tokens cut", cut("tokens/tokens-00000.bin"), f"{TRAIN} {TOKENS}", "tokens/tokens-00000.bin", "delete the folder"),
    Row("tokens gone", remove("tokens/tokens-00000.bin"), f"{TRAIN} {TOKENS}", "tokens/tokens-00000.bin", "delete the folder"),
    Row("tokens flipped", write("tokens/tokens-00000.bin", lambda: b"\1" + Path("tokens/tokens-00000.bin").read_bytes()[1:]), f"{PREPARE} {TOKENS}", "tokens/tokens-00000.bin", "delete the folder"),
    Row("tokens are a folder", both(remove("tokens/tokens-00000.bin"), lambda: os.mkdir("tokens/tokens-00000.bin")), f"{TRAIN} {TOKENS}", "tokens/tokens-00000.bin", "delete the folder"),
    Row("index of documents cut", cut("tokens/documents.bin"), f"{TRAIN} {TOKENS}", "tokens/documents.bin", "delete the folder"),
    Row("index of documents of ones", write("tokens/documents.bin", lambda: b"\xff" * Path("tokens/documents.bin").stat().st_size), f"{PLAN} {TOKENS}", "tokens/documents.bin", "delete the folder"),
    Row("tokens too few for a batch", write("law.jsonl", '{"text": "a"}'), TRAIN, "law", "expected"),
]  # fmt: skip

RUNS = [
    Row("run without its config", remove("run/config.resolved.json"), "inspect run", "run/config.resolved.json: is missing", "restore it from a copy, or resume the run with all options that it had"),
    Row("run with a config that is no JSON", write("run/config.resolved.json", "{"), "inspect run", "run/config.resolved.json", "expected the JSON that this program wrote"),
    Row("run with a config nested deeply", write("run/config.resolved.json", DEEP), EVAL, "run/config.resolved.json", "expected the JSON that this program wrote"),
    Row("run with a config that is a list", write("run/config.resolved.json", "[]"), "compare run run", "run/config.resolved.json", "expected the JSON object"),
    Row("run with a config of another program", write("run/config.resolved.json", '{"name": "x"}'), BRANCH, "run/config.resolved.json: has no tokenizer", "restore it from a copy"),
    Row("run with a wrong value in its config", replace("run/config.resolved.json", '"batch_size": 4', '"batch_size": "4"'), EVAL, "config.resolved.json: train.batch_size", "expected an integer"),
    Row("run whose config.yaml names code", write("run/config.yaml", "name: !!python/name:os.system x"), BRANCH, "run/config.yaml:1:7", "expected plain YAML without tags"),
    Row("run without events", remove("run/events.jsonl"), "inspect run", "run/events.jsonl", "expected the directory of a run"),
    Row("run with events that are none", write("run/events.jsonl", "hello\n"), "inspect run", "run/events.jsonl:1", "restore the file from a copy"),
    Row("run with events nested deeply", write("run/events.jsonl", DEEP + "\n"), "report run -o r.html", "run/events.jsonl:1", "restore the file from a copy"),
    Row("run with events that are empty", write("run/events.jsonl", ""), "inspect run", "run/events.jsonl", "has not begun yet"),
    Row("run with an event of another kind", write("run/events.jsonl", '{"event": "eval", "step": "x"}\n'), "inspect run", "run/events.jsonl:1", "restore the file from a copy"),
    Row("run with metrics that are none", write("run/metrics.jsonl", "[]\n"), "report run -o r.html", "run/metrics.jsonl", "restore the file from a copy"),
    Row("run whose record is cut", cut("run/events.jsonl"), RESUME + " 4", "run/events.jsonl", "restore the file from a copy"),
    Row("run without a record", both(remove("run/events.jsonl"), remove("run/metrics.jsonl")), RESUME + " 2", "run/events.jsonl", "restore the file from a copy"),
    Row("run without the right to read events", mode("run/events.jsonl", 0), "inspect run", "run/events.jsonl: cannot be read: Permission denied", "fix that, and try again", without_privileges=True),
    Row("run without the right to read metrics", mode("run/metrics.jsonl", 0), "inspect run", "run/metrics.jsonl: cannot be read: Permission denied", "fix that, and try again", without_privileges=True),
    Row("run without the right to read results", mode("run/evals", 0), "compare run run2", "run/evals: cannot be listed: Permission denied", "fix that, and try again", without_privileges=True),
    Row("run without the right to read gold", mode("run/gold", 0), "inspect run", "run/gold: cannot be listed: Permission denied", "fix that, and try again", without_privileges=True),
    Row("run without the right to read a checkpoint", mode("run/checkpoints/4", 0), "inspect run", "run/checkpoints/4: cannot be listed: Permission denied", "fix that, and try again", without_privileges=True),
    Row("run whose metrics are a folder", both(remove("run/metrics.jsonl"), lambda: os.mkdir("run/metrics.jsonl")), "inspect run", "run/metrics.jsonl: cannot be read: Is a directory", "fix that, and try again"),
    Row("resume with evals/ read-only", both(remove("run/checkpoints/4"), remove("run/evals/4.npz"), mode("run/evals", 0o555)), RESUME + " latest", "--run-dir run: run/evals is not a writable folder", "fix that, or choose another", without_privileges=True),
    Row("resume with checkpoints/ read-only", both(remove("run/checkpoints/4"), remove("run/evals/4.npz"), mode("run/checkpoints", 0o555)), RESUME + " latest", "--run-dir run: run/checkpoints is not a writable folder", "fix that, or choose another", without_privileges=True),
    Row("run without its model.json", remove("run/model.json"), EXPORT, "run/model.json: cannot be read", "expected the JSON that this program wrote"),
    Row("run with another tokenizer's ranks", write("run/tokenizer/tokenizer.json", "{}"), EVAL, "run/tokenizer/tokenizer.json", "expected a tokenizer's folder"),
    Row("run with results that are none", write("run/evals/4.npz", "hello"), "compare run run2", "run/evals/4.npz", "expected the arrays that this program wrote"),
    Row("run with results of one array", lambda: np.save(open("run/evals/4.npz", "wb"), np.arange(3)), "compare run run2", "run/evals/4.npz", "expected the arrays that this program wrote"),
    Row("run with results that are a pickle", write("run/evals/4.npz", lambda: pickle.dumps(Pickled())), "compare run run2", "run/evals/4.npz", "expected the arrays that this program wrote"),
    Row("run with results of pickles", lambda: np.savez("run/evals/4.npz", **{"primary/nats": np.array([Pickled()], object)}), "compare run run2", "run/evals/4.npz", "expected the arrays that this program wrote"),
    Row("checkpoint with its arrays cut", both(remove("run/gold"), damaged_arrays("run/checkpoints/2/params")), EVAL + " --step 2", "checkpoints/2", "step"),
    Row("checkpoint with its arrays cut, exported", both(remove("run/gold"), damaged_arrays("run/checkpoints/2/params")), EXPORT + " --step 2", "checkpoints/2", "step"),
    Row("checkpoint with its arrays cut, branched", both(remove("run/gold"), damaged_arrays("run/checkpoints/2/params")), BRANCH, "checkpoints/2", "step"),
    Row("checkpoint with its arrays cut, begun from", damaged_arrays("run/checkpoints/2/params"), TRAIN + " --init-from run/checkpoints/2", "checkpoints/2", "step"),
    Row("checkpoint with its optimizer cut", both(remove("run/gold"), damaged_arrays("run/checkpoints/2/train")), RESUME + " 2", "checkpoints/2", "step"),
    Row("checkpoint with a ledger that is none", both(remove("run/gold"), write("run/checkpoints/2/ledger/metadata", "{")), RESUME + " 2", "checkpoints/2", "restore it from a copy"),
    Row("checkpoint without a ledger", both(remove("run/checkpoints/4/ledger"), remove("run/gold")), RESUME + " 4", "--resume 4", "those that verify: 2"),
    Row("checkpoint that is a file", both(remove("run/gold"), remove("run/checkpoints/4"), write("run/checkpoints/4", "x")), EVAL + " --step 4", "--step 4", "available: "),
    Row("checkpoint that is an empty folder", both(remove("run/gold"), remove("run/checkpoints/4"), lambda: os.mkdir("run/checkpoints/4")), EXPORT + " --step 4", "--step 4", "those that verify: 2"),
    Row("no checkpoint", both(remove("run/gold"), remove("run/checkpoints")), EVAL + " --step 2", "run", "has no checkpoint"),
    Row("gold that is gone", lambda: shutil.rmtree("run/gold", ignore_errors=True), EXPORT + " --step gold", "gold", "available: "),
    Row("branch of a checkpoint of another model", nothing, BRANCH + " --set model.d_model=32", "model", "was 16"),
    Row("resume with another model", config("d_model: 16", "d_model: 32"), RESUME + " 2", "model", "was 16"),
]  # fmt: skip

TABLE = [*CONFIGS, *VALUES, *COMMAND_LINES, *DATA, *TOKENIZERS, *STORED, *RUNS]


# --- how it is run ------------------------------------------------------------------------------------------


def drop_privileges():
    """Hold the calling thread to the permissions of files, also where it is root's: nothing else may tell it to."""
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if os.geteuid() == 0 and ctypes.CDLL(None, use_errno=True).capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


def in_process(monkeypatch, capfd, row):
    """(exit code, stdout, stderr) of a command in a thread of its own, whose privileges end with it."""
    monkeypatch.setattr(sys, "argv", ["curriculum", *shlex.split(row.command)])
    ended = []

    def command():
        if row.without_privileges:
            drop_privileges()
        try:
            run_command()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=command)
    capfd.readouterr()
    thread.start()
    thread.join()
    if not isinstance(ended[0], SystemExit):
        raise ended[0]
    return ended[0].code, *capfd.readouterr()


def by_subprocess(row):
    done = subprocess.run(
        [sys.executable, "-m", "curriculum", *shlex.split(row.command)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with a good config, its sources and stores, two tokenizers, a prepared folder, and two runs."""
    folder = tmp_path_factory.mktemp("good")
    before = Path.cwd()
    os.chdir(folder)
    try:
        for name in ("web", "law"):
            texts = [f"{name} {i}: the quick brown fox jumps over the lazy dog {i * 7}" for i in range(30)]
            Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        write("extra/a.txt", "words of another kind, in a folder of their own, " * 9)()
        write("c.yaml", GOOD)()
        texts = [Path("web.jsonl").read_text()] * 3
        train_bpe(texts, 270).save("bpe")
        char_tokenizer([*texts, Path("law.jsonl").read_text(), Path("extra/a.txt").read_text()]).save("char")
        prepare_folder(["law.jsonl"], byte_tokenizer(), "tokens")
        train(load_config("c.yaml"), "run", store_dir=STORES)
        shutil.copytree("run", "run2")
    finally:
        os.chdir(before)
    return folder


def listing():
    """Kind, size and time of everything in the working folder; of folders that they are there, and of a run's lock,
    which tells who had it last.
    """
    found = {}
    for folder, folders, names in os.walk("."):
        found |= {os.path.join(folder, name): "folder" for name in folders}
        for name in names:
            if name == ".lock":
                continue
            status = os.lstat(os.path.join(folder, name))
            found[os.path.join(folder, name)] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found


def enter(row, good, tmp_path, monkeypatch):
    """Go to a copy of the good folder, with its runs where the command asks for one, and make the row's input.

    Where the command line alone is wrong, to the good folder itself: it has to stay as it is.
    """
    if row.make is not nothing:
        runs = () if "run" in row.command else ("run", "run2")
        good = shutil.copytree(good, tmp_path / "here", ignore=shutil.ignore_patterns(*runs))
    monkeypatch.chdir(good)
    row.make()


def check(row, run):
    before = listing()
    code, out, errors = run(row)
    assert code == 2, errors
    assert row.place in errors and row.fix in errors, errors
    assert out == ""
    lines = errors.splitlines()
    told = [line for line in lines if line and not re.match(r" +\d+ \| ", line)]  # but lines of a file that is no YAML
    assert told and all(line.startswith(("error: ", "Usage: ", "Try ", "Error: ")) for line in told), errors
    assert max(map(len, lines)) < 1000 and "site-packages" not in errors and "Traceback" not in errors, errors
    # Only what is prepared of the good sources may stay.
    prepares = row.command.split()[0] in ("train", "prepare", "eval", "branch")
    made = {path for path in listing().items() ^ before.items() if not (prepares and path[0].startswith(f"./{STORES}"))}
    assert not made


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.what)
def test_wrong_input(row, good, tmp_path, monkeypatch, capfd):
    enter(row, good, tmp_path, monkeypatch)
    check(row, lambda row: in_process(monkeypatch, capfd, row))


BY_SUBPROCESS = [
    "tag that calls",
    "command unknown",
    "JSONL nested deeply",
    "run with results of pickles",
    "checkpoint with its arrays cut",
]


@pytest.mark.parametrize("what", BY_SUBPROCESS)
def test_wrong_input_by_subprocess(what, good, tmp_path, monkeypatch):
    (row,) = (row for row in TABLE if row.what == what)
    enter(row, good, tmp_path, monkeypatch)
    check(row, by_subprocess)


def test_the_table_is_whole():
    """Enough rows, each of its own name, over all commands."""
    assert len(TABLE) >= 130 and len({row.what for row in TABLE}) == len(TABLE)
    commands = {"train", "plan", "prepare", "eval", "inspect", "compare", "report", "branch", "export"}
    assert commands <= {row.command.split()[0] for row in TABLE}


def test_code_in_a_folder_of_text_is_text(tmp_path, monkeypatch):
    """A loading script beside the text is read as one more text: nothing imports it."""
    monkeypatch.chdir(tmp_path)
    write("extra/extra.py", "open('pwned', 'w')")()
    prepare_folder(["extra"], byte_tokenizer(), "o")
    assert b"open('pwned'" in bytes(np.fromfile("o/tokens-00000.bin", "<u2").astype(np.uint8))
    assert not Path("pwned").exists()


def test_nothing_that_runs_what_it_reads():
    """No pickle, no loader of YAML that makes objects, no remote code: not in any module."""
    runs = re.compile(
        r"\bpickle\b|\bmarshal\b|\bshelve\b|\bdill\b|allow_pickle|trust_remote_code|yaml\.(load|full_load|unsafe_load)\b"
        r"|(?<!Safe)Loader\)|(?<![\w.])(eval|exec)\(|torch\.load|joblib"
    )
    root = Path(__file__).parents[1]
    modules = [path for name in ("curriculum", "phases", "evalsets", "tools") for path in (root / name).rglob("*.py")]
    found = [(path.name, line) for path in modules for line in path.read_text().splitlines() if runs.search(line)]
    assert len(modules) > 50 and not found


def test_a_finished_run_with_a_folder_that_cannot_be_written_to_is_finished(good, tmp_path, monkeypatch, capfd):
    command = RESUME + " latest --store-dir .curriculum"
    row = Row("gold/ read-only", mode("run/gold", 0o555), command, "", "", without_privileges=True)
    enter(row, good, tmp_path, monkeypatch)
    code, out, err = in_process(monkeypatch, capfd, row)
    assert code == 0 and "run is finished: 4 of 4 steps" in out, err
