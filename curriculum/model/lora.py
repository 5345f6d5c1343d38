"""Adapters of low rank (arXiv:2106.09685): taken out of a model's parameters, put back, merged, written for peft.

Nothing here imports jax. Shape suffixes: D inputs of a matrix, F its outputs, R the rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from curriculum.model.presets import ModelConfig

if TYPE_CHECKING:
    from curriculum.model.model import Params

A, B = "lora_a", "lora_b"  # names of an adapter's arrays, A_DR and B_RF, beside the kernel_DF that it adapts


def adapters_of(params: Params) -> Params:
    """The adapters alone, in dicts nested as in `params`."""
    return _part(params, lambda name: name in (A, B))


def frozen_of(params: Params) -> Params:
    """All but the adapters."""
    return _part(params, lambda name: name not in (A, B))


def _part(tree: Params, wanted: Any) -> Params:
    found = {
        name: _part(value, wanted) if isinstance(value, Mapping) else value
        for name, value in tree.items()
        if isinstance(value, Mapping) or wanted(name)
    }
    return {name: value for name, value in found.items() if not (isinstance(value, Mapping) and not value)}


def joined(frozen: Params, adapters: Params) -> Params:
    """The whole parameters, of which these are the parts."""
    both = {name: frozen.get(name, adapters.get(name)) for name in (*frozen, *adapters)}
    return {
        name: joined(frozen[name], adapters[name]) if name in frozen and name in adapters else value
        for name, value in both.items()
    }


def merged(params_by_name: Mapping[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """Parameters by dotted name without adapters: each adapted kernel as W + scale A B, float32."""
    arrays = {}
    for name, array in params_by_name.items():
        module, _, leaf = name.rpartition(".")
        if leaf in (A, B):
            continue
        if leaf == "kernel" and f"{module}.{A}" in params_by_name:
            a_DR, b_RF = (np.asarray(params_by_name[f"{module}.{of}"], np.float64) for of in (A, B))
            array = (array + config.lora.scale * (a_DR @ b_RF)).astype(np.float32)
        arrays[name] = array
    return arrays


def write_peft(
    folder: Path, config: ModelConfig, adapters_by_name: Mapping[str, np.ndarray], base: str, dtype: Any = np.float32
) -> None:
    """Write adapter_config.json and adapter_model.safetensors, which `peft` loads onto the model at `base`.

    `adapters_by_name`: arrays by dotted name; `dtype`: the numpy type to write them as. Of GPT-2's one matrix for
    query, key and value the adapter is one too: A has the rows of each that is adapted, one below the other, and B
    what belongs to them in blocks, at so many times the rank and, for the same scale, so many times alpha.
    """
    from safetensors.numpy import save_file

    lora, fused = config.lora, config.pos_encoding == "learned"
    layers, modules = ("transformer.h", _GPT2) if fused else ("model.layers", _LLAMA)
    tensors = {}
    for layer in range(config.n_layer):
        for module, parts in modules.items():
            of = {
                part: [adapters_by_name[f"blocks.{layer:03}.{part}.{name}"] for name in (A, B)]
                for part in parts
                if part.rpartition(".")[2] in lora.targets
            }
            if not of:
                continue
            at = f"base_model.model.{layers}.{layer}.{module}"
            widths = [config.projections()[part.rpartition(".")[2]][1] for part in parts]
            b_FR = np.zeros((sum(widths), lora.rank * len(of)), np.float32)
            for column, part in enumerate(of):
                first, place = column * lora.rank, parts.index(part)
                rows = slice(sum(widths[:place]), sum(widths[: place + 1]))
                b_FR[rows, first : first + lora.rank] = of[part][1].T
            # In the order of its axes: safetensors writes what lies in memory.
            a_RD = np.concatenate([a_DR.T for a_DR, _ in of.values()])
            tensors |= {f"{at}.lora_A.weight": a_RD.astype(dtype, order="C"), f"{at}.lora_B.weight": b_FR.astype(dtype)}
    targets = {m: sum(p.rpartition(".")[2] in lora.targets for p in parts) for m, parts in modules.items()}
    several = {module: times for module, times in targets.items() if times > 1}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": _whole(lora.alpha),
        "target_modules": [module for module, times in targets.items() if times],
        "rank_pattern": {module: times * lora.rank for module, times in several.items()},
        "alpha_pattern": {module: _whole(times * lora.alpha) for module, times in several.items()},
        "fan_in_fan_out": fused,  # GPT-2 keeps its matrices as [inputs, outputs]
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    path = folder / "adapter_model.safetensors"
    save_file(tensors, path, {"format": "pt"})
    path.chmod(folder.stat().st_mode & 0o666)  # safetensors makes files for their owner alone


# Modules of transformers' layers, and the matrices of a block that each holds.
_LLAMA = {
    **{f"self_attn.{name[0]}_proj": (f"attention.{name}",) for name in ("query", "key", "value", "out")},
    **{f"mlp.{name}_proj": (f"mlp.{name}",) for name in ("gate", "up", "down")},
}
_GPT2 = {
    "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
    "attn.c_proj": ("attention.out",),
    "mlp.c_fc": ("mlp.up",),
    "mlp.c_proj": ("mlp.down",),
}


def _whole(number: float) -> float | int:
    """As an integer where it is one, as peft writes it."""
    return int(number) if number == int(number) else number
