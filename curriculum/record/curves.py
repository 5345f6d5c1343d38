"""The numbers of the record as curves: one name for each, the same in every view that draws them.

`train/<field>` and `train/loss/<source>` from the metrics rows, `mixture/<source>`, `phase/index`,
`eval/<set>/loss` and `eval/<set>/bpb`; the primary set is called `val`, and a set measured with an average of the
parameters `<set>@<average>`.
"""

import re
from collections.abc import Sequence
from typing import Any

from curriculum.record.events import eval_averages, eval_sets, number
from evalsets.summary import Recorded


def row_curves(row: dict[str, Any], phase_names: Sequence[str]) -> dict[str, float]:
    """The point of each curve that a metrics row has; null and text give none."""
    values = {f"train/{re.sub('^loss_', 'loss/', key)}": value for key, value in row.items() if key != "step"}
    values |= {f"mixture/{source}": share for source, share in row["mixture"].items()}
    values["phase/index"] = phase_names.index(row["phase"])
    return _numbers(values)


def eval_curves(event: dict[str, Any]) -> dict[str, float]:
    """The point of each curve that an `eval` event has; `sem` gives none."""
    values = {}
    for name, measured in all_sets(event).items():
        values |= {f"eval/{name}/{metric}": value for metric, value in vars(measured).items() if metric != "sem"}
    return _numbers(values)


def all_sets(event: dict[str, Any]) -> dict[str, Recorded]:
    """What an `eval` event says of each set, including those measured with averages, `<set>@<average>`."""
    averaged = {f"{name}@{a}": found for a, sets in eval_averages(event).items() for name, found in sets.items()}
    return eval_sets(event) | averaged


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    floats = {name: number(value) for name, value in values.items()}
    return {name: as_float for name, as_float in floats.items() if as_float is not None}
