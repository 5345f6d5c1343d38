"""Branches of a trunk that was edited: what lies before their step is trained as the trunk was then, or refused."""

import shutil

import pytest
from tiny_run import last_state, record, tiny_train, write_corpus

from curriculum.branch import branch
from curriculum.errors import InputError
from curriculum.find_checkpoint import checkpoint_steps, read_ledger
from curriculum.run import load_run

FIRST = {"lr": 3e-3, "warmup_steps": 2, "schedule": "constant"}
OPTIM = {**FIRST, "weight_decay": 5.0}
RESTORED = [
    "optim.weight_decay=0.1", "phases[0].grad_accum=null", "evalsets.sets={}", "evalsets.regression.tolerance=0.01",
    "logging.every=1",
]  # fmt: skip


def evalsets(**changes):
    return {"every": 4, "primary": {"held_out_of": "web"}, **changes}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A corpus, and `trunk`, of which at step 8 the updates, what is measured and the rows were edited."""
    folder = write_corpus(tmp_path_factory.mktemp("between"))
    phase, checkpoint = {"name": "only", "until": "end", "mixture": {"web": 1.0}}, {"every": 4, "keep": 9}
    tiny_train(folder, folder / "trunk", optim=FIRST, evalsets=evalsets(), phases=[phase], checkpoint=checkpoint)
    edited = evalsets(sets={"law": {"held_out_of": "law"}}, regression={"tolerance": 0.5})
    logging = {"every": 2, "tensorboard": False}
    later = {"optim": OPTIM, "evalsets": edited, "phases": [{**phase, "grad_accum": 2}], "checkpoint": checkpoint}
    tiny_train(folder, folder / "trunk", resume=8, logging=logging, **later)
    assert [e["step"] for e in load_run(folder / "trunk").events if e["event"] == "schedule_edit"] == [8]
    return folder


@pytest.fixture
def without_8(place, tmp_path):
    """The trunk, whose checkpoint of step 8 is gone."""
    trunk = shutil.copytree(place / "trunk", tmp_path / "trunk")
    for folder in ("checkpoints", "gold"):
        shutil.rmtree(trunk / folder / "8", ignore_errors=True)
    assert checkpoint_steps(trunk / "checkpoints") == [4, 12]
    return trunk


def test_before_an_edit_a_branch_must_say_what_was_said_then(place, tmp_path):
    with pytest.raises(InputError) as told:
        branch(place / "trunk", 7, tmp_path / "new", store_dir=place / "store")
    again = "but the branch must repeat steps 4 to 7 as its trunk trained them, with"
    fix = "restore it, or branch at the step of a checkpoint: 4, 8, 12"
    config = place / "trunk/config.resolved.json"
    assert [str(problem).removeprefix(f"{config}: ") for problem in told.value.problems] == [
        f"evalsets.sets.law: got a set, {again} none of that name; {fix}",
        f"optim.weight_decay: got 5.0, {again} 0.1; {fix}",
        f"evalsets.regression.tolerance: got 0.5, {again} 0.01; {fix}",
        f"phases[0].grad_accum: got 2, {again} 1; {fix}",
        f"logging.every: got 2, {again} rows at 5, 6, 7; {fix}",
    ]
    assert not (tmp_path / "new").exists()
    branch(place / "trunk", 7, tmp_path / "new", overrides=RESTORED, store_dir=place / "store")
    (events, rows), (its_events, its_rows) = record(tmp_path / "new"), record(place / "trunk")
    assert rows[:7] == its_rows[:7] and [row["step"] for row in rows] == list(range(1, 13))
    assert [e for e in events if e["step"] < 7] == [e for e in its_events if e["step"] < 7]


def test_after_an_edit_a_branch_goes_on_as_it_says(place, tmp_path):
    """From the very checkpoint at which the trunk was edited, which does not know of the edit."""
    with pytest.raises(
        InputError, match="optim.weight_decay: got 0.1, but the branch must repeat steps 8 to 11 .* 5.0"
    ):
        branch(place / "trunk", 11, tmp_path / "new", overrides=RESTORED[:1], store_dir=place / "store")
    branch(place / "trunk", 11, tmp_path / "new", store_dir=place / "store")
    assert last_state(tmp_path / "new") == last_state(place / "trunk")
    (events, rows), (its_events, its_rows) = record(tmp_path / "new"), record(place / "trunk")
    assert rows == its_rows and [e for e in events if e.get("kind") != "branch"] == its_events


def test_a_branch_cannot_be_trained_by_two_configs(without_8, place, tmp_path):
    there = "which was changed in between; branch at the step of a checkpoint: 4, 12"
    for overrides, words in (
        (
            [],
            f"optim.weight_decay: got 5.0, but the branch must repeat steps 4 to 8 as its trunk trained them, with 0.1, {there}",
        ),
        (RESTORED, f"optim.weight_decay: got 0.1, but the branch must repeat steps 8 to 10 .* with 5.0, {there}"),
        (RESTORED, f"evalsets.sets.law: got no such set, but the branch must repeat steps 8 to 10 .* one, {there}"),
    ):
        with pytest.raises(InputError, match=words):
            branch(without_8, 10, tmp_path / "new", overrides=overrides, store_dir=place / "store")


def test_a_branch_of_a_branch_is_held_to_what_was_said_before_that_left(place, tmp_path):
    """Its gold of before then was made by the trunk's settings."""
    trunk = shutil.copytree(place / "trunk", tmp_path / "trunk")
    shutil.copytree(trunk / "checkpoints/4", trunk / "kept/4")
    first = tmp_path / "first"
    branch(trunk, 8, first, overrides=["optim.weight_decay=9.0"], store_dir=place / "store")
    assert read_ledger(first / "kept/4")["settings"]["optim"]["weight_decay"] == 0.1
    with pytest.raises(
        InputError, match="optim.weight_decay: got 9.0, but the branch must repeat steps 4 to 6 .* 0.1; re"
    ):
        branch(first, 6, tmp_path / "second", store_dir=place / "store")
    for folder in ("checkpoints", "gold"):
        shutil.rmtree(first / folder / "8", ignore_errors=True)
    with pytest.raises(InputError, match="optim.weight_decay: .* steps 4 to 8 .*, with 0.1, which was changed in bet"):
        branch(first, 10, tmp_path / "second", store_dir=place / "store")
