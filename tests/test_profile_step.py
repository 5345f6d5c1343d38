"""tools/profile_step.py: kernels of a card put together by the instruction that they compute."""

import profile_step
import pytest
from hlo_traffic import costs
from jax.profiler import ProfileData

PROFILE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "loop_add_fusion_1" } }
  event_metadata { key: 2 value { id: 2 name: "loop_add_fusion_2" } }
  event_metadata { key: 3 value { id: 3 name: "void lib::product_kernel<32, 16>(int)" } }
  event_metadata { key: 4 value { id: 4 name: "nvjet_sm90_tst_128x128_64x6" } }
  lines {
    name: "Stream #14(Compute)"
    events { metadata_id: 1 duration_ps: 3000000000 }
    events { metadata_id: 2 duration_ps: 3000000000 }
    events { metadata_id: 3 duration_ps: 1500000000 }
    events { metadata_id: 4 duration_ps: 9000000000 }
  }
  lines { name: "Framework Ops" events { metadata_id: 1 duration_ps: 7000000000 } }
}
planes { name: "/host:CPU" lines { name: "Stream" events { duration_ps: 7000000000 } } }
"""
PROGRAM = """
ENTRY %main (a: f32[1000,1000]) -> f32[1000,1000] {
  %a = f32[1000,1000]{1,0} parameter(0)
  %loop_add_fusion.1 = f32[1000,1000]{1,0} add(%a, %a), metadata={op_name="jit(f)/block_1/add"}
  ROOT %loop_add_fusion.2 = f32[1000,1000]{1,0} add(%loop_add_fusion.1, %a), metadata={op_name="jit(f)/block_2/add"}
}
"""


def test_kernels_of_a_kind_and_source_are_one_row():
    kernels = list(profile_step.kernels_of(ProfileData.from_text_proto(PROFILE)))
    assert [ms for _, ms in kernels] == [3, 3, 1.5, 9]
    products, adds, libs = profile_step.by_source(kernels, costs(PROGRAM))  # of three updates
    assert (products["kernel"], products["ms"], products["gb"]) == ("nvjet_sm90_tst", 3.0, None)
    assert (adds["kernel"], adds["source"], adds["ms"]) == ("loop_add_fusion", "jit(f)/block_#/add", 2.0)
    assert adds["tb_per_sec"] == pytest.approx((8e6 + 12e6) / 6e-3 / 1e12, abs=0.005)
    assert (libs["kernel"], libs["times"]) == ("lib::product_kernel", 0.3)


def test_without_a_card_it_says_what_it_needs(capsys):
    with pytest.raises(SystemExit):
        profile_step.main(["--size", "small"])
    assert "got jax backend cpu, expected an NVIDIA GPU" in capsys.readouterr().err
