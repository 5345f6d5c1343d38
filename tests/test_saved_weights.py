"""Which parameters `--weights` names."""

import pytest

from curriculum.errors import InputError
from curriculum.saved_weights import Weights


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("raw", Weights(None, None)),
        ("ema", Weights("ema", None)),
        ("mean:first", Weights("phase_mean", "first")),
        ("mean:raw", Weights("phase_mean", "raw")),  # a phase may have any name
        ("mean:", Weights("phase_mean", "")),
    ],
)
def test_a_name_says_which_average_and_of_which_phase(text, weights):
    assert Weights.parse(text) == weights and str(weights) == text


@pytest.mark.parametrize("text", ["", "best", "params", "phase_mean", "ema:first", "Mean:first"])
def test_any_other_name_is_refused(text):
    with pytest.raises(InputError, match=f"--weights {text}: unknown value; .*expected one of: raw, ema, mean:"):
        Weights.parse(text)
