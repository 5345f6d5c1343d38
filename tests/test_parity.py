"""Models made by transformers compute the same here, and what goes back is bit for bit what came."""

import importlib.util
import os

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from curriculum.model.formats.hf import hf_tensors, load_hf
from curriculum.model.formats.hf_config import read_hf_config
from curriculum.model.formats.hf_config_writer import hf_config_of
from curriculum.model.model import abstract_params, parameter_name
from curriculum.model.presets import ModelConfig
from curriculum.model.transformer import forward, head, transformer

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: the `parity` extra has it"),
]

TOLERANCE = 2e-5  # float32 products, added up in another order
SHAPES = ((1, 6), (2, 64), (3, 29))
WIDTHS = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
FAMILIES = {
    "llama2": ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "llama3.1": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 12, "tie_word_embeddings": False}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 6, "hidden_size": 36}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "num_hidden_layers": 3, "tie_word_embeddings": True}),
    "smollm3-window": ("SmolLM3", {"no_rope_layers": [1, 1], "attention_bias": True, "mlp_bias": True,
                                   "use_sliding_window": True, "sliding_window": 5,
                                   "layer_types": ["sliding_attention"] * 2}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": False}),
    "qwen3-tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", {}),
    "gpt2-untied": ("GPT2", {"tie_word_embeddings": False, "n_inner": 40}),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def theirs(request, tmp_path_factory):
    """(folder, {shape of a batch: (tokens, logits)}) of a model of transformers whose every number is random."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    torch.set_num_threads(1)
    family, settings = FAMILIES[request.param]
    if family == "GPT2":
        widths = {"vocab_size": 67, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    else:
        widths = WIDTHS
    config = getattr(transformers, f"{family}Config")(**widths | settings)
    kind = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    model = getattr(transformers, kind)(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            normal = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.4 * normal if is_norm else 0.3 * normal)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder, {shape: (tokens_of(shape), their_logits(model, tokens_of(shape))) for shape in SHAPES}


def tokens_of(shape):
    return np.random.default_rng(shape).integers(0, 67, shape)


def their_logits(model, tokens):
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


@pytest.fixture(scope="module")
def ours(theirs):
    """The config and the parameters that were read, and the logits as a compiled function of parameters and tokens."""
    folder, _ = theirs
    config = read_hf_config(folder)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), abstract_params(transformer(config))
    )
    logits = jax.jit(lambda params, tokens: forward(config, params, tokens) @ head(params).T)
    return config, load_hf(folder, config, like), logits


def apart(got, expected):
    return np.linalg.norm(np.asarray(got) - expected) / np.linalg.norm(expected)


def test_the_logits_are_those_of_transformers(theirs, ours):
    _, params, logits = ours
    for tokens, expected in theirs[1].values():
        assert np.std(expected) > 0.5 and apart(logits(params, tokens), expected) < TOLERANCE


def test_every_parameter_counts(theirs, ours):
    """So that none could be left out above: norms all 1, biases all 0, and matrices with two columns exchanged."""
    _, params, logits = ours
    tokens, expected = theirs[1][SHAPES[-1]]
    leaves, structure = jax.tree.flatten_with_path(params)
    for i, (path, array) in enumerate(leaves):
        name = parameter_name(path)
        if name.endswith("key.bias") and "positions" in params:
            continue  # without rope it adds the same to all scores of a query
        other = {"scale": np.ones_like, "bias": np.zeros_like}.get(name.rpartition(".")[2], lambda a: a[:, ::-1])
        changed = [leaf for _, leaf in leaves]
        changed[i] = jax.device_put(other(np.asarray(array)), array.sharding)
        assert apart(logits(jax.tree.unflatten(structure, changed), tokens), expected) > 100 * TOLERANCE, name


@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 5}, {"no_rope_every": 2}, {"qk_norm": True}],
    ids=["llama", "smollm3-window", "smollm3", "qwen3"],
)
def test_biases_of_query_key_and_value_without_qwens_tokenizer(changes, tmp_path):
    """A class with a bias of attention's output too, written as 0, gives the model's logits."""
    import json

    from transformers import AutoModelForCausalLM

    config = ModelConfig(
        vocab_size=67, n_layer=2, n_head=4, n_kv_head=2, d_model=32, d_ff=40, max_seq_len=64, qkv_bias=True, **changes
    )
    model = transformer(config)
    random = np.random.default_rng(1)
    params = jax.tree.map(lambda like: 0.3 * random.standard_normal(like.shape, np.float32), abstract_params(model))
    arrays = {parameter_name(path): np.asarray(array) for path, array in jax.tree.leaves_with_path(params)}
    save_file(dict(hf_tensors(config, arrays, out_bias=True)), tmp_path / "model.safetensors", {"format": "pt"})
    written = hf_config_of(config, bos=0, eos=1, qwen_tokenizer=False)
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    tokens = np.random.default_rng(0).integers(0, 67, (3, 24))
    assert apart(forward(config, params, tokens) @ head(params).T, their_logits(theirs, tokens)) < TOLERANCE


def test_what_goes_back_is_what_came(theirs, ours, tmp_path):
    import json

    from transformers import AutoModelForCausalLM

    folder, batches = theirs
    config, params, _ = ours
    arrays = {parameter_name(path): np.asarray(array) for path, array in jax.tree.leaves_with_path(params)}
    written = dict(hf_tensors(config, arrays))
    came = load_file(folder / "model.safetensors")
    assert written.keys() == came.keys() and len(came) > 10
    assert all(written[name].dtype == came[name].dtype and np.array_equal(written[name], came[name]) for name in came)

    save_file(written, tmp_path / "model.safetensors", {"format": "pt"})
    was = json.loads((folder / "config.json").read_text())
    theirs_now = hf_config_of(config, bos=was["bos_token_id"], eos=was["eos_token_id"])
    (tmp_path / "config.json").write_text(json.dumps(theirs_now))
    assert theirs_now["model_type"] == was["model_type"] and read_hf_config(tmp_path) == config
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    for tokens, expected in batches.values():
        assert np.array_equal(their_logits(model, tokens), expected)
