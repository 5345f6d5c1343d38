"""Runs beside each other that are related: recipes under several seeds, branches and their trunk, runs and their base."""

import json
import math

import numpy as np
import pytest
from related_runs import begun, branch, by_document, change_config, cut_otherwise, lineage, only, recipe_runs
from written_run import write_run

from curriculum.errors import InputError
from curriculum.record.events import eval_sets
from curriculum.run import load_run
from curriculum.views.compare import compare
from curriculum.views.compare_text import notes, table
from curriculum.views.shared_past import began_at, shared_past


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


def test_what_two_records_begin_with_alike_is_not_looked_into(tmp_path, monkeypatch):
    losses = {"val": lambda step: 3.0}
    trunk = write_run(tmp_path / "trunk", losses)
    leaf = branch(trunk, tmp_path / "leaf", 60, losses)
    looked_at = []
    monkeypatch.setattr(
        "curriculum.views.shared_past.eval_sets", lambda event: looked_at.append(event["step"]) or eval_sets(event)
    )
    assert shared_past(load_run(trunk), load_run(leaf)) == 60 and looked_at == []
    lines = (leaf / "events.jsonl").read_text().replace('"step": 40,', '"step": 40, "val_loss": 3.0, "seen": 1,')
    (leaf / "events.jsonl").write_text(lines)
    assert shared_past(load_run(trunk), load_run(leaf)) == 60 and looked_at == [40, 60, 40, 60]


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
