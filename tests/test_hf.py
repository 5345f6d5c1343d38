"""Hugging Face folders, written here by hand or by a mapping of the test's own; transformers is asked in test_parity."""

import json
import math
import os
import re
import struct
import subprocess
import sys
from dataclasses import make_dataclass, replace

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from curriculum.errors import InputError
from curriculum.model.counts import num_parameters
from curriculum.model.formats.hf import checked_tensors, hf_layout, hf_tensors, load_hf
from curriculum.model.formats.hf_config import hf_model_type, read_hf_config
from curriculum.model.formats.hf_config_writer import hf_config_of, needs_out_bias
from curriculum.model.formats.hf_weights import hf_fingerprint, stored_tensors, weight_files
from curriculum.model.model import abstract_params, parameter_name
from curriculum.model.presets import ModelConfig, RopeScaling
from curriculum.model.transformer import transformer

LLAMA = ModelConfig(vocab_size=11, n_layer=2, n_head=4, n_kv_head=2, d_model=8, d_ff=6, max_seq_len=32)
GPT2 = ModelConfig(
    vocab_size=11, n_layer=2, n_head=2, n_kv_head=2, d_model=8, d_ff=12, max_seq_len=5, pos_encoding="learned",
    mlp_type="gelu", norm_type="layernorm", bias=True,
)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "untied, with biases": ModelConfig(**vars(LLAMA) | {"bias": True, "tie_embeddings": False}),
    "qwen2": ModelConfig(**vars(LLAMA) | {"qkv_bias": True}),
    "qwen3": ModelConfig(**vars(LLAMA) | {"qk_norm": True, "d_head": 6, "tie_embeddings": False}),
    "gpt2": GPT2,
    "gpt2 untied": ModelConfig(**vars(GPT2) | {"tie_embeddings": False}),
}


def params_of(config, seed=0):
    """A random array for each parameter, by name."""
    shapes = jax.tree.leaves_with_path(abstract_params(transformer(config)))
    rng = np.random.default_rng(seed)
    return {parameter_name(path): rng.standard_normal(a.shape, np.float32) for path, a in shapes}


def like(config):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = abstract_params(transformer(config))
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), shapes)


def loaded(folder, config):
    params = load_hf(folder, config, like(config))
    return {parameter_name(path): np.asarray(array) for path, array in jax.tree.leaves_with_path(params)}


def equal(arrays, others):
    assert len(arrays) > 10
    return arrays.keys() == others.keys() and all(np.array_equal(arrays[name], others[name]) for name in arrays)


def in_llama(name, array):
    """The name and array that transformers has for a parameter of ours, word by word."""
    words = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attention": "self_attn",
             "query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj", "gate": "gate_proj",
             "up": "up_proj", "down": "down_proj", "query_norm": "q_norm", "key_norm": "k_norm", "scale": "weight",
             "kernel": "weight", "embedding": "weight", "embed": "embed_tokens", "blocks": "layers"}  # fmt: skip
    parts = [str(int(part)) if part.isdigit() else words.get(part, part) for part in name.split(".")]
    array = array.T if name.endswith("kernel") else array
    return ("lm_head.weight" if parts[0] == "head" else ".".join(["model", *parts])), array


def in_gpt2(params):
    """The same for all parameters of a GPT-2."""
    words = {"attention_norm": "ln_1", "mlp_norm": "ln_2", "attention": "attn", "out": "c_proj", "up": "c_fc",
             "down": "c_proj", "scale": "weight", "kernel": "weight", "embedding": "weight", "embed": "wte",
             "positions": "wpe", "blocks": "h", "norm": "ln_f"}  # fmt: skip
    written = {}
    for name, array in params.items():
        parts = [str(int(part)) if part.isdigit() else words.get(part, part) for part in name.split(".")]
        if parts[0] == "head":
            written["lm_head.weight"] = array.T
        elif "query" in parts:
            kind = name.rpartition(".")[2]
            three = [params[name.replace("query", other)] for other in ("query", "key", "value")]
            fused = np.stack(three, axis=-2).reshape(*array.shape[:-1], -1)
            written[f"transformer.h.{parts[1]}.attn.c_attn.{words.get(kind, kind)}"] = fused
        elif not {"key", "value"} & {*parts}:
            written[".".join(["transformer", *parts])] = array
    return written


def theirs(config, params):
    if config.pos_encoding == "learned":
        return in_gpt2(params)
    return dict(in_llama(name, array) for name, array in params.items())


def write(folder, config, tensors, **keys):
    """A folder of one file, with config.json by `hf_config_of`, some of its keys changed or (None) added as null."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config_of(config, bos=0, eos=0) | keys))
    return folder


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_each_tensor_is_read_and_written_in_its_place(tmp_path, config):
    params = params_of(config)
    tensors = theirs(config, params)
    folder = write(tmp_path / "hf", config, tensors)
    assert read_hf_config(folder) == config
    assert equal(loaded(folder, config), params)
    written = dict(hf_tensors(config, params))
    assert equal(written, tensors)
    assert all(array.flags.c_contiguous for array in written.values())  # safetensors writes memory as it lies
    assert {t.name: t.shape for t in hf_layout(config)} == {name: array.shape for name, array in tensors.items()}


def test_the_names_are_those_of_transformers():
    """Of one layer, as the classes of transformers 5 have them."""
    block = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
             "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]  # fmt: skip
    expected = ["model.embed_tokens", *(f"model.layers.0.{name}" for name in block), "model.norm"]
    assert [t.name for t in hf_layout(ModelConfig(**vars(LLAMA) | {"n_layer": 1}))] == [f"{n}.weight" for n in expected]
    block = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    names = [*(f"transformer.h.0.{name}" for name in block), "transformer.ln_f"]
    expected = ["transformer.wte.weight", "transformer.wpe.weight"]
    expected += [f"{name}.{what}" for name in names for what in ("weight", "bias")]
    assert [t.name for t in hf_layout(ModelConfig(**vars(GPT2) | {"n_layer": 1}))] == expected


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_widened(tmp_path, dtype):
    params = params_of(MODELS["qwen3"])
    tensors = {name: array.astype(dtype) for name, array in theirs(MODELS["qwen3"], params).items()}
    folder = write(tmp_path, MODELS["qwen3"], tensors)
    read = loaded(folder, MODELS["qwen3"])
    assert equal(read, {name: array.astype(dtype).astype(np.float32) for name, array in params.items()})
    assert {array.dtype for array in read.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize(("model", "wrong"), [("untied, with biases", math.nan), ("gpt2", -math.inf)])
def test_a_tensor_that_is_not_finite_is_told(tmp_path, model, wrong):
    config = MODELS[model]
    tensors = dict(theirs(config, params_of(config)))
    name = list(tensors)[5]
    tensors[name] = np.array(tensors[name])
    tensors[name].flat[-1] = wrong
    write(tmp_path, config, tensors)
    with pytest.raises(InputError, match=f"model.safetensors: {re.escape(name)} holds infinities or NaN"):
        loaded(tmp_path, config)


def test_large_finite_tensors_are_read(tmp_path):
    """Their sum in float32 would be infinite."""
    params = {name: np.full_like(array, 3e38) for name, array in params_of(LLAMA).items()}
    write(tmp_path, LLAMA, theirs(LLAMA, params))
    assert equal(loaded(tmp_path, LLAMA), params)


def test_shards_are_one_model(tmp_path):
    params = params_of(LLAMA)
    tensors = {name: np.ascontiguousarray(array) for name, array in theirs(LLAMA, params).items()}
    folder = write(tmp_path, LLAMA, tensors)
    (folder / "model.safetensors").unlink()
    shard(folder, tensors)
    assert equal(loaded(folder, LLAMA), params)


def shard(folder, tensors):
    half = len(tensors) // 2
    weight_map = {}
    for i, names in enumerate((list(tensors)[:half], list(tensors)[half:]), 1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_what_older_versions_saved_too_is_passed_over(tmp_path):
    """Masks, wavelengths, a second copy of the embedding; and GPT-2 as first released, without the prefix."""
    params = params_of(LLAMA)
    more = {"lm_head.weight": params["embed.embedding"], "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2)}
    assert equal(loaded(write(tmp_path / "llama", LLAMA, theirs(LLAMA, params) | more), LLAMA), params)
    params = params_of(GPT2)
    bare = {name.removeprefix("transformer."): array for name, array in theirs(GPT2, params).items()}
    bare |= {"h.0.attn.bias": np.ones((1, 1, 5, 5), np.float32), "h.1.attn.masked_bias": np.float32([-1e4])}
    assert "wte.weight" in bare
    assert equal(loaded(write(tmp_path / "gpt2", GPT2, bare), GPT2), params)


@pytest.mark.parametrize("config", [GPT2, MODELS["untied, with biases"]])
def test_a_padded_vocabulary_is_zeros_and_goes_no_further(tmp_path, config):
    params = params_of(config)
    folder = write(tmp_path, config, theirs(config, params))
    padded = ModelConfig(**vars(config) | {"vocab_size": 16, "num_ids": 11})
    read = loaded(folder, padded)
    assert read["embed.embedding"].shape == (16, 8) and not read["embed.embedding"][11:].any()
    if not config.tie_embeddings:
        assert read["head.kernel"].shape == (8, 16) and not read["head.kernel"][:, 11:].any()
    trained = {name: array + 1 for name, array in read.items()}
    there = dict(hf_tensors(padded, trained))
    assert equal(there, theirs(config, {name: array + 1 for name, array in params.items()}))
    assert hf_config_of(padded, bos=0, eos=0) == hf_config_of(config, bos=0, eos=0)


# Keys of config.json as published, without those that say nothing of the shape, and how many parameters there are.
PUBLISHED = {
    "Llama-2-7b": (6_738_415_616, {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "tie_word_embeddings": False, "torch_dtype": "float16", "vocab_size": 32000}),
    "Llama-3.2-1B": (1_235_814_400, {
        "model_type": "llama", "attention_bias": False, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256}),
    "Mistral-7B-v0.1": (7_241_732_096, {
        "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "vocab_size": 32000}),
    "SmolLM2-135M": (134_515_008, {
        "model_type": "llama", "attention_bias": False, "hidden_act": "silu", "hidden_size": 576,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "rms_norm_eps": 1e-05,
        "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
        "vocab_size": 49152}),
    "SmolLM3-3B": (3_075_098_624, {
        "model_type": "smollm3", "attention_bias": False, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
        "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
        "vocab_size": 128256}),
    "Qwen2.5-0.5B": (494_032_768, {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936}),
    "Qwen3-0.6B": (596_049_920, {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "use_sliding_window": False, "vocab_size": 151936}),
    "gpt2": (124_439_808, {
        "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "resid_pdrop": 0.1, "vocab_size": 50257}),
}  # fmt: skip


def config_json(folder, keys):
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_number_of_parameters(tmp_path, name):
    size, keys = PUBLISHED[name]
    config = read_hf_config(config_json(tmp_path, keys))
    assert num_parameters(config) == size and hf_model_type(tmp_path) == keys["model_type"]
    again = tmp_path / "again"
    again.mkdir()
    written = hf_config_of(config, bos=1, eos=[2, 3])
    assert read_hf_config(config_json(again, written)) == config
    assert (written["bos_token_id"], written["eos_token_id"]) == (1, [2, 3])


def test_what_the_keys_mean(tmp_path):
    def read(name, **keys):
        return read_hf_config(config_json(tmp_path, PUBLISHED[name][1] | keys))

    llama = read("Llama-3.2-1B")
    assert llama.rope_scaling == RopeScaling("llama3", 32.0, 8192, 1.0, 4.0) and llama.rope_theta == 500_000
    assert llama.d_head is None and llama.norm_eps == 1e-5 and llama.num_ids is None and llama.tie_embeddings
    assert read("Llama-3.2-1B", head_dim=80).d_head == 80
    # transformers 5 keeps it all in one place.
    scaled = {"rope_type": "linear", "factor": 2, "rope_theta": 7e4}
    newer = read("Llama-3.2-1B", rope_scaling=None, rope_theta=None, rope_parameters=scaled)
    assert newer.rope_scaling == RopeScaling("linear", 2.0) and newer.rope_theta == 70_000
    without = PUBLISHED["Llama-3.2-1B"][1]["rope_scaling"].copy()
    del without["original_max_position_embeddings"]
    assert read("Llama-3.2-1B", rope_scaling=without).rope_scaling.original_max_seq_len == 131_072
    assert read("Llama-2-7b", rope_scaling={"type": "linear", "factor": 4.0}).rope_scaling == RopeScaling("linear", 4.0)
    assert read("Llama-2-7b", attention_bias=True, mlp_bias=True).bias and not llama.bias
    assert (
        read("Mistral-7B-v0.1").sliding_window
        == 4096
        == read("Mistral-7B-v0.1", max_position_embeddings=9).sliding_window
    )
    assert read("Mistral-7B-v0.1", sliding_window=None).sliding_window is None
    # With layer_types transformers takes it for Ministral, which goes by them.
    assert read("Mistral-7B-v0.1", layer_types=["full_attention"] * 32).sliding_window is None
    assert read("Mistral-7B-v0.1", layer_types=["sliding_attention"] * 32).sliding_window == 4096
    smol = read("SmolLM3-3B")
    assert smol.no_rope_every == 4 and smol.tie_embeddings and smol.rope_theta == 5e6
    assert read("SmolLM3-3B", no_rope_layers=None).no_rope_every == 4
    assert read("SmolLM3-3B", no_rope_layers=[1] * 36).no_rope_every is None
    qwen = read("Qwen2.5-0.5B")
    assert qwen.qkv_bias and not qwen.bias and qwen.sliding_window is None
    assert read("Qwen2.5-0.5B", use_sliding_window=True, max_window_layers=0).sliding_window == 32768
    assert read("Qwen2.5-0.5B", use_sliding_window=True).sliding_window is None  # from layer 24 of 24 on
    assert read("Qwen2.5-0.5B", max_window_layers=None).sliding_window is None  # not read
    assert read("Qwen3-0.6B").qk_norm and read("Qwen3-0.6B").d_head == 128
    gpt2 = read("gpt2")
    assert (gpt2.pos_encoding, gpt2.mlp_type, gpt2.norm_type, gpt2.bias, gpt2.d_ff) == (
        "learned",
        "gelu",
        "layernorm",
        True,
        3072,
    )
    assert (
        gpt2.tie_embeddings
        and read("gpt2", n_inner=5).d_ff == 5
        and not read("gpt2", tie_word_embeddings=False).tie_embeddings
    )


def test_keys_left_out_are_what_the_class_takes(tmp_path):
    needed = {
        "hidden_size": 8,
        "intermediate_size": 6,
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "vocab_size": 9,
    }
    needed["hidden_size"] = 64
    expected = {
        "llama": (32, None, 1e4, 2048, False, None),
        "mistral": (8, None, 1e4, 131_072, False, 4096),
        "qwen2": (32, None, 1e4, 32_768, False, None),
        "qwen3": (32, 128, 1e4, 32_768, False, None),
        "smollm3": (4, None, 2e6, 32_768, True, None),
    }
    for model_type, values in expected.items():
        c = read_hf_config(config_json(tmp_path, needed | {"model_type": model_type}))
        got = (c.n_kv_head, c.d_head, c.rope_theta, c.max_seq_len, c.tie_embeddings, c.sliding_window)
        assert got == values and c.norm_eps == 1e-6, model_type
        c = read_hf_config(config_json(tmp_path, needed | {"model_type": model_type, "num_key_value_heads": None}))
        assert c.n_kv_head == 32


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("gpt2", {"model_type": "bert"}, 'model_type: got "bert", expected one of: gpt2, llama, mistral, qwen2'),
        ("gpt2", {"model_type": ["gpt2"]}, 'model_type: got ["gpt2"], expected one of'),
        ("gpt2", {"activation_function": "relu"}, 'activation_function: got "relu", expected "gelu_new"'),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: got true, expected false"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn: got true, expected false"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: got true, expected false"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights: got false, expected true"),
        ("gpt2", {"n_head": 7}, "as n_head: got 7, expected a divisor of d_model 768"),
        ("gpt2", {"n_layer": 10**12}, "n_layer: got 1000000000000, expected at most 16777216"),
        ("Llama-2-7b", {"hidden_act": "gelu"}, 'hidden_act: got "gelu", expected "silu"'),
        ("Llama-2-7b", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_scaling.rope_type: got "yarn", expected'),
        ("Llama-2-7b", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 'rope_scaling.rope_type: got "dynamic"'),
        ("Llama-2-7b", {"rope_parameters": {"rope_type": "longrope"}}, 'rope_parameters.rope_type: got "longrope"'),
        ("Llama-2-7b", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing; this key is needed"),
        ("Llama-2-7b", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor: got 0.5, expected 1 or more"),
        ("Llama-2-7b", {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
         "rope_scaling: got low_freq_factor 4.0, high_freq_factor 4.0; expected the first below the second"),
        ("Llama-2-7b", {"rope_scaling": "linear"}, "rope_scaling: got str, expected a mapping"),
        ("Llama-2-7b", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters: got one for each of: full_attention"),
        ("Llama-2-7b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, expected null or 1.0"),
        ("Llama-2-7b", {"mlp_bias": True}, "mlp_bias: got true with attention_bias false; expected biases in both"),
        ("Llama-2-7b", {"quantization_config": {"bits": 4}}, "quantization_config: the weights are quantised"),
        ("Llama-2-7b", {"hidden_size": "4096"}, 'hidden_size: got "4096", expected an integer'),
        ("Llama-2-7b", {"vocab_size": None}, "vocab_size: got null, expected an integer"),
        ("Llama-2-7b", {"rms_norm_eps": 0}, "rms_norm_eps: got 0, expected more than 0"),
        ("Llama-2-7b", {"rope_theta": 10**400}, "expected at most 1.79"),
        ("Llama-2-7b", {"tie_word_embeddings": "no"}, 'tie_word_embeddings: got "no", expected true or false'),
        ("Llama-2-7b", {"head_dim": 5}, "as d_head: got 5, expected an even number"),
        ("Qwen2.5-0.5B", {"use_sliding_window": True, "max_window_layers": 20},
         "use_sliding_window: 4 of 24 layers see 32768 tokens and the others all; expected all layers alike"),
        ("SmolLM3-3B", {"no_rope_layers": None, "no_rope_layer_interval": None}, "no_rope_layer_interval: got null, expected an integer"),
        ("SmolLM3-3B", {"max_position_embeddings": None}, "max_position_embeddings: got null, expected an integer"),
        ("Qwen3-0.6B", {"layer_types": ["sliding_attention"] * 28}, "sliding_window: missing, though layer_types has sliding_attention"),
        ("Qwen3-0.6B", {"layer_types": ["chunked_attention"] * 28}, "expected full_attention and sliding_attention only"),
        ("Qwen3-0.6B", {"layer_types": ["full_attention"] * 3}, "expected full_attention and sliding_attention only, for each of 28"),
        ("Mistral-7B-v0.1", {"layer_types": ["full_attention", "sliding_attention"] * 16},
         "layer_types: 16 of 32 layers see 4096 tokens and the others all"),
        ("SmolLM3-3B", {"no_rope_layers": [1, 0, 1, 1] * 9}, "no_rope_layers: none in layers [1, 5, 9, 13, 17, 21, 25, 29, 33]"),
        ("SmolLM3-3B", {"no_rope_layers": [1]}, "no_rope_layers: got [1], expected a 1 or a 0 for each of 36 layers"),
        ("SmolLM3-3B", {"layer_types": None, "use_sliding_window": True, "sliding_window": 8},
         "use_sliding_window: 9 of 36 layers see 8 tokens and the others all"),
    ],
)  # fmt: skip
def test_what_is_computed_otherwise_is_refused(tmp_path, name, keys, words):
    with pytest.raises(InputError) as told:
        read_hf_config(config_json(tmp_path, PUBLISHED[name][1] | keys))
    assert len(told.value.problems) == 1 and told.value.problems[0].startswith(f"{tmp_path / 'config.json'}: ")
    assert words in told.value.problems[0]


def test_all_that_is_wrong_with_the_keys_is_told_at_once(tmp_path):
    keys = {
        "model_type": "qwen2",
        "hidden_act": "relu",
        "num_attention_heads": 0,
        "rope_scaling": {"rope_type": "yarn"},
    }
    with pytest.raises(InputError) as told:
        read_hf_config(config_json(tmp_path, keys))
    named = [problem.split(": ")[1] for problem in told.value.problems]
    assert {"hidden_act", "num_attention_heads", "vocab_size", "hidden_size", "rope_scaling.rope_type"} < {*named}
    assert len(named) == len({*named})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is missing"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[1]", "got list, expected a JSON object"),
    ],
    ids=["missing", "torn", "deep", "list"],
)
def test_a_file_that_is_no_config(tmp_path, content, words):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=words):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "model_type"),
    [
        ({}, "llama"),
        ({"bias": True}, "llama"),
        ({"sliding_window": 3}, "mistral"),
        ({"n_head": 3, "n_kv_head": 1, "d_head": 4}, "mistral"),  # Llama's class wants d_model to be divided
        ({"qkv_bias": True}, "qwen2"),
        ({"qkv_bias": True, "sliding_window": 3, "d_head": 6}, "qwen2"),
        ({"qk_norm": True, "sliding_window": 3}, "qwen3"),
        ({"qk_norm": True, "qkv_bias": True}, "qwen3"),
        ({"qkv_bias": True, "no_rope_every": 2}, "smollm3"),
        ({"no_rope_every": 2, "bias": True, "sliding_window": 3}, "smollm3"),
        ({"bias": True, "sliding_window": 3}, "smollm3"),
        ({"rope_scaling": RopeScaling("llama3", 8.0, 16), "tie_embeddings": False}, "llama"),
    ],
)
def test_the_class_that_computes_a_model(tmp_path, changes, model_type):
    """What is written is read as the same model."""
    config = ModelConfig(**vars(LLAMA) | changes)
    written = hf_config_of(config, bos=None, eos=7, dtype="bfloat16")
    assert written["model_type"] == model_type and written["bos_token_id"] is None and written["dtype"] == "bfloat16"
    assert read_hf_config(config_json(tmp_path, written)) == config


@pytest.mark.parametrize(
    ("changes", "model_type"),
    [
        ({}, "llama"),
        ({"sliding_window": 3}, "smollm3"),
        ({"n_head": 3, "n_kv_head": 1, "d_head": 4}, "smollm3"),
        ({"no_rope_every": 2}, "smollm3"),
        ({"qk_norm": True}, "qwen3"),
    ],
)
def test_without_qwens_tokenizer_the_output_gets_a_bias_of_0(tmp_path, changes, model_type):
    config = ModelConfig(**vars(LLAMA) | changes | {"qkv_bias": True, "bias": False})
    written = hf_config_of(config, bos=0, eos=0, qwen_tokenizer=False)
    assert written["model_type"] == model_type and needs_out_bias(config, written)
    assert written["attention_bias"] and not written.get("mlp_bias")
    assert read_hf_config(config_json(tmp_path, written)) == config
    arrays = params_of(config)
    tensors = dict(hf_tensors(config, arrays, out_bias=True))
    zeros = [name for name in tensors if name.endswith("o_proj.bias")]
    assert len(zeros) == config.n_layer and not any(tensors[name].any() for name in zeros)
    save_file(tensors, tmp_path / "model.safetensors")
    assert len(checked_tensors(tmp_path, config)) == len(tensors) - len(zeros)
    save_file({**tensors, zeros[0]: np.full_like(tensors[zeros[0]], 1e-6)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=rf"{re.escape(zeros[0])}: is not 0; expected one only where"):
        checked_tensors(tmp_path, config)
    plain = ModelConfig(**vars(LLAMA) | changes)
    assert not needs_out_bias(plain, hf_config_of(plain, bos=0, eos=0, qwen_tokenizer=False))


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (ModelConfig(**vars(LLAMA) | {"pos_encoding": "learned"}), ["mlp_type", "norm_type", "bias", "n_kv_head"]),
        (ModelConfig(**vars(GPT2) | {"n_kv_head": 1}), ["n_kv_head"]),
        (ModelConfig(**vars(GPT2) | {"d_head": 6}), ["d_head"]),
        (ModelConfig(**vars(GPT2) | {"qk_norm": True, "sliding_window": 4}), ["qk_norm", "sliding_window"]),
        (ModelConfig(**vars(LLAMA) | {"mlp_type": "gelu"}), ["mlp_type"]),
        (ModelConfig(**vars(LLAMA) | {"norm_type": "layernorm"}), ["norm_type"]),
        (ModelConfig(**vars(LLAMA) | {"qk_norm": True, "bias": True}), ["bias"]),
        (
            ModelConfig(**vars(LLAMA) | {"qk_norm": True, "qkv_bias": True, "no_rope_every": 2}),
            ["no_rope_every"],
        ),
    ],
)
def test_a_combination_that_no_class_has_is_named(config, fields):
    with pytest.raises(InputError) as told:
        hf_config_of(config, bos=0, eos=0)
    assert [problem.split(":")[0] for problem in told.value.problems] == [f"model.{field}" for field in fields]
    assert all("no class has both" in problem for problem in told.value.problems)


@pytest.mark.parametrize("name", MODELS)
def test_a_field_that_no_class_knows_is_refused_away_from_its_default(name):
    more = [("logit_cap", float | None, None), ("residual_scale", float, 1.0)]
    wider = make_dataclass("Wider", more, bases=(ModelConfig,), frozen=True)
    config = wider(**vars(MODELS[name]))
    assert hf_config_of(config, bos=0, eos=0) == hf_config_of(MODELS[name], bos=0, eos=0)
    with pytest.raises(InputError) as told:
        hf_config_of(replace(config, logit_cap=30.0, residual_scale=0.5), bos=0, eos=0)
    who = (
        "GPT-2, the class with learned positions,"
        if name.startswith("gpt2")
        else "the Llama family, the classes with rope,"
    )
    assert told.value.problems == (
        f"model.logit_cap: got 30.0, but {who} has none; no class has both",
        f"model.residual_scale: got 0.5, but {who} has 1.0; no class has both",
    )


def test_tensors_that_do_not_fit_are_all_told(tmp_path):
    tensors = theirs(LLAMA, params_of(LLAMA))
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((8, 6), np.float32)
    tensors["model.layers.1.self_attn.q_proj.bias"] = np.zeros(8, np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((6, 8), np.float64)
    folder = write(tmp_path, LLAMA, tensors)
    with pytest.raises(InputError) as told:
        checked_tensors(folder, LLAMA)
    assert sorted(told.value.problems) == [
        f"{folder}: model.layers.0.mlp.up_proj.weight: got [8, 6], expected [6, 8]",
        f"{folder}: model.layers.1.mlp.up_proj.weight: got F64, expected F32, F16, BF16",
        f"{folder}: model.layers.1.self_attn.q_proj.bias: got [8], expected no such tensor",
        f"{folder}: model.norm.weight: is missing, expected [8]",
    ]
    with pytest.raises(InputError) as told:
        checked_tensors(write(tmp_path, LLAMA, {}), LLAMA)
    assert len(told.value.problems) == 20  # all of them: 2 layers of 9, the embedding and the norm


def test_a_tied_model_with_another_head_is_refused(tmp_path):
    params = params_of(LLAMA)
    other = params["embed.embedding"].copy()
    other[-1, -1] += 1
    folder = write(tmp_path, LLAMA, theirs(LLAMA, params) | {"lm_head.weight": other})
    with pytest.raises(
        InputError, match="lm_head.weight: differs from model.embed_tokens.weight, though config.json says tie"
    ):
        checked_tensors(folder, LLAMA)
    untied = ModelConfig(**vars(LLAMA) | {"tie_embeddings": False})
    assert np.array_equal(loaded(folder, untied)["head.kernel"], other.T)
    with pytest.raises(InputError, match="lm_head.weight: is missing"):
        checked_tensors(write(tmp_path, LLAMA, theirs(LLAMA, params)), untied)


def one_tensor(entry=None, cut=0, more=b""):
    """A file of one tensor of 2 floats, its header or bytes changed."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | (entry or {})
    text = json.dumps({"__metadata__": {"format": "pt"}, "x": entry}).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(8) + more
    return content[: len(content) - cut]


@pytest.mark.parametrize(
    "content",
    [
        b"\x05\0\0",
        struct.pack("<Q", 2) + b"{",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        b"<html>Repository not found</html>",
        one_tensor({"shape": [3]}),
        one_tensor({"data_offsets": [4, 12]}),
        one_tensor(cut=3),
        one_tensor(more=b"1"),
    ],
)
def test_a_file_that_is_not_whole(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError) as told:
        stored_tensors(tmp_path)
    (problem,) = told.value.problems
    where = f"{tmp_path / 'model.safetensors'}: is not a complete safetensors file: "
    assert problem.startswith(where) and problem.endswith("; copy it again")
    assert len(problem) > len(where) + len("; copy it again")


def test_a_whole_file_is_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(one_tensor())
    assert stored_tensors(tmp_path)["x"].map().tolist() == [0, 0]


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(InputError, match="model.safetensors: is missing; expected the weights"):
        stored_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(InputError, match="has its weights only as pytorch_model.bin; convert it: .* save_pretrained"):
        stored_tensors(tmp_path)
    tensors = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
    shard(tmp_path, tensors)
    shard_2 = tmp_path / "model-00002-of-00002.safetensors"
    shard_2.unlink()
    with pytest.raises(InputError, match="00002.safetensors: is missing; model.safetensors.index.json names it"):
        stored_tensors(tmp_path)
    save_file({"a": tensors["a"]}, shard_2)
    with pytest.raises(InputError, match="a is already in model-00001-of-00002.safetensors"):
        stored_tensors(tmp_path)
    for content, words in (
        ("{", "is not an index"),
        ("{}", "is not an index"),
        ("[]", "is not an index"),
        ("[" * 100_000, "is not an index"),
        ('{"weight_map": {}}', "names no file"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(InputError, match=words):
            stored_tensors(tmp_path)


def test_a_whole_file_beside_an_index_is_the_one_that_counts(tmp_path):
    """As in transformers: the shards may be of an older save, and need not be there."""
    whole = {"a": np.full(2, 1.0, np.float32)}
    shard(tmp_path, {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)})
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    save_file(whole, tmp_path / "model.safetensors")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    found = stored_tensors(tmp_path)
    assert list(found) == ["a"] and found["a"].map().tolist() == [1.0, 1.0]


def test_the_fingerprint_is_of_the_weights(tmp_path):
    tensors = theirs(LLAMA, params_of(LLAMA))
    one, other = write(tmp_path / "one", LLAMA, tensors), write(tmp_path / "other", LLAMA, tensors, added=1)
    assert hf_fingerprint(one) == hf_fingerprint(other) and len(hf_fingerprint(one)) == 32
    tensors["model.norm.weight"][3] *= -1
    assert hf_fingerprint(write(tmp_path / "other", LLAMA, tensors)) != hf_fingerprint(one)


MEMORY = """
import json, sys
import numpy as np, jax
from curriculum.model.formats.hf import load_hf
from curriculum.model.formats.hf_config import read_hf_config
from curriculum.model.model import abstract_params, parameter_name
from curriculum.model.transformer import transformer
from curriculum.train.device import tune_device
from curriculum.schema.sections import MeshConfig
from curriculum.train.mesh import abstract_on_mesh, make_mesh

tune_device(None)
small, large = sys.argv[1:]
mesh = make_mesh(MeshConfig(data=1, fsdp=2))

def load(folder):
    config = read_hf_config(folder)
    return load_hf(folder, config, abstract_on_mesh(mesh, abstract_params(transformer(config))))

def status(key):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(key)]
    return int(line.split()[1]) * 1024

load(small)
open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here on
before = status("VmRSS")
params = load(large)
peak = status("VmHWM")
leaves = jax.tree.leaves_with_path(params)
print(json.dumps({
    "beyond": peak - before - sum(a.nbytes for _, a in leaves),
    "largest": max(a.nbytes for _, a in leaves),
    "parts": {parameter_name(p): [list(s.data.shape) for s in a.addressable_shards] for p, a in leaves},
    "sums": {parameter_name(p): float(np.asarray(a, np.float64).sum()) for p, a in leaves},
}))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks are read from Linux's /proc")
@pytest.mark.parametrize(
    ("width", "num_ids"), [(512, 8192), pytest.param(1024, 32_000, marks=pytest.mark.slow)], ids=["100 MB", "320 MB"]
)
def test_memory_beyond_the_parameters_is_that_of_one_array_and_its_file(tmp_path, width, num_ids):
    """On two devices, with malloc as in training: it would keep what is freed."""
    config = ModelConfig(**vars(LLAMA) | {"d_model": width, "d_ff": 4096, "n_layer": 3, "vocab_size": num_ids})
    params = params_of(config)
    large = write(tmp_path / "large", config, theirs(config, params))
    small = write(tmp_path / "small", LLAMA, theirs(LLAMA, params_of(LLAMA)))
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(small), str(large)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["largest"] == num_ids * width * 4
    file_pages = found["largest"]  # of the one array that is mapped
    assert 0 < found["beyond"] < 1.3 * found["largest"] + file_pages
    assert found["parts"]["blocks.000.mlp.up.kernel"] == [[width // 2, 4096]] * 2
    assert found["sums"] == pytest.approx({name: float(np.asarray(a, np.float64).sum()) for name, a in params.items()})
