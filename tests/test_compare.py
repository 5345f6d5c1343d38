"""Runs beside each other: which evals count, paired differences worked by hand, what is refused."""

import dataclasses
import json
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from related_runs import by_document, only
from written_run import command, windows, without, write_run

from curriculum.errors import InputError
from curriculum.run import load_run
from curriculum.views.compare import compare, compare_runs
from curriculum.views.compare_text import notes, table


@pytest.fixture
def pair(tmp_path):
    """25 documents: the second run is 0.1 worse on ten of them and 0.05 better on the others."""
    first = write_run(tmp_path / "first", {"val": lambda step: by_document(*[3.0] * 25)})
    second = write_run(tmp_path / "second", {"val": lambda step: by_document(*[3.1] * 10, *[2.95] * 15)})
    return first, second


def test_the_paired_difference_of_documents_worked_by_hand(pair):
    # delta = (10 * 0.1 - 15 * 0.05) / 25 = 0.01. A document has 30 tokens: u = 30 * 0.09 = 2.7 ten times and
    # 30 * -0.06 = -1.8 fifteen times, so SE^2 = 25/24 * (10 * 2.7^2 + 15 * 1.8^2) / 750^2 = 0.015^2.
    m = only(compare(pair))
    assert (m.step, m.tokens) == (100, 10_000)
    assert m.loss == pytest.approx(3.01) and m.bpb == pytest.approx(3.01 / 4 / math.log(2), abs=1e-6)
    d = m.difference
    assert (d.against, d.clusters, d.num_clusters) == ("first", "documents", 25)
    assert d.delta == pytest.approx(0.01) and d.sem == pytest.approx(0.015)
    half = 2.0639 * 0.015  # Student's t with 24 degrees of freedom, from a printed table
    assert d.interval == pytest.approx((0.01 - half, 0.01 + half), abs=1e-6)
    assert m.verdict.startswith("no difference shown between second at step 100 and first at step 100: +0.0100 (95 %")
    assert m.verdict.endswith("to +0.0410)")


@pytest.mark.parametrize(
    "shift, step, said, seed",
    [
        (0.004, 1e-4, "worse than first at step 100 by 0.0041 nats per token (95 % 0.0041 to 0.0041; so small", True),
        (-0.004, 1e-4, "better than first at step 100 by 0.0039 nats per token (95 % 0.0039 to 0.0039; so small", True),
        # Mean 0.0096 of nine 0, eight 0.01 and eight 0.02; error sqrt(25 / 24 x 0.001696) / 25 = 0.00168, t = 2.0639.
        (-0.3, 1e-2, "better than first at step 100 by 0.2904 nats per token (95 % 0.2869 to 0.2939)", False),
    ],
)
def test_a_difference_beyond_its_interval_is_told_with_what_it_does_not_say(tmp_path, shift, step, said, seed):
    first = write_run(tmp_path / "first", {"val": lambda step: by_document(*[3.0] * 25)})
    # Each document moves by the shift, give or take a little.
    second = write_run(
        tmp_path / "second", {"val": lambda _: by_document(*(3 + shift + step * (i % 3) for i in range(25)))}
    )
    verdict = only(compare([first, second])).verdict
    assert said in verdict
    assert ("another seed could reverse it" in verdict) == seed


def test_a_difference_of_roundings_is_called_that(tmp_path):
    runs = [
        write_run(tmp_path / name, {"val": lambda _, by=by: by_document(*(3 - by - by * (i % 3) for i in range(25)))})
        for name, by in (("one", 0.0), ("two", 1e-8))
    ]
    comparison = compare(runs)
    assert only(comparison).difference.interval[1] < 0  # beyond its own error, as nothing else moves
    less = "two at step 100 and one at step 100 differ by less than 0.0001 nats per token, within another device's rounding"
    assert only(comparison).verdict.startswith(less) and "-0.0000" not in "".join(table(comparison))


def test_a_folder_of_runs_stands_for_all_of_them(tmp_path, pair):
    (tmp_path / "notes.txt").touch()
    assert compare([tmp_path]).to_json() == compare(pair).to_json()
    write_run(tmp_path / "third", {"val": lambda step: by_document(*[2.0] * 25)})
    assert [run["name"] for run in compare([tmp_path / "third", tmp_path]).runs] == ["third", "first", "second"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: holds no run"):
        compare([tmp_path, tmp_path / "empty"])


def test_a_run_without_an_eval_is_left_out(tmp_path, pair):
    begun = write_run(tmp_path / "begun", {"val": lambda step: None}, until=0)
    found = compare([pair[0], begun, pair[1]])
    assert [m.run for m in found.sets[0].runs] == ["first", "second"]
    assert found.unmeasured == ("begun",) and notes(found)[0] == "begun: no eval yet, left out"


def _half(file):
    file.write_bytes(file.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("file", "damage", "why"),
    [
        ("config.resolved.json", _half, "config.resolved.json: cannot be read: "),
        ("config.resolved.json", Path.unlink, "config.resolved.json: is missing; "),
        ("events.jsonl", Path.unlink, "events.jsonl: no such file; "),
        ("events.jsonl", lambda file: file.write_bytes(b"\0\n" + file.read_bytes()), "events.jsonl:1: got "),
        ("events.jsonl", lambda file: file.write_text(file.read_text().partition("\n")[2]), "events.jsonl:1: got eval"),
        ("events.jsonl", without("tokens_drawn", "phase"), "events.jsonl:8: eval has no phase; "),
        ("evals/100.npz", _half, "evals/100.npz: cannot be read: "),
        ("evals/100.npz", Path.unlink, "evals/100.npz: no such file; "),
    ],
)
def test_a_damaged_run_of_a_folder_is_left_out(tmp_path, pair, file, damage, why):
    damaged = write_run(tmp_path / "damaged", {"val": lambda step: 3.0})
    damage(damaged / file)
    found = compare([tmp_path])
    assert [run["name"] for run in found.runs] == ["first", "second"]
    ((path, told),) = found.damaged.items()
    assert (
        path == str(damaged) and told.startswith(f"{damaged}/{why}") and notes(found)[0] == f"{path}: left out: {told}"
    )
    with pytest.raises(InputError, match=re.escape(why)):
        compare([*pair, damaged])
    shutil.rmtree(pair[0])
    with pytest.raises(InputError, match="got 1 run, expected two or more to compare") as error:
        compare([tmp_path])
    assert error.value.details == (f"{path}: left out: {told}",)


def test_a_folder_of_damaged_runs_alone_is_an_error(tmp_path, pair):
    for run in pair:
        _half(run / "config.resolved.json")
    with pytest.raises(InputError) as error:
        compare([tmp_path])
    assert [problem.partition(": cannot be read")[0] for problem in error.value.problems] == [
        f"{run}/config.resolved.json" for run in pair
    ]


def test_the_same_run_twice_differs_by_exactly_nothing(pair):
    comparison = compare([pair[1], pair[1]])
    m = only(comparison)
    assert (m.difference.delta, m.difference.sem, m.difference.interval) == (0.0, 0.0, (0.0, 0.0))
    assert m.verdict == "second (2) at step 100 and second (1) at step 100 are equal in every window"
    assert comparison.shared == ()


def test_the_last_eval_at_or_before_the_common_tokens_or_step_counts(tmp_path):
    # 100 steps of 100 tokens, and 100 steps of 200: 10,000 tokens are step 50 of the second, whose last eval was at 40.
    first = write_run(tmp_path / "first", {"val": lambda step: 3 + step / 1000})
    second = write_run(tmp_path / "second", {"val": lambda step: 4 + step / 1000}, tokens_per_step=200)
    by_tokens, by_step = compare([first, second]), compare([first, second], at="step")
    assert (by_tokens.common, by_step.common) == (10_000, 100)
    assert [(m.step, m.tokens, m.loss) for m in by_tokens.sets[0].runs] == [(100, 10_000, 3.1), (40, 8_000, 4.04)]
    assert [(m.step, m.loss) for m in by_step.sets[0].runs] == [(100, 3.1), (100, 4.1)]
    assert only(by_tokens).difference.delta == pytest.approx(0.94)


def test_only_the_evals_that_are_compared_are_looked_into(tmp_path):
    class Counted(dict):
        looked_into = False

        def get(self, key, default=None):
            self.looked_into |= key == "val_bpb"
            return super().get(key, default)

    losses = {"val": lambda step: 3.0, "law": lambda step: 4.0}
    runs = [load_run(write_run(tmp_path / name, losses)) for name in ("first", "second")]
    runs = [dataclasses.replace(run, events=[Counted(event) for event in run.events]) for run in runs]
    assert [c.name for c in compare_runs(runs).sets] == ["val", "law"]
    read = [event.looked_into for run in runs for event in run.events if event["event"] == "eval"]
    assert read == [*[False] * 5, True] * 2  # steps 0 to 100 of two runs


def test_the_path_of_a_run_is_resolved_once_not_for_each_other_run(tmp_path, monkeypatch):
    runs = [load_run(write_run(tmp_path / name, {"val": lambda step: 3.0})) for name in "abcd"]
    resolve, resolved = Path.resolve, []
    monkeypatch.setattr(Path, "resolve", lambda path: resolved.append(path.name) or resolve(path))
    assert len(compare_runs(runs).runs) == 4
    assert sorted(resolved) == [*"abcd"]


def test_a_set_measured_less_often_counts_where_it_was_measured(tmp_path):
    losses = {"val": lambda step: 3.0, "rare": lambda step: 2.0 if step in (0, 60, 100) else None}
    first = write_run(tmp_path / "first", losses)
    second = write_run(tmp_path / "second", losses, until=80)
    comparison = compare([first, second])
    assert comparison.common == 8_000
    assert [[m.step for m in c.runs] for c in comparison.sets] == [[80, 80], [60, 60]]
    assert [run["finished"] for run in comparison.runs] == [True, False]


def test_unequal_numbers_of_tokens_are_said(tmp_path, pair):
    assert not any("unequal numbers" in line for line in table(compare(pair)))
    assert "tokens)" not in only(compare(pair)).verdict
    first = write_run(tmp_path / "a", {"val": lambda step: 3 + step / 1000, "law": lambda step: 3.0})
    second = write_run(tmp_path / "b", {"val": lambda step: 4.0, "law": lambda step: 3.0}, every=30, until=90)
    comparison = compare([first, second])  # 9,000 tokens; evals every 2,000 and every 3,000
    assert only(comparison).verdict.startswith(
        "b at step 90 (9,000 tokens) is worse than a at step 80 (8,000 tokens) by 0.92"
    )
    said = "measured after unequal numbers of tokens, which is part of the difference: "
    assert f"{said}val (a 8,000, b 9,000), law (a 8,000, b 9,000)" in table(comparison)


def test_a_loss_that_is_not_a_number_gets_no_verdict(tmp_path):
    first = write_run(tmp_path / "first", {"val": lambda step: 3.0})
    second = write_run(tmp_path / "second", {"val": lambda step: windows(math.nan if step else 3.0)})
    comparison = compare([first, second])
    assert only(comparison).verdict == "no verdict: the loss of second at step 100 is nan"
    assert math.isnan(only(comparison).difference.delta)
    as_json = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert as_json["sets"][0]["runs"][1]["loss"] == "NaN"


def test_one_cluster_has_no_interval_and_no_verdict(tmp_path):
    first = write_run(tmp_path / "first", {"val": lambda step: windows(3.0, num_documents=1)})
    second = write_run(tmp_path / "second", {"val": lambda step: windows(3.5, num_documents=1)})
    m = only(compare([first, second]))
    assert (m.difference.delta, m.difference.sem, m.difference.interval) == (0.5, None, None)
    assert m.verdict.startswith("no verdict: second at step 100 differs from first at step 100 by +0.5000 nats")


def test_few_documents_are_said(tmp_path):
    paths = [
        write_run(tmp_path / name, {"val": lambda step, loss=loss: windows(loss, num_documents=10)})
        for name, loss in (("first", 3.0), ("second", 3.5))
    ]
    comparison = compare(paths)
    assert only(comparison).difference.clusters == "blocks"
    over = "fewer than 20 distinct ones each, in 20 windows or more; their standard errors cover more text from the same documents, not other documents"
    assert f"few documents in val: {over}" in table(comparison)


def test_of_many_runs_each_set_has_one_line(tmp_path):
    def run(i, loss):
        return write_run(tmp_path / f"run{i}", {"val": lambda step: windows(loss, spread=0.2, seed=i)})

    losses = [3.0, 2.0, *[3.0] * 11, 4.0, math.nan, *[3.0] * 11]
    paths = [run(i, loss) for i, loss in enumerate(losses)]
    assert any("val: run1 at step 100 is better than run0" in line for line in table(compare(paths[:25])))
    (line,) = [line for line in table(compare(paths)) if line.startswith("val") and "against" in line]
    head, better, worse, same = re.fullmatch(
        r"(val against run0): better: (\S+ \S+); worse: (\S+ \S+); no difference shown: (.*); no verdict: run14 \S+",
        line,
    ).groups()
    assert better.startswith("run1 -") and worse.startswith("run13 +") and same.endswith(" and 14 more")
    assert not any("is better than" in line for line in table(compare(paths)))


def test_runs_of_one_name_are_called_by_their_paths(tmp_path):
    a = write_run(tmp_path / "a" / "run", {"val": lambda step: 3.0})
    b = write_run(tmp_path / "b" / "run", {"val": lambda step: 3.0})
    assert [run["name"] for run in compare([a, b]).runs] == [str(a), str(b)]


def test_what_cannot_be_compared_is_said(tmp_path, pair):
    first, second = pair
    with pytest.raises(InputError, match="got 1 run, expected two or more"):
        compare([first])
    for at in ("epochs", True, 40.0, -40, None):
        with pytest.raises(InputError, match=f"--at {at}: expected tokens, step, gold, or the number of a step"):
            compare(pair, at=at)
    assert compare(pair, at=np.int64(40)).common == compare(pair, at="40").common == 40
    with pytest.raises(InputError, match="nowhere: holds no run"):
        compare([first, tmp_path / "nowhere"])
    with pytest.raises(InputError, match="unmeasured: no eval yet, expected two runs or more that have one"):
        compare([first, write_run(tmp_path / "unmeasured", {"val": lambda step: None}, until=0)])
    begun = write_run(tmp_path / "begun", {"val": lambda step: 3.0}, until=20)
    late = write_run(tmp_path / "late", {"val": lambda step: 3.0 if step > 50 else None})
    with pytest.raises(InputError, match="late: has no eval at or before 2,000 tokens, where another run ends"):
        compare([begun, late])
    with pytest.raises(InputError, match="late: has no eval at or before 20 steps"):
        compare([begun, late], at="step")
    none_common = write_run(tmp_path / "c", {"law": lambda step: 3.0})
    with pytest.raises(InputError) as error:
        compare([first, none_common])
    (problem,) = error.value.problems
    assert problem.startswith("no eval set can be compared: no two of these runs measured the same text")
    assert "to add one, resume a run with --eval-dataset-dir NAME=DIR" in problem
    assert error.value.details == ("val: only first measured it", "law: only c measured it")
    refused = write_run(tmp_path / "d", {"val": lambda step: 3.0}, hashes={"val": "other"})
    with pytest.raises(InputError, match="no eval set can be compared: .*\nval: first and d"):
        compare([first, refused])


def test_windows_that_are_gone_or_do_not_fit_are_said(pair):
    first, second = pair
    results = second / "evals/100.npz"
    arrays = dict(np.load(results))
    np.savez(results, **arrays | {key: 2 * arrays[key] for key in ("primary.tokens", "primary.nats")})
    with pytest.raises(InputError, match="val: evals/100.npz of second and evals/100.npz of first differ in windows"):
        compare(pair)
    np.savez(results, other=np.zeros(1))
    with pytest.raises(InputError, match="100.npz: has no windows of val, which the record says was measured"):
        compare(pair)
    whole = results.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"x" * 100):
        results.write_bytes(damaged)
        opened = os.listdir("/proc/self/fd")
        with pytest.raises(InputError, match="100.npz: cannot be read: ") as told:
            compare(pair)
        assert told and os.listdir("/proc/self/fd") == opened  # though its traceback is still there
    results.unlink()
    with pytest.raises(InputError, match="100.npz: no such file; the paired difference needs the windows"):
        compare(pair)


def test_windows_that_contradict_the_record_are_said(tmp_path):
    run = write_run(tmp_path / "run", {"val": lambda step: 3.0 - step / 100})
    other = write_run(tmp_path / "other", {"val": lambda step: 2.0})
    results = run / "evals/100.npz"
    of_start, arrays = (dict(np.load(run / f"evals/{step}.npz")) for step in (0, 100))
    nats, tokens = arrays["primary.nats"], arrays["primary.tokens"]
    assert not math.isclose(nats.sum(), of_start["primary.nats"].sum())
    for changed, got in (
        (of_start, "a loss of 3.000000"),
        ({"primary.nats": nats * math.nan}, "a loss of nan"),
        ({"primary.nats": nats + 2e-6 * tokens}, "a loss of 2.000002"),
        ({"primary.tokens": 0 * tokens}, "a loss of inf"),
        ({"primary.nats": nats[:-1]}, "arrays of different lengths"),
        ({"primary.document": nats[:, None]}, "arrays of different lengths"),
    ):
        np.savez(results, **arrays | changed)
        said = f"evals/100.npz: the windows of primary are .*: got {got}, expected a loss of 2.000000, as in the record"
        for pair in ([run, other], [other, run]):
            with pytest.raises(InputError, match=said):
                compare(pair)
    np.savez(results, **arrays | {"primary.nats": nats + 4e-7 * tokens})
    assert only(compare([other, run])).difference.delta == pytest.approx(4e-7, rel=1e-6)


def test_runs_are_compared_at_their_golds(tmp_path):
    gold = {"metric": "primary/loss", "value": 3.0, "previous": None, "previous_step": None, "path": "gold/40"}
    lineage = {"init_from": "early", "run": "written", "step": 100, "keep_optimizer": False, "lineage": None}
    early = write_run(tmp_path / "early", {"val": lambda step: 3 + step / 1000}, more={40: [("gold_checkpoint", gold)]})
    late = write_run(
        tmp_path / "late", {"val": lambda step: 4.0}, more={80: [("gold_checkpoint", gold)]}, start={"lineage": lineage}
    )
    none = write_run(tmp_path / "none", {"val": lambda step: 5.0})
    comparison = compare([early, late, none], at="gold")
    assert [(run["step"], run["gold_step"]) for run in comparison.runs] == [(40, 40), (80, 80), (100, None)]
    assert (comparison.at, comparison.common, comparison.begun) == ("gold", None, ())
    assert comparison.sets[0].runs[0].loss == pytest.approx(3.04)
    first = "Each run is compared at its gold checkpoint, which export takes. none has none: the last eval is used."
    assert table(comparison)[0] == first
    assert any(line.startswith("measured after unequal numbers of tokens") for line in notes(comparison))
    assert compare([early, late]).runs[0]["step"] == 100  # where late began


def test_runs_are_compared_at_a_step_that_is_asked_for(tmp_path):
    falling = {"val": lambda step: 4.0 - step / 100}
    runs = [write_run(tmp_path / name, falling) for name in ("first", "second")]
    comparison = compare(runs, at=50)
    assert [m.step for m in comparison.sets[0].runs] == [40, 40] and (comparison.at, comparison.common) == ("step", 50)
    assert table(comparison)[0] == "Each run is compared by its last eval at or before 50 steps."
    assert [m.step for m in compare(runs, at=10**9).sets[0].runs] == [100, 100]
    late = write_run(tmp_path / "late", {"late": lambda step: 4.0 if step >= 40 else None})
    with pytest.raises(InputError, match="late: has no eval at or before 20 steps$"):
        compare([late, late], at=20)


def test_the_command_prints_a_table_or_json_and_needs_no_jax(pair):
    code, out, _, modules = command("compare", *pair)
    assert code == 0 and not modules & {"jax", "matplotlib", "pydantic"} and "numpy" in modules
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "val first 100 3.0000 0.0000 1.0820" in lines
    assert "second 100 3.0100 0.0150 1.0856 +0.0100 -0.0210 to +0.0410" in lines
    assert "another seed moves a final loss too, by about 0.002 nats in a long run" in lines[-1]
    assert "Their intervals cover the choice of held-out text alone" in lines[-1]
    code, out, _, _ = command("compare", *pair, "--at", "step", "--json")
    told = json.loads(out)
    assert code == 0 and told["at"] == "step" and told["sets"][0]["runs"][1]["difference"]["num_clusters"] == 25
