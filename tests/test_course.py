"""What a run trains on after so many updates, worked by hand from its config."""

import pytest
from tiny_run import tiny_data, tiny_train, write_corpus

from curriculum.config import build_config
from curriculum.errors import InputError
from curriculum.run import checkpoint_steps, load_run
from curriculum.scheduling import resolve_schedule
from curriculum.train import trainer
from curriculum.train.setup import build


def test_after_so_many_updates_it_is_the_newest_one_that_counts(tmp_path):
    """The tiny run: 12 updates, the first 6 of phase a; 2 of warm-up to 3e-3, and 2 of decay to a tenth of it."""
    setup = build(build_config(tiny_data(write_corpus(tmp_path))), tmp_path / "store")
    try:
        course = setup.course
        assert course.total_steps == 12 and course.phase_ends == {6, 12}
        assert [course.phase_at(done) for done in (0, 1, 6, 7, 12)] == ["a", "a", "a", "b", "b"]
        mixtures = [course.mixture_at(done) for done in (0, 6, 7, 12)]
        assert mixtures == [{"web": 1.0}, {"web": 1.0}, {"law": 1.0}, {"law": 1.0}]
        rates = [course.rate_at(done) for done in (0, 1, 2, 6, 12)]
        assert rates == pytest.approx([1.5e-3, 1.5e-3, 3e-3, 3e-3, 3e-4], rel=1e-12)
    finally:
        setup.close()


@pytest.mark.parametrize("end", [9, 14])
def test_a_run_ends_where_its_course_does_by_then(end, tmp_path, monkeypatch):
    """An edit of the schedule after 6 updates moves the end from step 12."""
    judge = trainer.judge

    def judge_and_edit(run, done, evaluated):
        course = run.setup.course
        if done == 6:
            sections = {"train": {"steps": end, "batch_size": 4, "seq_len": 32}}
            config = build_config(tiny_data(tmp_path, **sections))
            schedule = resolve_schedule(config, run.setup.corpus.tokens_per_epoch)
            course._replan(schedule, schedule.segments)
        return judge(run, done, evaluated)

    monkeypatch.setattr(trainer, "judge", judge_and_edit)
    complete = tiny_train(write_corpus(tmp_path), tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert (
        complete["total_steps"] == end == run.metrics[-1]["step"] == max(checkpoint_steps(tmp_path / "run/checkpoints"))
    )
    assert [e["step"] for e in run.events if e["event"] == "eval"] == [0, 3, 6, 9, *([] if end == 9 else [12, 14])]


def test_a_last_checkpoint_that_is_gone_is_told_but_not_of_the_disk(tmp_path, monkeypatch):
    save = trainer.save
    monkeypatch.setattr(
        trainer, "save", lambda run, done, planned: run.offsets() if done == 12 else save(run, done, planned)
    )
    with pytest.raises(InputError) as error:
        tiny_train(write_corpus(tmp_path), tmp_path / "run")
    assert str(error.value) == (
        f"{tmp_path}/run/checkpoints/12: the last checkpoint is not there, though the disk refused none; the last good "
        "one is of step 10; go on with --resume latest"
    )
