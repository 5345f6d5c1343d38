"""Low-rank adapters (arXiv:2106.09685): taken out of a model's parameters, put back, merged.

Nothing here imports jax. Shape suffixes: D inputs of a matrix, F its outputs, R the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

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


def _part(tree: Params, wanted: Callable[[str], bool]) -> Params:
    found = {
        name: _part(value, wanted) if isinstance(value, Mapping) else value
        for name, value in tree.items()
        if isinstance(value, Mapping) or wanted(name)
    }
    return {name: value for name, value in found.items() if not (isinstance(value, Mapping) and not value)}


def joined(frozen: Params, adapters: Params) -> Params:
    """The parameters that `frozen_of` and `adapters_of` took apart."""
    both = dict(frozen)
    for name, value in adapters.items():
        both[name] = joined(both[name], value) if name in both else value
    return both


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
