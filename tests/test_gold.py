"""The gold against sequences worked by hand, and what must hold whatever the sequence."""

import json
import math
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curriculum.parsing.typed import read
from evalsets.config import GoldConfig, Limit
from evalsets.gold import (
    Blocked,
    Candidate,
    Gold,
    GoldState,
    Measured,
    Pending,
    Regressed,
    accepted,
    decide,
    kept_steps,
    vetoed,
)
from evalsets.summary import Summary

OFF = GoldConfig(overfit_ratio=None, consecutive_rises=None)
TREND = GoldConfig(overfit_ratio=None)


def summary(loss, bpb=None):
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return Summary(loss=loss, perplexity=perplexity, bpb=bpb, accuracy=0.5, sem=0.01, clusters="documents")


def measured(step, *, train_loss=None, regressed=None, is_last=False, is_candidate=True, from_start=False, **losses):
    """One eval; `losses` by set, e.g. primary=3.0."""
    summaries = {name: summary(loss) for name, loss in losses.items()}
    return Measured(step, summaries, train_loss, regressed or {}, is_last, is_candidate, from_start)


def run(config, evals, state=None):
    """The decisions of a sequence of evals, (state, [per eval its decisions])."""
    state, all_decisions = state or GoldState(), []
    for one in evals:
        state, decisions = decide(config, state, one)
        all_decisions.append(decisions)
    return state, all_decisions


def of_values(config, values, *, last=False):
    """A run whose primary losses are these, at steps 10, 20, ...; told as 'gold STEP' and 'blocked STEP'."""
    evals = [measured(10 * i, primary=v, is_last=last and i == len(values)) for i, v in enumerate(values, start=1)]
    state, decisions = run(config, evals)
    return state, [[told(d) for d in ds] for ds in decisions]


def needed_steps(state, decisions):
    """The steps whose checkpoints have to be there until these decisions are carried out."""
    needed = kept_steps(state)
    for decision in decisions:
        while isinstance(decision, Candidate):
            needed.add(decision.step)
            decision = decision.instead
    return needed


def told(decision):
    return f"{'gold' if isinstance(decision, Gold) else 'blocked'} {decision.step}"


def test_the_lowest_is_the_gold_and_names_the_one_before():
    state, decisions = run(OFF, [measured(10 * i, primary=v) for i, v in enumerate([4.0, 3.0, 3.0, 3.5, 2.5], 1)])
    assert [len(d) for d in decisions] == [1, 1, 0, 0, 1]  # a tie is no candidate
    assert decisions[0] == [Gold(10, "primary/loss", 4.0, None, None, None)]
    assert decisions[4] == [Gold(50, "primary/loss", 2.5, 3.0, 20, None)]
    assert decisions[4][0].event == "gold_checkpoint"
    assert decisions[4][0].fields() == {
        "metric": "primary/loss", "value": 2.5, "previous": 3.0, "previous_step": 20, "score": None,
    }  # fmt: skip
    assert kept_steps(state) == {50}


def test_another_set_and_metric_are_minimised():
    config = GoldConfig(minimise="domain/bpb")
    assert config.target == ("domain", "bpb")
    evals = [
        Measured(10, {"primary": summary(3.0, 1.0), "domain": summary(2.0, 0.9)}, 3.0),
        Measured(20, {"primary": summary(2.0, 0.5), "domain": summary(1.9, 0.95)}, 3.0),
        Measured(30, {"primary": summary(4.0, 2.0), "domain": summary(2.1, 0.8)}, 3.0),
        Measured(40, {"primary": summary(4.0, 2.0), "domain": summary(0.1, None)}, 3.0),  # a set without bytes
    ]
    _, decisions = run(config, evals)
    assert [[told(d) for d in ds] for ds in decisions] == [["gold 10"], [], ["gold 30"], []]
    assert decisions[2][0].value == 0.8 and decisions[2][0].previous == 0.9
    perplexity = run(GoldConfig(minimise="domain/perplexity"), evals[:1])[1][0][0]
    assert perplexity.value == math.exp(2.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_the_gold(bad):
    state, decisions = of_values(OFF, [bad, 3.0, bad, 2.0])
    assert decisions == [[], ["gold 20"], [], ["gold 40"]]
    assert json.loads(json.dumps(state.to_json(), allow_nan=False)) == state.to_json()


def test_step_0_is_a_candidate_only_when_told_so_and_else_the_bar():
    begun = [measured(0, primary=7.0, is_candidate=False), measured(10, primary=147.0), measured(20, primary=7.0)]
    state, decisions = run(OFF, [*begun, measured(30, primary=6.9), measured(40, primary=6.95)])
    assert decisions[0] == [] and [told(d) for d in decisions[3]] == ["gold 30"] and decisions[4] == []
    blocked = [(d.step, d.guard, d.reason) for d in [*decisions[1], *decisions[2]]]
    assert blocked == [
        (10, "start", "start: 147.0000 is not below 7.0000, the value before training"),
        (20, "start", "start: 7.0000 is not below 7.0000, the value before training"),
    ]
    assert state.start == 7.0 and GoldState.from_json(state.to_json()) == state
    # Without a finite loss, or of another metric, nothing is known of the start.
    assert told(run(OFF, [measured(0, primary=math.nan, is_candidate=False), *begun[1:]])[1][1][0]) == "gold 10"
    state, _ = run(OFF, begun[:1])
    assert told(decide(replace(OFF, minimise="primary/perplexity"), state, begun[1])[1][0]) == "gold 10"
    _, decisions = run(OFF, [measured(0, primary=1.0), measured(10, primary=4.0)])
    assert [told(d) for d in decisions[0]] == ["gold 0"] and decisions[1] == []


def test_an_eval_without_the_minimised_set_decides_nothing_and_is_no_confirmation():
    config = GoldConfig(overfit_ratio=None, subject_to={"code": Limit(0.1)})
    evals = [measured(i, primary=v, code=2.0) for i, v in enumerate([3.0, 3.1, 3.2, 2.5], start=1)]
    state, decisions = run(config, evals)
    assert state.pending == Pending(4, 2.5, 2, {"primary": 2.5, "code": 2.0})
    state, none = decide(config, state, measured(5, code=1.0))
    assert (
        none == []
        and state.pending == Pending(4, 2.5, 2, {"primary": 2.5, "code": 2.0})
        and state.rises == 0
        and state.last == 2.5
    )
    assert state.sets["code"].lowest == 1.0  # what it did measure is remembered
    _, decisions = decide(config, state, measured(6, primary=2.6, code=1.2))
    assert [told(d) for d in decisions] == ["gold 4"]


def test_overfit():
    config = GoldConfig(consecutive_rises=None)
    _, [[decision]] = run(config, [measured(10, primary=3.1, train_loss=0.5)])
    assert decision == Blocked(
        10, "primary/loss", 3.1, None, None, "overfit",
        "overfit: val loss is 6.2x the training loss, overfit_ratio is 5.0x",
    )  # fmt: skip
    assert decision.event == "gold_blocked" and "step" not in decision.fields()
    reasons = {
        0.62: None,  # exactly 5.0
        0.6199: "overfit: val loss is 5.001x the training loss, overfit_ratio is 5.000x",  # as many decimals as it takes
        620.0: None,
        0.0: "overfit: val loss is infx the training loss, overfit_ratio is 5.0x",
        math.nan: None,  # nothing to hold it against
        None: None,
    }
    for train_loss, reason in reasons.items():
        _, [[decision]] = run(config, [measured(10, primary=3.1, train_loss=train_loss)])
        assert (decision.reason if isinstance(decision, Blocked) else None) == reason, train_loss
    _, [[decision]] = run(OFF, [measured(10, primary=3.1, train_loss=0.001)])
    assert isinstance(decision, Gold)
    # The validation loss is the primary set's, whatever is minimised.
    domain = GoldConfig(minimise="domain/loss")
    assert run(domain, [measured(10, primary=1.0, domain=9.0, train_loss=1.0)])[1][0][0].event == "gold_checkpoint"
    assert run(domain, [measured(10, primary=6.0, domain=1.0, train_loss=1.0)])[1][0][0].guard == "overfit"


CODE = Regressed(2.1, 2.6, 0.5, 20)
LAW = Regressed(1.0, 1.25, 0.25, 30)


def test_a_regression_of_a_guarded_set():
    evals = [
        measured(10, primary=3.0),
        measured(20, primary=2.9, regressed={"code": CODE}),
        measured(30, primary=2.8, regressed={"code": CODE, "law": LAW}),
        measured(40, primary=2.85),
    ]
    state, decisions = run(GoldConfig(), evals)
    assert decisions[1] == [
        Blocked(
            20,
            "primary/loss",
            2.9,
            3.0,
            10,
            "regression",
            "eval regression: code 2.1000→2.6000 (+0.5000, alarm since step 20)",
        )
    ]
    assert decisions[2][0].reason == (
        "eval regression: code 2.1000→2.6000 (+0.5000, alarm since step 20), law 1.0000→1.2500 (+0.2500, alarm since step 30)"
    )
    # What was blocked is no bar: 2.85 lies above the blocked 2.8 and below the gold's 3.0.
    assert [told(d) for d in decisions[3]] == ["gold 40"] and decisions[3][0].previous == 3.0
    # Where limits are given they decide: law may rise by 0.3, and code as far as it will.
    only_law = GoldConfig(subject_to={"law": Limit(0.3)})
    evals = [measured(10, primary=3.0, law=1.0, code=2.1)]
    evals += [measured(20, primary=2.9, law=1.25, code=2.6, regressed={"code": CODE, "law": LAW})]
    evals += [measured(30, primary=2.8, law=1.31, code=2.6, regressed={"code": CODE, "law": LAW})]
    state, (*_, (blocked,)) = run(only_law, evals)
    assert state.gold.step == 20 and blocked.reason == "limit: law 1.0000→1.3100 (+0.3100), max_increase=0.3000"
    # The one that is minimised does not object to itself.
    assert told(run(GoldConfig(), [measured(10, primary=3.0, regressed={"primary": CODE})])[1][0][0]) == "gold 10"
    domain = GoldConfig(minimise="domain/loss")
    blocked = run(domain, [measured(10, primary=2.6, domain=1.0, regressed={"primary": CODE})])[1][0][0]
    assert (
        blocked.reason == "eval regression: val 2.1000→2.6000 (+0.5000, alarm since step 20)"
    )  # its name in the record


def test_a_regressed_set_that_is_no_worse_than_at_the_gold_does_not_object():
    def at(step, primary, code, now=None):
        regressed = {} if now is None else {"code": Regressed(2.0, now, now - 2.0, 20)}
        return measured(step, primary=primary, code=code, regressed=regressed)

    # The gold of 10 has code 2.4. In between code was 2.0 without a better primary.
    evals = [at(10, 3.0, 2.4), at(20, 3.1, 2.0), at(30, 2.9, 2.5, 2.5), at(40, 2.8, 2.4, 2.4), at(50, 2.7, 2.41, 2.41)]
    state, decisions = run(OFF, evals)
    assert [[told(d) for d in ds] for ds in decisions] == [["gold 10"], [], ["blocked 30"], ["gold 40"], ["blocked 50"]]
    assert state.gold.losses == {"primary": 2.8, "code": 2.4}  # what counts from now on
    assert GoldState.from_json(json.loads(json.dumps(state.to_json()))) == state
    # A set that the gold's eval did not measure, or whose loss is not finite, still objects.
    state, _ = run(OFF, [measured(10, primary=3.0)])
    assert told(decide(OFF, state, at(20, 2.9, 2.1, 2.1))[1][0]) == "blocked 20"
    state, _ = run(OFF, [measured(5, code=2.4), measured(10, primary=3.0)])
    assert told(decide(OFF, state, at(20, 2.9, 2.1, 2.1))[1][0]) == "blocked 20"
    state, _ = run(OFF, [at(10, 3.0, 2.4)])
    assert told(decide(OFF, state, at(20, 2.9, math.nan, math.nan))[1][0]) == "blocked 20"
    # A dip that the next eval confirms has the losses of its own eval.
    state, _ = run(TREND, [*(at(i, 3 + i / 10, 2.4) for i in range(3)), at(3, 2.9, 2.2)])
    state, decisions = decide(TREND, state, at(4, 2.95, 2.3))
    assert [told(d) for d in decisions] == ["gold 3"] and state.gold.losses["code"] == 2.2
    # As an older version wrote the state, without losses: as if they had not been measured.
    saved = state.to_json()
    del saved["gold"]["losses"]
    assert told(decide(OFF, GoldState.from_json(saved), at(5, 2.8, 2.1, 2.1))[1][0]) == "blocked 5"


def test_limits_from_the_lowest_and_from_the_start():
    config = GoldConfig(subject_to={"general": Limit(0.02)})
    evals = [(10, 3.0, 3.30), (20, 2.9, 3.21), (30, 2.8, 3.25), (40, 2.7, 3.22)]
    _, decisions = run(config, [measured(s, primary=v, general=g) for s, v, g in evals])
    assert [[told(d) for d in ds] for ds in decisions] == [["gold 10"], ["gold 20"], ["blocked 30"], ["gold 40"]]
    assert decisions[2][0].guard == "limit"
    assert decisions[2][0].reason == "limit: general 3.2100→3.2500 (+0.0400), max_increase=0.0200"
    evals = [(0, 4.0, 3.10), (10, 3.0, 2.50), (20, 2.9, 3.11), (30, 2.8, 3.1201)]
    _, decisions = run(config, [measured(s, primary=v, general=g, from_start=True) for s, v, g in evals])
    assert [[told(d) for d in ds] for ds in decisions] == [["gold 0"], ["gold 10"], ["gold 20"], ["blocked 30"]]
    assert decisions[3][0].reason == "limit: general 3.1000→3.1201 (+0.0201), max_increase=0.0200"


def test_a_limited_set_that_is_measured_now_and_then_counts_as_last_measured():
    config = GoldConfig(subject_to={"code": Limit(0.02)})
    evals = [
        measured(10, primary=3.0),  # nothing is known of it yet
        measured(20, primary=2.9, code=2.0),
        measured(30, primary=2.8, code=2.5),
        measured(40, primary=2.7),
        measured(50, primary=2.6, code=math.nan),
        measured(60, primary=2.5),
        measured(70, primary=2.4, code=1.9),
        measured(80, primary=2.3),
    ]
    _, decisions = run(config, evals)
    assert [ds[0].reason if isinstance(ds[0], Blocked) else told(ds[0]) for ds in decisions] == [
        "gold 10",
        "gold 20",
        "limit: code 2.0000→2.5000 (+0.5000), max_increase=0.0200",
        "limit: code 2.0000→2.5000 at step 30 (+0.5000), max_increase=0.0200",
        "limit: the loss of code is not finite",
        "limit: the loss of code at step 50 is not finite",
        "gold 70",
        "gold 80",
    ]


def test_every_objection_is_told_and_the_first_names_the_guard():
    config = GoldConfig(subject_to={"code": Limit(0.0)}, consecutive_rises=None)
    evals = [measured(10, primary=9.0, code=2.0, train_loss=9.0)]
    evals += [measured(20, primary=6.2, code=2.6, train_loss=1.0, regressed={"code": CODE})]
    blocked = run(config, evals)[1][1][0]
    assert blocked.guard == "overfit" and blocked.reason == (
        "overfit: val loss is 6.2x the training loss, overfit_ratio is 5.0x; "
        "limit: code 2.0000→2.6000 (+0.6000), max_increase=0.0000"
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # One rise is not a trend.
        ([3.0, 3.1, 2.9], [["gold 10"], [], ["gold 30"]]),
        # Two are: the dip waits, and the next eval, still below the gold, confirms it. The dip is the better one.
        ([3.0, 3.1, 3.2, 2.8, 2.9], [["gold 10"], [], [], [], ["gold 40"]]),
        ([3.0, 3.1, 3.2, 2.8, 2.8], [["gold 10"], [], [], [], ["gold 40"]]),
        # Better still: the later one wins, and alone.
        ([3.0, 3.1, 3.2, 2.8, 2.7], [["gold 10"], [], [], [], ["gold 50"]]),
        # Not confirmed, also where it comes back to just the gold's value; the gold stays the bar.
        ([3.0, 3.1, 3.2, 2.8, 3.0, 2.95], [["gold 10"], [], [], [], ["blocked 40"], ["gold 60"]]),
        ([3.0, 3.1, 3.2, 2.8, math.nan], [["gold 10"], [], [], [], ["blocked 40"]]),
        # 2.8 and 3.1 are no rises in a row; nor are those across an equal value.
        ([3.0, 3.1, 3.0, 3.1, 2.9], [["gold 10"], [], [], [], ["gold 50"]]),
        ([3.0, 3.1, 3.1, 3.2, 2.9], [["gold 10"], [], [], [], ["gold 50"]]),
        # A fall that is no candidate ends the row: the value below the gold after it does not wait.
        ([3.0, 3.1, 3.2, 3.1, 2.9], [["gold 10"], [], [], [], ["gold 50"]]),
        # What is not finite counts as a rise.
        ([3.0, math.nan, math.inf, 2.8, 2.9], [["gold 10"], [], [], [], ["gold 40"]]),
        # Dip, refused, two rises (3.1 the first), dip again, confirmed.
        ([3.0, 3.1, 3.2, 2.8, 3.1, 3.2, 2.9, 2.95],
         [["gold 10"], [], [], [], ["blocked 40"], [], [], ["gold 70"]]),
    ],
)  # fmt: skip
def test_a_dip_after_rises_must_be_confirmed(values, expected):
    assert of_values(TREND, values)[1] == expected


def test_the_words_of_a_dip_that_was_not_confirmed():
    evals = [measured(10 * i, primary=v) for i, v in enumerate([3.0, 3.1, 3.2, 3.3, 2.8], start=1)]
    state, _ = run(TREND, evals)
    assert state.pending == Pending(50, 2.8, 3, {"primary": 2.8}) and state.gold.step == 10
    assert kept_steps(state) == {10, 50}
    after, [blocked] = decide(TREND, state, measured(60, primary=3.4))
    assert blocked == Blocked(
        50, "primary/loss", 2.8, 3.0, 10, "trend",
        "trend: a dip to 2.8000 after 3 rises in a row was not confirmed: 3.4000 at step 60 is not below the "
        "gold's 3.0000 (step 10)",
    )  # fmt: skip
    assert kept_steps(after) == {10} and after.pending is None
    _, [blocked] = decide(TREND, state, measured(60, primary=math.nan))
    assert blocked.reason.endswith("was not confirmed: at step 60 the value is not finite")
    _, [gold] = decide(TREND, state, measured(60, primary=2.95))
    assert (gold.step, gold.value, gold.previous, gold.previous_step) == (50, 2.8, 3.0, 10)


def test_the_last_eval_obeys_the_same_guards():
    state, decisions = run(
        TREND, [measured(i, primary=v, is_last=i == 4) for i, v in enumerate([3.0, 3.1, 3.2, 2.8], 1)]
    )
    assert state.pending is None and kept_steps(state) == {1}
    assert decisions[3] == [
        Blocked(
            4, "primary/loss", 2.8, 3.0, 1, "trend",
            "trend: a dip to 2.8000 after 2 rises in a row cannot be confirmed at the last eval",
        )
    ]  # fmt: skip
    assert of_values(TREND, [3.0, 3.1, 3.2, 2.8, 2.9], last=True)[1][4] == ["gold 40"]
    assert of_values(TREND, [3.0, 3.1, 3.2, 2.8, 3.1], last=True)[1][4] == ["blocked 40"]
    assert of_values(TREND, [3.0, 3.1, 2.8], last=True)[1][2] == ["gold 30"]


def test_a_dip_that_another_guard_blocks_is_not_pending():
    evals = [measured(i, primary=v) for i, v in enumerate([3.0, 3.1, 3.2], start=1)]
    state, decisions = run(TREND, [*evals, measured(4, primary=2.8, regressed={"code": CODE})])
    assert state.pending is None and decisions[3][0].guard == "regression"
    state, decisions = decide(TREND, state, measured(5, primary=2.7))
    assert [told(d) for d in decisions] == ["gold 5"]  # 2.8 came after rises, 2.7 after a fall


def test_a_better_eval_confirms_the_dip_even_where_it_is_blocked_itself():
    state, _ = run(TREND, [measured(i, primary=v) for i, v in enumerate([3.0, 3.1, 3.2, 2.8], start=1)])
    state, decisions = decide(TREND, state, measured(5, primary=2.7, regressed={"code": CODE}))
    assert [told(d) for d in decisions] == ["blocked 5", "gold 4"]
    assert (decisions[0].best, decisions[0].best_step, decisions[1].previous) == (3.0, 1, 3.0)
    assert state.gold.step == 4 and kept_steps(state) == {4}


def test_rises_before_there_is_a_gold():
    evals = [measured(i, primary=v, train_loss=0.1) for i, v in enumerate([3.0, 3.1, 3.2], start=1)]
    config = GoldConfig()
    state, decisions = run(config, evals)
    assert [ds[0].guard for ds in decisions] == ["overfit"] * 3 and state.gold is None
    state, none = decide(config, state, measured(4, primary=3.1))
    assert none == [] and state.pending == Pending(4, 3.1, 2, {"primary": 3.1})
    assert [told(d) for d in decide(config, state, measured(5, primary=9.0))[1]] == [
        "gold 4"
    ]  # there is nothing better
    assert [told(d) for d in decide(config, state, measured(5, primary=3.0))[1]] == ["gold 5"]
    assert [told(d) for d in decide(config, state, measured(5, primary=math.inf))[1]] == ["blocked 4"]


def test_another_metric_begins_anew_and_keeps_the_losses():
    state, _ = run(OFF, [measured(10, primary=3.0, code=1.0), measured(20, primary=2.0, code=2.0)])
    other = GoldConfig(minimise="code/loss")
    state, [gold] = decide(other, state, measured(30, primary=2.5, code=1.5))
    assert (gold.step, gold.metric, gold.previous) == (30, "code/loss", None)
    assert state.sets["code"].start == 1.0 and state.sets["code"].lowest == 1.0 and state.sets["primary"].lowest == 2.0


def test_a_limit_that_one_decimal_would_round_to_nothing_has_more():
    _, [[decision]] = run(GoldConfig(overfit_ratio=0.01), [measured(10, primary=3.1, train_loss=3.1)])
    assert decision.reason == "overfit: val loss is 1.00x the training loss, overfit_ratio is 0.01x"


GATED = GoldConfig(overfit_ratio=None, gate="./gate")


def test_a_gate_is_asked_before_anything_is_gold():
    state, [candidate] = decide(GATED, GoldState(), measured(10, primary=3.0))
    assert candidate == Candidate(10, "primary/loss", 3.0, {"primary": 3.0})
    assert state.gold is None and kept_steps(state) == set() and needed_steps(state, [candidate]) == {10}
    state, [gold] = accepted(state, candidate, 0.5)
    assert gold == Gold(10, "primary/loss", 3.0, None, None, 0.5) and state.gold.score == 0.5

    state, [candidate] = decide(GATED, state, measured(20, primary=2.9))
    after, [blocked] = vetoed(state, candidate, "exit code 3")
    assert blocked == Blocked(20, "primary/loss", 2.9, 3.0, 10, "gate", "gate: exit code 3") and after == state
    for score, reason in (
        (0.5, "gate: score 0.5 is not below the gold's 0.5 (step 10)"),
        (math.nan, "gate: score nan"),
    ):
        after, [blocked] = accepted(state, candidate, score)
        assert after == state and blocked.guard == "gate" and blocked.reason.startswith(reason)
    state, [candidate] = decide(GATED, state, measured(30, primary=2.95))  # above what was vetoed
    state, [gold] = accepted(state, candidate, 0.25)
    assert (gold.step, gold.previous, gold.score) == (30, 3.0, 0.25)
    state, [candidate] = decide(GATED, state, measured(40, primary=2.0))
    state, [gold] = accepted(state, candidate)  # a gate that gives no score only vetoes
    assert gold.score is None and state.gold.score is None


def test_the_gate_is_asked_about_the_dip_when_it_vetoes_what_surpassed_it():
    state, _ = run(TREND, [measured(i, primary=v) for i, v in enumerate([3.0, 3.1, 3.2, 2.8], start=1)])
    state, [candidate] = decide(GATED, state, measured(5, primary=2.7))
    dip = Candidate(4, "primary/loss", 2.8, {"primary": 2.8})
    assert candidate == Candidate(5, "primary/loss", 2.7, {"primary": 2.7}, instead=dip)
    assert needed_steps(state, [candidate]) == {1, 4, 5}
    after, [blocked, following] = vetoed(state, candidate, "no")
    assert told(blocked) == "blocked 5" and following == dip and needed_steps(after, [blocked, following]) == {1, 4}
    after, [gold] = accepted(after, following)
    assert (gold.step, gold.previous_step) == (4, 1)
    after, [gold] = accepted(state, candidate)
    assert gold.step == 5 and kept_steps(after) == {5}


def test_the_gate_is_asked_about_the_confirming_eval_when_it_vetoes_the_dip():
    before, _ = run(TREND, [measured(i, primary=v) for i, v in enumerate([3.0, 3.1, 3.2, 2.8], start=1)])
    for confirming in (2.9, 2.8):  # a tie, too
        state, [candidate] = decide(GATED, before, measured(5, primary=confirming))
        own = Candidate(5, "primary/loss", confirming, {"primary": confirming})
        assert candidate == Candidate(4, "primary/loss", 2.8, {"primary": 2.8}, instead=own)
        assert needed_steps(state, [candidate]) == {1, 4, 5}
        after, [blocked, following] = vetoed(state, candidate, "no")
        after, [gold] = accepted(after, following)
        assert (told(blocked), gold.step, gold.previous_step) == ("blocked 4", 5, 1)
        assert [told(d) for d in accepted(state, candidate)[1]] == ["gold 4"]
    state, [candidate] = decide(GATED, before, measured(5, primary=2.9, regressed={"code": CODE}))
    assert [told(d) for d in vetoed(state, candidate, "no")[1]] == ["blocked 4", "blocked 5"]
    assert [told(d) for d in accepted(state, candidate)[1]] == ["gold 4"]  # above it, 5 is no candidate


def test_a_value_below_the_gold_that_rises_is_no_dip():
    state, _ = decide(TREND, GoldState(), measured(1, primary=3.0))
    for step, value in ((2, 2.0), (3, 2.2), (4, 2.4)):
        state, [blocked] = decide(TREND, state, measured(step, primary=value, regressed={"code": CODE}))
        assert told(blocked) == f"blocked {step}"
    assert [told(d) for d in decide(TREND, state, measured(5, primary=2.6))[1]] == ["gold 5"]
    assert decide(TREND, state, measured(5, primary=2.3))[0].pending == Pending(5, 2.3, 2, {"primary": 2.3})


# What must hold whatever the sequence.

LOSSES = st.one_of(st.integers(1, 6).map(lambda n: n / 2), st.sampled_from([math.nan, math.inf]))  # many ties
EVALS = st.lists(
    st.fixed_dictionaries(
        {"primary": LOSSES},
        optional={
            "code": LOSSES,
            "train_loss": st.sampled_from([0.25, 1.0]),
            "regressed": st.just({"code": CODE}),
        },
    ),
    max_size=14,
)
CONFIGS = st.builds(
    GoldConfig,
    subject_to=st.sampled_from([{}, {"code": Limit(0.5)}]),
    overfit_ratio=st.sampled_from([None, 5.0]),
    consecutive_rises=st.sampled_from([None, 0, 1, 2, 3]),
    gate=st.sampled_from([None, "./gate"]),
)
ANSWERS = st.lists(st.sampled_from([None, False, 0.0, 1.0, 2.0]), min_size=1)  # accepted, vetoed, accepted with a score


def course(config, evals, answers, *, through_json=False):
    """As a trainer does it: what is in gold/ after each eval, the state, all decisions. `answers` are the gate's."""
    state, disk, decided, turn = GoldState(), set(), [], count()
    for i, given_losses in enumerate(evals):
        one = measured(i, is_last=i == len(evals) - 1, from_start=len(evals) % 2 == 0, **given_losses)
        if through_json:
            state = GoldState.from_json(json.loads(json.dumps(state.to_json(), allow_nan=False)))
        state, decisions = decide(config, state, one)
        while decisions:
            if one.step in needed_steps(state, decisions):
                disk.add(one.step)
            assert (
                needed_steps(state, decisions) <= disk
            )  # never one that was not saved at its own eval, or was dropped
            decision, *decisions = decisions
            if isinstance(decision, Candidate):
                answer = answers[next(turn) % len(answers)]
                if answer is False:
                    state, more = vetoed(state, decision, "no")
                else:
                    state, more = accepted(state, decision, answer)
                decisions = [*more, *decisions]
            else:
                decided.append(decision)
        if one.step in kept_steps(state):
            disk.add(one.step)
        assert kept_steps(state) <= disk
        disk &= kept_steps(state)
        assert state.gold is None or state.gold.step in disk
    return state, disk, decided


@settings(max_examples=300)
@given(st.lists(LOSSES, max_size=20))
def test_without_guards_the_gold_is_the_first_of_the_lowest(values):
    state, disk, _ = course(OFF, [{"primary": value} for value in values], [None])
    finite = [value for value in values if math.isfinite(value)]
    assert disk == ({values.index(min(finite))} if finite else set())
    assert state.gold is None if not finite else state.gold.value == min(finite)


@settings(max_examples=500)
@given(CONFIGS, EVALS, ANSWERS)
def test_nothing_is_lost_whatever_the_sequence(config, evals, answers):
    state, disk, decided = course(config, evals, answers)
    golds = [d for d in decided if isinstance(d, Gold)]
    assert all(later.value < earlier.value for earlier, later in zip(golds, golds[1:], strict=False))
    assert [d.previous_step for d in golds] == [None, *(d.step for d in golds)][: len(golds)]
    assert disk == ({golds[-1].step} if golds else set())  # at the end nothing is pending
    values = {i: one["primary"] for i, one in enumerate(evals) if math.isfinite(one["primary"])}
    assert all(d.value == values[d.step] for d in decided)
    # An eval below the final gold is one whose blocking was told, and only candidates are told of.
    blocked = {d.step for d in decided if isinstance(d, Blocked)}
    bar = golds[-1].value if golds else math.inf
    assert {i for i, value in values.items() if value < bar} <= blocked
    assert all(d.best is None or d.value < d.best for d in decided if isinstance(d, Blocked))
    if config.gate is None and config.overfit_ratio is None and not config.consecutive_rises and golds:
        assert golds[-1].value == min(v for i, v in values.items() if i not in blocked)


@settings(max_examples=300)
@given(CONFIGS, EVALS, ANSWERS)
def test_a_state_through_json_decides_the_same(config, evals, answers):
    assert course(config, evals, answers, through_json=True) == course(config, evals, answers)


@pytest.mark.parametrize(
    ("given_config", "problem"),
    [
        ({}, None),
        ({"minimise": "domain/bpb", "subject_to": {"primary": {"max_increase": 0}}, "gate": "python 'a b'"}, None),
        ({"overfit_ratio": None, "consecutive_rises": None}, None),
        ({"minimise": "loss"}, "minimise: got 'loss', expected one of SET/loss, SET/bpb, SET/perplexity"),
        ({"minimise": "primary/accuracy"}, "minimise: got 'primary/accuracy', expected one of SET/loss, SET/bpb"),
        ({"minimise": "/loss"}, "minimise: got '/loss', expected one of"),
        ({"subject_to": {"primary": {"max_increase": 1.0}}},
         "subject_to.primary: 'primary' is the set that is minimised; limit other sets"),
        ({"subject_to": {"code": {"max_increase": -0.1}}},
         "subject_to.code.max_increase: got -0.1, expected 0 or more nats per token"),
        ({"subject_to": {"code": {"max_increase": math.inf}}}, "subject_to.code.max_increase: got inf, expected 0 or"),
        ({"overfit_ratio": 0.0}, "overfit_ratio: got 0.0, expected more than 0, or null for no limit"),
        ({"overfit_ratio": math.nan}, "overfit_ratio: got nan, expected more than 0"),
        ({"consecutive_rises": -1}, "consecutive_rises: got -1, expected 0 or more"),
        ({"gate": " "}, "gate: got an empty command, expected a program and its arguments, or null"),
        ({"gate": "check 'it"}, "gate: got \"check 'it\": No closing quotation; expected a command with its quotes"),
        ({"gate_timeout_seconds": 0.0}, "gate_timeout_seconds: got 0.0, expected more than 0"),
        ({"gate_timeout_seconds": math.inf}, "gate_timeout_seconds: got inf, expected more than 0"),
    ],
)  # fmt: skip
def test_problems_of_a_config(given_config, problem):
    config = read(GoldConfig, given_config, "", wrong := [])
    assert not wrong
    found = [f"{path}: {message}" for path, message in config.problems()]
    assert len(found) == (problem is not None)
    if problem is not None:
        assert found[0].startswith(problem)
