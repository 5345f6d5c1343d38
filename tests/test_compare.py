"""Runs beside each other: which evals count, paired differences worked by hand, what is refused."""

import dataclasses
import json
import math
import os
import re
import shutil
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from tiny_run import tiny_data, tiny_train, write_corpus
from written_run import command, windows, without, write_run

from curriculum.errors import InputError
from curriculum.run import load_run
from curriculum.views.compare import compare, compare_runs
from curriculum.views.compare_text import notes, table
from curriculum.views.shared_past import began_at, shared_past


def by_document(*losses: float):
    """Two windows, of 10 and 20 tokens, for each document of a loss of its own."""
    results = windows(0.0, len(losses))
    return results._replace(nats_N=results.tokens_N * np.repeat(losses, 2).astype(np.float64))


@pytest.fixture
def pair(tmp_path):
    """25 documents: the second run is 0.1 worse on ten of them and 0.05 better on the others."""
    first = write_run(tmp_path / "first", {"val": lambda step: by_document(*[3.0] * 25)})
    second = write_run(tmp_path / "second", {"val": lambda step: by_document(*[3.1] * 10, *[2.95] * 15)})
    return first, second


def only(comparison, name="val"):
    """The second of two runs on a set."""
    compared = next(c for c in comparison.sets if c.name == name)
    assert len(compared.runs) == 2
    return compared.runs[1]


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


def recipe_runs(folder, losses):
    """Runs of recipes, {name: [the loss under seed 0, 1, ...]}; they differ in their learning rates."""
    runs = []
    for i, (name, of_seeds) in enumerate(losses.items()):
        for seed, loss in enumerate(of_seeds):
            run = write_run(folder / f"{name}-seed{seed}", {"val": lambda _, loss=loss: by_document(*[loss] * 25)})
            change_config(run, seed=seed, optim={"lr": (1 + i) * 1e-4})
            runs.append(run)
    return runs


def change_config(run, **changes):
    """Change a resolved config: a section's keys, or a value."""
    path = run / "config.resolved.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(config))


def test_runs_that_differ_in_their_seeds_are_taken_together(tmp_path):
    recipe_runs(tmp_path, {"low": [2.0, 2.2, 2.4], "high": [3.0, 3.2]})
    found = compare([tmp_path])
    assert [(recipe.name, recipe.seeds) for recipe in found.recipes] == [
        ("high", {"high-seed0": 0, "high-seed1": 1}),
        ("low", {"low-seed0": 0, "low-seed1": 1, "low-seed2": 2}),
    ]
    high, low = found.sets[0].recipes
    assert (high.runs, high.difference, high.verdict) == (("high-seed0", "high-seed1"), None, None)
    assert high.loss == pytest.approx(3.1) and high.sd == pytest.approx(0.02**0.5)
    assert low.loss == pytest.approx(2.2) and low.sd == pytest.approx(0.2)
    # SE^2 = 0.02 / 2 + 0.04 / 3, with 2.882 degrees of freedom by Satterthwaite; no document differs.
    between = low.difference
    assert between.delta == pytest.approx(-0.9) and between.df_seeds == pytest.approx(2.882, abs=1e-3)
    assert between.sem_seeds == pytest.approx((0.01 + 0.04 / 3) ** 0.5) and between.sem_text == pytest.approx(
        0, abs=1e-9
    )
    low_end, high_end = between.interval
    assert (low_end + high_end) / 2 == pytest.approx(-0.9)
    # The t of 2.882 degrees lies between those of 3 and 2 degrees, 3.182 and 4.303, of a printed table.
    assert 3.182 < (high_end - low_end) / 2 / between.sem_seeds < 3.4
    assert low.verdict.startswith("low (3 seeds) is better than high (2 seeds) by 0.9000 nats per token (95 % 0.4")

    lines = table(found)
    config = lines.index("  config    high    low")  # a column for each recipe, and no row for the seed
    assert lines[config + 1 : config + 3] == ["  optim.lr  0.0002  0.0001", ""]
    assert "No key of the configs differs but the seed." in table(
        compare([tmp_path / "high-seed0", tmp_path / "high-seed1"])
    )
    [row] = [line.split() for line in lines if line.startswith("            low  ")]
    assert row[:4] == ["low", "3", "2.2000", "0.2000"]
    assert f"val: {low.verdict}" in lines
    assert not any("low-seed1 at step 100 is" in line for line in lines)  # no verdicts on single runs
    assert any(
        line.startswith("Recipes are runs that began alike and whose configs differ in the seed") for line in lines
    )
    told = found.to_json()
    assert told["recipes"][1]["seeds"] == {"low-seed0": 0, "low-seed1": 1, "low-seed2": 2}
    assert told["sets"][0]["recipes"][1]["difference"]["against"] == "high"
    assert "low-seed1 at step 100 is" in told["sets"][0]["runs"][3]["verdict"]


@pytest.mark.parametrize(
    "losses, said",
    [
        (
            {"low": [2.0, 2.2], "mid": [2.1], "high": [2.1, 2.2]},
            "mid-seed0 (1 seed) differs from high (2 seeds) by -0.0500 nats per token, but what another seed does is "
            "not known of mid-seed0",
        ),
        ({"low": [2.0, math.nan], "high": [2.1, 2.2]}, "no verdict: not every loss of low (2 seeds) is a number"),
        ({"low": [2.0, 2.2], "high": [2.1, 2.2]}, "% of its variance comes from the seeds"),
        ({"low": [2.0, 2.0], "high": [2.0, 2.0]}, "low (2 seeds) and high (2 seeds) are equal in every window"),
    ],
)
def test_what_seeds_do_not_show_is_said(tmp_path, losses, said):
    recipe_runs(tmp_path, losses)
    assert said in "\n".join(line for line in table(compare([tmp_path])) if line.startswith("val: "))


def test_the_part_of_the_seeds_is_that_of_the_variance(tmp_path):
    for name, seed, loss, spread in (("a", 0, 2.0, 0), ("b", 1, 2.1, 0), ("c", 0, 2.0, 0.2), ("d", 1, 2.1, 0.2)):
        by = by_document(*(loss + spread * (-1) ** i for i in range(25)))
        run = write_run(tmp_path / name, {"val": lambda _, by=by: by})
        change_config(run, seed=seed, optim={"lr": 1e-3 if spread else 1e-4})
    of_c = compare([tmp_path]).sets[0].recipes[1]
    seeds, text = of_c.difference.sem_seeds, of_c.difference.sem_text
    assert 0.5 < seeds / text < 2  # else a part of the error would be rounded to the same number
    assert of_c.verdict.endswith(
        f"; {100 * seeds**2 / (seeds**2 + text**2):.0f} % of its variance comes from the seeds"
    )


def test_runs_of_other_lengths_are_other_recipes(tmp_path):
    for name, seed, steps in (("a", 0, 100), ("b", 1, 100), ("longer", 2, 200)):
        change_config(write_run(tmp_path / name, {"val": lambda step: 3.0}), seed=seed, train={"steps": steps})
    assert [[*recipe.seeds] for recipe in compare([tmp_path]).recipes] == [["a", "b"], ["longer"]]


def test_no_seed_counts_twice(tmp_path):
    runs = recipe_runs(tmp_path, {"low": [2.0, 2.2], "high": [2.1, 2.2]})
    change_config(write_run(tmp_path / "again", {"val": lambda _: 5.0}), seed=1, optim={"lr": 1e-4})
    found = compare([*runs, tmp_path / "again"])
    assert found.recipes[0].repeats == {"again": "low-seed1"} and len(found.sets[0].recipes[0].runs) == 2
    assert "again has the seed of low-seed1, of the same recipe: it does not count in low" in notes(found)
    assert compare([runs[1], tmp_path / "again"]).recipes == ()  # one seed: no recipe of several


def test_recipes_that_begin_alike_are_called_by_their_first_runs(tmp_path):
    runs = recipe_runs(tmp_path, {"a": [2.0, 2.2], "a-b": [2.1, 2.2]})
    for run, name in zip(runs, ("x-1", "x-2", "x-3", "x-4"), strict=True):
        run.rename(tmp_path / name)
    assert [recipe.name for recipe in compare([tmp_path]).recipes] == ["x-1", "x-3"]


def test_a_recipe_in_folders_is_called_by_its_folder(tmp_path):
    runs = recipe_runs(tmp_path, {"low": [2.0, 2.2], "high": [2.1, 2.2]})
    for run in runs:
        recipe, _, seed = run.name.partition("-")
        (tmp_path / recipe).mkdir(exist_ok=True)
        run.rename(tmp_path / recipe / seed)
    found = compare([tmp_path / "low", tmp_path / "high"])
    assert [recipe.name for recipe in found.recipes] == ["low", "high"]


def test_with_a_single_recipe_of_several_seeds_runs_are_told_apart(tmp_path):
    recipe_runs(tmp_path, {"low": [2.0, 2.2], "high": [2.5]})
    told = [line for line in table(compare([tmp_path])) if line.startswith("val: ")]
    assert len(told) == 2 and told[0].startswith("val: low-seed0 at step 100 is better than high-seed0 at step 100 by")


def test_runs_of_a_recipe_count_after_the_same_number_of_tokens(tmp_path):
    recipe_runs(tmp_path, {"low": [2.0, 2.2, 2.4], "high": [3.0, 3.2]})
    from_low = begun(tmp_path / "from_low", "low-seed0", 40)  # so that low-seed0 enters at step 40
    found = compare(
        [tmp_path / "high-seed0", tmp_path / "high-seed1", *(tmp_path / f"low-seed{i}" for i in range(3)), from_low]
    )
    low = found.sets[0].recipes[1]
    assert low.runs == ("low-seed1", "low-seed2") and low.loss == pytest.approx(2.3)
    assert "val: low-seed0 does not count in low: measured after another number of tokens" in notes(found)


def test_runs_that_began_with_other_parameters_or_were_edited_are_no_recipe(tmp_path):
    edit = {40: [("schedule_edit", {"changes": []})]}
    started = [lineage("base", 40) | {"started_at": f"2026-01-01T00:00:0{i}+00:00"} for i in (0, 0, 1)]
    for name, seed, more, start in (
        ("a", 0, None, None), ("b", 1, None, None), ("edited", 2, edit, None),
        ("c", 0, None, started[0]), ("d", 1, None, started[1]), ("other-base", 2, None, started[2]),
    ):  # fmt: skip
        run = write_run(tmp_path / name, {"val": lambda step: 3.0}, more=more, start={"lineage": start})
        change_config(run, seed=seed)
    assert [[*recipe.seeds] for recipe in compare([tmp_path]).recipes] == [
        ["a", "b"],
        ["c", "d"],
        ["edited"],
        ["other-base"],
    ]


def test_a_base_is_known_though_another_run_is_where_it_was(tmp_path):
    start = "2026-11-27T12:00:00+01:00"
    base = write_run(tmp_path / "w2", {"val": lambda step: 3.0}, complete={"started_at": start})
    was = lineage("current", 40) | {"started_at": start}
    adapted = write_run(
        tmp_path / "w3", {"val": lambda step: 2.0}, start={"lineage": was}, complete={"started_at": "later"}
    )
    for now_there in ("w2", "w3"):  # a link that is moved to the newest run
        (tmp_path / "current").unlink(missing_ok=True)
        (tmp_path / "current").symlink_to(now_there)
        assert began_at(load_run(adapted), load_run(base)) == 40
    twin = write_run(tmp_path / "twin", {"val": lambda step: 3.0}, complete={"started_at": start})  # in the same second
    assert began_at(load_run(adapted), load_run(twin)) == 40  # nothing tells it from the one that is meant
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to("w2")
    assert began_at(load_run(adapted), load_run(twin)) is None


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
        ("events.jsonl", without("tokens_drawn", "phase"), "events.jsonl:2: eval has no phase; "),
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
            self.looked_into |= key == "val_loss"
            return super().get(key, default)

    losses = {"val": lambda step: 3.0, "law": lambda step: 4.0}
    runs = [load_run(write_run(tmp_path / name, losses)) for name in ("first", "second")]
    runs = [dataclasses.replace(run, events=[Counted(event) for event in run.events]) for run in runs]
    assert [c.name for c in compare_runs(runs).sets] == ["val", "law"]
    read = [event.looked_into for run in runs for event in run.events if event["event"] == "eval"]
    assert read == [*[False] * 5, True] * 2  # steps 0 to 100 of two runs


def test_a_set_measured_less_often_counts_where_it_was_measured(tmp_path):
    losses = {"val": lambda step: 3.0, "rare": lambda step: 2.0 if step in (0, 60, 100) else None}
    first = write_run(tmp_path / "first", losses)
    second = write_run(tmp_path / "second", losses, until=80)
    comparison = compare([first, second])
    assert comparison.common == 8_000
    assert [[m.step for m in c.runs] for c in comparison.sets] == [[80, 80], [60, 60]]
    assert [run["finished"] for run in comparison.runs] == [True, False]


def test_sets_of_other_text_are_refused_by_name_and_sets_of_one_run_are_listed(tmp_path):
    losses = {"val": lambda step: 3.0, "law": lambda step: 2.0}
    first = write_run(tmp_path / "first", {**losses, "mine": lambda step: 1.0})
    second = write_run(tmp_path / "second", losses, hashes={"law": "0123456789abcdef"})
    third = write_run(tmp_path / "third", losses)
    comparison = compare([first, second, third])
    assert [(c.name, [m.run for m in c.runs]) for c in comparison.sets] == [
        ("val", ["first", "second", "third"]),
        ("law", ["first", "third"]),
    ]
    assert list(comparison.refused) == ["law"] and len(comparison.refused["law"]) == 1
    assert (
        "first and second measured different text (content hash-of-law and 0123456789ab)"
        in comparison.refused["law"][0]
    )
    assert comparison.only == {"mine": ("first",)}
    shown = "\n".join(table(comparison))
    assert (
        "law: not compared: first and second measured different text" in shown
        and "mine: measured only by first" in shown
    )


def test_one_text_is_compared_under_two_names(tmp_path):
    """An adapted run whose primary set is the domain has the base's primary text under another name."""
    base = write_run(tmp_path / "base", {"val": lambda step: 3.0, "law": lambda step: 4.0, "code": lambda step: 1.0})
    losses = {"val": lambda step: 3.5, "books": lambda step: 3.25, "poems": lambda step: 5.0}
    hashes = {"val": "hash-of-law", "books": "hash-of-val"}
    adapted = write_run(tmp_path / "adapted", losses, hashes=hashes)
    comparison = compare([base, adapted])
    compared = {c.title: [(m.run, m.set, m.loss) for m in c.runs] for c in comparison.sets}
    assert compared == {
        "val (books in adapted)": [("base", "val", 3.0), ("adapted", "books", 3.25)],
        "law (val in adapted)": [("base", "law", 4.0), ("adapted", "val", 3.5)],
    }
    assert [c.runs[1].difference.delta for c in comparison.sets] == pytest.approx([0.25, -0.5])
    (why,) = comparison.refused["val"]
    assert why.startswith("base and adapted measured different text (content hash-of-val and hash-of-law)")
    assert comparison.only == {"code": ("base",), "poems": ("adapted",)} and comparison.alone == ()
    shown = table(comparison)
    assert any(line.startswith("  val (books in adapted)  base ") for line in shown)
    assert any(line.startswith("law (val in adapted): adapted at step 100 is better than base") for line in shown)
    told = comparison.to_json()["sets"][0]
    assert (told["name"], [m["set"] for m in told["runs"]]) == ("val", ["val", "books"])
    results = adapted / "evals/100.npz"
    arrays = dict(np.load(results))
    np.savez(results, **arrays | {key: 2 * arrays[key] for key in ("books.tokens", "books.nats")})
    with pytest.raises(
        InputError, match=r"val \(books in adapted\): evals/100.npz of adapted and evals/100.npz of base"
    ):
        compare([base, adapted])


def cut_otherwise(nats_D, bytes_D, texts_D, windows_D):
    """The windows of documents with these sums, each cut into a number of equal windows."""
    document_N = np.repeat(np.arange(len(nats_D)), windows_D)
    each = np.repeat(windows_D, windows_D)
    nats_N, bytes_N = np.repeat(nats_D, windows_D) / each, np.repeat(bytes_D, windows_D) // each
    return windows(3.0)._replace(
        nats_N=nats_N,
        correct_N=np.ones(len(nats_N), int),
        tokens_N=np.full(len(nats_N), 10),
        bytes_N=bytes_N,
        document_N=document_N,
        text_N=np.repeat(texts_D, windows_D).astype(np.uint64),
    )


def test_other_windows_of_the_same_documents_are_compared_in_bits_per_byte(tmp_path):
    # Texts 1 to 4 of 20, 40, 20 and 20 bytes; the second run lacks text 4, has a text 9, and cuts them otherwise.
    # Over texts 1 to 3 the rise is (2 + 2 - 1) nats / 80 bytes = 0.0375. u = 2 - 0.75, 2 - 1.5, -1 - 0.75, so
    # SE^2 = 3/2 (1.25^2 + 0.5^2 + 1.75^2) / 80^2 = 7.3125 / 6400 = 0.0338^2, in nats per byte.
    first = cut_otherwise([10.0, 20.0, 10.0, 50.0], [20, 40, 20, 20], [1, 2, 3, 4], [1, 2, 1, 2])
    second = cut_otherwise([12.0, 22.0, 9.0, 10.0], [20, 40, 20, 120], [1, 2, 3, 9], [2, 4, 2, 1])
    paths = [
        write_run(tmp_path / name, {"val": lambda step, of_run=of_run: of_run}, hashes={"val": name})
        for name, of_run in (("first", first), ("second", second))
    ]
    comparison = compare(paths)
    (compared,) = comparison.sets
    assert (compared.unit, comparison.refused, comparison.alone) == ("bits per byte", {}, ())
    d = compared.runs[1].difference
    assert (d.num_clusters, d.clusters, d.share) == (3, "documents", pytest.approx(80 / 200))
    assert d.delta == pytest.approx(0.0375 / math.log(2))
    sem = math.sqrt(7.3125) / 80 / math.log(2)
    assert d.sem == pytest.approx(sem)
    assert d.interval[1] == pytest.approx(d.delta + 4.30265 * sem, rel=1e-5)  # Student's t with 2 degrees of freedom
    verdict = "no difference shown between second at step 100 and first at step 100: +0.0541 bits per byte (95 %"
    assert compared.runs[1].verdict.startswith(verdict)
    shown = "\n".join(table(comparison))
    assert "+0.0541 bpb  -0.1557 to +0.2639" in shown and "or bits per byte where it says bpb" in shown
    assert "over the 3 documents that both measured, 40 % of the bytes" in shown

    # A third run with the windows of the first is compared with it in nats, and a fourth without any of its texts is not.
    third = write_run(tmp_path / "third", {"val": lambda step: first}, hashes={"val": "first"})
    stranger = cut_otherwise([1.0], [20], [77], [1])
    fourth = write_run(tmp_path / "fourth", {"val": lambda step: stranger}, hashes={"val": "fourth"}, until=20)
    comparison = compare([*paths, third, fourth])
    told = [(c.unit, [m.run for m in c.runs]) for c in comparison.sets]
    assert told == [("nats per token", ["first", "third"]), ("bits per byte", ["first", "second"])]
    assert comparison.alone == ("fourth",) and comparison.common == 10_000
    assert comparison.refused == {
        "val": ("first and fourth measured different text (content first and fourth): they share no document",)
    }


def test_mean_losses_of_recipes_with_other_windows_are_said_to_be_apart(tmp_path):
    """Those of two tokenizers stand in one table, in nats of other tokens."""
    runs = []
    for name, tokens in (("coarse", 20), ("fine", 10)):
        for seed, nats in enumerate((20.0, 21.0)):
            of_run = cut_otherwise([nats] * 8, [20] * 8, range(8), [1] * 8)._replace(tokens_N=np.full(8, tokens))
            runs.append(write_run(tmp_path / f"{name}-{seed}", {"val": lambda _, r=of_run: r}, hashes={"val": name}))
            change_config(runs[-1], seed=seed, optim={"lr": tokens * 1e-5})
    said = (
        "val: the mean losses of coarse and of fine are of other tokens or documents, and say nothing beside each other"
    )
    assert f"{said}; the runs' bits per byte do" in notes(compare(runs))
    assert "say nothing beside each other" not in "\n".join(notes(compare(runs[:2])))


def test_of_recipes_with_other_documents_the_bits_per_byte_are_not_said_to_compare(tmp_path):
    runs = []
    for name, documents in (("small", range(8)), ("large", range(8, 16))):
        for seed, nats in enumerate((20.0, 21.0)):
            of_run = cut_otherwise([nats] * 8, [20] * 8, documents, [1] * 8)
            runs.append(write_run(tmp_path / f"{name}-{seed}", {"val": lambda _, r=of_run: r}, hashes={"val": name}))
            change_config(runs[-1], seed=seed, optim={"lr": 1e-5 + documents[0]})
    compared = compare(runs)
    assert "they share no document" in compared.refused["val"][0]
    assert (
        "val: the mean losses of small and of large are of other tokens or documents, and say nothing beside each other"
        in notes(compared)
    )


def test_runs_of_two_tokenizers_and_lengths_are_compared_by_the_documents_of_both(tmp_path):
    write_corpus(tmp_path)
    evalsets = tiny_data(tmp_path)["evalsets"]
    tiny_train(tmp_path, tmp_path / "bytes")
    tokenizer = {"kind": "bpe", "vocab_size": 300}
    tiny_train(tmp_path, tmp_path / "bpe", tokenizer=tokenizer, evalsets={**evalsets, "seq_len": 16})
    comparison = compare([tmp_path / "bytes", tmp_path / "bpe"])
    assert [(c.name, c.unit) for c in comparison.sets] == [("val", "bits per byte"), ("law", "bits per byte")]
    for compared, key in zip(comparison.sets, ("primary", "law"), strict=True):
        # Each run by its own texts, a document at a time.
        bits, sizes = [], []
        for m in compared.runs:
            with np.load(tmp_path / m.run / f"evals/{m.step}.npz") as file:
                texts = file[f"{key}.text"].tolist()
                bits.append(dict.fromkeys(texts, 0.0)), sizes.append(dict.fromkeys(texts, 0))
                for text, nats, num_bytes in zip(texts, file[f"{key}.nats"], file[f"{key}.bytes"], strict=True):
                    bits[-1][text] += nats / math.log(2)
                    sizes[-1][text] += num_bytes
        both = sizes[0].keys() & sizes[1].keys()
        assert len(both) >= 10 and all(sizes[0][text] == sizes[1][text] for text in both)
        delta = sum(bits[1][text] - bits[0][text] for text in both) / sum(sizes[0][text] for text in both)
        d = compared.runs[1].difference
        assert (d.num_clusters, d.delta) == (len(both), pytest.approx(delta, rel=1e-9)) and d.delta < 0
        assert d.share == sum(sizes[0][text] for text in both) / max(sum(of_run.values()) for of_run in sizes)


def test_documents_of_evals_that_do_not_tell_them_apart_are_not_guessed(tmp_path):
    told = cut_otherwise([10.0, 20.0], [20, 40], [1, 2], [1, 2])
    paths = [
        write_run(tmp_path / name, {"val": lambda step, of_run=of_run: of_run}, hashes={"val": name})
        for name, of_run in (("new", told), ("old", told._replace(text_N=None)))
    ]
    with pytest.raises(InputError, match="no eval set can be compared") as caught:
        compare(paths)
    assert "the evals of old are of a version that did not record which document is which" in caught.value.details[0]

    # Runs that tell them are compared, though one that does not comes first.
    more = cut_otherwise([11.0, 21.0], [20, 40], [1, 2], [2, 2])
    paths.append(write_run(tmp_path / "more", {"val": lambda step: more}, hashes={"val": "more"}))
    comparison = compare([paths[1], paths[0], paths[2]])
    assert [[m.run for m in c.runs] for c in comparison.sets] == [["new", "more"]] and comparison.alone == ("old",)
    assert [why.split(" measured")[0] for why in comparison.refused["val"]] == ["old and new", "old and more"]
    # Nor one that shares nothing.
    apart = cut_otherwise([11.0], [20], [5], [2])
    paths.append(write_run(tmp_path / "apart", {"val": lambda step: apart}, hashes={"val": "apart"}))
    comparison = compare([paths[3], paths[0], paths[2]])
    assert [[m.run for m in c.runs] for c in comparison.sets] == [["new", "more"]] and comparison.alone == ("apart",)
    # The last eval need not be on file if an earlier one is compared.
    (tmp_path / "new/evals/100.npz").unlink()
    assert [c.runs[1].step for c in compare([paths[0], paths[2]], at=40).sets] == [40]


def test_a_small_difference_in_bits_per_byte_could_be_another_seeds(tmp_path):
    # 0.002 nats a token between seeds are 0.002 / 4 / ln 2 = 0.00072 bits a byte, where a token has 4 bytes.
    def told(loss, text, document_tokens):
        measured = windows(loss)
        nats_N = measured.nats_N * (1 + 1e-6 * (measured.document_N % 3))
        return measured._replace(nats_N=nats_N, text_N=measured.document_N.astype(np.uint64) + text)

    def verdict(by):
        paths = [
            write_run(tmp_path / f"{name}{by}", {"val": lambda step, loss=loss: told(loss, 7, 1)}, hashes={"val": name})
            for name, loss in (("a", 3.0), ("b", 3.0 + by))
        ]
        (compared,) = compare(paths).sets
        assert compared.unit == "bits per byte"
        return compared.runs[1].verdict

    assert "another seed could reverse it" in verdict(0.005)  # 0.0018 bits, below 2 sqrt(2) x 0.00072 = 0.00204
    assert "another seed could reverse it" not in verdict(0.0063)


def test_a_name_is_said_to_be_of_those_that_measured_its_text(tmp_path):
    base = write_run(tmp_path / "base", {"val": lambda step: 3.0})
    adapted = write_run(tmp_path / "adapted", {"books": lambda step: 3.0}, hashes={"books": "hash-of-val"})
    other = write_run(tmp_path / "other", {"val": lambda step: 3.0}, hashes={"val": "other"})
    comparison = compare([base, adapted, other])
    assert [(c.title, [m.run for m in c.runs]) for c in comparison.sets] == [
        ("val (books in adapted)", ["base", "adapted"])
    ]
    assert comparison.only == {"books": ("base", "adapted")} and list(comparison.refused) == ["val"]


def test_a_text_that_counts_under_one_of_its_names_is_compared(tmp_path):
    """The namesake in the base was first measured after the adapted run began."""
    base = write_run(tmp_path / "base", {"val": lambda step: 3.0, "books": lambda step: 3.0 if step > 80 else None},
                     hashes={"books": "hash-of-val"})  # fmt: skip
    adapted = begun(tmp_path / "adapted", str(base), 80, hashes={"val": "domain", "books": "hash-of-val"}, books=2.0)
    (compared,) = compare([base, adapted]).sets
    assert [(m.set, m.step, m.loss) for m in compared.runs] == [("val", 80, 3.0), ("books", 100, 2.0)]


def test_runs_are_compared_wherever_two_measured_the_same_text(tmp_path):
    losses = {"val": lambda step: 3.0, "law": lambda step: 2.0}
    other = {"hashes": {"law": "other-law"}}
    first = write_run(tmp_path / "first", losses)
    second = write_run(tmp_path / "second", {**losses, "law": lambda step: 2.5}, **other)
    third = write_run(tmp_path / "third", {**losses, "law": lambda step: 2.25}, **other)
    comparison = compare([first, second, third])
    compared = [(c.name, c.content_hash, [m.run for m in c.runs]) for c in comparison.sets]
    assert compared[0] == ("val", "hash-of-val", ["first", "second", "third"])
    assert compared[1] == ("law", "other-law", ["second", "third"])
    assert comparison.sets[1].runs[1].difference.delta == pytest.approx(-0.25)
    assert comparison.sets[1].runs[1].difference.against == "second"
    assert [why.split(" and ")[1].split(" ")[0] for why in comparison.refused["law"]] == ["second", "third"]
    assert [m.run for m in compare([second, first, third]).sets[1].runs] == ["second", "third"]


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


def test_a_set_whose_content_no_record_tells_is_refused(tmp_path):
    first = write_run(tmp_path / "first", {"val": lambda step: 3.0, "added": lambda step: 2.0})
    events = first / "events.jsonl"
    begun, *rest = events.read_text().splitlines(keepends=True)
    told = json.loads(begun)
    facts = told["evalsets"].pop("added")
    events.write_text(json.dumps(told) + "\n" + "".join(rest))
    with_it = write_run(tmp_path / "second", {"val": lambda step: 3.0, "added": lambda step: 2.0})
    comparison = compare([with_it, first])
    assert [c.name for c in comparison.sets] == ["val"]
    assert comparison.refused["added"] == ("second and first: the record of first has no content hash of it",)

    twice = compare([first, first])
    assert [c.name for c in twice.sets] == ["val"] and list(twice.refused) == ["added"]

    # A `resume` event tells of the sets that were added with it.
    resumed = {**told, "event": "resume", "evalsets": {"added": facts}}
    events.write_text(json.dumps(told) + "\n" + json.dumps(resumed) + "\n" + "".join(rest))
    assert [c.name for c in compare([with_it, first]).sets] == ["val", "added"]


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


def branch(trunk: Path, path: Path, at: int, losses) -> Path:
    """A run that shares the trunk's record up to step `at`, as `curriculum branch` makes it."""
    point = {"run": "elsewhere", "step": at, "id": path.name, "branched_from": load_run(trunk).branched_from}
    write_run(path, losses, branched_from=point)
    kept = [line for line in (trunk / "events.jsonl").read_text().splitlines() if json.loads(line)["step"] <= at]
    kept = [line for line in kept if json.loads(line)["event"] != "training_complete"]
    own = [line for line in (path / "events.jsonl").read_text().splitlines() if json.loads(line)["step"] > at]
    assert len(kept) > 2 and own
    (path / "events.jsonl").write_text("\n".join([*kept, *own]) + "\n")
    return path


def test_a_branching_is_one_note_however_many_runs_share_it(tmp_path):
    losses = {"val": lambda step: 3.0}
    trunk = write_run(tmp_path / "trunk", losses)
    at_60 = [branch(trunk, tmp_path / f"b{i}", 60, losses) for i in range(3)]
    at_20 = branch(trunk, tmp_path / "early", 20, losses)
    comparison = compare([trunk, *at_60, at_20])
    assert len(comparison.shared) == 10
    assert [note for note in notes(comparison) if "the same run" in note] == [
        "trunk, b0, b1, b2 and early are the same run up to step 20",
        "trunk, b0, b1 and b2 are the same run up to step 60",
    ]


def test_the_past_that_branches_share(tmp_path):
    losses = {"val": lambda step: 3.0}
    trunk = write_run(tmp_path / "trunk", losses)
    other = write_run(tmp_path / "other", losses, start={"lineage": {"run": "another"}})
    at_60 = branch(trunk, tmp_path / "at_60", 60, losses)
    at_20 = branch(trunk, tmp_path / "at_20", 20, losses)
    twin = branch(trunk, tmp_path / "twin", 60, losses)
    runs = {path.name: load_run(path) for path in (trunk, other, at_60, at_20, twin)}
    assert shared_past(runs["trunk"], runs["at_60"]) == 60 == shared_past(runs["at_60"], runs["trunk"])
    assert shared_past(runs["at_60"], runs["at_20"]) == 20
    assert shared_past(runs["at_60"], runs["twin"]) == 60
    assert shared_past(runs["trunk"], runs["trunk"]) is None
    assert shared_past(runs["trunk"], runs["other"]) is None and shared_past(runs["at_60"], runs["other"]) is None
    of_branch = load_run(branch(at_60, tmp_path / "of_branch", 80, losses))
    assert shared_past(runs["trunk"], of_branch) == 60 == shared_past(of_branch, runs["twin"])
    assert shared_past(runs["at_60"], of_branch) == 80 and shared_past(runs["at_20"], of_branch) == 20
    comparison = compare([trunk, at_60])
    assert comparison.shared == ({"runs": ("trunk", "at_60"), "step": 60},)
    assert "trunk and at_60 are the same run up to step 60, and separate runs after it" in table(comparison)


def test_a_trunk_that_went_another_way_before_the_branching_shares_less(tmp_path):
    """Resumed from step 40, otherwise, after a branch at 60; and where a row of the metrics alone says so."""
    losses = {"val": lambda step: 3 - step / 1000}
    trunk = write_run(tmp_path / "trunk", losses)
    leaf = load_run(branch(trunk, tmp_path / "leaf", 60, losses))
    other = {"val": lambda step: 3 - step / 1000 + (step > 40)}
    begun = (trunk / "events.jsonl").read_text().splitlines(keepends=True)[0]
    trunk.rename(tmp_path / "before")
    events = write_run(trunk, other) / "events.jsonl"
    events.write_text(begun + "".join(events.read_text().splitlines(keepends=True)[1:]))
    assert shared_past(load_run(trunk), leaf) == 40 == shared_past(leaf, load_run(trunk))
    assert "trunk and leaf are the same run up to step 40, and separate runs after it" in table(
        compare([trunk, tmp_path / "leaf"])
    )
    metrics = trunk / "metrics.jsonl"
    rows = [json.loads(row) for row in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows][:2] == [20, 40]
    rows[1]["loss"] += 1
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert shared_past(load_run(trunk), leaf) == 20


def lineage(init_from, step, before=None, run="written"):
    started_at = datetime.now().astimezone().isoformat(timespec="seconds")
    return {
        "init_from": init_from, "run": run, "started_at": started_at, "step": step, "keep_optimizer": False,
        "lineage": before,
    }  # fmt: skip


def begun(path, init_from, step, before=None, loss=2.0, books=None, **rest):
    losses = {"val": lambda s: loss + s / 1000} | ({} if books is None else {"books": lambda s: books})
    return write_run(path, losses, start={"lineage": lineage(init_from, step, before)}, **rest)


def counted(comparison):
    return {m.run: (m.step, m.loss) for m in comparison.sets[0].runs}


@pytest.mark.parametrize("at, common", [("tokens", 6_000), ("step", 60)])
@pytest.mark.parametrize("init_from", ["runs/base", "runs/base/", "runs/base/gold/80", "runs/base/checkpoints/80"])
def test_a_run_is_compared_with_its_base_at_the_step_that_it_took_over(tmp_path, at, common, init_from):
    """The base at 80 and not at 60, where it had as many tokens; paths are those seen from where it was trained."""
    base = write_run(tmp_path / "runs/base", {"val": lambda step: 3 + step / 1000})
    adapted = begun(tmp_path / "runs/adapted", init_from, 80, until=60)
    comparison = compare([adapted, base], at=at)
    assert counted(comparison) == {"adapted": (60, 2.06), "base": (80, 3.08)}
    assert comparison.common == common and comparison.base_steps == {"base": 80}
    assert comparison.begun == ({"run": "adapted", "base": "base", "step": 80},)
    verdict = only(comparison).verdict
    assert verdict.startswith("base at step 80 (adapted comes from it) is worse than adapted at step 60 by 1.0200 nats")
    first, *lines = table(comparison)
    assert first == (
        "base is compared by its last eval at or before step 80, where adapted began. Each other run is compared by its last "
        f"eval at or before {common:,} {'tokens' if at == 'tokens' else 'steps'}, where the shortest was last measured."
    )
    assert not any("unequal numbers of tokens" in line or "last measured" in line for line in lines)
    assert counted(compare([base, adapted], at=at)) == counted(comparison)


def test_a_base_that_was_measured_before_the_step_that_was_taken_over_is_told(tmp_path):
    write_run(tmp_path / "runs/base", {"val": lambda step: 3 + step / 1000})
    adapted = begun(tmp_path / "runs/adapted", "runs/base", 75, until=60)
    told = (
        "base last measured val at step 60, before its step 75, where adapted began: what it learned in between is part of "
        "these differences, but not of the gains over the start of adapted"
    )
    assert told in table(compare([tmp_path / "runs/base", adapted]))


def test_a_run_that_shares_no_set_is_said_to_be_left_aside(tmp_path):
    """It was measured at fewer tokens than the others are compared at."""
    runs = [write_run(tmp_path / name, {"val": lambda step: 3.0}) for name in ("first", "second")]
    runs += [write_run(tmp_path / "other", {"val": lambda step: 3.0}, hashes={"val": "its own"}, until=60)]
    comparison = compare(runs)
    assert comparison.alone == ("other",) and [run["tokens"] for run in comparison.runs] == [10_000, 10_000, 6_000]
    measured = "where the shortest that shares a set was last measured. other shares no set: its last eval is used."
    assert table(comparison)[0] == f"Each run is compared by its last eval at or before 10,000 tokens, {measured}"
    adapted = begun(tmp_path / "adapted", str(runs[0]), 80)
    assert table(compare([*runs[:1], adapted, runs[2]]))[0].endswith(measured)
    assert table(compare(runs[:2]))[0].endswith("10,000 tokens, where the shortest was last measured.")
    runs.append(write_run(tmp_path / "last", {"val": lambda step: 3.0}, hashes={"val": "another"}))
    assert table(compare(runs))[0].endswith("last measured. other and last share no set: their last evals are used.")


def test_a_base_that_was_not_measured_where_it_was_taken_over(tmp_path):
    base = write_run(tmp_path / "base", {"val": lambda step: 3 + step / 1000})
    m = only(compare([base, begun(tmp_path / "adapted", str(base), 70)]))
    assert "better than base at step 60 (adapted comes from its step 70) by 0.9600" in m.verdict
    late = write_run(tmp_path / "late", {"val": lambda step: 3.0 if step > 50 else None})
    with pytest.raises(InputError, match="late: has no eval at or before 20 steps, where another run begins"):
        compare([late, begun(tmp_path / "early", str(late), 20)])


def test_several_runs_of_one_base_and_a_grandparent(tmp_path):
    first = write_run(tmp_path / "first", {"val": lambda step: 3 + step / 1000})
    second = begun(tmp_path / "second", "first/gold", 40)
    third = begun(tmp_path / "third", "second", 80, lineage("first/gold", 40), until=60)
    other = begun(tmp_path / "other", "first", 60)
    comparison = compare([first, second, third])
    assert {name: step for name, (step, _) in counted(comparison).items()} == {"first": 40, "second": 80, "third": 60}
    assert comparison.common == 6_000
    assert counted(compare([first, third])) == {"first": (40, 3.04), "third": (60, 2.06)}
    # Two that began elsewhere: the later step, and how to see the other pair.
    comparison = compare([first, second, other])
    assert {name: step for name, (step, _) in counted(comparison).items()} == {"first": 60, "second": 100, "other": 100}
    assert "first is compared by its last eval at or before step 60, where other began." in table(comparison)[0]
    assert (
        "second began from step 40 of first, not the step of first compared here; compare these two alone for that"
        in notes(comparison)
    )
    assert "(second comes from its step 40)" in comparison.sets[0].runs[1].verdict
    # Neither began from the other.
    comparison = compare([second, other])
    assert comparison.begun == () and counted(comparison) == {"second": (100, 2.1), "other": (100, 2.1)}


def test_a_run_that_only_looks_like_the_base_is_none(tmp_path, monkeypatch):
    base = write_run(tmp_path / "one/runs/base", {"val": lambda step: 3.0})
    adapted = begun(tmp_path / "one/runs/adapted", "runs/base", 40)
    elsewhere = write_run(tmp_path / "two/runs/base", {"val": lambda step: 3.0})
    renamed = write_run(tmp_path / "three/base", {"val": lambda step: 3.0}, name="renamed")
    monkeypatch.chdir(tmp_path / "two")  # from where the other one has the path that was given
    assert began_at(load_run(adapted), load_run(base)) == 40
    assert began_at(load_run(adapted), load_run(elsewhere)) is None
    assert began_at(load_run(adapted), load_run(adapted)) is None
    assert began_at(load_run(begun(tmp_path / "three/a", "base", 40)), load_run(renamed)) is None
    # One that was moved is known by its name and the time of its start.
    start = "2026-11-27T12:00:00+01:00"
    moved = write_run(tmp_path / "new", {"val": lambda step: 3.0}, complete={"started_at": start})
    for at, found in ((start, 40), ("2026-11-27T12:00:01+01:00", None)):
        was = lineage("gone", 40) | {"started_at": at}
        run = write_run(tmp_path / f"three/{found}", {"val": lambda step: 3.0}, start={"lineage": was})
        assert began_at(load_run(run), load_run(moved)) == found
        assert began_at(load_run(run), load_run(base)) is None
    # One whose --run-dir lies elsewhere: the path is that of the working folder.
    assert began_at(load_run(begun(tmp_path / "far/c", "runs/base", 40)), load_run(elsewhere)) == 40
    hf = {"init_from": "runs/base", "kind": "hf", "model_type": "llama", "keep_optimizer": False, "lineage": None}
    of_folder = write_run(tmp_path / "one/runs/d", {"val": lambda step: 3.0}, start={"lineage": hf})
    assert began_at(load_run(of_folder), load_run(base)) is None
    mid = {**lineage("runs/mid", 60, lineage("runs/base", 40), run="mid"), "started_at": "2000-01-01T00:00:00+00:00"}
    leaf = write_run(tmp_path / "one/runs/leaf", {"val": lambda step: 3.0}, start={"lineage": mid})
    assert began_at(load_run(leaf), load_run(base)) is None  # the base of `mid` was older than `mid`
    assert began_at(load_run(begun(tmp_path / "one/runs/late", "runs/mid", 60, mid["lineage"])), load_run(base)) == 40

    with (tmp_path / "one/runs/base/events.jsonl").open("r+") as record:  # as if it were trained anew since
        first, *others = [json.loads(line) for line in record]
        record.seek(0)
        record.writelines(json.dumps(e) + "\n" for e in ({**first, "timestamp": "2999-01-01T00:00:00+00:00"}, *others))
    assert began_at(load_run(adapted), load_run(base)) is None


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
