"""cuDNN's attention in the program that cards would get: lowered for them from simulated devices, never run.

This file is run as a process of its own: the devices are made at its start.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import PartitionSpec as P

from curriculum.model.presets import ModelConfig
from curriculum.model.transformer import init_params, transformer
from curriculum.schema.sections import MeshConfig
from curriculum.train.mesh import ROW_AXES, make_mesh, on_each, on_mesh

ROOT = Path(__file__).parents[1]
B, T = 4, 8
CONFIG = ModelConfig(
    vocab_size=16, n_layer=1, n_head=4, n_kv_head=2, d_model=32, d_ff=32, max_seq_len=T, compute_dtype="bfloat16"
)
# Data, fsdp and tensor; the heads that a device then computes: all of them where the two groups do not split evenly.
MESHES = {(1, 1, 1): 4, (2, 2, 1): 4, (2, 1, 2): 2, (1, 1, 8): 4}


def lowered_gradient(mesh, seq_len=T, apart=False):
    """The text of a loss's gradient, lowered for cards. `apart`: documents are."""
    model = on_mesh(transformer(CONFIG), mesh)

    def loss(params, tokens_BT):
        documents_BT = (tokens_BT == 0).cumsum(axis=1) if apart else None
        return model.forward(params, tokens_BT, documents_BT, None).astype(jnp.float32).sum()

    tokens_BT = jax.ShapeDtypeStruct((B, seq_len), np.int32, sharding=jax.NamedSharding(mesh, P(ROW_AXES)))
    traced = jax.jit(jax.grad(loss)).trace(init_params(CONFIG, 0), tokens_BT)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def most_apart(mesh, masked):
    """The largest difference between attention on each device for itself and all at once, and the result's heads."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(B, T, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    masks = [np.tril(rng.random((B, 1, T, T)) < 0.7) | np.eye(T, dtype=bool)] if masked else []

    def attend(query, key, value, mask=None):
        return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True)

    each = jax.jit(on_each(mesh, attend, num_groups=2))(query, key, value, *masks)
    return float(np.abs(each - attend(query, key, value, *masks)).max())


def main(file):
    sys.path.append(str(ROOT / "tools"))
    from check_gpu_program import as_on_a_gpu

    jax.config.update("jax_num_cpu_devices", 8)
    meshes = {sizes: make_mesh(MeshConfig(*sizes)) for sizes in MESHES}
    told = {"differ": {f"{s} {masked}": most_apart(meshes[s], masked) for s in MESHES for masked in (False, True)}}
    with as_on_a_gpu(), mock.patch.object(cudnn, "cuda_versions", SimpleNamespace(cudnn_get_version=lambda: 91000)):
        told |= {f"{s} {apart}": lowered_gradient(meshes[s], apart=apart) for s in MESHES for apart in (False, True)}
        told["odd"] = lowered_gradient(meshes[1, 1, 1], seq_len=T - 1)
    file.write_text(json.dumps(told))


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    file = tmp_path_factory.mktemp("cudnn") / "told.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__, file], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("sizes", MESHES)
def test_each_card_calls_it_for_its_own_rows_and_heads(told, sizes, apart):
    shapes = re.findall(r"custom_call @__cudnn\$fmha.*?: \(tensor<(\d+)x\d+x(\d+)x", told[f"{sizes} {apart}"])
    assert shapes == [(str(B // sizes[0] // sizes[1]), str(MESHES[sizes]))] * 2  # forward and backward


@pytest.mark.parametrize("sizes", MESHES)
def test_a_later_process_finds_the_program_in_its_cache(told, sizes):
    """A call that the compiler splits holds an address of the process, which is part of the cache's key."""
    assert "CustomSPMDPartitioning" not in told[f"{sizes} False"] + told[f"{sizes} True"]


def test_beside_a_mask_it_is_causal_too(told):
    for apart in (False, True):
        assert re.findall(r"mask_type\\22: \\22(\w+)", told[f"(1, 1, 1) {apart}"]) == ["CAUSAL"] * 2


def test_an_odd_number_of_positions_is_left_to_plain_attention(told):
    assert "cudnn" not in told["odd"]


def test_each_device_for_itself_computes_what_one_does(told):
    assert len(told["differ"]) == 2 * len(MESHES) and max(told["differ"].values()) < 1e-6


if __name__ == "__main__":
    main(Path(sys.argv[1]))
