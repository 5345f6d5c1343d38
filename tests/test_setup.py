"""What a run is made of, built before anything is written."""

import jax
import pytest

from curriculum.train.setup import cache_compiled


@pytest.fixture
def kept():
    """The settings of jax's cache, put back afterwards."""
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    yield lambda: tuple(getattr(jax.config, name) for name in before)
    for name, value in before.items():
        jax.config.update(name, value)


def test_compiled_programs_lie_beside_the_stores_where_jax_was_given_no_folder(kept, tmp_path):
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    cache_compiled(tmp_path / "store")
    assert kept() == (str(tmp_path / "store/compiled"), 0.0, -1)  # everything, however small and quick


def test_a_folder_that_jax_was_given_stays_with_its_limits(kept, tmp_path):
    given = (str(tmp_path / "given"), 2.5, 7)
    jax.config.update("jax_compilation_cache_dir", given[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", given[1])
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", given[2])
    cache_compiled(tmp_path / "store")
    assert kept() == given
