"""Quantiles of Student's t-distribution."""

import numpy as np


def student_quantile(tail: float, df: np.ndarray | int) -> np.ndarray:
    """The t that Student's T with `df` degrees of freedom exceeds with probability `tail`.

    In the shape of `df`; inf for a tail of 0, NaN for df below 1. Raises ValueError unless 0 <= tail <= 0.5.
    """
    from scipy.special import stdtrit  # a tenth of a second that only verdicts need

    if not 0 <= tail <= 0.5:
        raise ValueError(f"student_quantile: the tail is {tail}, expected 0 to 0.5")
    df = np.asarray(df)
    quantiles = -stdtrit(np.maximum(df, 1), tail) if tail > 0 else np.inf
    return np.where(df < 1, np.nan, quantiles)
