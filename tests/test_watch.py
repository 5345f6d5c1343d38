"""What is remembered of the eval sets, told as plain data."""

import numpy as np

from curriculum.train.watch import Watch, transfer_matrix
from evalsets.metrics import WindowResults
from evalsets.regressions import begin, observe


def test_a_set_without_a_standard_error_has_no_intervals():
    tokens_N, document_N = np.array([10]), np.array([0])
    nats = [30.0, 20.0, 25.0]

    def results(step):
        return WindowResults(np.array([nats[step]]), tokens_N, tokens_N, 4 * tokens_N, document_N)

    watched = begin(0, 0, np.array([nats[0]]), tokens_N)
    for step in (1, 2):
        nats_N = results(step).nats_N
        watched, _ = observe(watched, step, step - 1, nats_N, tokens_N, document_N, tolerance=0.01, level=0.0)
    ends = {step: {"primary": results(step)} for step in (1, 2)}
    found = transfer_matrix([("a", 0, 1), ("b", 1, 2)], Watch({"primary": watched}), ends)
    assert found == {
        "phases": ["a", "b"],
        "steps": [1, 2],
        "sets": {
            "val": {
                "start": 3.0,
                "loss": [2.0, 2.5],
                "forgetting": {"value": 0.5, "interval": None, "best_phase": "a"},
                "gain": {"value": 0.5, "interval": None},
            }
        },
    }
    best_last = transfer_matrix([("a", 0, 1)], Watch({"primary": watched}), {1: {"primary": results(1)}})
    assert best_last["sets"]["val"]["forgetting"] == {"value": 0.0, "interval": [0.0, 0.0], "best_phase": "a"}
