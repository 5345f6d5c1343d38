"""Adapters as peft reads them: adapter_config.json and adapter_model.safetensors.

Nothing here imports jax. Shape suffixes as in `curriculum.model.lora`.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from curriculum.model.formats.hf import hf_layout
from curriculum.model.formats.safetensors_writer import save_arrays
from curriculum.model.lora import A, B
from curriculum.model.presets import ModelConfig


def write_peft(
    folder: Path,
    config: ModelConfig,
    adapters_by_name: Mapping[str, np.ndarray],
    base: str,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors, which `peft` loads onto the model at `base`.

    `config` must be one that transformers has a class for. `adapters_by_name`: arrays by dotted name, written in their
    own type. `metadata`: more to say in the header of the safetensors file.

    GPT-2 has one matrix for query, key and value, and so one adapter for the n of them that are adapted: their A are
    stacked, their B are its blocks, its rank is n times the rank and, to keep the scale, its alpha n times alpha.
    """
    lora, shapes = config.lora, config.projections()
    tensors: dict[str, np.ndarray] = {}
    times: dict[str, int] = {}  # how many of our matrices a module adapts, by its name within a layer
    for tensor in hf_layout(config):
        parts = [name.removesuffix(".kernel") for name in tensor.parameters]
        names = [part.rpartition(".")[2] for part in parts]
        adapted = [i for i, name in enumerate(names) if name in lora.targets]
        if not adapted or not tensor.parameters[0].endswith(".kernel"):
            continue
        module = tensor.name.removesuffix(".weight")
        times[_LAYER.sub("", module)] = len(adapted)
        of = [[np.asarray(adapters_by_name[f"{parts[i]}.{name}"]) for name in (A, B)] for i in adapted]
        rows_of = np.cumsum([0, *(shapes[name][1] for name in names)])
        b_FR = np.zeros((rows_of[-1], lora.rank * len(adapted)), of[0][1].dtype)
        for column, (i, (_, b_RF)) in enumerate(zip(adapted, of, strict=True)):
            b_FR[rows_of[i] : rows_of[i + 1], column * lora.rank : (column + 1) * lora.rank] = b_RF.T
        # In C order: safetensors writes the bytes as they lie in memory.
        a_RD = np.ascontiguousarray(np.concatenate([a_DR.T for a_DR, _ in of]))
        at = f"base_model.model.{module}"
        tensors |= {f"{at}.lora_A.weight": a_RD, f"{at}.lora_B.weight": b_FR}
    several = {module: number for module, number in times.items() if number > 1}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": _whole(lora.alpha),
        "target_modules": list(times),
        "rank_pattern": {module: number * lora.rank for module, number in several.items()},
        "alpha_pattern": {module: _whole(number * lora.alpha) for module, number in several.items()},
        "fan_in_fan_out": config.pos_encoding == "learned",  # GPT-2 keeps its matrices as [inputs, outputs]
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    save_arrays(tensors, folder / "adapter_model.safetensors", {"format": "pt", **(metadata or {})})


_LAYER = re.compile(r"^.*\.\d+\.")  # what stands before a module's name in its layer


def _whole(number: float) -> float | int:
    """As an integer if it is one, as peft writes it."""
    return int(number) if number == int(number) else number
