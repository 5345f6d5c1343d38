"""What a run trains on after so many updates, worked by hand from its config."""

import pytest
from tiny_run import tiny_data, write_corpus

from curriculum.config import build_config
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
