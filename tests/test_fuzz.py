"""Inputs that nobody thought of: whatever a file or an option says, it is read as it stands or refused in words.

`HYPOTHESIS_PROFILE=long pytest tests/test_fuzz.py` searches for minutes, from another seed each time.
"""

import json
import os
import resource
import shutil
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from curriculum.config import config_from_json, load_config
from curriculum.data.chat import ChatConfig, Template
from curriculum.data.pieces import read_pieces
from curriculum.data.prepare import prepare_store
from curriculum.data.sources import SourceConfig
from curriculum.data.tokenizers.tokenizer import byte_tokenizer
from curriculum.errors import InputError
from curriculum.plan import plan

_COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": True,
}
settings.register_profile("quick", max_examples=60, derandomize=True, **_COMMON)
settings.register_profile("long", max_examples=2_000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

LONGEST_SECONDS = 1.0  # of the processor, for one input
MOST_BYTES = 300 << 20  # by which the process may grow


# --- configs ------------------------------------------------------------------------------------------------

GOOD = {
    "name": "small",
    "seed": 1,
    "tokenizer": {"kind": "byte"},
    "model": {"preset": "tiny", "n_layer": 1},
    "variables": {"rate": 1e-3},
    "sources": {"web": {"path": "web.txt", "held_out": "10%"}, "law": {"path": "law.txt", "max_epochs": 3, "on_exhaust": "stop"}},
    "phases": [
        {"name": "a", "until": "40%", "mixture": {"web": 1.0}},
        {"name": "b", "until": 70, "mixture": {"web": 0.5, "law": 0.5}, "ramp_steps": 5, "ramp_shape": "cosine"},
        {"name": "c", "until": "end", "mixture": {"law": 1}, "lr": {"peak": 1e-3, "rewarm_steps": 4, "decay_steps": 3}},
    ],
    "evalsets": {
        "primary": {"held_out_of": "web"},
        "every": 10,
        "sets": {"law": {"path": "law.txt", "every": 20}},
        "regression": {"tolerance": 0.01, "action": "log"},
        "gold": {"minimise": "primary/loss", "subject_to": {"law": {"max_increase": 0.1}}},
    },
    "train": {"steps": 100, "batch_size": 8, "grad_accum": 2, "seq_len": 64},
    "optim": {"name": "adamw", "lr": "$variables.rate", "schedule": "wsd", "warmup_steps": "3%", "decay_steps": 20},
    "adaptation": {"replay": {"web": 0.05}},
    "mesh": {"data": -1},
    "packing": {"mode": "best_fit"},
    "averages": {"ema_decay": 0.9},
    "chat": {"user": "U{content}"},
    "checkpoint": {"every": 20, "keep": 3},
    "logging": {"every": 10, "wandb": {"project": "p", "tags": ["x"]}},
}  # fmt: skip

WORDS = [
    "", "end", "0%", "50%", "101%", "1e3%", "-1%", "2 epochs of law", "1 epochs of nowhere", "5K tokens", "1.5B tokens",
    "web", "law", "primary", "val", "..", "/", "a/b", "~", "~x/y", "\0", "é", "数", "\u202e", "$variables.rate", "${variables.x}",
    "best_fit", "muon", "cosine", "bpe", "tiktoken", "gpt2", "primary/loss", "null", "nan", "1e999", "x" * 300,
]  # fmt: skip
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.sampled_from([10**9, 10**18, 2**63, -(2**63), 10**39, 2**31]),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=20),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(WORDS), st.sampled_from(sorted(GOOD))), inner, max_size=3),
    ),
    max_leaves=5,
)


class Pairs(list):
    """A mapping in which a key may stand twice."""


def pairs_of(value):
    if isinstance(value, dict):
        return Pairs([key, pairs_of(item)] for key, item in value.items())
    return [pairs_of(item) for item in value] if isinstance(value, list) else value


def yaml_text(node):
    """Flow style, with quoted text as in JSON: what YAML writes otherwise is left to `test_text`."""
    if isinstance(node, Pairs):
        return "{" + ", ".join(f"{json.dumps(key)}: {yaml_text(value)}" for key, value in node) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(map(yaml_text, node)) + "]"
    if isinstance(node, float) and node != node:
        return ".nan"
    if isinstance(node, float) and node in (float("inf"), -float("inf")):
        return ".inf" if node > 0 else "-.inf"
    return json.dumps(node)


def places(node):
    """Every (parent, index) of a tree; of a mapping's entry the entry itself."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            yield node, i
            yield from places(item[1] if isinstance(node, Pairs) else item)


@st.composite
def mutated(draw):
    """The good config after a few changes of single nodes."""
    tree = pairs_of(GOOD)
    for _ in range(draw(st.integers(1, 3))):
        all_places = list(places(tree))
        if not all_places:
            break
        parent, i = all_places[draw(st.integers(0, len(all_places) - 1))]
        change = draw(st.sampled_from(["replace", "replace", "replace", "delete", "duplicate", "rename"]))
        if change == "delete":
            del parent[i]
        elif change == "duplicate":
            parent.insert(draw(st.integers(0, len(parent))), parent[i])
        elif not isinstance(parent, Pairs):
            parent[i] = pairs_of(draw(values))
        elif change == "rename":
            parent[i] = [draw(st.one_of(st.sampled_from(WORDS), st.text(max_size=5))), parent[i][1]]
        else:
            parent[i] = [parent[i][0], pairs_of(draw(values))]
    return yaml_text(tree)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    before = Path.cwd()
    os.chdir(folder)
    for name in ("web", "law"):
        Path(f"{name}.txt").write_text("some text")
    yield folder
    os.chdir(before)


def check_config(text, overrides=()):
    """It loads and plans, or it is refused; never slowly."""
    Path("c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    began, size = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = None
    try:
        config = load_config("c.yaml", overrides)
        planned = plan(config, store_dir="none")
    except InputError as error:
        assert error.problems and all(error.problems)
    else:
        ends = [phase["end"] for phase in planned.phases]
        assert ends == sorted(set(ends)) and 0 < ends[-1] <= planned.total_steps <= config.train.steps
    assert time.process_time() - began < LONGEST_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size < MOST_BYTES / 1024
    if config is not None:
        assert config_from_json(json.loads(json.dumps(config.to_json()))) == config
    return config


def test_the_good_config_loads(folder):
    assert check_config(yaml_text(pairs_of(GOOD))) is not None


@given(content=st.binary(max_size=200))
def test_bytes(folder, content):
    assert check_config(content) is None


@given(
    text=st.text(
        st.one_of(st.sampled_from("{}[]:,-?!&*|>'\"%@`# \n\tab0.~<="), st.characters(codec="utf-8")), max_size=80
    )
)
def test_text(folder, text):
    check_config(text)
    check_config("name: small\nseed: " + text)


@given(text=mutated())
def test_mutated_configs(folder, text):
    check_config(text)


PATHS = [
    "train.steps",
    "train",
    "phases[0].until",
    "phases[1]",
    "phases",
    "sources.law",
    "optim.lr",
    "evalsets.sets.x.path",
]


@given(
    path=st.one_of(st.sampled_from(PATHS), st.text(st.sampled_from("abtrains.[]0139 =é"), max_size=12)),
    value=st.one_of(st.text(max_size=12), values.map(pairs_of).map(yaml_text)),
)
def test_overrides(folder, path, value):
    check_config(yaml_text(pairs_of(GOOD)), [f"{path}={value}"])


numbers = st.one_of(
    st.integers(-2, 200).map(str),
    st.integers(0, 10**40).map(str),
    st.floats(0, 1e6).map(str),
    st.sampled_from(["1e400", "1e-400", "0.0", "٣", "²", "1_000", "0x10", ".5", "5.", "+5", "nan", "inf", "9" * 5000]),
)
units = st.sampled_from(
    [
        "",
        "%",
        " %",
        " tokens",
        "K tokens",
        "M tokens",
        "T tokens",
        "Q tokens",
        " epochs of law",
        " epochs of web",
        " epochs",
        " steps",
    ]
)


@given(
    until=st.tuples(numbers, units).map("".join),
    ramp=st.tuples(numbers, units).map("".join),
    steps=st.integers(1, 10**9),
)
def test_clocks(folder, until, ramp, steps):
    options = [
        f"phases[0].until={json.dumps(until)}",
        f"phases[1].ramp_steps={json.dumps(ramp)}",
        f"train.steps={steps}",
    ]
    options += ["phases[1].until=" + json.dumps(until.replace("1", "2")), "optim.warmup_steps=0", "optim.decay_steps=0"]
    check_config(yaml_text(pairs_of(GOOD)), options)


# --- token stores -------------------------------------------------------------------------------------------

CHAT = Template(ChatConfig(user="U{content}", assistant="A{content};"))


def contents_of(store):
    return [store.documents.tobytes(), store.stream[:].tobytes(), store.scored_stream[:].tobytes(), store.facts]


@pytest.fixture(scope="module")
def stored(folder):
    """(read, whole folder of the store, what it holds): a store of conversations in several files."""
    turns = [[{"role": "user", "content": "u" * i}, {"role": "assistant", "content": f"{i}"}] for i in range(1, 12)]
    Path("talks.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns))

    def read():
        source = SourceConfig(path="talks.jsonl", format="messages")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("curriculum.data.store_writer.SHARD_TOKENS", 40)
            return contents_of(prepare_store("talks", source, byte_tokenizer(), "stores", chat=CHAT.chat))

    held = read()
    (whole,) = Path("stores/stores").iterdir()
    shutil.copytree(whole, "whole")
    assert len(list(whole.iterdir())) > 6 and read() == held
    return read, whole, held


@st.composite
def corruption(draw):
    """A change of one file of a store, as a function of its folder."""
    which = draw(st.integers(0, 50))
    kind = draw(
        st.sampled_from(["flip", "flip", "truncate", "extend", "delete", "swap", "zeros", "field", "folder", "loop"])
    )
    at, bit, tail = draw(st.integers(0, 10**6)), draw(st.integers(0, 7)), draw(st.binary(min_size=1, max_size=40))
    field, value = draw(st.integers(0, 20)), draw(values)

    def corrupt(folder):
        names = sorted(path.name for path in folder.iterdir())
        if not names:
            return
        path, other = folder / names[which % len(names)], folder / names[at % len(names)]
        content = path.read_bytes()
        if kind == "flip" and content:
            at_byte = at % len(content)
            path.write_bytes(content[:at_byte] + bytes([content[at_byte] ^ 1 << bit]) + content[at_byte + 1 :])
        elif kind == "truncate":
            path.write_bytes(content[: at % (len(content) + 1)])
        elif kind == "extend":
            path.write_bytes(content + tail)
        elif kind == "delete":
            path.unlink()
        elif kind == "swap":
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
        elif kind == "zeros":
            path.write_bytes(bytes(len(content)))
        elif kind == "field":
            with suppress(FileNotFoundError, ValueError):
                facts = json.loads((folder / "store.json").read_text())
                facts[list(facts)[field % len(facts)]] = value
                (folder / "store.json").write_text(json.dumps(facts))
        else:
            path.unlink()
            path.mkdir() if kind == "folder" else path.symlink_to(path)

    corrupt.__name__ = f"{kind}-{which}-{at}-{bit}-{field}-{value!r}"
    return corrupt


@given(change=corruption())
def test_corrupt_stores(stored, change):
    """What is read is what was written, to the bit, or it is refused."""
    read, store, held = stored
    shutil.rmtree(store)
    shutil.copytree("whole", store)
    change(store)
    try:
        assert read() == held
    except InputError as error:
        assert str(store) in str(error) and "delete the folder" in str(error)


# --- JSON lines ---------------------------------------------------------------------------------------------

messages = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "x"]), st.one_of(st.sampled_from(["user", "assistant"]), values), max_size=3
    ),
    max_size=3,
)
rows = st.one_of(
    st.dictionaries(
        st.sampled_from(["text", "txet", "messages", "prompt", "completion"]),
        st.one_of(st.text(), messages, values),
        max_size=3,
    ),
    values,
)
lines = st.one_of(
    st.text(max_size=30).map(lambda text: json.dumps({"text": text}).encode()),
    rows.map(json.dumps).map(str.encode),
    rows.map(lambda row: json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    st.binary(max_size=30),
    st.sampled_from(
        [
            b"",
            b"\r",
            b" ",
            b"\xef\xbb\xbf",
            b'{"text": "\\ud800"}',
            b'{"text": "a", "text": "b"}',
            b"[" * 5000,
            b"9" * 5000,
        ]
    ),
)


@given(
    content=st.lists(lines, max_size=4),
    end=st.sampled_from([b"\n", b"\r\n", b""]),
    form=st.sampled_from(["text", "messages", "completion"]),
)
def test_json_lines(folder, content, end, form):
    path = Path("fuzzed.jsonl")
    path.write_bytes((end or b"\n").join(content) + end)
    began = time.process_time()
    try:
        pieces = list(read_pieces(SourceConfig(path=str(path), format=form), CHAT))
    except InputError as error:
        assert str(error).startswith("fuzzed.jsonl:")
        return
    finally:
        assert time.process_time() - began < LONGEST_SECONDS
    documents = "".join(piece.text + "\0" * piece.ends_document for piece in pieces)
    lines = [line.removeprefix(b"\xef\xbb\xbf") for line in path.read_bytes().split(b"\n")]
    kept = [json.loads(line) for line in lines if line.strip()]
    if not kept:
        assert [(piece.text, piece.ends_document) for piece in pieces] == [("", True)]
        return
    if form == "text":
        assert documents == "".join(row["text"] + "\0" for row in kept)
    elif form == "messages":
        turns = [
            [("U{}" if turn["role"] == "user" else "A{};").format(turn["content"]) for turn in row["messages"]]
            for row in kept
        ]
        assert documents == "".join("".join(turn) + "\0" for turn in turns)
    for piece in pieces:
        piece.text.encode()
    assert np.array([piece.ends_document for piece in pieces]).sum() == len(kept)
