"""transformers reads the GGUF files: logits and greedy text are ours, the tokenizer gives our ids."""

import importlib.util

import numpy as np
import pytest
from gguf_models import config_of, logits_of, params_of
from hf_folders import TEXTS, corpus, write_folder
from test_hf_writer import own_tokenizer

from curriculum.data.tokenizers.tokenizer import load_tokenizer
from curriculum.model.formats.gguf import fields_for_transformers, write_gguf
from curriculum.model.model import by_name

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: the `parity` extra has it"),
]


NUM_POSITIONS, NUM_NEW = 24, 12


@pytest.fixture(autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)


def tokenizer_of(kind: str, folder):
    return own_tokenizer(kind) if kind == "bpe" else load_tokenizer(write_folder(kind, folder / "source"))


# What transformers does not read (fields_for_transformers) is held against the parameters in test_gguf.py.
@pytest.mark.parametrize(
    ("model", "kind"),
    [("llama", "llama2"), ("qwen2", "qwen"), ("qwen3", "qwen"), ("gpt2", "bpe"), ("gpt2 with a head", "gpt2")],
)
def test_logits_and_greedy_text(model, kind, tmp_path):
    import torch
    import transformers

    tokenizer = tokenizer_of(kind, tmp_path)
    config = config_of(model, tokenizer.vocab_size + 3, num_ids=tokenizer.vocab_size)
    params = params_of(config, seed=1)
    write_gguf(tmp_path / "model.gguf", config, by_name(params), tokenizer, dtype="f32", name="tiny")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, **fields_for_transformers(config)
    )
    theirs.eval()

    prompt = tokenizer.encode("Longtemps, je me suis")[: NUM_POSITIONS - NUM_NEW]
    tokens_BT = np.random.default_rng(0).integers(0, tokenizer.vocab_size, (2, NUM_POSITIONS))
    tokens_BT[0, : len(prompt)] = prompt
    with torch.no_grad():
        got_BTV = theirs(torch.tensor(tokens_BT)).logits.numpy()
    ours_BTV = logits_of(config, params, tokens_BT)
    assert got_BTV.shape == ours_BTV.shape and np.abs(ours_BTV).max() > 1
    # Float32 sums in another order, through a few layers.
    np.testing.assert_allclose(got_BTV, ours_BTV, atol=2e-5 * np.abs(ours_BTV).max())

    greedy_BT = tokens_BT[:1].copy()
    for place in range(len(prompt), len(prompt) + NUM_NEW):
        greedy_BT[0, place] = logits_of(config, params, greedy_BT)[0, place - 1].argmax()
    with torch.no_grad():
        generated = theirs.generate(
            torch.tensor(greedy_BT[:, : len(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NUM_NEW,
            eos_token_id=None,
            pad_token_id=0,
        )[0].tolist()
    expected = greedy_BT[0, : len(prompt) + NUM_NEW].tolist()
    assert generated == expected
    assert len(set(expected[len(prompt) :])) > 1

    read = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert tokenizer.decode_bytes(np.array(generated), True).decode(errors="replace") == read.decode(generated)


@pytest.mark.parametrize("kind", ["bpe", "gpt2", "llama3", "qwen", "llama2", "mistral"])
def test_tokenizer_in_the_file(kind, tmp_path):
    import transformers

    tokenizer = tokenizer_of(kind, tmp_path)
    config = config_of("llama", tokenizer.vocab_size, n_layer=1)
    write_gguf(tmp_path / "model.gguf", config, by_name(params_of(config)), tokenizer, dtype="f16", name="tiny")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    num_ids = 0
    for name, text in [*TEXTS.items(), *enumerate(corpus())]:
        # transformers puts no blank before one that is there, as newer tokenizers of Llama; llama.cpp always does.
        if kind == "llama2" and text.startswith((" ", "\u2581")):
            continue
        # It takes the class of GPT-2 for every byte-level vocabulary, and with it no normalizer.
        if kind == "qwen" and name == "marks of composition":
            continue
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == tokenizer.encode(text).tolist(), name
        num_ids += len(ids)
    assert num_ids > 5000
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos, tokenizer.eot)
