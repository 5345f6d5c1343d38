"""Student's t-distribution with a whole number of degrees of freedom: its tail and its quantiles."""

import math
from functools import lru_cache

import numpy as np


def student_quantile(tail: float, df: np.ndarray | int) -> np.ndarray:
    """The t that Student's T with `df` degrees of freedom (integers) exceeds with probability `tail`.

    In the shape of `df`; inf for a tail of 0, NaN for df below 1. Raises ValueError unless 0 <= tail <= 0.5.
    """
    if not 0 <= tail <= 0.5:
        raise ValueError(f"student_quantile: the tail is {tail}, expected 0 to 0.5")
    df = np.asarray(df)
    distinct, inverse = np.unique(df, return_inverse=True)
    quantiles = np.array([_student_quantile(float(tail), int(one)) for one in distinct])
    return quantiles[inverse].reshape(df.shape)


@lru_cache(maxsize=4096)
def _student_quantile(tail: float, df: int) -> float:
    """By bisection down to neighbouring floats, as the tail falls strictly with t."""
    if df < 1:
        return math.nan
    if tail == 0:
        return math.inf
    low, high = 0.0, 1.0
    while student_tail(high, df) > tail:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if student_tail(middle, df) > tail else (low, middle)
    return high


def student_tail(t: float, df: int) -> float:
    """P(T > t) for Student's T with a whole number of degrees of freedom, t >= 0.

    With angle = atan(t / sqrt(df)) and x = cos^2, P(|T| > t) = sin * sum over j = df, df + 2, ... of c_j cos^j,
    c_j = Gamma((j+1)/2) / (sqrt(pi) Gamma(j/2 + 1)). This is the rest of a series for 1 (even df) or for
    2/pi (pi/2 - angle) (odd df), whose first terms are Abramowitz & Stegun 26.7.3 and 26.7.4. Subtracting the first
    terms from the whole would cancel all digits of a far tail: there the rest itself is summed, whose terms are all
    positive and fall at least as fast as x^k.
    """
    root, side = math.sqrt(df), math.hypot(t, math.sqrt(df))
    sin, cos, x = t / side, root / side, df / (df + t * t)
    odd, num_first = df % 2, df // 2
    first, whole = (2 / math.pi * cos, 2 / math.pi * math.atan2(root, t)) if odd else (1.0, 1.0)

    def terms(number: int) -> np.ndarray:
        j = odd + 2 * np.arange(number)
        return first * np.cumprod(np.concatenate([[1.0], (j + 1) / (j + 2) * x]))

    both_sides = whole - sin * float(np.sum(terms(num_first)[:num_first]))
    if both_sides < 1e-3:
        num_rest = math.ceil(40 / -math.log(x)) if 0 < x else 0
        both_sides = sin * float(np.sum(terms(num_first + num_rest)[num_first:]))
    return both_sides / 2
