"""The folder that is written for peft, loaded by peft: our logits, and peft's merge is ours."""

import importlib.util
import json
import os
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from curriculum.model.formats.hf import hf_tensors
from curriculum.model.formats.hf_config_writer import hf_config_of
from curriculum.model.formats.peft import write_peft
from curriculum.model.lora import adapters_of, merged
from curriculum.model.model import by_name
from curriculum.model.presets import LoraConfig, ModelConfig
from curriculum.model.transformer import forward, head, init_params

MISSING = [name for name in ("torch", "transformers", "peft") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: the `parity` extra has it"),
]

TOLERANCE = 2e-5  # float32 products, added up in another order
LLAMA = ModelConfig(
    vocab_size=67, n_layer=2, n_head=4, n_kv_head=2, d_model=16, d_ff=24, max_seq_len=64, tie_embeddings=False,
    lora=LoraConfig(3, 7.5, ("query", "key", "value", "out", "gate", "up", "down")),
)  # fmt: skip
GPT2 = ModelConfig(
    vocab_size=67, n_layer=2, n_head=4, n_kv_head=4, d_model=16, d_ff=40, max_seq_len=64, pos_encoding="learned",
    mlp_type="gelu", norm_type="layernorm", bias=True, lora=LoraConfig(2, 8.0, ("query", "value", "out", "down")),
)  # fmt: skip
CONFIGS = {
    "llama, every matrix": LLAMA,
    "qwen3, the default ones": replace(LLAMA, qk_norm=True, d_head=6, lora=LoraConfig(4, 8.0)),
    "gpt2, two of the fused": GPT2,
    "gpt2, one of the fused": replace(GPT2, lora=LoraConfig(3, 6.0, ("key", "up"))),
    "gpt2, all of the fused": replace(GPT2, lora=LoraConfig(2, 4.0, ("query", "key", "value"))),
}
TOKENS_BT = np.random.default_rng(0).integers(0, 67, (3, 29))


@pytest.fixture(scope="module", params=CONFIGS)
def adapted(request, tmp_path_factory):
    """(config, our parameters by name, our logits, peft's model on the exported base)."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    config, rng = CONFIGS[request.param], np.random.default_rng(1)
    params = jax.tree.map(lambda a: (a + rng.normal(0, 0.3, a.shape)).astype(np.float32), init_params(config, 0))
    arrays = by_name(params)
    folder = tmp_path_factory.mktemp("base")
    settings = hf_config_of(config, bos=0, eos=1, dtype="float32")
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(dict(hf_tensors(config, arrays)), folder / "model.safetensors", {"format": "pt"})
    adapter = tmp_path_factory.mktemp("adapter")
    write_peft(adapter, config, by_name(adapters_of(params)), str(folder))
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    return config, arrays, logits_of(config, params), PeftModel.from_pretrained(base, adapter).eval()


def logits_of(config, params):
    return np.asarray(jax.jit(lambda p: forward(config, p, TOKENS_BT) @ head(p).T)(params))


def their_logits(model):
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(TOKENS_BT)).logits.numpy()


def apart(got, expected):
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


def test_peft_computes_what_was_trained_and_merges_as_here(adapted):
    """In this order: peft takes its model apart as it merges."""
    config, arrays, expected, model = adapted
    assert np.std(expected) > 0.3 and apart(their_logits(model), expected) < TOLERANCE
    with model.disable_adapter():
        assert apart(their_logits(model), expected) > 0.05
    names = [name for name, _ in model.named_parameters() if "lora_" in name]
    assert len(names) == 2 * config.n_layer * len(model.peft_config["default"].target_modules)
    theirs = {name: tensor.numpy() for name, tensor in model.merge_and_unload().state_dict().items()}
    ours = dict(hf_tensors(config, merged(arrays, config)))
    assert ours.keys() <= theirs.keys() and len(ours) > 10
    assert max(apart(theirs[name], array) for name, array in ours.items()) < 1e-6
    assert apart(their_logits(model.base_model.model), expected) < TOLERANCE
