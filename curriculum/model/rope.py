"""Rotary positions: by which angle each pair of a head is turned. Nothing here imports jax."""

from __future__ import annotations

import numpy as np

from curriculum.model.presets import RopeScaling


def rope_angles(num_positions: int, head_width: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """angles_TK, K being half a head: position t times theta^(-2k / head_width) (arXiv:2104.09864), float64.

    Scaled, a frequency is divided by the factor. With kind llama3 (arXiv:2407.21783, as released with Llama 3.1) that
    holds for wavelengths above original_max_seq_len / low_freq_factor, those below original_max_seq_len /
    high_freq_factor stay, and between them it goes over linearly in 1 / wavelength.
    """
    frequencies_K = theta ** (-np.arange(0, head_width, 2) / head_width)
    if scaling is not None:
        kept_K = np.zeros_like(frequencies_K)
        if scaling.kind == "llama3":
            turns_K = scaling.original_max_seq_len * frequencies_K / (2 * np.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept_K = np.clip((turns_K - low) / (high - low), 0, 1)
        frequencies_K = kept_K * frequencies_K + (1 - kept_K) * frequencies_K / scaling.factor
    return np.outer(np.arange(num_positions), frequencies_K)
