"""Text and conversations that tests prepare, and what they come to by hand."""

import json
import random

import xxhash

from curriculum.data.chat import ChatConfig
from curriculum.data.sources import SourceConfig
from curriculum.data.tokenizers.tokenizer import TokenizerConfig

WORDS = ["the", "tree", "grows", "naïve", "汉字", "👩‍👧", "<|endoftext|>", "it's", "2026", "\r\n", "\n\n", "\t"]


def make_text(seed, num_words):
    generator = random.Random(seed)
    return " ".join(generator.choice(WORDS) for _ in range(num_words))


def write_sources(tmp_path):
    """Two sources: a folder of texts, one of them empty, and a file of JSON rows, one of them empty."""
    folder = tmp_path / "sources" / "web"
    folder.mkdir(parents=True)
    for i in range(5):
        (folder / f"{i}.txt").write_bytes(make_text(i, 40 * i).encode())
    rows = [f'{{"text": "row {i} {"word " * i}"}}\n' for i in range(30)] + ['{"text": ""}\n']
    (tmp_path / "sources" / "code.jsonl").write_text("".join(rows))
    return {
        "web": SourceConfig(path=str(folder)),
        "code": SourceConfig(path=str(tmp_path / "sources" / "code.jsonl")),
    }


BPE = TokenizerConfig(kind="bpe", vocab_size=300)


class Recorder:
    """Notes how often and how far a job reported."""

    def __init__(self):
        self.calls = []

    def __call__(self, done_bytes, total_bytes):
        self.calls.append((done_bytes, total_bytes))


def everything_in(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


SHORT = ChatConfig(system="S{content}/", user="U:{content}.", assistant="A:{content};")


TALKS = [
    [{"role": "user", "content": "é"}, {"role": "assistant", "content": "ab"}],
    [
        {"role": "user", "content": "<|endoftext|>"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ],
]


# The same by hand: (text, scored) and what end-of-text is.
BY_HAND = [
    ([("U:é.A:", 0), ("ab;", 1)], 1),
    ([("U:<|endoftext|>.A:", 0), ("c;", 1), ("U:d.", 0)], 0),
]


def talks(tmp_path, name="talks.jsonl", **options):
    path = tmp_path / name
    if not path.exists():
        path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    return SourceConfig(path=str(path), **({"format": "messages"} | options))


def assert_by_hand(store, tokenizer):
    tokens, scored = [], []
    for stretches, end in BY_HAND:
        for text, mark in stretches:
            ids = tokenizer.encode(text).tolist()
            tokens += ids
            scored += [mark] * len(ids)
        tokens, scored = [*tokens, tokenizer.eot], [*scored, end]
    assert store.view()[:].tolist() == tokens
    assert store.scored_view()[:].tolist() == scored
    assert store.facts.num_scored == sum(scored) > 0
    texts = ["".join(text for text, _ in stretches).encode() for stretches, _ in BY_HAND]
    assert store.documents["bytes"].tolist() == [len(text) for text in texts]
    hashes = [high << 64 | low for high, low in store.documents["hash"].tolist()]
    assert hashes == [xxhash.xxh3_128(text).intdigest() for text in texts]
    return tokens
