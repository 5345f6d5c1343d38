"""What is shown of a run whose phases differ in shape: the plan, the record's views, tokens and what is left of it."""

import io
import json

import pytest
from tiny_run import tiny_data, tiny_train, write_corpus
from written_run import write_run

from curriculum.cli.plan import table
from curriculum.config import build_config
from curriculum.data.corpus import load_corpus
from curriculum.plan import plan
from curriculum.record.board import _phase_switch_markdown
from curriculum.record.console import Console
from curriculum.record.console_text import header
from curriculum.record.sentences import shape_moves, verdict
from curriculum.run import load_run
from curriculum.views.inspection import inspect_run
from curriculum.views.inspection_text import text
from curriculum.views.model_card_sections import training
from curriculum.views.report import report
from curriculum.views.report_runs import overlays

PHASES = [
    {"name": "short", "until": "640 tokens", "mixture": {"web": 0.75, "law": 0.25}, "seq_len": 16, "batch_size": 8},
    {"name": "main", "until": 20, "mixture": {"web": 1.0}},
    {"name": "long", "until": "end", "mixture": {"law": 1.0}, "seq_len": 64, "batch_size": 3, "grad_accum": 3, "rope_theta": 5e5},
]  # fmt: skip
TRAIN = {"steps": 30, "batch_size": 4, "seq_len": 32}


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan over prepared sources: 5 steps of 8 x 16, 15 of 4 x 32 and 10 of 3 x 64."""
    place = write_corpus(tmp_path_factory.mktemp("planned"))
    optim = {"lr": 1e-3, "schedule": "constant", "scale_lr_by_batch": "sqrt"}
    config = build_config(tiny_data(place, phases=PHASES, train=TRAIN, optim=optim))
    load_corpus(config, place / "store")
    return plan(config, store_dir=place / "store")


def test_the_plan_counts_each_update_at_its_size(planned):
    assert (planned.tokens_per_step, planned.total_tokens) == (None, 640 + 1920 + 1920)
    assert [(p["start"], p["end"], p["tokens"]) for p in planned.phases] == [(0, 5, 640), (5, 20, 1920), (20, 30, 1920)]
    assert [(row.phase, row.source, row.tokens) for row in planned.rows] == [
        ("short", "web", 480),
        ("short", "law", 160),
        ("main", "web", 1920),
        ("long", "law", 1920),
    ]
    assert [row.share_given for row in planned.rows] == [0.75, 0.25, 1.0, 1.0]
    # 480 tokens of web are 15 rows of 32 already; 160 of law are two and a half of 64.
    assert planned.passed_over == ({"step": 20, "phase": "long", "tokens": {"law": 32}},)
    # An epoch is of whole blocks of 64, whatever is read of them.
    size = planned.sources["law"]["tokens_per_epoch"]
    assert size % 64 == 0 and planned.rows[-1].epochs_so_far == (160 + 32 + 1920) / size
    assert [rate for _, rate in planned.rates][:3] == pytest.approx([1e-3 * 2**0.5, 1e-3, 1e-3 * 0.75**0.5], rel=1e-12)
    assert json.loads(json.dumps(planned.to_json()))["phases"][2] == {
        "name": "long",
        "start": 20,
        "end": 30,
        "tokens": 1920,
        "mixture": {"law": 1.0},
        "ramp_steps": 0,
        "batch_size": 3,
        "seq_len": 64,
        "grad_accum": 3,
        "rope_theta": 5e5,
        "lr_scale": 0.75**0.5,
    }


def test_the_plan_s_table(planned):
    shown = table(planned)
    assert shown[0] == "tiny: 30 steps of 128 to 192 tokens = 4,480 tokens"
    of_shapes = shown[shown.index("") + 1 :]
    assert of_shapes[:4] == [
        "phase  rows x tokens  tokens a step  micro-steps  tokens       rope theta  rates x",
        "short         8 x 16            128            1     640  the model's own    1.414",
        "main          4 x 32            128            1   1,920  the model's own        1",
        "long          3 x 64            192            3   1,920          500,000    0.866",
    ]
    assert "passed over at step 20, where phase long begins with whole sequences of its own: law 32 tokens" in shown
    # Attention's scores make 4 rows of 32 the larger micro-step.
    assert planned.memory["phase"] == "main" and shown[2].endswith(
        "4 rows x 32 of phase main (mesh.data: -1 counted as 1)"
    )


def test_what_does_nothing_and_what_may_not_be_meant_is_warned_of(tmp_path):
    place = write_corpus(tmp_path)
    phases = [{**PHASES[2], "until": 20}, {**PHASES[1], "name": "after", "until": "end", "seq_len": 64}]
    optim = {"lr": 1e-3, "schedule": "constant", "scale_lr_by_batch": "sqrt"}
    data = tiny_data(place, phases=phases, train={**TRAIN, "batch_size": 3}, optim=optim)
    warnings = plan(build_config(data), store_dir=place / "store").warnings
    assert "optim.scale_lr_by_batch does nothing: every phase has train.batch_size" in warnings
    assert (
        "phase after goes back from a rope_theta of 500000 to the model's own; to keep it, give the phase rope_theta: "
        "500000" in warnings
    )
    phases[0]["rope_theta"] = 1e4  # the model's own, written out
    assert not [w for w in plan(build_config(data), store_dir=place / "store").warnings if "goes back" in w]


STEPS = (("foundation", 0, 60, {"web": 0.8, "code": 0.2}), ("domain", 60, 100, {"law": 1.0}))
SHAPES = {
    "foundation": {"batch_size": 4, "seq_len": 16, "rope_theta": None},
    "domain": {"batch_size": 2, "seq_len": 128, "rope_theta": 1e6},
}
FALLING = {"val": lambda step: 3 - step / 100}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """60 updates of 64 tokens and 40 of 256; at the switch 7 tokens of each source are passed over."""
    return write_run(tmp_path_factory.mktemp("written") / "run", FALLING, phases=STEPS, shapes=SHAPES)


def test_inspect_counts_tokens_and_tells_shapes(written):
    facts = inspect_run(load_run(written))
    assert facts["progress"]["tokens"] == 60 * 64 + 40 * 256
    # What is passed over is of no phase, and of what epochs count.
    assert [phase["tokens"] for phase in facts["phases"]] == [{"web": 3072, "code": 768}, {"law": 10240}]
    assert facts["phases"][1]["epochs"]["law"] == pytest.approx(1.0247)
    shown = "\n".join(text(facts))
    assert "rows x tokens" in shown and "4 x 16 " in shown and "2 x 128, rope theta 1,000,000" in shown


def test_the_report_and_the_card_count_by_the_plan(written, tmp_path):
    run = load_run(written)
    page = report([run])
    assert "rows x tokens" in page and "2 x 128, rope theta 1,000,000" in page
    told = "\n".join(training(run, 80, None, []))
    assert f"{60 * 64 + 20 * 256:,} tokens up to step 80." in told
    again = write_run(tmp_path / "again", FALLING, phases=STEPS, shapes=SHAPES)
    plain = write_run(tmp_path / "plain", FALLING)
    names = ["one", "two"]
    (drawn,) = overlays([run, load_run(again)], names, dict.fromkeys(names, ""))
    assert drawn.x == "tokens" and list(drawn.curves[0].xs)[-2:] == [60 * 64 + 20 * 256, 60 * 64 + 40 * 256]
    (drawn,) = overlays([run], ["one"], {"one": ""})
    assert drawn.x == "step"
    assert "rows x tokens" not in report([load_run(plain)])


SWITCH = {
    "event": "phase_switch",
    "step": 60,
    "from_phase": "foundation",
    "new_phase": "domain",
    "mixture_before": {"web": 1.0},
    "mixture_after": {"web": 1.0},
    "ramp_steps": 0,
    "shape_before": {"batch_size": 512, "seq_len": 1024, "grad_accum": 1, "rope_theta": None, "lr_scale": 1.0},
    "shape_after": {"batch_size": 64, "seq_len": 8192, "grad_accum": 1, "rope_theta": 1e6, "lr_scale": 0.5**1.5},
    "passed_over": {"web": 1024, "law": 7168},
    "consumed": {"web": 5},
    "epochs": {"web": 0.5},
    "lr": 3e-4,
}


def test_a_switch_says_what_changes_of_the_shape():
    moves = "seq_len 1,024 → 8,192{0}batch_size 512 → 64{0}rope theta the model's own → 1,000,000{0}rates x 1 → 0.3536"
    moves += "{0}passed over web 1,024, law 7,168 tokens"
    assert verdict(SWITCH) == f"phase switch at step 60: foundation → domain | {moves.format(' | ')} | lr 3.00e-04"
    assert _phase_switch_markdown(SWITCH).splitlines()[2] == moves.format("; ")


def test_a_switch_says_what_changes_of_fields_that_other_versions_have():
    before, after = {"seq_len": 64, "left_out": 2.0}, {"seq_len": 64, "added": None, "named": "x"}
    assert shape_moves({"shape_before": before, "shape_after": after}) == [
        "left_out 2 → the run's own",
        "named the run's own → x",
    ]


def test_a_length_that_was_edited_on_the_way(tmp_path, capsys):
    """Three updates of 3 x 16 are 2.25 blocks of 64: three quarters of one are passed over."""
    place, run_dir = write_corpus(tmp_path), tmp_path / "run"
    optim = {"lr": 1e-3, "schedule": "constant"}

    def go_on(steps, seq_len, resume=None):
        phases = [{"name": "only", "until": "end", "mixture": {"law": 1.0}, "seq_len": seq_len, "batch_size": 3}]
        tiny_train(place, run_dir, resume, phases=phases, train={"steps": steps, "seq_len": 64}, optim=optim)

    go_on(3, 16)
    go_on(5, 64, resume="latest")
    run = load_run(run_dir)
    (edit,) = [event for event in run.events if event["event"] == "schedule_edit"]
    assert (edit["step"], edit["passed_over"]) == (3, {"law": 48})
    assert "phases.only.seq_len 16 → 64 | passed over law 48 tokens | only until step 5" in capsys.readouterr().out
    (only,) = inspect_run(run)["phases"]
    assert only["tokens"] == {"law": 3 * 3 * 16 + 2 * 3 * 64} and run.complete["total_tokens"] == 528
    assert list(header(run.start | {"plan": run.plan}, tmp_path))[-1].endswith("law 1 | 3 x 16, from step 3 3 x 64")


def test_the_time_left_goes_by_tokens(written, tmp_path):
    start = load_run(written).start
    shown = list(header(start, tmp_path))
    assert shown[-2].endswith("web 0.8, code 0.2 | 4 x 16")
    assert shown[-1].endswith("law 1 | 2 x 128, rope theta 1,000,000")
    out = io.StringIO()
    console = Console(tmp_path, None, stream=out)
    console.event(start)
    stamp = {
        "event": "eval",
        "timestamp": "2026-11-20T14:45:12+01:00",
        "progress_pct": 1.0,
        "lr": 1e-3,
        "phase": "a",
        "eval_duration_s": 0.5,
    }
    for step, elapsed_s in ((0, 1.0), (15, 40.0), (30, 70.0)):  # 15 x 64 tokens in 30 s; 30 x 64 + 40 x 256 are left
        of_eval = {"step": step, "elapsed_s": elapsed_s, "tokens_processed": step * 64, "val_loss": 3.0, "val_bpb": 1.0}
        console.event({**stamp, **of_eval})
    assert "ETA 6m" in out.getvalue().splitlines()[-2]
