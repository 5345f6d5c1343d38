"""Generation: what is drawn with a cache is what the model says without one, alone, among others and in training."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_folders import write_folder
from noisy import noisy_params
from tiny_run import last_state, record, tiny_data, tiny_train, write_corpus

from curriculum.config import build_config
from curriculum.data.tokenizers.tokenizer import END_OF_TEXT, Tokenizer, byte_tokenizer, load_tokenizer
from curriculum.errors import InputError
from curriculum.generate import generate, load_generator, read_prompts
from curriculum.model.continuation import Continuation, Prompt
from curriculum.model.draw import DrawKnobs, draw, scaled
from curriculum.model.generate import NUM_ROWS, Generator
from curriculum.model.model import Model
from curriculum.model.presets import ModelConfig, RopeScaling
from curriculum.model.transformer import forward, head, transformer
from curriculum.run import load_run
from curriculum.sampling import GenerateSection, Sampling
from curriculum.schema.sections import MeshConfig
from curriculum.train.mesh import make_mesh
from curriculum.train.samples import beginnings
from curriculum.train.trainer import train
from curriculum.views.inspection import inspect_run
from curriculum.views.inspection_text import text as inspection_text
from curriculum.views.report import write_report
from evalsets.evalset import cut_windows

BYTES = byte_tokenizer()
SMALL = ModelConfig(
    vocab_size=257, n_layer=2, n_head=4, n_kv_head=2, d_model=16, d_ff=12, max_seq_len=24, rope_theta=100.0
)
ARCHITECTURES = {
    "grouped heads, rope": {},
    "learned positions": {
        "pos_encoding": "learned", "mlp_type": "gelu", "norm_type": "layernorm", "bias": True, "n_kv_head": 4,
        "tie_embeddings": False,
    },
    "a window": {"sliding_window": 5, "n_kv_head": 1},
    "layers without positions": {"no_rope_every": 2, "n_layer": 3},
    "normed queries and keys": {"qk_norm": True, "d_head": 6, "qkv_bias": True},
    "stretched rope": {"rope_scaling": RopeScaling(kind="linear", factor=3.0)},
    "padded ids": {"vocab_size": 300, "num_ids": 257},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "computed again in training": {"remat": "dots", "dropout": 0.5},
}  # fmt: skip


def generator(model, tokenizer=BYTES):
    return Generator(model, tokenizer, make_mesh(MeshConfig(data=1)))


# ---------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("changes", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_a_row_that_goes_on_is_the_row_that_is_read_at_once(changes):
    """Rows of unequal length, filled up with anything, then the likeliest token six times, each row where it stands."""
    config = replace(SMALL, **changes)
    params, model = noisy_params(config), transformer(config)
    rows_BT = np.random.default_rng(1).integers(0, 257, (3, 16)).astype(np.int32)
    lengths_B = np.array([5, 8, 1])
    extend = jax.jit(model.extend)

    def likeliest(features_BD):
        return np.asarray((features_BD.astype(jnp.float32) @ head(params).T)[:, :257].argmax(axis=-1))

    filled_BT = np.where(np.arange(8) < lengths_B[:, None], rows_BT[:, :8], 77).astype(np.int32)
    features_BTD, cache = extend(params, model.empty_cache(3, 20), filled_BT, np.zeros(3, np.int32), lengths_B)
    got = [[np.asarray(features_BTD[b, : lengths_B[b]], np.float32)] for b in range(3)]
    features_BD = features_BTD[np.arange(3), lengths_B - 1]
    for step in range(6):
        positions_B = (lengths_B + step).astype(np.int32)
        rows_BT[np.arange(3), positions_B] = likeliest(features_BD)
        tokens_BT = rows_BT[np.arange(3), positions_B][:, None]
        features_BTD, cache = extend(params, cache, tokens_BT, positions_B, np.ones(3, np.int32))
        features_BD = features_BTD[:, 0]
        for b in range(3):
            got[b].append(np.asarray(features_BTD[b], np.float32))

    expected_BTD = jax.jit(partial(forward, config))(params, rows_BT)
    # The same numbers are added, in sums of another length: float32, or bfloat16 with its 8 bits.
    tolerance = 0.1 if config.compute_dtype == "bfloat16" else 1e-5
    for b, of_row in enumerate(map(np.concatenate, got)):
        assert len(of_row) == lengths_B[b] + 6 and np.abs(of_row).max() > 0.5
        np.testing.assert_allclose(of_row, np.asarray(expected_BTD[b, : len(of_row)], np.float32), atol=tolerance)
        drawn_T = rows_BT[b, lengths_B[b] : len(of_row)]
        np.testing.assert_array_equal(drawn_T, likeliest(expected_BTD[b, lengths_B[b] - 1 : len(of_row) - 1]))
    assert len(np.unique(rows_BT)) > 10


@pytest.mark.parametrize("changes", [{}, ARCHITECTURES["learned positions"] | ARCHITECTURES["padded ids"]])
def test_temperature_0_is_the_argmax_without_a_cache_at_every_position(changes):
    config = replace(SMALL, **changes)
    params, drawer = noisy_params(config), generator(transformer(config))
    prompts = [drawer.prompt(text) for text in ("lazy dog", "abcdefgh", "the quick brown")]
    got = drawer.generate(params, prompts, Sampling(max_tokens=10, temperature=0))
    run = jax.jit(partial(forward, config))
    for prompt, generation in zip(prompts, got, strict=True):
        row_T = np.concatenate([prompt.ids, generation.ids])
        logits_TV = run(params, np.pad(row_T[:-1], (0, 25 - len(row_T)))[None])[0] @ head(params).T[:, :257]
        expected = np.asarray(logits_TV.argmax(axis=-1))[len(prompt.ids) - 1 : len(row_T) - 1]
        assert generation.ids == tuple(expected) and {type(i) for i in generation.ids} <= {int}
        assert len(generation.ids) == min(10, 25 - len(prompt.ids)) or generation.ids[-1] == BYTES.eot
    assert len({generation.ids for generation in got}) == 3


def test_padded_ids_are_never_drawn():
    """Nor those that the model has and the tokenizer does not."""
    tokenizer = Tokenizer("char", (*(bytes([byte]) for byte in range(97, 107)), b""), {END_OF_TEXT: 10})
    config = replace(SMALL, vocab_size=64)
    params = noisy_params(config)
    drawer = generator(transformer(config), tokenizer)
    generations = drawer.generate(params, [drawer.prompt("abc")] * 8, Sampling(temperature=1e6, seed=2))
    drawn = {i for generation in generations for i in generation.ids}
    assert drawn == set(range(11))


# ---------------------------------------------------------------------------------------- what is drawn


def kept_by_hand(logits, temperature, top_k, top_p, min_p):
    """{id: probability} after the filters, one id at a time, in the order of likelihood."""
    odds = {i: np.exp(float(x) / temperature) for i, x in enumerate(logits) if np.isfinite(x)}
    ranked = sorted(odds, key=odds.get, reverse=True)
    if top_k:
        ranked = [i for i in ranked if odds[i] >= odds[ranked[min(top_k, len(ranked)) - 1]]]
    total, before, kept = sum(odds[i] for i in ranked), 0.0, []
    for i in ranked:
        if top_p < 1 and before >= top_p * total and odds[i] < odds[kept[-1]]:
            break
        kept.append(i)
        before += odds[i]
    kept = [i for i in kept if odds[i] >= min_p * odds[ranked[0]]]
    return {i: odds[i] / sum(odds[j] for j in kept) for i in kept}


LOGITS = [
    [2.0, 1.0, 0.5, 0.25, 0.0, -0.5, -1.0, -2.0, -3.0, -5.0, -9.0, -np.inf],
    [0.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0, -4.0, -4.0, 2.0, 2.0, -np.inf],
    [7.0] + [-3.0] * 10 + [-np.inf],
    [0.1] * 11 + [-np.inf],
    [0.0, -18.0, -19.0] + [-20.0] * 8 + [-np.inf],  # in float32 the sum of the odds is that of the first
]
FILTERS = [
    (1.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 4, 1.0, 0.0), (2.0, 12, 1.0, 0.0),
    (1.0, 10**6, 1.0, 0.0), (1.0, 0, 0.6, 0.0), (1.0, 0, 1e-6, 0.0), (1.0, 5, 0.8, 0.0), (1.0, 0, 1.0, 0.2),
    (0.7, 0, 1.0, 1.0), (1.5, 6, 0.9, 0.1),
]  # fmt: skip


def test_the_filters_keep_what_a_loop_over_the_ids_keeps():
    run = jax.jit(lambda logits_BV, knobs: jax.nn.softmax(scaled(logits_BV, knobs)))
    for temperature, top_k, top_p, min_p in FILTERS:
        knobs = DrawKnobs.of(Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
        got_BV = np.asarray(run(np.array(LOGITS, np.float32), knobs))
        for logits, got_V in zip(LOGITS, got_BV, strict=True):
            expected = kept_by_hand(logits, temperature, top_k, top_p, min_p)
            assert np.flatnonzero(got_V).tolist() == sorted(expected), (temperature, top_k, top_p, min_p)
            np.testing.assert_allclose(got_V[sorted(expected)], [expected[i] for i in sorted(expected)], rtol=2e-6)
    assert run._cache_size() == 1


def test_draws_have_the_distribution_of_what_is_kept():
    num = 4000
    keys_B2 = np.random.default_rng(0).integers(0, 2**32, (num, 2), dtype=np.uint32)
    logits_BV = np.tile(np.float32(LOGITS[0]), (num, 1))
    run = jax.jit(draw)
    for settings in ((0.8, 0, 1.0, 0.0), (1.5, 6, 0.9, 0.1)):
        knobs = DrawKnobs.of(Sampling(**dict(zip(("temperature", "top_k", "top_p", "min_p"), settings, strict=True))))
        expected = kept_by_hand(LOGITS[0], *settings)
        at = {t: np.asarray(run(logits_BV, keys_B2, np.full(num, t, np.int32), knobs)) for t in (3, 4)}
        assert (at[3] != at[4]).mean() > 0.3  # a row draws anew at each position
        for drawn in at.values():
            counts = Counter(drawn.tolist())
            assert counts.keys() <= expected.keys()
            for i, share in expected.items():
                # 5 standard deviations, in some 30 comparisons: by chance once in 60,000 such tests
                assert abs(counts[i] - num * share) < 5 * np.sqrt(num * share * (1 - share)) + 1
    greedy = run(logits_BV, keys_B2, np.zeros(num, np.int32), DrawKnobs.of(Sampling(temperature=0, top_k=3)))
    assert set(np.asarray(greedy).tolist()) == {0}
    assert run._cache_size() == 1


# ---------------------------------------------------------------------------------------- many prompts


@pytest.fixture(scope="module")
def small():
    """(generator, parameters) of a model that is compiled."""
    config = replace(SMALL, max_seq_len=64)
    return generator(transformer(config)), noisy_params(config)


TEXTS = ["", "a", "b", "abc", "the quick brown fox jumps", "a", "fox", "x" * 30, "lazy", "dog", "abc", "the quick", "z"]


def test_a_text_is_the_same_bit_for_bit_alone_among_others_and_in_another_order(small):
    drawer, params = small
    sampling = Sampling(max_tokens=20, temperature=1.2, seed=7)

    def texts(prompts):
        return [g.ids for g in drawer.generate(params, [drawer.prompt(text) for text in prompts], sampling)]

    together = texts(TEXTS)
    assert len(TEXTS) > NUM_ROWS and len({ids[:3] for ids in together}) == len(TEXTS)  # equal prompts differ
    assert texts(TEXTS) == together
    backwards = texts(TEXTS[::-1])[::-1]
    for i, text in enumerate(TEXTS):
        if TEXTS.count(text) == 1:
            assert backwards[i] == together[i]
        if text not in TEXTS[:i]:
            assert texts([text]) == [together[i]]
    assert sorted(backwards) == sorted(together)
    other_seed = [g.ids for g in drawer.generate(params, [drawer.prompt("dog")], replace(sampling, seed=8))]
    assert other_seed != texts(["dog"])


def test_nothing_is_compiled_twice(small):
    drawer, params = small
    for sampling in (Sampling(max_tokens=20), Sampling(max_tokens=18, top_k=3, top_p=0.5, min_p=0.1, temperature=0)):
        drawer.generate(params, [drawer.prompt(text) for text in TEXTS], sampling)
        drawer.generate(params, [drawer.prompt("of another length")], sampling)
    # Prompts of up to 16 tokens in rooms for 32, of up to 32 in rooms for 64.
    assert (drawer.num_prefill_traces, drawer.num_decode_traces) == (2, 2)
    assert drawer._decode._cache_size() == 2


def test_what_is_compiled_ahead_gives_the_same_and_nothing_more_is_compiled(small):
    drawer, params = small
    sampling, prompts = Sampling(max_tokens=20, seed=3), [drawer.prompt(text) for text in (*TEXTS, "of another length")]
    ahead = generator(drawer.model)
    lies = jax.sharding.NamedSharding(make_mesh(MeshConfig(data=1)), jax.sharding.PartitionSpec())
    ahead.compile(
        jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=lies), params), prompts, sampling
    )
    assert (ahead.num_prefill_traces, ahead.num_decode_traces) == (2, 2)
    got, expected = (d.generate(jax.device_put(params, lies), prompts, sampling) for d in (ahead, drawer))
    assert [g.ids for g in got] == [g.ids for g in expected] and any(len(g.ids) == 20 for g in got)
    assert (ahead.num_prefill_traces, ahead.num_decode_traces) == (2, 2)
    assert [function._cache_size() for function in (ahead._no_rows, ahead._prefill, ahead._decode)] == [0, 0, 0]


def test_several_prompts_are_streamed_at_once_and_pieces_make_the_text(small):
    drawer, params = small
    pieces = list(
        drawer.stream(params, [drawer.prompt(t) for t in ("one", "two")], Sampling(max_tokens=np.int64(25), seed=1))
    )
    order = [piece.index for piece in pieces if piece.text]
    assert order.index(1) < len(order) - 1 - order[::-1].index(0)  # the second begins before the first ends
    for index in (0, 1):
        of_prompt = [piece for piece in pieces if piece.index == index]
        assert [piece.whole is not None for piece in of_prompt] == [False] * (len(of_prompt) - 1) + [True]
        assert "".join(piece.text for piece in of_prompt) == of_prompt[-1].whole.text


# ---------------------------------------------------------------------------------------- where a text ends


def counting(vocab_size=257, max_seq_len=None):
    """A model whose next id is the one before it plus 1: 'a' is followed by 'b'. It keeps nothing, and has no head."""

    def forward(params, tokens_BT, segment_ids_BT, keys_B):
        return params["scale"] * jax.nn.one_hot((tokens_BT + 1) % vocab_size, vocab_size)

    def extend(params, cache, tokens_BT, starts_B, lengths_B):
        return forward(params, tokens_BT, None, None), cache

    return Model(
        init=lambda seed: {"scale": np.float32([50])},
        forward=forward,
        empty_cache=lambda num_rows, num_positions: {},
        extend=extend,
        max_seq_len=max_seq_len,
    )


@pytest.fixture(scope="module")
def count():
    """What a counting model of 16 positions goes on with."""
    drawer, params = generator(counting(max_seq_len=16)), {"scale": np.float32([50])}

    def run(text, **settings):
        pieces = list(drawer.stream(params, [drawer.prompt(text)], Sampling(temperature=0, **settings)))
        assert "".join(piece.text for piece in pieces) == pieces[-1].whole.text
        return pieces[-1].whole

    return run


def test_where_a_text_ends(count):
    def ends(*arguments, **settings):
        whole = count(*arguments, **settings)
        return whole.text, whole.finished, len(whole.ids)

    assert ends("a", max_tokens=5) == ("bcdef", "length", 5)
    assert ends("", max_tokens=2) == ("\0\1", "length", 2)  # after end-of-text, the last id, the first one
    assert ends("a", max_tokens=1) == ("b", "length", 1)
    # All 16 positions are read: end-of-text, 13 times "a", "b" and "c", which stands at 15; "d" comes after them.
    assert ends("a" * 13, max_tokens=100) == ("bcd", "max_seq_len", 3)
    assert ends("a" * 15, max_tokens=100) == ("b", "max_seq_len", 1)
    assert ends("a" * 13, max_tokens=3) == ("bcd", "length", 3)
    assert ends("a", max_tokens=30, stop=("ef",)) == ("bcd", "stop", 5)
    assert ends("a", max_tokens=30, stop=("fgx", "gh", "h")) == ("bcdef", "stop", 7)  # both are whole at h: the longer
    assert ends("a", max_tokens=30, stop=("cde", "d")) == ("bc", "stop", 3)  # the first to be whole
    assert ends("a", max_tokens=5, stop=("fgh", "xyz")) == ("bcdef", "length", 5)  # what was held back is shown
    assert ends("a", max_tokens=5, stop=("fabc", "bcdefg")) == ("bcdef", "length", 5)
    assert ends("a", max_tokens=1, stop=("b",)) == ("", "stop", 1)


def test_a_text_ends_at_end_of_text():
    params = {"scale": np.float32([50])}
    drawer = generator(counting())
    whole = drawer.generate(params, [Prompt("", np.int32([256, 250]))], Sampling(temperature=0))[0]
    assert whole.ids == (251, 252, 253, 254, 255, 256) and whole.finished == "stop"
    first = drawer.generate(params, [Prompt("", np.int32([256, 255]))], Sampling(temperature=0))[0]
    assert (first.text, first.finished, first.ids) == ("", "stop", (256,))


def test_only_whole_characters_are_shown_and_stops_may_lie_across_tokens():
    """Tokens of several bytes that cut characters and stop strings."""
    tokens = ("é".encode()[:1], "é".encode()[1:] + b"a", b"bST", b"OP and", "€".encode()[:2], b"\xff", b"")
    tokenizer = Tokenizer("bpe", tokens, {END_OF_TEXT: 6})

    def shown(ids, *stop):
        text = Continuation(0, Prompt("", np.int32([6])), np.zeros(2, np.uint32), len(ids), "length", stop)
        return [text.add([id_], tokenizer).text for id_ in ids], text.whole

    pieces, whole = shown([0, 1, 2, 3, 0], "STOP")
    assert pieces == ["", "éa", "b", "", ""] and (whole.text, whole.finished) == ("éab", "stop") and len(whole.ids) == 4
    pieces, whole = shown([0, 1, 2, 0, 1], "STOP", "Sé")
    assert pieces == ["", "éa", "b", "", "STéa"] and whole.finished == "length"
    pieces, whole = shown([1, 5, 4])  # bytes that are no text, and a character that is cut through
    assert pieces == ["\N{REPLACEMENT CHARACTER}a", "\N{REPLACEMENT CHARACTER}", ""]
    assert whole.text == "\N{REPLACEMENT CHARACTER}a\N{REPLACEMENT CHARACTER}" and whole.ids == (1, 5, 4)


def test_a_prompt_opens_a_document_as_the_tokenizer_does_and_a_text_without_one_begins_without_its_blank(tmp_path):
    tokenizer = load_tokenizer(write_folder("llama2", tmp_path / "hf"))
    assert tokenizer.bos != tokenizer.eot and tokenizer.prefix == b" "
    words = tokenizer.encode("for the").tolist()
    drawer = generator(counting(vocab_size=tokenizer.vocab_size), tokenizer)
    assert drawer.prompt("for the").ids.tolist() == [tokenizer.bos, *words]

    def after(prompt):
        text = Continuation(0, Prompt("", np.int32(prompt)), np.zeros(2, np.uint32), 99, "length", ())
        return text.add(words, tokenizer).text

    assert after([tokenizer.bos]) == "for the" and after([tokenizer.bos, *words]) == " for the"


# ---------------------------------------------------------------------------------------- errors


def test_everything_wrong_with_the_settings_and_the_prompts_is_told_at_once(small):
    drawer, params = small
    wrong = Sampling(max_tokens=0, temperature=-1.0, top_k=-1, top_p=0.0, min_p=1.5, seed=-1, stop=("x", ""))
    prompts = [drawer.prompt("fits"), drawer.prompt("x" * 64)]
    with pytest.raises(InputError) as error:
        drawer.stream(params, prompts, wrong)
    assert error.value.problems == (
        "max_tokens: got 0, expected 1 to 1000000",
        "temperature: got -1.0, expected 0, or 1e-6 to 1e6",
        "top_k: got -1, expected 0 (all tokens) or more",
        "top_p: got 0.0, expected more than 0 and at most 1 (all tokens)",
        "min_p: got 1.5, expected 0 (all tokens) to 1",
        "seed: got -1, expected 0 to 9223372036854775807",
        "stop: got an empty text, expected at least one character",
        "prompt 2: got 65 tokens, the one that opens a document included, expected at most the model's max_seq_len 64",
    )
    for text in (b"a", 3, None):
        with pytest.raises(InputError, match=f"^got {text!r}, expected text$"):
            drawer.prompt(text)
    for stop in ("END", b"END", ("x", b"END"), None, 3):
        assert Sampling(stop=stop).problems() == [("stop", f"got {stop!r}, expected a tuple of texts")]
    of_latin_1 = os.fsdecode(b"caf\xe9")  # as an argument arrives that is not UTF-8
    assert Sampling(stop=("x", of_latin_1)).problems() == [
        ("stop", "got 'caf\\udce9', expected text that UTF-8 can encode")
    ]
    assert [key for key, _ in Sampling(temperature=float("nan"), top_p=float("nan")).problems()] == [
        "temperature",
        "top_p",
    ]
    with pytest.raises(InputError, match=r"got 'a\\ud800', expected text that UTF-8 can encode"):
        drawer.prompt("a\ud800")


def test_a_model_that_cannot_generate_is_told():
    with pytest.raises(InputError, match="cannot generate; expected Model.empty_cache and Model.extend"):
        generator(replace(counting(), extend=None))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("p.txt", "one\r\n\n two \n", ["one", " two "]),
        ("p.jsonl", '{"prompt": "one\\ntwo"}\n\n{"prompt": "", "id": 3}\n', ["one\ntwo", ""]),
        ("p.JSONL", '{"prompt": "one"}\n', ["one"]),
        ("p.ndjson", '{"prompt": "one"}\n', ["one"]),
        ("p.jsonl", '{"prompt": 3}\n[1]\n{"text": "x"}\n{"prompt": "x"}\nnot json', ["1: got", "2:", "3:", "5: got 'not"]),
        ("p.txt", "\ufeffone\n", ["one"]),
        ("p.jsonl", '\ufeff{"prompt": "one"}\n', ["one"]),
        ("p.txt", "\n \n", ["holds no prompt, expected one per line"]),
        ("p.txt", b"a\xff", ["byte 1: not UTF-8; convert the file to UTF-8"]),
        ("p.txt", "one\n".encode("utf-16"), ["byte 0: not UTF-8; convert the file to UTF-8"]),
        ("p.txt", "one\n".encode("utf-16-le"), ["holds NUL, expected UTF-8 text; UTF-16? convert"]),
        ("p.txt", None, ["cannot be read: No such file"]),
    ],
)  # fmt: skip
def test_a_file_of_prompts(tmp_path, name, content, expected):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        assert read_prompts(tmp_path / name) == expected
    except InputError as error:
        assert len(error.problems) == len(expected)
        for problem, part in zip(error.problems, expected, strict=True):
            assert part in problem and str(tmp_path / name) in problem


# ---------------------------------------------------------------------------------------- a run


SAMPLED = {"prompts": ["the ", ""], "from_evalset": "law", "num": 2, "prompt_tokens": 9, "max_tokens": 6, "seed": 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs alike, `with` samples every 4 steps, and `without`."""
    place = write_corpus(tmp_path_factory.mktemp("generate"))
    logging = {"every": 1, "tensorboard": False}
    tiny_train(place, place / "without", logging=logging)
    sampled = logging | {"generate_every": 4, "generate": SAMPLED, "tensorboard": True}
    tiny_train(place, place / "with", logging=sampled)
    return place, sampled


def test_samples_change_no_bit_of_training(runs):
    place, _ = runs
    assert last_state(place / "with") == last_state(place / "without")
    (events, metrics), (plain, plain_metrics) = (
        record(place / name, without=("generation", "training_start")) for name in ("with", "without")
    )
    assert events == plain and metrics == plain_metrics and len(metrics) == 12


def test_samples_stand_in_the_record_after_the_eval_and_before_the_checkpoint(runs):
    place, _ = runs
    run = load_run(place / "with")
    told = [(e["step"], e["event"]) for e in run.events]
    assert [step for step, name in told if name == "generation"] == [4, 8, 12]
    assert told[told.index((12, "generation")) - 1] == (12, "eval")
    assert told.index((12, "generation")) < told.index((12, "checkpoint"))
    samples = [e["samples"] for e in run.events if e["event"] == "generation"]
    prompts = [sample["prompt"] for sample in samples[0]]
    assert prompts[:2] == ["the ", ""] and [len(prompt) for prompt in prompts[2:]] == [9, 9]
    texts = [json.loads(line)["text"] for line in (place / "law.jsonl").read_text().splitlines()]
    assert all(any(prompt in text for text in texts) for prompt in prompts[2:]) and prompts[2] != prompts[3]
    for of_step in samples:
        assert [sample["prompt"] for sample in of_step] == prompts
        assert all(s["tokens"] == 6 and s["finished"] == "length" or s["finished"] == "stop" for s in of_step)
    # What a checkpoint of the step goes on with is what was told of it.
    settings = {key: SAMPLED[key] for key in ("max_tokens", "seed")}
    again = generate(place / "with", prompts[:2], step=12, store_dir=place / "store", **settings)
    assert [generation.to_json() for generation in again] == samples[-1][:2]


def test_samples_are_shown(runs, tmp_path):
    place, _ = runs
    lines = (place / "with/train.log").read_text().splitlines()
    shown = [line for line in lines if line.startswith("  sample at step 8: ")]
    assert len(shown) == 4 and shown[0].startswith("  sample at step 8: the  | ")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    texts = {
        event.step: value.tensor.string_val[0].decode()
        for path in (place / "with/tensorboard").glob("*.tfevents.*")
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tag.startswith("generation")
    }
    assert list(texts) == [4, 8, 12] and texts[8].startswith("    the ▏")
    assert [line for line in inspection_text(inspect_run(load_run(place / "with"))) if "  sample at step 12: " in line]
    write_report([place / "with"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Text samples" in page and page.count('<td class="text">the </td>') == 3
    write_report([place / "without"], tmp_path / "report.html")
    assert "Text samples" not in (tmp_path / "report.html").read_text()


def test_a_resume_tells_no_sample_twice(runs, tmp_path):
    place, sampled = runs
    shutil.copytree(place / "with", tmp_path / "run")
    tiny_train(place, tmp_path / "run", resume=8, logging=sampled)
    assert record(tmp_path / "run") == record(place / "with")
    superseded = [json.loads(line)["line"] for line in (tmp_path / "run/superseded.jsonl").read_text().splitlines()]
    assert [line["step"] for line in superseded if line.get("event") == "generation"] == [12]


def test_a_run_from_another_first_writes_what_that_one_did(runs, tmp_path):
    place, sampled = runs
    changes = {
        "adaptation": {"init_from": str(place / "with")},
        "phases": [{"name": "only", "until": "end", "mixture": {"law": 1.0}}],
        "train": {"steps": 1, "batch_size": 4, "seq_len": 32},
        "optim": {"lr": 1e-3, "schedule": "constant"},
        "logging": sampled | {"generate_every": 100},
    }
    tiny_train(place, tmp_path / "run", **changes)
    told = {e["step"]: e["samples"] for e in load_run(tmp_path / "run").events if e["event"] == "generation"}
    of_base = [e["samples"] for e in load_run(place / "with").events if e["event"] == "generation"]
    assert list(told) == [0, 1] and told[0] == of_base[-1]


def test_what_a_set_begins_with():
    documents = [np.frombuffer(text, np.uint8) for text in (b"0123456789", b"ab", b"ABCDEFGHIJKLMNOPQ", b"abcdefg")]
    evalset = cut_windows("x", documents, BYTES.token_bytes_V, bos=BYTES.eot, seq_len=8)

    def texts(num, prompt_tokens):
        prompts = beginnings(evalset, num, prompt_tokens, BYTES)
        assert all(p.ids[0] == BYTES.eot and bytes(p.ids[1:].tolist()).decode() == p.text for p in prompts)
        return [prompt.text for prompt in prompts]

    assert texts(2, 5) == ["01234", "ABCDE"]
    assert texts(3, 5) == ["01234", "ABCDE", "abcde"]
    assert texts(9, 5) == ["01234", "ab", "ABCDE", "abcde"]  # a short one is a prompt where there is no other
    assert texts(1, 100) == ["0123456"]  # of one window, and not all of it

    # Of a conversation the windows without an answer are not in the set: what is left of one begins in its middle.
    scored = [np.arange(len(document)) >= at for document, at in zip(documents, (9, 1, 3, 0), strict=True)]
    evalset = cut_windows("x", documents, BYTES.token_bytes_V, bos=BYTES.eot, seq_len=8, scored=scored)
    assert evalset.num_documents == 4
    # One whose first answer stands in its first window is a prompt up to there.
    assert texts(2, 5) == ["a", "ABC"] and texts(9, 5) == ["a", "ABC", "abcde"]


def test_a_set_without_a_beginning_is_told(tmp_path):
    place = write_corpus(tmp_path)
    messages = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y"}]
    (place / "talk.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    sets = {"talk": {"path": str(place / "talk.jsonl"), "format": "messages"}}
    data = tiny_data(place, logging={"generate_every": 4, "generate": {"from_evalset": "talk"}})
    data["evalsets"] |= {"sets": sets}
    with pytest.raises(InputError, match=r"logging.generate.from_evalset: every conversation in talk starts with a"):
        train(build_config(data), place / "run", store_dir=place / "store")
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    ("logging", "problems"),
    [
        ({"generate_every": -1}, ["logging.generate_every: got -1"]),
        (
            {"generate": {"from_evalset": "laws", "num": 0, "prompt_tokens": 0, "top_p": 2.0}},
            [
                "logging.generate.from_evalset: got 'laws': no such eval set; did you mean 'law'?",
                "logging.generate.num: got 0, expected 1 to 1000000",
                "logging.generate.prompt_tokens: got 0, expected 1 to 1000000",
                "logging.generate.top_p: got 2.0, expected more than 0",
            ],
        ),
    ],
)
def test_what_is_wrong_with_the_section_is_told(tmp_path, logging, problems):
    with pytest.raises(InputError) as error:
        build_config(tiny_data(write_corpus(tmp_path), logging=logging))
    assert len(error.value.problems) == len(problems)
    for problem, expected in zip(sorted(error.value.problems), problems, strict=True):
        assert expected in problem


def test_a_prompt_that_does_not_fit_ends_no_run_in_the_middle(tmp_path):
    place = write_corpus(tmp_path)
    section = {"generate_every": 4, "generate": {"prompts": ["x", "x" * 1024]}}
    with pytest.raises(InputError, match=r"logging.generate.prompts\[1\]: got 1025 tokens"):
        tiny_train(place, place / "run", logging=section)
    assert not (place / "run").exists()
    assert GenerateSection().evalset == "primary" and GenerateSection(prompts=("x",)).evalset is None


# ---------------------------------------------------------------------------------------- the command


def test_the_command(runs, tmp_path):
    place, _ = runs
    (tmp_path / "p.jsonl").write_text('{"prompt": "the "}\n{"prompt": ""}\n')
    settings = ("--max-tokens", "9", "--seed", "5", "--top-k", "40", "--store-dir", place / "store")
    run = partial(command_line.run, tmp_path, "generate", place / "with")
    shown = run("--prompt", "the ", "--prompt", "", *settings)
    first, second = generate(place / "with", ["the ", ""], max_tokens=9, seed=5, top_k=40, store_dir=place / "store")
    assert shown.returncode == 0
    assert shown.stdout == f"the {first.text}\n\n{second.text}\n"
    num_tokens = len(first.ids) + len(second.ids)
    assert shown.stderr.startswith(
        f"step {load_run(place / 'with').gold_step} (gold), raw weights: {num_tokens} tokens in "
    )
    told = json.loads(run("--prompts-file", "p.jsonl", *settings, "--json").stdout)
    assert told["generations"] == [first.to_json(), second.to_json()]
    assert told["step"] == 12 and told["weights"] == "raw" and told["sampling"]["top_k"] == 40
    assert told["generations"][0]["prompt_tokens"] == 5
    assert told["generations"][0]["tokens"] == len(first.ids) <= 9
    earlier = json.loads(run("--prompt", "the ", "--step", "10", *settings, "--json").stdout)
    assert earlier["step"] == 10 and earlier["generations"] != told["generations"]
    long = run("--prompt", "the ", "--prompt", "x" * 1023, *settings, "--temperature", "0", "--stop", "zzz")
    assert "prompt 2: stopped at the model's last position (max_seq_len)" in long.stderr


@pytest.mark.parametrize(
    ("chat", "prompt", "ends"),
    [
        ({}, "<|im_start|>user\nhi {content}<|im_end|>\n<|im_start|>assistant\n", ("<|im_end|>",)),
        ({"user": "U:{content}.", "assistant": "A:{content} "}, "U:hi {content}.A:", (" ",)),
        ({"user": "{content}\n", "assistant": "{content}"}, "hi {content}\n", ()),
    ],
)
def test_a_question_is_asked_by_the_template_and_answered_to_its_end(runs, tmp_path, chat, prompt, ends):
    place, _ = runs
    shutil.copytree(place / "with", tmp_path / "run")
    resolved = json.loads((tmp_path / "run/config.resolved.json").read_text())
    (tmp_path / "run/config.resolved.json").write_text(json.dumps(resolved | {"chat": resolved["chat"] | chat}))
    settings = {"max_tokens": 40, "seed": 5, "store_dir": place / "store"}
    (expected,) = generate(place / "with", [prompt], stop=(*ends, "zz"), **settings)
    assert generate(tmp_path / "run", ["hi {content}"], chat=True, stop=("zz",), **settings) == [expected]
    options = ("--max-tokens", "40", "--seed", "5", "--stop", "zz", "--store-dir", place / "store")
    run = partial(command_line.run, tmp_path, "generate", "run", "--chat", "--prompt", "hi {content}", *options)
    assert run().stdout == f"hi {{content}}\n{expected.text}\n"
    assert json.loads(run("--json").stdout)["generations"] == [expected.to_json()]


def test_an_answer_ends_before_what_closes_it_in_the_template(runs, tmp_path):
    place, _ = runs
    shutil.copytree(place / "with", tmp_path / "run")
    resolved = json.loads((tmp_path / "run/config.resolved.json").read_text())
    settings = {"max_tokens": 40, "seed": 5, "store_dir": place / "store"}
    (open_ended,) = generate(place / "with", ["U:hi A:"], **settings)
    close = next(text for i in range(4, 40) if (text := open_ended.text[i : i + 2]).strip() == text != "")
    chat = {"user": "U:{content} ", "assistant": f"A:{{content}}{close}\n"}
    (tmp_path / "run/config.resolved.json").write_text(json.dumps(resolved | {"chat": resolved["chat"] | chat}))
    (answer,) = generate(tmp_path / "run", ["hi"], chat=True, **settings)
    assert answer.text == open_ended.text.partition(close)[0] != open_ended.text
    assert answer.finished == "stop" != open_ended.finished


def test_what_is_wrong_with_a_command_is_told(runs, tmp_path):
    place, _ = runs
    run = partial(command_line.run, tmp_path, "generate")

    def errors(*arguments):
        done = run(*arguments)
        assert done.returncode == 2 and not done.stdout
        return done.stderr.splitlines()

    both = "error: --prompt and --prompts-file: got {}, expected one of them"
    assert errors(place / "with", "--top-p", "0", "--max-tokens", "0") == [
        "error: --max-tokens: got 0, expected 1 to 1000000",
        "error: --top-p: got 0.0, expected more than 0 and at most 1 (all tokens)",
        both.format("neither"),
    ]
    assert errors(place / "with", "--prompt", "x", "--prompts-file", "y") == [both.format("both")]
    assert "cannot be read" in errors(place / "with", "--prompts-file", "nowhere")[0]
    assert errors("nowhere", "--prompt", "x") == [
        "error: nowhere: holds no run; expected a directory made by `curriculum train`; it does not exist"
    ]
    store = ("--store-dir", place / "store")
    assert "--step 7" in errors(place / "with", "--prompt", "x", "--step", "7", *store)[0]
    assert "--weights emma" in errors(place / "with", "--prompt", "x", "--weights", "emma", *store)[0]
    assert errors(place / "with", "--prompt", "x" * 1024, "--prompt", "", *store) == [
        "error: prompt 1: got 1025 tokens, the one that opens a document included, expected at most the model's "
        "max_seq_len 1024"
    ]


@pytest.mark.slow
def test_a_reader_that_is_gone_and_ctrl_c_end_quietly(runs, tmp_path):
    """In processes of their own: what is tested is what the interpreter says as it ends."""
    place, _ = runs
    command = [sys.executable, "-m", "curriculum", "generate", place / "with", "--store-dir", place / "store"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command += ["--prompt", "the ", "--max-tokens", "900"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(6)[:4] == b"the "
    process.send_signal(2)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (130, b"")
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert (process.wait(), process.stderr.read()) == (0, b"")


def test_a_run_of_a_model_of_ones_own_needs_it(runs, tmp_path):
    place, _ = runs
    shutil.copytree(place / "without", tmp_path / "run")
    resolved = json.loads((tmp_path / "run/config.resolved.json").read_text())
    (tmp_path / "run/config.resolved.json").write_text(json.dumps(resolved | {"model": None}))
    with pytest.raises(InputError, match=r"a custom model; call generate\(make_model=\.\.\.\)"):
        load_generator(tmp_path / "run")
