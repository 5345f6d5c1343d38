"""Tiny models of every architecture that llama.cpp has and this program exports, with parameters that are not tame."""

import jax
import jax.numpy as jnp
import numpy as np

from curriculum.model.model import parameter_name
from curriculum.model.presets import ModelConfig, RopeScaling
from curriculum.model.transformer import forward, head, init_params

SHAPE = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "d_model": 64, "d_ff": 96, "max_seq_len": 64}
GPT2 = {"pos_encoding": "learned", "mlp_type": "gelu", "norm_type": "layernorm", "bias": True, "n_kv_head": 4}
LLAMA3_SCALING = RopeScaling("llama3", 8.0, original_max_seq_len=32)
MODELS = {
    "llama": {"tie_embeddings": False},
    "llama with biases": {"bias": True, "d_head": 32},
    "llama stretched": {"rope_scaling": LLAMA3_SCALING, "rope_theta": 500000.0},
    "llama stretched linearly": {"rope_scaling": RopeScaling("linear", 2.0)},
    "qwen2": {"qkv_bias": True, "tie_embeddings": False, "rope_theta": 1e6, "norm_eps": 1e-6},
    "qwen3": {"qk_norm": True, "d_head": 32, "tie_embeddings": False, "rope_theta": 1e6, "norm_eps": 1e-6},
    "smollm3": {"no_rope_every": 4, "n_layer": 5},
    "gpt2": GPT2,
    "gpt2 with a head": GPT2 | {"tie_embeddings": False},
}


def config_of(name: str, vocab_size: int, **more) -> ModelConfig:
    """The config of one of MODELS."""
    return ModelConfig(**{"vocab_size": vocab_size, **SHAPE, **MODELS[name], **more})


def params_of(config: ModelConfig, seed: int = 0):
    """Parameters drawn wide enough that no part of the model is near to doing nothing."""
    rng = np.random.default_rng(seed)

    def draw(path, array):
        name = parameter_name(path)
        noise = rng.standard_normal(array.shape).astype(np.float32)
        if name.endswith("scale"):
            return 1 + 0.2 * noise
        return (0.5 if "embedding" in name else 0.2 if name.endswith("bias") else 0.12) * noise

    return jax.tree.map_with_path(draw, init_params(config, 0))


def logits_of(config: ModelConfig, params, tokens_BT) -> np.ndarray:
    """float32 [B, T, V], padding cut off."""
    with jax.default_matmul_precision("highest"):
        features_BTD = forward(config, params, jnp.asarray(tokens_BT))
        return np.asarray(features_BTD @ head(params).T)[..., : config.num_ids or config.vocab_size]
