"""Rotary positions: the angle by which each pair of a head is rotated. Nothing here imports jax.

Shape suffixes: T positions, K pairs of a head, half its width.
"""

import numpy as np

from curriculum.model.presets import RopeScaling


def rope_angles(num_positions: int, head_width: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """angles_TK: position t times the frequency theta^(-2k / head_width) (arXiv:2104.09864), float64.

    With scaling, each frequency is divided by the factor, except for its `unscaled_share`.
    """
    frequencies_K = _frequencies(head_width, theta)
    if scaling is not None:
        kept_K = unscaled_share(head_width, theta, scaling)
        frequencies_K = kept_K * frequencies_K + (1 - kept_K) * frequencies_K / scaling.factor
    return np.outer(np.arange(num_positions), frequencies_K)


def unscaled_share(head_width: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """share_K of each frequency that scaling leaves unchanged: from 0 (divided by the factor) to 1 (kept).

    For kind linear it is 0 throughout. For kind llama3 (arXiv:2407.21783, as released with Llama 3.1) it is 0 for
    wavelengths above original_max_seq_len / low_freq_factor, 1 for those below original_max_seq_len / high_freq_factor,
    and between them linear in 1 / wavelength.
    """
    frequencies_K = _frequencies(head_width, theta)
    if scaling.kind == "linear":
        return np.zeros_like(frequencies_K)
    turns_K = scaling.original_max_seq_len * frequencies_K / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return np.clip((turns_K - low) / (high - low), 0, 1)


def _frequencies(head_width: int, theta: float) -> np.ndarray:
    return theta ** (-np.arange(0, head_width, 2) / head_width)
