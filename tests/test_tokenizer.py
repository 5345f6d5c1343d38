"""Tokenizers: lossless on awkward text, the ids of the libraries they stand for, saved and loaded whole."""

import json
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from curriculum.data.pieces import read_pieces
from curriculum.data.sources import SourceConfig
from curriculum.data.tokenizers.tokenizer import (
    SHARED_CHARACTERS,
    Tokenizer,
    TokenizerConfig,
    byte_tokenizer,
    load_tokenizer,
)
from curriculum.data.tokenizers.vocabulary import LONGEST_STRETCH_BYTES, char_tokenizer, tiktoken_tokenizer, train_bpe
from curriculum.errors import InputError

AWKWARD = [
    "",
    " ",
    "\n",
    "plain words, it's they'll we've 2026 1234567",
    "CRLF\r\n\r\n  and\ttabs\x01\x7f",
    "naïve e\u0301 — «汉字» 👩‍👩‍👧 \U0010ffff\u2028 ",
    "<|endoftext|> in the text, twice: <|endoftext|>",
    "trailing blanks   ",
    "   \n\n leading",
    "aaaaaaaaaaaaaaaaaaaaaa" * 40,
]


@pytest.fixture(scope="module")
def corpus():
    """Real text: the source of these tests and of the standard library's modules beside json."""
    paths = [Path(__file__), *sorted(Path(json.__file__).parent.glob("*.py"))]
    return [path.read_text(encoding="utf-8") for path in paths] + AWKWARD


@pytest.fixture(scope="module")
def bpe(corpus):
    return train_bpe(corpus, 700)


@pytest.fixture(scope="module", params=["byte", "char", "bpe"])
def tokenizer(request, corpus, bpe):
    return {"byte": byte_tokenizer, "char": lambda: char_tokenizer(corpus), "bpe": lambda: bpe}[request.param]()


def test_round_trip(tokenizer, corpus):
    for text in corpus:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint16
        assert tokenizer.decode_bytes(ids) == text.encode()
        assert tokenizer.token_bytes_V[ids].sum() == len(text.encode())
        assert tokenizer.eot not in ids
    assert tokenizer.eot == tokenizer.vocab_size - 1
    assert tokenizer.token_bytes_V.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes_V[tokenizer.eot] == 0
    assert tokenizer.decode_bytes([tokenizer.eot]) == b""


def test_saved_and_loaded_it_is_the_same(tokenizer, corpus, tmp_path):
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.kind, loaded.vocab_size, loaded.eot) == (tokenizer.kind, tokenizer.vocab_size, tokenizer.eot)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.tokens == tokenizer.tokens
    for text in corpus:
        assert loaded.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_continues_character_marks_the_inner_bytes_of_a_character(tokenizer):
    text = "a汉é"
    starts = []
    offset = 0
    for token_id in tokenizer.encode(text).tolist():
        starts.append(not tokenizer.continues_character_V[token_id])
        expected = offset in {0, 1, 4}  # where a, 汉 and é begin
        assert starts[-1] == expected
        offset += len(tokenizer.tokens[token_id])
    assert offset == 6 and any(starts)


def test_byte_ids_are_the_bytes():
    assert byte_tokenizer().encode("aé\n").tolist() == [97, 0xC3, 0xA9, 10]
    assert byte_tokenizer().vocab_size == 257


def test_char_ids_follow_code_points():
    tokenizer = char_tokenizer(["hello", "wörld\n"])
    assert b"".join(tokenizer.tokens).decode() == "\ndehlorwö"
    assert tokenizer.encode("dö\n").tolist() == [1, 8, 0]
    assert tokenizer.eot == 9


def test_char_refuses_what_it_has_not_seen():
    with pytest.raises(InputError, match=r"'€' \(U\+20AC\) is not among the 3 .* use tokenizer kind byte or bpe"):
        char_tokenizer(["abc"]).encode("ab€c€")


def test_bpe_ids_are_those_of_tokenizers(corpus, bpe):
    from tokenizers import Tokenizer as Reference
    from tokenizers import models, pre_tokenizers, trainers

    reference = Reference(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    reference.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=699, initial_alphabet=alphabet, show_progress=False)
    )
    unseen = [path.read_text(encoding="utf-8") for path in sorted(Path(subprocess.__file__).parent.glob("c*.py"))]
    num_tokens = 0
    for text in corpus + unseen:
        ids = reference.encode(text).ids
        assert bpe.encode(text).tolist() == ids
        num_tokens += len(ids)
    assert num_tokens > 100_000


def test_bpe_training_counts_pairs_in_parts_of_long_stretches():
    """A page of Chinese has no blank: without that, a megabyte of it takes minutes."""
    letters = np.random.default_rng(0).geometric(0.02, 20_000) + 0x4E00
    text = "".join(map(chr, letters))
    step = LONGEST_STRETCH_BYTES // 3
    parts = [text[start : start + step] for start in range(0, len(text), step)]
    assert train_bpe([text], 1000).fingerprint == train_bpe(parts, 1000).fingerprint
    assert train_bpe([text], 1000).fingerprint != train_bpe([part[1:] for part in parts], 1000).fingerprint


def test_bpe_training_is_deterministic_across_processes(bpe, tmp_path):
    program = (
        "import json, sys; from pathlib import Path; from curriculum.data.tokenizers.vocabulary import train_bpe\n"
        "print(train_bpe(json.loads(sys.stdin.read()), 600).fingerprint)"
    )
    text = json.dumps([Path(__file__).read_text(encoding="utf-8"), *AWKWARD])
    prints = {
        subprocess.run(
            [sys.executable, "-c", program], input=text, capture_output=True, text=True, check=True,
            env={"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads, "PYTHONPATH": "."},
            cwd=Path(__file__).parents[1],
        ).stdout
        for threads in ("1", "3")
    }  # fmt: skip
    assert prints == {train_bpe(json.loads(text), 600).fingerprint + "\n"}


@pytest.mark.parametrize("num_texts", [100_000, 10_000_000], ids=["merging", "reading"])
def test_ctrl_c_does_not_wait_for_a_tokenizer(num_texts):
    program = (
        "import random\n"
        "from curriculum.data.tokenizers.vocabulary import train_bpe\n"
        "def texts():\n"
        f"    for i in range({num_texts}):\n"
        "        yield ''.join(random.choices('abcdefghijklmnopqrstuvwxyz', k=40))\n"
        "        if i == 99_999:\n"
        "            print('read', flush=True)\n"
        "train_bpe(texts(), 3000)\n"
    )
    training = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert training.stdout.readline() == b"read\n"
    time.sleep(0.5)  # the merges take 20 s
    asked = time.monotonic()
    training.send_signal(signal.SIGINT)
    _, said = training.communicate()
    assert said.endswith(b"KeyboardInterrupt\n") and training.returncode == -signal.SIGINT
    assert time.monotonic() - asked < 5


def test_bpe_says_how_many_ids_a_small_corpus_allows():
    # "abab" three times: ab, then abab. 256 bytes, two merges, end-of-text.
    with pytest.raises(InputError, match="got 300, but the sources yield only 259 .*set vocab_size: 259"):
        train_bpe(["abab", "abab", "abab"], 300)
    tokenizer = train_bpe(["abab", "abab", "abab"], 259)
    assert [tokenizer.tokens[token_id] for token_id in tokenizer.encode("ababab")] == [b"abab", b"ab"]


def test_a_thread_that_encodes_much_gives_the_same_ids_by_an_encoding_of_its_own(bpe):
    text = "So it goes, and goes on; it does.\n" * 10_000
    ids = bpe.encode(text)
    with ThreadPoolExecutor(1) as thread:
        many = list(thread.map(bpe.encode, [text] * (SHARED_CHARACTERS // len(text) + 2)))
    assert all(np.array_equal(again, ids) for again in many)


def test_a_run_of_a_million_blanks_is_refused_not_fatal(bpe):
    with pytest.raises(InputError, match="shorten"):
        bpe.encode(" " * 1_200_000 + "x")


def test_the_fingerprint_follows_the_ids():
    tokens = (*(bytes([byte]) for byte in range(256)), b"ab", b"")
    base = Tokenizer("bpe", tokens, {"<|endoftext|>": 257}, r"\S+|\s+")
    assert base.fingerprint == Tokenizer("tiktoken", tokens, {"<|endoftext|>": 257}, r"\S+|\s+", "x").fingerprint
    others = [
        Tokenizer("bpe", tokens, {"<|endoftext|>": 257}, r".+"),
        Tokenizer("bpe", (*tokens[:256], b"ba", b""), {"<|endoftext|>": 257}, r"\S+|\s+"),
        Tokenizer("bpe", (*tokens[:256], b"", b"ab"), {"<|endoftext|>": 256}, r"\S+|\s+"),
        Tokenizer("byte", (*tokens[:256], b""), {"<|endoftext|>": 256}),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 5
    unused = (*tokens, b"")
    ends = {Tokenizer("bpe", unused, {"<|endoftext|>": eot}, ".+").fingerprint for eot in (257, 258)}
    assert len(ends) == 2


def test_decoding_refuses_ids_outside_the_vocabulary(tokenizer):
    for ids in ([0, tokenizer.vocab_size], [-1, 0]):
        with pytest.raises(ValueError, match=f"expected 0 to {tokenizer.vocab_size - 1}"):
            tokenizer.decode_bytes(ids)
    assert tokenizer.decode_bytes([]) == b""


@pytest.fixture
def published_encoding(bpe, monkeypatch):
    """An encoding that tiktoken knows by name, shaped like cl100k_base: more special tokens, and unused ids."""
    import tiktoken

    assert "gpt2" in tiktoken.list_encoding_names()  # also loads the table that is extended here
    ranks = {token: token_id for token_id, token in enumerate(bpe.tokens) if token}
    special = {"<|endoftext|>": 701, "<|fim_prefix|>": 702}
    encoding = {"name": "toy", "pat_str": bpe.pattern, "mergeable_ranks": ranks, "special_tokens": special}
    monkeypatch.setitem(tiktoken.registry.ENCODING_CONSTRUCTORS, "toy", lambda: encoding)
    yield tiktoken.get_encoding("toy")
    del tiktoken.registry.ENCODINGS["toy"]


def test_a_published_encoding_gives_tiktokens_ids(published_encoding, corpus, tmp_path):
    tokenizer = tiktoken_tokenizer("toy")
    assert (tokenizer.vocab_size, tokenizer.eot) == (703, 701)
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint and loaded.name == "toy"
    for text in [*corpus, "<|fim_prefix|>"]:
        ids = published_encoding.encode_ordinary(text)
        assert tokenizer.encode(text).tolist() == loaded.encode(text).tolist() == ids
        assert loaded.decode_bytes(ids) == text.encode()
    assert tokenizer.token_bytes_V[[699, 700, 701, 702]].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("with_end_of_text", [False, True])
def test_many_texts_at_once_have_the_ids_of_each_alone(published_encoding, corpus, with_end_of_text):
    """Their ends as well: blanks that end a text, or begin it, meet nothing of the neighbour's."""
    tokenizer = tiktoken_tokenizer("toy")
    texts = [t for t in [*corpus, "", "<|fim_prefix|> it", "", "  ", "ends in blanks  ", "\n \n", "  begins", ""]]
    if not with_end_of_text:
        texts = [t for t in texts if "<|endoftext|>" not in t]
    ids = tokenizer.encode_batch(texts, [True] * len(texts))
    assert len(texts) > 15 and all(part.dtype == tokenizer.dtype for part in ids)
    assert [part.tolist() for part in ids] == [published_encoding.encode_ordinary(text) for text in texts]
    assert tokenizer.encode_batch([""], [True])[0].tolist() == []


def test_a_loaded_tokenizer_needs_neither_network_nor_cache(published_encoding, tmp_path):
    tiktoken_tokenizer("toy").save(tmp_path)
    program = (
        "import sys; from curriculum.data.tokenizers.tokenizer import load_tokenizer; t = load_tokenizer(sys.argv[1]);"
        "assert 'tiktoken' not in sys.modules; print(t.encode('some words').tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True,
        env={"https_proxy": "http://127.0.0.1:9", "TIKTOKEN_CACHE_DIR": str(tmp_path / "none"), "PYTHONPATH": "."},
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert json.loads(done.stdout) == published_encoding.encode_ordinary("some words")


def test_an_encoding_that_cannot_be_fetched_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(
        InputError, match="could not fetch 'p50k_edit'.*TIKTOKEN_CACHE_DIR.*or give tokenizer.path"
    ) as error:
        tiktoken_tokenizer("p50k_edit")
    assert f", and TIKTOKEN_CACHE_DIR ({tmp_path}) does not hold it; it needs the network" in str(error.value)


def test_an_unknown_encoding_is_refused_with_a_guess():
    with pytest.raises(InputError, match="tiktoken has no 'gpt-2'; did you mean 'gpt2'"):
        tiktoken_tokenizer("gpt-2")


@pytest.mark.parametrize("name", ["r50k_base", "cl100k_base", "o200k_base"])
def test_pieces_are_cut_where_no_published_pattern_notices(name, bpe, corpus, tmp_path, monkeypatch):
    import tiktoken
    from tiktoken_ext import openai_public

    ranks = {token: token_id for token_id, token in enumerate(bpe.tokens) if token}
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *arguments, **options: ranks)
    pattern = getattr(openai_public, name)()["pat_str"]
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    generator = random.Random(1)
    strands = [*"aZé汉9_.,'s/ \n\n\t\r ", "\r\n", "  ", "\n ", " the", "it's", "10", "//", "²", "\u0301", "\x1c"]
    text = "".join(generator.choice(strands) for _ in range(20_000)) + "".join(corpus)
    (tmp_path / "a.txt").write_bytes(text.encode())
    expected = encoding.encode_ordinary(text)
    num_pieces = 0
    for piece_bytes in (50, 61, 200):
        monkeypatch.setattr("curriculum.data.pieces.PIECE_BYTES", piece_bytes)
        pieces = [piece.text for piece in read_pieces(SourceConfig(path=str(tmp_path / "a.txt")))]
        assert [token_id for piece in pieces for token_id in encoding.encode_ordinary(piece)] == expected
        num_pieces += len(pieces)
    assert num_pieces > 1000


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kind": "bpe"}, "needs vocab_size"),
        ({"kind": "bpe", "vocab_size": 256}, "256 is too small: the 256 bytes and end-of-text take 257"),
        ({"kind": "tiktoken"}, "needs name"),
        ({"kind": "tiktoken", "name": "gpt2", "path": "p"}, "needs name"),
        ({"kind": "byte", "name": "gpt2"}, "name applies to kind tiktoken only"),
        ({"kind": "byte", "path": "p"}, "nothing to load"),
        ({"kind": "byte", "vocab_size": 5}, "vocab_size applies to kind bpe.*got kind byte"),
        ({"kind": "char", "vocab_size": 5}, "vocab_size applies to kind bpe"),
        ({"kind": "tiktoken", "name": "gpt2", "vocab_size": 50257}, "vocab_size applies to kind bpe"),
        ({"kind": "bpe", "vocab_size": 300, "name": "gpt2"}, "name applies to kind tiktoken only"),
    ],
)
def test_contradictory_fields_are_refused(fields, expected):
    with pytest.raises(ValueError, match=expected):
        TokenizerConfig(**fields)


def altered(field, value):
    def alter(directory):
        path = directory / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))

    return alter


@pytest.mark.parametrize(
    ("alter", "expected"),
    [
        (lambda directory: (directory / "tokenizer.json").unlink(), "tokenizer.json: No such file"),
        (lambda directory: (directory / "tokenizer.json").write_text("{"), "Invalid JSON"),
        (lambda directory: (directory / "tokenizer.json").write_text('{"tokens": {}}'), "format_version: missing"),
        (altered("vocab_size", "700"), 'vocab_size: got "700", expected an integer'),
        (altered("format_version", 99), "format_version 99; expected 1"),
        (altered("eot", 5), "do not match its fingerprint"),
        (altered("vocab_size", 701), "do not match its fingerprint"),
        (altered("vocab_size", -1), "do not match its fingerprint"),
        (altered("vocab_size", 10**15), "do not match its fingerprint"),
        (altered("pattern", "."), "do not match its fingerprint"),
        (altered("special_tokens", {}), "do not match its fingerprint"),
        (lambda directory: (directory / "ranks.tiktoken").unlink(), "ranks.tiktoken: No such file"),
        (lambda directory: (directory / "ranks.tiktoken").write_bytes(b"YQ== 1"), "do not match its fingerprint"),
        (lambda directory: (directory / "ranks.tiktoken").write_bytes(b"junk"), "do not match its fingerprint"),
        (lambda directory: (directory / "ranks.tiktoken").write_bytes(b"YQ== 999999"), "do not match its fingerprint"),
    ],
)
def test_a_damaged_tokenizer_is_refused(bpe, tmp_path, alter, expected):
    bpe.save(tmp_path)
    load_tokenizer(tmp_path)
    alter(tmp_path)
    with pytest.raises(InputError, match=expected) as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)
