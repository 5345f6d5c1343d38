"""The console: exact lines, worked by hand."""

import contextlib
import io
import itertools
import os

import pytest

from curriculum.find_checkpoint import CHECKPOINT_ITEMS
from curriculum.record.commands import program
from curriculum.record.console import Console
from curriculum.record.console_text import phase_lines
from curriculum.record.queries import planned_tokens
from curriculum.record.sentences import verdict

SHAPE = {"batch_size": 4, "seq_len": 1024, "grad_accum": 1, "rope_theta": None, "lr_scale": 1.0}
UPDATES = {"ramp_steps": 0, **SHAPE}
PLAN = {
    "total_steps": 75000,
    "tokens_per_step": 4096,
    "step_sizes": [{"start": 0, "end": 75000, "tokens_per_step": 4096}],
    "phases": [
        {"name": "foundation", "start": 0, "end": 45000, "mixture": {"web": 0.8, "code": 0.2, "law": 0.0}, **UPDATES},
        {"name": "domain", "start": 45000, "end": 75000, "mixture": {"law": 0.9, "web": 0.1}, **UPDATES},
    ],
    "learning_rate": [{"piece": {"start": 0, "first": 6e-4, "last": 6e-4}}],
}
NO_PHASES = {**PLAN, "phases": []}  # for what is no matter of the phases ahead
CONFIG = {
    "name": "example",
    "sources": {"web": {}, "code": {}, "law": {}},
    "evalsets": {"sets": {"general": {}, "domain": {}}},
    "logging": {"wandb": None},
}


def stamped(name, step, elapsed_s=0.0, tokens=0, **fields):
    return {
        "event": name,
        "step": step,
        "timestamp": "2026-11-20T14:45:12+01:00",
        "elapsed_s": elapsed_s,
        "tokens_processed": tokens,
        **fields,
    }


def start():
    return stamped("training_start", 0, config=CONFIG, model={"num_parameters": 124_400_000}, plan=PLAN, lineage=None)


def evaluated(step, elapsed_s, tokens=0, **losses):
    measured = {}
    for name, loss in losses.items():
        key = "val_loss" if name == "val" else f"eval_{name}"
        measured |= {key: loss, key.replace("_loss", "") + "_bpb": 1.0}
    progress = {"progress_pct": 100 * step / 75000, "lr": 1.4e-05, "phase": "foundation"}
    return stamped("eval", step, elapsed_s, tokens, **progress, **measured, eval_duration_s=1.0)


def row(step, loss=5.12341, tokens_per_sec=12345.6):
    return {"step": step, "loss": loss, "lr": 6e-4, "tokens_per_sec": tokens_per_sec, "phase": "foundation"}


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


def printed(run_dir, *events, **arguments):
    """The lines that a console prints for these events, without closing it."""
    stream = io.StringIO()
    console = Console(run_dir, stream=stream, **arguments)
    for event in events:
        console.event(event)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(("step", "shown"), [(74_962, "99.9"), (74_999, "99.9"), (75_000, "100.0")])
def test_only_the_last_step_is_all(tmp_path, step, shown):
    assert printed(tmp_path, start(), evaluated(step, 0.0, val=4.0))[-2].startswith(f"step {step}/75000 ({shown}%) | ")


def test_an_eval_is_two_lines(tmp_path):
    lines = printed(
        tmp_path,
        start(),
        evaluated(0, 40.0, val=9.0),
        evaluated(100, 292.0, val=8.0),
        # 250 steps in 630 s leave 74650 x 2.52 s = 188118 s = 52.26 h; 922 s are 15.4 minutes
        evaluated(350, 922.0, 34_406_400, val=4.12345, general=4.23456, domain=4.34567, code=3.98765),
    )
    assert lines[-2:] == [
        "step 350/75000 (0.5%) | 14:45:12 | 15m | ETA 52.3h | 34M tokens",
        "  val 4.1235 | lr 1.40e-05 | phase: foundation | general 4.2346 | domain 4.3457 | code 3.9876",
    ]
    assert lines[-6].startswith("step 0/75000 (0.0%) | 14:45:12 | 40s | ETA ? | 0 tokens")


def test_an_eval_says_which_sets_are_worse_and_which_may_be(tmp_path):
    standing = {"regressed": ["general", "code"], "warned": ["domain"]}
    line = printed(tmp_path, start(), evaluated(350, 922.0, val=4.0, code=3.0) | standing)[-1]
    assert line.endswith(
        " | phase: foundation | code 3.0000 | worse: general, code | maybe worse: domain"
    )  # older runs
    standing["rises"] = {"general": 0.25, "code": "Infinity", "domain": 0.0625}
    line = printed(tmp_path, start(), evaluated(350, 922.0, val=4.0, code=3.0) | standing)[-1]
    assert line.endswith(" | code 3.0000 | worse: general +0.2500, code +inf | maybe worse: domain +0.0625")


def test_of_many_sets_an_eval_shows_the_primary_one_and_those_that_are_worse(tmp_path):
    def shown(num_sets, regressed=(), warned=(), **more):
        names = ["val", *(f"s{i}" for i in range(1, num_sets))]
        event = evaluated(350, 922.0, **{name: 3.0 + i / 100 for i, name in enumerate(names)})
        return printed(tmp_path, start(), event | {"regressed": regressed, "warned": warned} | more)[7:]

    assert shown(12)[0].count(" | s") == 11 and "others" not in shown(12)[0]
    assert shown(13) == ["  val 3.0000 | lr 1.40e-05 | phase: foundation | 12 others"]
    measured = {key: 2.5 for i in range(1, 13) for key in (f"eval_s{i}", f"eval_s{i}_bpb")}
    averages = {"ema": {"val_loss": 2.5, "val_bpb": 1.0, **measured}}
    # One that stands worse need not be measured at each eval.
    assert shown(13, ["val", "rare"], ["s11", "s2"], **averages) == [
        "  val 3.0000 | lr 1.40e-05 | phase: foundation | s11 3.1100 | s2 3.0200 | 10 others | worse: val, rare | "
        "maybe worse: s11, s2",
        "  ema: val 2.5000 | s11 2.5000 | s2 2.5000 | 10 others",
    ]
    (line,) = shown(41, [f"s{i}" for i in range(1, 10)], [f"s{i}" for i in range(10, 31)])
    eight = ", ".join(f"s{i}" for i in range(1, 9))
    assert " | s8 3.0800 | 32 others | worse: " in line
    assert f" | worse: {eight} and 1 more | maybe worse: s10, s11, s12, s13, s14, s15, s16, s17 and 13 more" in line


def test_sets_that_were_not_due_are_left_out_and_what_is_not_finite_is_shown(tmp_path):
    lines = printed(tmp_path, start(), evaluated(400, 1.0, val="NaN", code=3.0), evaluated(400, 1.0, new=2.0))
    assert lines[-3] == "  val nan | lr 1.40e-05 | phase: foundation | code 3.0000"
    assert lines[-1] == "  lr 1.40e-05 | phase: foundation | new 2.0000"


@pytest.mark.parametrize(
    ("earlier", "eta"),
    [
        # start-up, the eval at step 0 and compiling are no part of the pace: 10 + 20 s for 200 steps, 74700 steps left
        ([(0, 500.0), (100, 900.0), (200, 910.0), (300, 930.0)], "3.1h"),
        ([(0, 500.0), (100, 900.0)], "?"),  # without a row
        # of seven intervals the last five count: 100 s for 500 steps, 74300 left = 14860 s
        (
            [(0, 0.0), (100, 900.0), (200, 1800.0), *((200 + 100 * i, 1800.0 + 20 * i) for i in range(1, 6))],
            "4.1h",
        ),
        ([(74000, 0.0), (74990, 990.0)], "10s"),
        ([(74000, 0.0), (75000, 990.0)], "0s"),
    ],
)
def test_eta_follows_the_recent_pace_evals_included(tmp_path, earlier, eta):
    lines = printed(tmp_path, start(), *(evaluated(step, elapsed_s, val=4.0) for step, elapsed_s in earlier))
    assert lines[-2].split(" | ")[3] == f"ETA {eta}"


def test_eta_after_a_resume_counts_neither_other_processes_nor_compiling(tmp_path):
    stream = io.StringIO()
    console = Console(tmp_path, stream=stream)
    console.event(stamped("resume", 30000, 36000.0, plan=PLAN))
    console.row(row(30100, tokens_per_sec=planned_tokens(PLAN, 75000) / 75000 / 2))  # 2 s a step
    console.event(evaluated(30100, 37200.0, val=4.0))
    console.event(evaluated(30200, 37500.0, val=4.0))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "resumed at step 30000 of 75000"
    etas = [line for line in lines if " | ETA " in line]
    assert etas[0] == "step 30100/75000 (40.1%) | 14:45:12 | 10.3h | ETA 24.9h | 0 tokens"  # 44900 x 2 s
    assert etas[1].split(" | ")[3] == "ETA 37.3h"  # 44800 x 3 s, with the evals
    assert printed(tmp_path / "none", start(), evaluated(0, 9.0, val=4.0))[-2].split(" | ")[3] == "ETA ?"


def test_eta_begins_anew_with_a_run_that_goes_back_to_its_start_more_than_once(tmp_path):
    back = stamped("rollback", 0, 300.0, told_at_step=2, first_bad_step=0, plan=PLAN)
    back |= {"number": 1, "max": 9, "reason": "bad luck", "skip_steps": 20}
    evals = [evaluated(0, 301.0, val=4.0), back, evaluated(2, 302.0, val=4.0)]
    lines = printed(tmp_path, start(), *evals, *(start(), *evals) * 2)
    etas = [line.split(" | ")[3] for line in lines if line.startswith("step ")]
    assert len(etas) == 6 and set(etas[::2]) == {"ETA ?"} and not any("-" in eta for eta in etas)


def test_eta_after_a_rollback_counts_what_comes_after_it(tmp_path):
    back = stamped("rollback", 1000, 300.0, told_at_step=1400, first_bad_step=1390, plan=PLAN)
    back |= {"skip_steps": 20, "number": 1, "max": 3, "reason": "bad luck"}
    before = (evaluated(step, step / 5, val=4.0) for step in (1000, 1100, 1200, 1300))
    lines = printed(tmp_path, start(), *before, back, evaluated(1100, 500.0, val=4.0))
    assert lines[-2].split(" | ")[3] == "ETA 41.1h"  # 73900 x 2 s
    events = (stamped("resume", 1200, 9.0, plan=PLAN), back, evaluated(1100, 500.0, val=4.0))  # to before the resume
    assert printed(tmp_path / "resumed", *events)[-2].split(" | ")[3] == "ETA 41.1h"


@pytest.mark.parametrize(("wandb", "shown"), [(None, False), ({"mode": "online"}, False), ({"mode": "offline"}, True)])
def test_the_header_says_where_an_offline_run_of_wandb_lies(tmp_path, wandb, shown):
    event = start()
    event["config"] = event["config"] | {"logging": {"wandb": wandb}}
    folder = f"'{tmp_path}/a run/wandb'"
    lines = [line for line in printed(tmp_path / "a run", event) if line.startswith("  wandb ")]
    assert [line.split("; later: ")[0] for line in lines] == ([f"  wandb      offline, {folder}"] if shown else [])
    assert all(line.endswith(f"wandb sync {folder}/offline-run-*") for line in lines)


def test_what_it_trains_on_is_said_once_a_process(tmp_path):
    lines = ["  devices    2 x NVIDIA H200", "             added to XLA_FLAGS: --a=1"]
    started = printed(tmp_path, start(), evaluated(0, 40.0, val=9.0), device_lines=lines)
    assert [line for line in started if line in lines] == lines and started[-4:-2] == lines
    resumed = printed(tmp_path, stamped("resume", 500, plan=NO_PHASES), device_lines=iter(lines))
    assert resumed == ["resumed at step 500 of 75000", *lines]
    again, *_ = printed(tmp_path, stamped("resume", 500, plan=PLAN, trained_to=501))
    assert again == "resumed at step 500 of 75000; at least 1 step after it will be trained again"


@pytest.mark.parametrize(
    ("elapsed_s", "tokens", "shown"),
    [
        (59.9, 999, "59s | ETA ? | 999 tokens"),
        (60.0, 1000, "1m00s | ETA ? | 1.0k tokens"),
        (599.9, 1000, "9m59s | ETA ? | 1.0k tokens"),
        (600.0, 1000, "10m | ETA ? | 1.0k tokens"),
        (3599.9, 9_940, "59m | ETA ? | 9.9k tokens"),
        (3600.0, 65_536, "1.0h | ETA ? | 66k tokens"),
        (188118.0, 999_600, "52.3h | ETA ? | 1.0M tokens"),
        (360000.0, 1_500_000_000, "100.0h | ETA ? | 1.5B tokens"),
        (0.0, 12_000_000_000_000, "0s | ETA ? | 12T tokens"),
    ],
)
def test_durations_and_counts(tmp_path, elapsed_s, tokens, shown):
    lines = printed(tmp_path, start(), evaluated(0, elapsed_s, tokens, val=4.0))
    assert lines[-2] == f"step 0/75000 (0.0%) | 14:45:12 | {shown}"


def test_header_says_what_is_about_to_be_trained(tmp_path):
    assert printed(tmp_path, start()) == [
        "example: 124M parameters, 75000 steps",
        f"  run        {tmp_path}",
        "  sources    web, code, law",
        "  eval sets  val, general, domain",
        "  phase      foundation [    0, 45000) web 0.8, code 0.2",
        "  phase      domain     [45000, 75000) law 0.9, web 0.1",
    ]
    ramped = {**PLAN, "phases": [{**phase, "ramp_steps": 1500} for phase in PLAN["phases"]]}
    ends = [line.rpartition(" (")[2] for line in printed(tmp_path, {**start(), "plan": ramped})[4:]]
    assert ends == ["ramp 1500 steps)", "ramp 1500 steps)"]
    one = {**start(), "plan": {**PLAN, "total_steps": 1}}
    assert printed(tmp_path, one)[0] == "example: 124M parameters, 1 step"
    base = {"init_from": "runs/base", "run": "base", "step": 1500, "keep_optimizer": False, "lineage": None}
    begun = "  begins with the parameters of base, step 1,500 (runs/base)"
    assert printed(tmp_path, {**start(), "lineage": base})[1:3] == [begun, f"  run        {tmp_path}"]
    untrained = begun.replace("1,500", "0") + ", that run's initial parameters"
    assert printed(tmp_path, {**start(), "lineage": {**base, "step": 0}})[1] == untrained
    warned = {**start(), "warnings": ["phase domain: web has a positive proportion but gets no sequence"]}
    last = "  warning    phase domain: web has a positive proportion but gets no sequence"
    assert printed(tmp_path, warned)[-1] == last


SWITCH = stamped(
    "phase_switch",
    45000,
    from_phase="base",
    new_phase="law",
    mixture_before={"web": 0.8, "code": 0.2, "law": 0.0, "docs": 0.1},
    mixture_after={"law": 0.9, "web": 0.125, "docs": 0.1},
    ramp_steps=0,
    shape_before=SHAPE,
    shape_after=SHAPE,
    consumed={},
    epochs={},
    lr=3e-4,
)


def pair(name, baseline, baseline_step, loss, delta, interval, first_step, **mixture_change):
    return {
        "set": name, "baseline": baseline, "baseline_step": baseline_step, "loss": loss, "delta": delta,
        "interval": interval, "first_step": first_step, "mixture_change": mixture_change,
    }  # fmt: skip


MOVED = {"web": [0.8, 0.1], "law": [0.0, 0.9]}
OFFENDERS = [
    pair("code", "start", 0, 2.6, 0.1, [0.01, 0.19], 500, law=[0.1, 0.9]),
    pair("code", "phase_start", 400, 2.6, 0.5, [0.46, 0.54], 500, **MOVED),
    pair("code", "best", 400, 2.6, 0.5, [0.46, 0.54], 500, **MOVED),
    *(pair("law", baseline, 450, "NaN", "NaN", ["NaN", "NaN"], 500) for baseline in ("start", "phase_start", "best")),
    pair("web", "best", 300, 3.0, 0.25, [0.2, 0.3], 450),
]
VERDICTS = [
    (
        SWITCH,
        "phase switch at step 45000: base → law | web 0.8 → 0.125 | code 0.2 → 0 | law 0 → 0.9 | lr 3.00e-04",
    ),
    (
        {**SWITCH, "ramp_steps": 500},
        "phase switch at step 45000: base → law | web 0.8 → 0.125 | code 0.2 → 0 | law 0 → 0.9 | over 500 steps | "
        "lr 3.00e-04",
    ),
    (
        stamped("eval_regression", 500, offenders=OFFENDERS, action=None),
        "eval regression at step 500: code 2.6000: +0.1000 (95 % +0.0100 to +0.1900) against start at step 0, "
        "+0.5000 (95 % +0.4600 to +0.5400) against phase_start and best at step 400 "
        "(since step 400: web 0.8 → 0.1, law 0 → 0.9); law nan: not finite against start, phase_start and best at step 450; "
        "still worse: web (since step 450)",
    ),
    (
        stamped("eval_regression", 500, offenders=[OFFENDERS[2] | {"rate_rise": [2e-3, 0.015]}], action=None),
        "eval regression at step 500: code 2.6000: +0.5000 (95 % +0.4600 to +0.5400) against best at step 400 "
        "(since step 400: web 0.8 → 0.1, law 0 → 0.9, learning rate 0.002 → 0.015)",
    ),
    (
        stamped("eval_regression", 500, offenders=[OFFENDERS[2] | {"repeated": {"law": [0.0, 6.125]}}], action=None),
        "eval regression at step 500: code 2.6000: +0.5000 (95 % +0.4600 to +0.5400) against best at step 400 "
        "(since step 400: web 0.8 → 0.1, law 0 → 0.9, epochs of law 0.00 → 6.12)",
    ),
    (
        stamped("eval_regression", 500, offenders=OFFENDERS[2:3], action="kept as kept/500"),
        "eval regression at step 500: code 2.6000: +0.5000 (95 % +0.4600 to +0.5400) against best at step 400 "
        "(since step 400: web 0.8 → 0.1, law 0 → 0.9) | kept as kept/500",
    ),
    (  # of one text under two names
        stamped("eval_regression", 500, offenders=[*OFFENDERS[2:3], OFFENDERS[2] | {"set": "val"}], action=None),
        "eval regression at step 500: code and val 2.6000: +0.5000 (95 % +0.4600 to +0.5400) against best at step 400 "
        "(since step 400: web 0.8 → 0.1, law 0 → 0.9)",
    ),
    (
        stamped("eval_recovered", 600, offenders=[OFFENDERS[-1] | {"tolerance": 0.3}]),
        "eval recovered at step 600: web 3.0000: +0.2500 (95 % +0.2000 to +0.3000) against best at step 300, tolerance 0.3",
    ),
    (
        stamped("eval_recovered", 600, offenders=[OFFENDERS[-1] | {"tolerance": 0.2}]),
        "eval recovered at step 600: web 3.0000: +0.2500 (95 % +0.2000 to +0.3000) against best at step 300, no longer "
        "clearly above the tolerance of 0.2",
    ),
    (
        stamped(
            "schedule_edit",
            500,
            phase="law",
            mixture_before={"web": 0.1, "law": 0.9},
            mixture_after={"web": 0.2, "law": 0.8},
            until=700,
            reason="replay of web, as general got worse",
        ),
        "schedule edit at step 500: replay of web, as general got worse | web 0.1 → 0.2 | law 0.9 → 0.8 | "
        "law until step 700",
    ),
    (
        stamped(
            "schedule_edit",
            500,
            phase="law",
            mixture_before={"web": 0.1, "law": 0.9},
            mixture_after={"web": 0.1, "law": 0.9},
            until=700,
            reason="seed 1 → 2",
            accepted_past=True,
        ),
        "schedule edit at step 500: seed 1 → 2 | law until step 700 | --accept-past: what was trained stays as it was",
    ),
    (
        stamped("gold_checkpoint", 700, metric="primary/loss", value=3.21, previous=3.456, previous_step=600),
        "gold checkpoint at step 700: primary/loss 3.2100, was 3.4560 at step 600",
    ),
    (
        stamped("gold_checkpoint", 100, metric="domain/bpb", value=1.5, previous=None, previous_step=None),
        "gold checkpoint at step 100: domain/bpb 1.5000",
    ),
    (
        stamped(
            "gold_blocked",
            800,
            guard="overfit",
            reason="overfit: val loss is 6.2x the training loss, overfit_ratio is 5.0x",
        ),  # fmt: skip
        "gold blocked at step 800: overfit: val loss is 6.2x the training loss, overfit_ratio is 5.0x",
    ),
    (
        stamped("diverged", 212, reason="3 updates in a row were bad, from update 209 on", last_good_step=200),
        "diverged at step 212: 3 updates in a row were bad, from update 209 on | the last good checkpoint is of step 200",
    ),
    (
        stamped("diverged", 2, reason="parameters are not finite after update 1", last_good_step=None),
        "diverged at step 2: parameters are not finite after update 1 | there is no good checkpoint",
    ),
]
DIVERGED = stamped("diverged", 212, reason="3 updates in a row were bad", last_good_step=200)
ROLLBACK = stamped(
    "rollback", 200, told_at_step=212, first_bad_step=209, skip_steps=20, number=1, max=3, reason="bad luck",
    skipped_updates=4, skipped_nonfinite=1, skipped_outliers=2, plan=PLAN,
)  # fmt: skip


@pytest.mark.parametrize(("event", "line"), VERDICTS)
def test_a_verdict_is_one_line(tmp_path, event, line):
    assert verdict(event) == line
    assert printed(tmp_path, start(), event)[6:] == [line]


def test_of_many_sources_those_whose_shares_change_most_are_named(tmp_path):
    names = [f"s{i}" for i in range(30)]
    before, after = dict.fromkeys(names, 0.01), {name: 0.01 + i / 1000 for i, name in enumerate(names)}
    line = verdict({**SWITCH, "mixture_before": before, "mixture_after": after, "passed_over": dict.fromkeys(names, 5)})
    moves = " | ".join(f"s{i} 0.01 → {0.01 + i / 1000:.4g}" for i in range(29, 17, -1))
    passed = ", ".join(f"s{i} 5" for i in range(12))
    told = "phase switch at step 45000: base → law"
    assert line == f"{told} | {moves} | 17 more | passed over {passed}, 18 more tokens | lr 3.00e-04"
    alarm = pair("code", "best", 400, 2.6, 0.5, [0.46, 0.54], 500, **{n: [before[n], after[n]] for n in names})
    assert "s18 0.01 → 0.028, 18 more)" in verdict(stamped("eval_regression", 500, offenders=[alarm], action=None))
    begun = start()
    begun["config"]["sources"] = dict.fromkeys(names)
    begun["plan"]["phases"][0]["mixture"] = after
    header = printed(tmp_path, begun)
    assert any(line == f"  sources    {', '.join(names[:20])} and 10 more" for line in header)
    assert any(line.endswith("s18 0.028, 18 more") for line in header)


def test_a_verdict_names_the_sets_that_rose_most_and_counts_the_others():
    def sets(num, first_step):
        return [pair(f"s{i}", "best", 400, 3 + i / 10, i / 10, [0.0, 2.0], first_step) for i in range(1, num + 1)]

    def of(i):
        return f"s{i} {3 + i / 10:.4f}: {i / 10:+.4f} (95 % +0.0000 to +2.0000) against best at step 400"

    alarm = stamped("eval_regression", 500, offenders=sets(6, 500), action=None)
    assert verdict(alarm) == f"eval regression at step 500: {'; '.join(of(i) for i in range(1, 7))}"
    lost = pair("lost", "best", 400, "NaN", "NaN", ["NaN", "NaN"], 500)
    alarm["offenders"] = [*sets(8, 500), lost]
    named = "lost nan: not finite against best at step 400; " + "; ".join(of(i) for i in (8, 7, 6, 5, 4))
    assert verdict(alarm) == f"eval regression at step 500: {named}; and 3 more"
    alarm["offenders"] = [*sets(9, 450), lost]
    still = ", ".join(f"s{i} (since step 450)" for i in range(1, 9))
    assert verdict(alarm).endswith(f"against best at step 400; still worse: {still} and 1 more")


def test_updates_that_were_skipped_are_said_once_with_their_reasons(tmp_path):
    def counted(step, total, nonfinite, outliers):
        return row(step) | {"skipped_updates": total, "skipped_nonfinite": nonfinite, "skipped_outliers": outliers}

    (tmp_path / "checkpoints/200").mkdir(parents=True)
    stream = io.StringIO()
    console = Console(tmp_path, stream=stream, clock=Clock())
    console.event(start())
    for one in (counted(10, 0, 0, 0), counted(20, 4, 1, 2), counted(30, 4, 1, 2)):
        console.row(one)
    console.event(ROLLBACK)
    console.row(counted(210, 4, 1, 2))
    console.row(counted(220, 5, 1, 3))
    console.close()
    assert stream.getvalue().splitlines()[6:] == [
        "step 10/75000 | loss 5.1234 | lr 6.00e-04 | 12.3k tok/s | phase foundation",
        "skipped 4 updates up to step 20: 1 not finite, 2 with a loss or gradient norm far above the recent ones, "
        "1 without a scored target",
        "rollback 1 of 3 at step 212, to step 200: bad luck | the data of 20 steps from step 209 on are passed over",
        "skipped 1 update up to step 220: 1 with a loss or gradient norm far above the recent ones",
        "stopped",
        f"  resume from  {tmp_path / 'checkpoints/200'}",
    ]


def test_a_run_that_skips_updates_all_along_says_so_once_an_eval(tmp_path):
    stream = io.StringIO()
    console = Console(tmp_path, stream=stream, clock=Clock())
    console.event(start())

    def told(step, *totals):
        """What is said, rows of these totals and the eval at `step` given, as `NUMBER STEP`; `eval` for the eval."""
        before = len(stream.getvalue())
        for i, total in enumerate(totals):
            counts = {"skipped_updates": total, "skipped_nonfinite": total, "skipped_outliers": 0}
            console.row(row(step - len(totals) + 1 + i) | counts)
        console.event(evaluated(step, 40.0 + step, val=4.0))
        words = [line.split() for line in stream.getvalue()[before:].splitlines()]
        return [f"{w[1]} {w[6]}" if w[0] == "skipped" else "eval" for w in words if w[0] in ("skipped", "val")]

    assert told(100, 0, 1, 1, 3, 4) == ["1 97:", "3 100:", "eval"]  # the first one at once, the others with the eval
    assert told(200, 4, 5, 6) == ["2 200:", "eval"]
    assert [told(step, 6) for step in range(300, 1200, 100)] == [["eval"]] * 9
    assert told(1200, 7, 7) == ["1 1200:", "eval"]  # the tenth eval
    assert [told(step, 7) for step in range(1300, 2300, 100)] == [["eval"]] * 10
    assert told(2300, 8, 8) == ["1 2299:", "eval"]  # is news after ten
    console.row(row(2310) | {"skipped_updates": 9, "skipped_nonfinite": 9, "skipped_outliers": 0})
    console.event(DIVERGED)
    assert [line.split(":")[0] for line in stream.getvalue().splitlines()[-2:]] == [
        "skipped 1 update up to step 2310",
        "diverged at step 212",
    ]


def test_other_events_print_nothing(tmp_path):
    assert verdict(stamped("of_tomorrow", 5)) is None
    assert len(printed(tmp_path, start(), stamped("of_tomorrow", 5), stamped("checkpoint", 5))) == 6


def test_a_sample_is_one_line_that_steers_no_terminal(tmp_path):
    samples = [{"prompt": "x" * 50, "text": "one\n\x1b[31mtwo\té"}, {"prompt": "", "text": "y" * 200}]
    assert printed(tmp_path, start(), stamped("generation", 5, samples=samples))[6:] == [
        f"  sample at step 5: ...{'x' * 40} | one\\n\\x1b[31mtwo\\té",
        f"  sample at step 5:  | {'y' * 160}...",
    ]


def test_into_a_pipe_progress_comes_at_a_sensible_rate(tmp_path):
    stream, clock = io.StringIO(), Clock()
    console = Console(tmp_path, stream=stream, clock=clock)
    console.event(start())
    for step in range(40, 100, 10):
        console.row(row(step))
        clock.seconds += 4.0
    assert stream.getvalue().splitlines()[6:] == [
        f"step {step}/75000 | loss 5.1234 | lr 6.00e-04 | 12.3k tok/s | phase foundation" for step in (40, 70)
    ]
    clock.seconds += 10
    console.row(row(100, loss="Infinity", tokens_per_sec=460_000.0))
    assert stream.getvalue().splitlines()[-1] == (
        "step 100/75000 | loss inf | lr 6.00e-04 | 460k tok/s | phase foundation"
    )
    console.close()


def read_to_the_end(descriptor):
    """What a terminal holds once its other side is closed: the end is an error on Linux, nothing on macOS."""
    chunks = []
    with contextlib.suppress(OSError):
        while chunk := os.read(descriptor, 10000):
            chunks.append(chunk)
    os.close(descriptor)
    return b"".join(chunks).decode()


def test_on_a_terminal_progress_overwrites_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "32")
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = os.openpty()
    with os.fdopen(writer, "w", encoding="utf-8") as terminal:
        console = Console(tmp_path, stream=terminal)
        console.event(stamped("resume", 30, plan=NO_PHASES))
        console.row(row(40))
        console.row(row(50))
        console.event(stamped("gold_blocked", 60, reason="trend", guard="trend"))
    shown = read_to_the_end(reader)
    assert shown == (
        "resumed at step 30 of 75000\r\n"
        "\r\x1b[Kstep 40/75000 | loss 5.1234 | l"  # 31 columns, so that no line wraps
        "\r\x1b[Kstep 50/75000 | loss 5.1234 | l"
        "\r\x1b[Kgold blocked at step 60: trend\r\n"
    )
    assert (tmp_path / "train.log").read_text().splitlines() == [
        "resumed at step 30 of 75000",
        "step 40/75000 | loss 5.1234 | lr 6.00e-04 | 12.3k tok/s | phase foundation",
        "gold blocked at step 60: trend",
    ]


@pytest.mark.parametrize(
    ("environment", "colored"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_a_terminal_shows_what_matters_in_color_unless_it_is_not_to(tmp_path, monkeypatch, environment, colored):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    reader, writer = os.openpty()
    failed = stamped(
        "checkpoint_failed", 60, path="checkpoints/60", why="no space", last_good_step=30, next_try_step=90
    )
    with os.fdopen(writer, "w", encoding="utf-8") as terminal:
        console = Console(tmp_path, stream=terminal)
        console.event(stamped("resume", 30, plan=NO_PHASES))
        console.event(failed)
    line = verdict(failed)
    shown = f"\x1b[31m{line}\x1b[0m" if colored else line
    assert read_to_the_end(reader) == f"resumed at step 30 of 75000\r\n{shown}\r\n"
    assert (tmp_path / "train.log").read_text().splitlines() == ["resumed at step 30 of 75000", line]


def test_that_a_checkpoint_and_its_copy_as_the_gold_were_not_saved_is_one_failure(tmp_path):
    paths = ["checkpoints/60", "gold/60", "gold/80", "checkpoints/90", "gold/90"]
    of = {"why": "no space", "last_good_step": 30}
    failed = [
        stamped(
            "checkpoint_failed", step := int(path.split("/")[1]), path=path, next_try_step=-(-step // 30) * 30, **of
        )
        for path in paths
    ]
    first, _, second, third, _ = map(verdict, failed)
    assert printed(tmp_path, *failed) == [first, "  nor was gold/60", second, third, "  nor was gold/90"]


def test_a_terminal_that_cannot_overwrite_gets_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    clock = Clock()
    reader, writer = os.openpty()
    with os.fdopen(writer, "w", encoding="utf-8") as terminal:
        console = Console(tmp_path, stream=terminal, clock=clock)
        for clock.seconds, step in ((100, 40), (105, 50), (111, 60)):
            console.row(row(step))
    of_step = "step {}/0 | loss 5.1234 | lr 6.00e-04 | 12.3k tok/s | phase foundation\r\n".format
    assert read_to_the_end(reader) == of_step(40) + of_step(60)


def test_a_run_that_ends_early_names_the_checkpoint_that_it_goes_on_from(tmp_path):
    """A gold is one, where no other checkpoint could be saved."""
    (tmp_path / "gold/20").mkdir(parents=True)
    failed = stamped("checkpoint_failed", 60, path="checkpoints/60", why="", last_good_step=20, next_try_step=None)
    stream = io.StringIO()
    console = Console(tmp_path, stream=stream)
    for event in (start(), failed):
        console.event(event)
    console.close()
    assert stream.getvalue().splitlines()[-2:] == ["stopped", f"  resume from  {tmp_path}/gold/20"]


def test_of_golds_that_one_guard_blocks_in_a_row_the_first_is_told(tmp_path):
    gold = stamped("gold_checkpoint", 50, metric="val/loss", value=2.0, previous=None, previous_step=None)
    guards = ["regression", "regression", "limit", "regression"]
    before = [blocked(10 * i, guard, f"{guard}: {10 * i}") for i, guard in enumerate(guards, 1)]
    after = [blocked(step, "regression", f"regression: {step}") for step in (60, 70)]
    lines = printed(tmp_path, *before, gold, *after)
    told = [line.partition(" at step ")[2] for line in lines]
    assert told == [
        "10: regression: 10",
        "30: limit: 30",
        "40: regression: 40",
        "50: val/loss 2.0000",
        "60: regression: 60",
    ]


def test_train_log_keeps_every_line_and_the_checkpoints(tmp_path):
    events = [start(), evaluated(0, 1.0, val=4.0), SWITCH]
    lines = printed(tmp_path, *events, stamped("checkpoint", 200))
    log = (tmp_path / "train.log").read_text(encoding="utf-8").splitlines()
    assert log == [*lines, f"checkpoint at step 200: {tmp_path / 'checkpoints' / '200'}"] and len(lines) == 9
    printed(tmp_path, stamped("resume", 200, plan=PLAN))
    log_after = (tmp_path / "train.log").read_text(encoding="utf-8").splitlines()
    assert log_after == [
        *log,
        "resumed at step 200 of 75000",
        *phase_lines(PLAN),
    ]


def test_the_mixture_in_force_is_shown_and_later_ones(tmp_path):
    remixed = [
        {"step": 60, "mixture": {"web": 0.25, "law": 0.75}},
        {"step": 90, "mixture": {"law": 1.0}, "ramp_end": 95},
    ]
    phase = {**PLAN["phases"][0], "end": 100, "mixture": {"web": 1.0}, "ramp_steps": 5, "remixed": remixed}
    plan = {**PLAN, "total_steps": 100, "phases": [phase]}
    later = "from step 90 law 1 (ramp to step 95)"
    shown = "  phase      foundation [  0, 100) "
    assert list(phase_lines(plan)) == [f"{shown}web 1 (ramp 5 steps); from step 60 web 0.25, law 0.75; {later}"]
    assert list(phase_lines(plan, 60)) == [f"{shown}web 0.25, law 0.75; {later}"]
    assert list(phase_lines(plan, 99)) == [f"{shown}law 1"]


def test_a_resume_shows_the_phases_ahead_up_to_a_number(tmp_path):
    phases = [{**PLAN["phases"][0], "name": f"p{i}", "start": 100 * i, "end": 100 * i + 100} for i in range(12)]
    lines = printed(tmp_path, stamped("resume", 200, plan={**PLAN, "total_steps": 1200, "phases": phases}))
    ahead = [line.split()[1] for line in lines if line.startswith("  phase ")]
    assert ahead == [f"p{i}" for i in range(2, 10)] and lines[-1] == "             and 2 more phases"
    lines = printed(tmp_path, stamped("resume", 401, plan={**PLAN, "total_steps": 1200, "phases": phases}))
    assert [line.split()[1] for line in lines if line.startswith("  phase ")] == [f"p{i}" for i in range(4, 12)]
    assert "more phase" not in lines[-1]


def complete(gold_step, train_steps=75000):
    return stamped(
        "training_complete",
        75000,
        total_elapsed_s=188118.0,
        total_steps=75000,
        train_steps=train_steps,
        total_tokens=7_372_800_000,
        skipped_updates=0,
        tokens_per_sec=39192.4,
        final_train_loss=None,
        final_val_loss=3.05,
        best_val_loss=3.0,
        gold_step=gold_step,
        gold_metric="domain/bpb",
        gold_value=1.25,
        transfer={
            "phases": ["base", "law"],
            "steps": [45000, 75000],
            "sets": {
                "val": {"forgetting": {"value": 0.0, "interval": [0.0, 0.0], "best_phase": "law"}},
                "code": {"forgetting": {"value": 0.25, "interval": [0.2, 0.3], "best_phase": "base"}},
                "general": {"forgetting": {"value": 0.01, "interval": [-0.1, 0.12], "best_phase": "base"}},
                "single": {"forgetting": {"value": 0.3, "interval": None, "best_phase": "base"}},  # no standard error
            },
        },
    )


def test_the_end_says_where_to_resume_what_to_deploy_and_how_to_look(tmp_path):
    run_dir = tmp_path / "my runs" / "example-1"
    (run_dir / "tensorboard").mkdir(parents=True)
    lines = printed(
        run_dir,
        start(),
        stamped("checkpoint", 75000),
        complete(gold_step=70000),
        resume_command=lambda step, raised: f"resume {step} {raised or ''}",
    )
    link = "http://127.0.0.1:6006/?runFilter=%5Eexample-1%2F&tagFilter=eval_sets&smoothing=0#timeseries"
    assert lines[6:] == [
        "complete: 75000 steps, 7.4B tokens in 52.3h (39.2k tok/s) | train - | val 3.0500, best 3.0000",
        "  forgotten    code +0.2500 since base",
        "  not judged   single +0.3000 since base, too little text for a standard error",
        f"  resume from  {run_dir}/checkpoints/75000: resume latest train.steps",
        f"  deploy       {run_dir}/gold/70000 (gold, step 70000, domain/bpb 1.2500)",
        f"  TensorBoard  {program('tensorboard')} --logdir '{tmp_path}/my runs' --host 127.0.0.1",
        f"               {link}",
    ]


def test_the_end_names_a_set_with_a_standing_alarm_whatever_its_interval(tmp_path):
    lines = printed(tmp_path, start(), {**evaluated(74000, 40.0), "regressed": ["general"]}, complete(gold_step=70000))
    forgotten = "  forgotten    code +0.2500 since base; general +0.0100 (95 % -0.1000 to +0.1200) since base"
    assert forgotten in lines
    lines = printed(tmp_path, start(), {**evaluated(74000, 40.0), "regressed": ["general"]}, evaluated(75000, 41.0),
                    complete(gold_step=70000))  # fmt: skip
    assert "  forgotten    code +0.2500 since base" in lines  # it has recovered


def test_the_end_names_what_is_worse_than_between_the_ends_of_phases(tmp_path):
    """Of a set that is no worse than at any phase's end, but worse than at its best eval."""
    last = {**evaluated(75000, 41.0), "regressed": ["val", "code"], "rises": {"val": 0.125, "code": 0.3}}
    lines = printed(tmp_path, start(), last, complete(gold_step=70000))
    assert "  forgotten    code +0.2500 since base" in lines
    assert "  still worse  val +0.1250 over its baseline" in lines
    later = printed(tmp_path, start(), last, evaluated(75000, 42.0), complete(gold_step=70000))
    assert not any("still worse" in line for line in later)


def test_the_end_says_what_evals_took_of_the_time(tmp_path):
    evals = [{**evaluated(step, 40.0), "eval_duration_s": 12.0} for step in (100, 200)]
    end = {**complete(gold_step=None), "elapsed_s": 100.0}

    def told(*events):
        return printed(tmp_path, start(), *events, {**stamped("checkpoint", 300)}, end)

    assert any("(39.2k tok/s; evals took 24% of the time) | " in line for line in told(*evals))
    resumed = stamped("resume", 50, 20.0, plan=PLAN)
    assert any("; evals took 30% of the time since step 50) | " in line for line in told(resumed, *evals))
    short = [{**event, "eval_duration_s": 4.0} for event in evals]
    assert any("(39.2k tok/s) | " in line for line in told(*short))


def test_the_end_of_a_run_that_a_source_stopped_says_so(tmp_path):
    lines = printed(tmp_path, start(), stamped("checkpoint", 75000), complete(70000, train_steps=80000))
    assert lines[9:11] == [
        "  ended early  at step 75000 of 80000: a source with on_exhaust: stop has been read max_epochs times",
        f"  resume from  {tmp_path}/checkpoints/75000 with a higher sources.NAME.max_epochs",
    ]


def blocked(step, guard, reason):
    return stamped("gold_blocked", step, reason=reason, guard=guard)


LATEST = "  deploy       {run}/checkpoints/75000 (the latest; the run has no gold checkpoint)"
BEGUN_WITH = [
    "  deploy       {run}/gold/0 (gold, step 0, domain/bpb 1.2500)",
    "               (the run's initial parameters: no later eval was lower and passed every guard;",
    "               eval and export take another checkpoint with --step, such as latest)",
]


@pytest.mark.parametrize(
    ("before", "gold_step", "val_loss", "lines"),
    [
        ([], None, 3.05, ["  resume from  {run}/checkpoints/75000 with a higher train.steps", LATEST]),
        ([blocked(60, "regression", "x regressed")], None, 3.05, [LATEST, "               (gold blocked at step 60: x regressed)"]),
        ([blocked(60, "regression", "x regressed")], 70000, 3.05, [
            "  deploy       {run}/gold/70000 (gold, step 70000, domain/bpb 1.2500)",
            "               (gold blocked at step 60: x regressed)",
        ]),
        ([], 0, 3.05, BEGUN_WITH),
        ([blocked(500, "regression", "eval regression: books 4.0→4.3")], 0, 3.05, [
            *BEGUN_WITH,
            "               (gold blocked at step 500: eval regression: books 4.0→4.3)",
            "               (evalsets.gold.subject_to says how far each other set may rise)",
        ]),
        ([blocked(75000, "start", "start: 8.1 is not below 7.6")], None, 3.05, [
            "  deploy       nothing: the last eval was no better than before training, and none before it is gold",
            "               (gold blocked at step 75000: start: 8.1 is not below 7.6)",
        ]),
        ([], None, "NaN", ["  deploy       nothing: val is nan, and the run has no gold checkpoint"]),
        ([], None, "Infinity", ["  deploy       nothing: val is inf, and the run has no gold checkpoint"]),
    ],
)  # fmt: skip
def test_the_end_says_what_to_deploy_and_why_no_other(tmp_path, before, gold_step, val_loss, lines):
    end = {**complete(gold_step), "final_val_loss": val_loss}
    shown = printed(tmp_path, start(), *before, stamped("checkpoint", 75000), end)
    assert shown[-len(lines) :] == [line.format(run=tmp_path) for line in lines]


def test_the_end_names_the_checkpoint_from_before_the_decay(tmp_path):
    def pieces(*spans):
        names = ("start", "first", "last", "shape")
        return [{"piece": dict(zip(names, span, strict=False))} for span in spans]

    def told(*spans):
        begun = {**start(), "plan": {**PLAN, "learning_rate": pieces((0, 0.0, 1.0), *spans)}}
        lines = printed(
            tmp_path, begun, stamped("checkpoint", 75000), complete(gold_step=None), resume_command="{0} {1}".format
        )
        return [line.removeprefix(f"  resume from  {tmp_path}/checkpoints/") for line in lines[9:-1]]

    for step in (200, 60000, 65000, 75000):
        for item in CHECKPOINT_ITEMS:
            (tmp_path / f"checkpoints/{step}/{item}").mkdir(parents=True)
    assert told((10, 1.0, 1.0)) == ["75000: latest train.steps"]
    before = "60000, before the rate's decay: 60000 train.steps"
    assert told((10, 1.0, 1.0), (60000, 1.0, 0.1)) == [before]
    assert told((10, 1.0, 0.1, "inverse_sqrt")) == ["75000: latest train.steps"]  # its rate goes on as it was
    rises = "               (the rate has decayed by then; continuing at its peak needs optim.allow_jump: true)"
    assert told((10, 1.0, 0.1)) == ["75000: latest train.steps", rises]
    for place in ("gold", "kept"):  # from there --resume takes a step too
        (tmp_path / "checkpoints/60000").rename((tmp_path / place).mkdir() or tmp_path / place / "60000")
        assert told((10, 1.0, 1.0), (60000, 1.0, 0.1)) == [f"  resume from  {tmp_path}/{place}/{before}"]
        (tmp_path / place / "60000").rename(tmp_path / "checkpoints/60000")


@pytest.mark.parametrize(
    ("events", "closing"),
    [
        ([], []),
        ([start()], ["stopped before the first checkpoint: the run starts again at step 0"]),
        ([start(), stamped("checkpoint", 200)], ["stopped", "  resume from  {run}/checkpoints/200: again"]),
        ([start(), stamped("checkpoint", 300)], ["stopped", "  resume from  {run}/checkpoints/200: again"]),
        ([start(), stamped("checkpoint", 50)], ["stopped before the first checkpoint: the run starts again at step 0"]),
        ([start(), ROLLBACK | {"step": 0}], ["stopped before the first checkpoint: the run starts again at step 0"]),
        ([stamped("resume", 100, plan=PLAN)], ["stopped", "  resume from  {run}/checkpoints/100: again"]),
        ([start(), stamped("checkpoint", 200), DIVERGED], []),  # what to do then, a summary says
        ([start(), stamped("checkpoint", 75000), complete(None)], []),
    ],
)
def test_a_run_that_stops_early_says_where_to_take_it_up(tmp_path, events, closing):
    """In a folder with the checkpoints of 100 and 200; those of others are still being saved, or could not be."""
    for step, item in itertools.product((100, 200), CHECKPOINT_ITEMS):
        (tmp_path / f"checkpoints/{step}/{item}").mkdir(parents=True)
    stream = io.StringIO()
    console = Console(tmp_path, resume_command=lambda step, raised: "again", stream=stream)
    for event in events:
        console.event(event)
    before = stream.getvalue()
    console.close()
    expected = [line.format(run=tmp_path) for line in closing]
    assert stream.getvalue()[len(before) :].splitlines() == expected
    log = (tmp_path / "train.log").read_text().splitlines()
    assert log[len(log) - len(expected) :] == expected


def test_a_stream_without_arrows_gets_escapes_instead_of_an_error(tmp_path):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(tmp_path, stream=stream).event(SWITCH)
    assert b"base \\u2192 law" in raw.getvalue()
    assert "base → law" in (tmp_path / "train.log").read_text(encoding="utf-8")


def test_the_name_of_a_folder_steers_no_terminal(tmp_path):
    run_dir = tmp_path / "a\x1b[2J\nb"
    run_dir.mkdir()
    lines = printed(run_dir, start())
    assert r"a\x1b[2J\nb" in "".join(lines) and "\x1b" not in "".join(lines)


class OnlyWrites:
    """What a program puts in the place of stdout to have a copy in a file of its own."""

    def __init__(self):
        self.lines, self.fails = [], False

    def write(self, text):
        if self.fails:
            raise ValueError("I/O operation on closed file")
        self.lines.append(text)

    def flush(self):
        pass


def test_a_run_without_a_stdout_has_its_lines_in_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    console = Console(tmp_path)
    console._print("a line")
    assert (tmp_path / "train.log").read_text() == "a line\n"


def test_a_stream_that_only_writes_is_written_to_until_it_is_closed(tmp_path):
    stream = OnlyWrites()
    console = Console(tmp_path, stream=stream)
    console._print("one")
    stream.fails = True
    console._print("two")
    console._print("three")
    assert stream.lines == ["one\n"]
    told = "console: I/O operation on closed file; from here on, output goes to this file only"
    assert (tmp_path / "train.log").read_text() == f"one\ntwo\n{told}\nthree\n"
