"""The machine: flags that are added and those that are kept, what is said, malloc, and where programs are kept."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from curriculum.errors import InputError
from curriculum.train import device
from curriculum.train.device import (
    DETERMINISTIC_FLAGS,
    GPU_FLAGS,
    HOST_MEMORY_LIMIT,
    cache_compiled,
    card_names,
    device_lines,
    gpu_lines,
    has_nvidia_driver,
    missing_flags,
    tune_device,
)

SCHEDULER = "--xla_gpu_enable_latency_hiding_scheduler=true"
PRODUCTS = ["--xla_gpu_enable_triton_gemm=false", "--xla_gpu_dot_merger_threshold_mb=0"]
COMMAND_BUFFER = "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL"


@pytest.fixture
def gpu_machine(tmp_path):
    """A root folder as the driver of two H200 fills it; Model can be written anew."""

    def machine(model="NVIDIA H200"):
        for gpu in ("0000:18:00.0", "0000:2a:00.0"):
            folder = tmp_path / "proc/driver/nvidia/gpus" / gpu
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 157\nGPU UUID: \t GPU-1\n")
        (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX")
        return tmp_path

    return machine


@pytest.mark.parametrize(
    ("given", "deterministic", "expected"),
    [
        ("", None, [SCHEDULER, *PRODUCTS]),
        ("", False, [SCHEDULER, *PRODUCTS]),
        ("", True, [SCHEDULER, *PRODUCTS, *DETERMINISTIC_FLAGS]),
        ("--xla_gpu_enable_latency_hiding_scheduler=false", None, PRODUCTS),
        ("--xla_gpu_deterministic_ops=false", True, [SCHEDULER, *PRODUCTS, DETERMINISTIC_FLAGS[1]]),
        ("--xla_gpu_autotune_level", True, [SCHEDULER, *PRODUCTS, DETERMINISTIC_FLAGS[0]]),
        ("--xla_gpu_enable_latency_hiding_scheduler_more=1", None, [SCHEDULER, *PRODUCTS]),
        (" --xla_dump_to=/tmp/x  --xla_gpu_ftz=true", True, [SCHEDULER, *PRODUCTS, *DETERMINISTIC_FLAGS]),
    ],
)
def test_flags_are_added_to_those_that_are_given(gpu_machine, monkeypatch, given, deterministic, expected):
    monkeypatch.setenv("XLA_FLAGS", given)
    assert tune_device(deterministic, gpu_machine()) == expected
    assert os.environ["XLA_FLAGS"].split() == given.split() + expected


def test_a_card_has_flags_of_its_own(gpu_machine, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert card_names(gpu_machine("NVIDIA B200")) == ["NVIDIA B200", "NVIDIA B200"]
    assert tune_device(None, gpu_machine("NVIDIA B200")) == [SCHEDULER, *PRODUCTS, COMMAND_BUFFER]
    assert tune_device(None, gpu_machine("NVIDIA GB200")) == []  # they are there by now


def test_without_a_gpu_nothing_is_set(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert tune_device(True, tmp_path) == [] and "XLA_FLAGS" not in os.environ
    assert not has_nvidia_driver(tmp_path) and card_names(tmp_path) == []
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert has_nvidia_driver(tmp_path)


def test_checkpoints_may_leave_the_cards_through_all_of_the_machines_memory(gpu_machine, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    for given, expected in (("7", 7), (None, max(64, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30))):
        monkeypatch.setenv(HOST_MEMORY_LIMIT, "")  # restored after the test
        os.environ.pop(HOST_MEMORY_LIMIT) if given is None else monkeypatch.setenv(HOST_MEMORY_LIMIT, given)
        tune_device(None, gpu_machine())
        assert int(os.environ[HOST_MEMORY_LIMIT]) == expected


def run(program, *arguments, **environment):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.parametrize(("given", "kept"), [("cuda", "cuda,cpu"), ("cpu", "cpu"), ("cuda,cpu", "cuda,cpu"), ("", "")])
def test_the_cpu_stays_beside_a_card_that_is_asked_for(given, kept):
    program = "import jax; from curriculum.train.device import tune_device; tune_device(None); print(jax.config.jax_platforms or '')"
    done = run(program, JAX_PLATFORMS=given)
    assert (done.returncode, done.stdout.strip()) == (0, kept), done.stderr


@pytest.mark.parametrize(("given", "refused"), [("cuda", True), ("cuda,cpu", True), ("cpu", False), ("", False)])
def test_a_card_that_is_asked_for_and_not_there_is_no_cpu(given, refused):
    if jax.devices()[0].platform != "cpu":
        pytest.skip("what is said where jax sees no GPU")
    program = "from curriculum.train.device import check_platform, tune_device; tune_device(None); check_platform()"
    done = run(program, JAX_PLATFORMS=given)
    assert (done.returncode != 0) == refused, done.stderr
    assert ("InputError: JAX_PLATFORMS: got cuda, but jax finds no such device" in done.stderr) == refused


def test_a_platform_that_is_none_is_told_in_a_line():
    done = run("from curriculum.train.device import check_platform; check_platform()", JAX_PLATFORMS="no_such")
    told = done.stderr.splitlines()[-1]
    assert told.startswith("curriculum.errors.InputError: jax does not start: ") and "no_such" in told


def test_a_flag_is_known_by_its_whole_name():
    assert missing_flags("--a=1 --bc=2", ["--a=3", "--b=4"]) == ["--b=4"]


@pytest.mark.parametrize(
    "flag", [*(flag for _, flag in GPU_FLAGS), *DETERMINISTIC_FLAGS, "--xla_gpu_no_such_flag=true"]
)
def test_the_installed_jaxlib_knows_each_flag(flag):
    """Set as a run sets it: jax is imported already, its backend has not started."""
    program = "import os, sys, jax; os.environ['XLA_FLAGS'] = sys.argv[1]; print(len(jax.devices()))"
    done = run(program, flag, XLA_FLAGS="", JAX_PLATFORMS="cpu")
    known = "no_such" not in flag
    assert (done.returncode == 0) == known and (done.stdout == "1\n") == known, done.stderr


def lines_of(root, **environment):
    program = "import sys, pathlib; from curriculum.train.device import device_lines\nprint(*device_lines([], 'float32', pathlib.Path(sys.argv[1])), sep='\\n')"
    kept = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)], env={**kept, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_cpu_is_one_line_and_a_gpu_that_jax_does_not_see_is_told(tmp_path, gpu_machine):
    if jax.devices()[0].platform != "cpu":
        pytest.skip("what is said where jax sees no GPU")
    assert lines_of(tmp_path) == ["  devices    the CPU"]
    assert lines_of(tmp_path, JAX_NUM_CPU_DEVICES="8") == ["  devices    8 simulated on the CPU"]
    told, how = lines_of(gpu_machine())
    assert told == "  devices    the CPU" and f"pip install 'jax[cuda13]=={jax.__version__}'" in how
    assert lines_of(gpu_machine(), JAX_PLATFORMS="cpu") == ["  devices    the CPU"]


def test_a_gpu_is_named_with_its_memory_and_what_was_set():
    assert gpu_lines(2, "NVIDIA H200", 112_500_000_000, [SCHEDULER, *PRODUCTS], "bfloat16") == [
        "  devices    2 x NVIDIA H200, 112.5 GB of each for jax (XLA_CLIENT_MEM_FRACTION)",
        f"             added to XLA_FLAGS: {SCHEDULER} {' '.join(PRODUCTS)} (docs/gpu.md)",
    ]
    assert gpu_lines(1, "NVIDIA H200", None, [], None) == ["  devices    1 x NVIDIA H200"]
    one, hint = gpu_lines(1, "NVIDIA H200", None, [], "float32")
    assert one == "  devices    1 x NVIDIA H200"
    assert hint.strip().startswith("model.compute_dtype: bfloat16 takes less than half the time of float32")


def test_a_tpu_is_named_without_what_is_true_of_gpus(monkeypatch):
    chips = [SimpleNamespace(platform="tpu", device_kind="TPU v5 lite", memory_stats=lambda: {"bytes_limit": 16e9})] * 4
    monkeypatch.setattr(jax, "devices", lambda: chips)
    assert device_lines([], "float32") == ["  devices    4 x TPU v5 lite"]


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted as Linux does, malloc is glibc's")
def test_freed_blocks_stay_with_the_process_in_every_thread():
    program = """
import ctypes, platform, resource, threading
from curriculum.train.device import tune_malloc

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def touch():
    block = libc.malloc(200 << 20)
    ctypes.memset(block, 1, 200 << 20)
    libc.free(block)

def count():
    touch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    touch()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

if platform.libc_ver()[0] == "glibc":
    count()
    tune_malloc()
    count()
    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    if not done.stdout:
        pytest.skip("this libc is not glibc")
    plain, tuned, tuned_thread = map(int, done.stdout.split())
    assert max(tuned, tuned_thread) < 10 < plain  # huge pages or not


GROWN = """
import os, resource, sys

limit = int(sys.argv[1])
if limit:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

import ctypes
from curriculum.train.device import tune_malloc

def kilobytes(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

before = kilobytes("VmRSS"), kilobytes("VmSize")
tune_malloc()
print(kilobytes("VmRSS") - before[0], kilobytes("VmSize") - before[1])
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
middle = libc.malloc(200 << 20) + (100 << 20)
for line in open("/proc/self/smaps"):
    first, _, rest = line.partition(" ")[0].partition("-")
    if rest and not first.endswith(":"):
        inside = int(first, 16) <= middle < int(rest, 16)
    elif line.startswith("VmFlags") and inside:
        print(line)
"""


def grown(limit=0):
    """(kB of memory, kB of addresses that tune_malloc adds; flags of a block allocated afterwards), in a process."""
    if platform.libc_ver()[0] != "glibc" or not device._can_ask_for_huge_pages():
        pytest.skip("this machine gives huge pages to all or to none, or its libc is not glibc")
    command = [sys.executable, "-c", GROWN, str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    memory, addresses, *flags = done.stdout.split()
    return int(memory), int(addresses), flags


def test_what_is_allocated_is_in_huge_pages_where_one_may_ask_for_them():
    """hg: VM_HUGEPAGE, in `man 5 proc_pid_smaps`."""
    memory, addresses, flags = grown()
    assert memory < 8192 < addresses  # reserved, but not touched
    assert "hg" in flags


def test_addresses_that_are_limited_are_not_reserved():
    half = os.sysconf("SC_PHYS_PAGES") // 2 * os.sysconf("SC_PAGE_SIZE")
    _, addresses, flags = grown(half + (2 << 30))
    assert addresses < 1 << 20
    assert flags and "hg" not in flags


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"enabled": "[always] madvise never"}, False),
        ({"enabled": "always madvise [never]"}, False),
        ({"size": str(512 << 20)}, False),
        ({"overcommit": "2"}, False),
        ({"overcommit": None}, False),
    ],
)
def test_when_huge_pages_are_asked_for(tmp_path, monkeypatch, changed, expected):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    monkeypatch.delenv("MALLOC_PERTURB_", raising=False)
    found = {"enabled": "always [madvise] never", "size": str(2 << 20), "overcommit": "0"} | changed
    pages = "sys/kernel/mm/transparent_hugepage"
    places = {"enabled": f"{pages}/enabled", "size": f"{pages}/hpage_pmd_size"}
    places["overcommit"] = "proc/sys/vm/overcommit_memory"
    for name, text in found.items():
        path = tmp_path / places[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(text + "\n")
    assert device._can_ask_for_huge_pages(tmp_path) is expected
    monkeypatch.setenv("MALLOC_PERTURB_", "7")
    assert not device._can_ask_for_huge_pages(tmp_path)


CACHE = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def kept():
    """The settings of jax's cache, put back afterwards."""
    before = {name: getattr(jax.config, name) for name in CACHE}
    yield lambda: tuple(getattr(jax.config, name) for name in CACHE)
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_that_a_full_disk_left_empty_are_removed(kept, tmp_path):
    jax.config.update("jax_compilation_cache_dir", None)
    (tmp_path / "compiled").mkdir()
    for name, content in (("whole-cache", b"whole"), ("empty-cache", b""), ("whole-atime", b"")):
        (tmp_path / "compiled" / name).write_bytes(content)
    cache_compiled(tmp_path)
    assert sorted(path.name for path in (tmp_path / "compiled").iterdir()) == ["whole-atime", "whole-cache"]


def test_a_store_directory_that_is_not_utf_8_is_told(kept, tmp_path):
    jax.config.update("jax_compilation_cache_dir", None)
    with pytest.raises(InputError, match=r"--store-dir: .*/s\\xff/compiled: the path is not read as UTF-8"):
        cache_compiled(tmp_path / os.fsdecode(b"s\xff"))


def test_compiled_programs_lie_beside_the_stores_where_jax_was_given_no_folder(kept, tmp_path):
    everything = str(tmp_path / "store/compiled"), 0.0, -1  # however small and quick
    own = str(tmp_path / "given"), 2.5, 7
    for given, expected in (((None, 1.0, 0), everything), (own, own)):
        for name, value in zip(CACHE, given, strict=True):
            jax.config.update(name, value)
        cache_compiled(tmp_path / "store")
        assert kept() == expected
