"""Flash attention for TPUs, interpreted: it computes what plain attention does, on one device and on each of several."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curriculum.model.attention import splash_attention
from curriculum.schema.sections import MeshConfig
from curriculum.train.mesh import make_mesh, on_each

ROOT = Path(__file__).parent.parent
H, J, K = 4, 2, 24
MESHES = [(2, 1, 1), (1, 2, 2), (2, 2, 2)]


def plain(sliding_window, query_BTHK, key_BTJK, value_BTJK, documents_BT=None):
    """By the definition: softmax of the scores that are seen, all others left out."""
    T = query_BTHK.shape[1]
    key_BTHK, value_BTHK = (jnp.repeat(array, H // J, axis=2) for array in (key_BTJK, value_BTJK))
    behind_TS = np.arange(T)[:, None] - np.arange(T)
    seen_BHTS = ((behind_TS >= 0) & (behind_TS < (sliding_window or T)))[None, None]
    if documents_BT is not None:
        seen_BHTS = seen_BHTS & (documents_BT[:, None, :, None] == documents_BT[:, None, None])
    scores_BHTS = jnp.where(seen_BHTS, jnp.einsum("bthk,bshk->bhts", query_BTHK, key_BTHK), -jnp.inf)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores_BHTS, axis=-1), value_BTHK)


def inputs(rows, seq_len, documents):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(0, 0.5, (rows, seq_len, heads, K)).astype(np.float32) for heads in (H, J, J)]
    ids = [np.sort(rng.integers(0, 5, (rows, seq_len)), axis=1).astype(np.int32)] if documents else []
    return arrays, ids


def results(attend, arrays, ids):
    """What attention gives, and the gradient of its arrays for a random cotangent."""
    mixed_BTHK, gradient = jax.vjp(lambda *arrays: attend(*arrays, *ids), *arrays)
    cotangent = np.random.default_rng(1).normal(0, 1, mixed_BTHK.shape).astype(np.float32)
    return [mixed_BTHK, *gradient(cotangent)]


@pytest.mark.parametrize(
    ("seq_len", "sliding_window", "documents"),
    [(128, None, False), (256, None, True), (640, None, True), (640, 200, False), (384, 100, True), (128, 1, False)],
)
def test_it_computes_what_plain_attention_does(seq_len, sliding_window, documents):
    arrays, ids = inputs(2, seq_len, documents)
    expected = results(partial(plain, sliding_window), arrays, ids)
    found = results(partial(splash_attention, sliding_window, interpret=True), arrays, ids)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)  # sums in another order
    of_query = expected[1]
    assert (np.abs(of_query).max() > 0.1) == (sliding_window != 1)  # one score has the share 1, whatever it is


def most_apart(sizes, documents):
    """The largest difference between what each device of a mesh computes for itself and what one does."""
    arrays, ids = inputs(8, 128, documents)
    attend = partial(splash_attention, None, interpret=True)
    each = jax.jit(lambda *arrays: results(on_each(make_mesh(MeshConfig(*sizes)), attend, J), arrays, ids))
    found = each(*arrays)
    return max(float(np.abs(one - other).max()) for one, other in zip(found, results(attend, arrays, ids), strict=True))


def main(file):
    jax.config.update("jax_num_cpu_devices", 8)
    told = {f"{sizes} {documents}": most_apart(sizes, documents) for sizes in MESHES for documents in (False, True)}
    Path(file).write_text(json.dumps(told))


def test_each_device_attends_for_itself(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    file = tmp_path / "told.json"
    done = subprocess.run([sys.executable, __file__, file], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(file.read_text())
    assert len(told) == 2 * len(MESHES) and max(told.values()) < 1e-5, told


if __name__ == "__main__":
    main(sys.argv[1])
