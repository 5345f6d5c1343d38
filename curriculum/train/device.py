"""The machine that trains: what is set before jax starts, and the console's lines about it."""

import ctypes
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from curriculum.errors import InputError, check_folder, check_read_as_utf8

# (part of the card's name, flag of XLA); docs/gpu.md says what each is for, who recommends it, and what was measured.
# jaxlib ends the process at a flag that it does not know: a test asks the installed one.
GPU_FLAGS = (
    ("", "--xla_gpu_enable_latency_hiding_scheduler=true"),
    ("", "--xla_gpu_enable_triton_gemm=false"),
    ("", "--xla_gpu_dot_merger_threshold_mb=0"),
    ("B200", "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL"),
)
# Without timing kernels, so that a machine that compiles anew takes the same ones.
DETERMINISTIC_FLAGS = ("--xla_gpu_deterministic_ops=true", "--xla_gpu_autotune_level=0")
HOST_MEMORY_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
LARGEST_HUGE_PAGE_BYTES = 32 << 20


def tune_device(deterministic: bool | None, root: Path = Path("/")) -> list[str]:
    """Set what helps on this machine; to be called before the process starts threads or a jax backend.

    With an NVIDIA driver, the flags for its cards are added to XLA_FLAGS, and if `deterministic` is true those for
    deterministic kernels. A flag that is already there keeps its value. Checkpoints leave the cards through memory that
    XLA would limit to 64 GB, less than the state of a large model on all cards of one process; all of the machine's is
    allowed. Returns the flags added. `root`: the folder that holds dev and proc.
    """
    tune_malloc()
    keep_host()
    if not has_nvidia_driver(root):
        return []
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    os.environ.setdefault(HOST_MEMORY_LIMIT, str(max(64, machine_bytes >> 30)))
    cards = card_names(root)
    flags = [flag for part, flag in GPU_FLAGS if not part or any(part in card for card in cards)]
    given = os.environ.get("XLA_FLAGS", "")
    added = missing_flags(given, [*flags, *(DETERMINISTIC_FLAGS if deterministic else [])])
    if added:
        os.environ["XLA_FLAGS"] = " ".join([*given.split(), *added])
    return added


def keep_host() -> None:
    """Let jax have the CPU as well if JAX_PLATFORMS names cards alone: saved arrays are read onto the host.

    To be called before the process starts a jax backend.
    """
    import jax

    platforms = jax.config.jax_platforms
    if platforms and "cpu" not in platforms.split(","):
        jax.config.update("jax_platforms", f"{platforms},cpu")


def check_platform() -> None:
    """Raise InputError if jax cannot start or has no device of JAX_PLATFORMS' first. Starts the jax backend.

    With the CPU beside it, as `keep_host` puts it there, jax passes over a card that it does not find without a word.
    """
    import jax

    wanted = (jax.config.jax_platforms or "").partition(",")[0]
    try:
        found = jax.default_backend()
    except RuntimeError as error:  # a driver or a plugin that does not work, or a platform that is none
        raise InputError(f"jax does not start: {error}") from error
    if wanted not in ("", "cpu") and found == "cpu":
        to_mend = f"see to the driver and to jax's plugin for it (pip install 'jax[cuda13]=={jax.__version__}')"
        raise InputError(f"JAX_PLATFORMS: got {wanted}, but jax finds no such device; {to_mend}, or unset it")


def check_settings() -> None:
    """Raise InputError for a setting of jax under which no run trains."""
    import jax

    unfit = {
        "jax_disable_jit": "a run's programs are compiled ahead",
        "jax_debug_infs": "a run keeps infinity where no loss is yet; jax_debug_nans finds what is no number",
    }
    on = {name: why for name, why in unfit.items() if getattr(jax.config, name)}
    if on:
        raise InputError(*(f"{name}: is on, and {why}; turn it off for this call" for name, why in on.items()))


@contextmanager
def own_settings() -> Iterator[None]:
    """Context in which the caller's mesh, and what he forbids his own code, do not reach what is computed here.

    Arrays of a run lie on the run's mesh, and jax would refuse them beside another one. Its transfers and promotions of
    ranks and types are meant. It holds in its own thread: in others is what he forbids in the whole process.
    """
    import jax

    with (
        jax.set_mesh(None),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.transfer_guard("allow"),
    ):
        yield


def cache_folder(store_dir: str | Path) -> str:
    """Where compiled programs are kept: beside the stores, or where JAX_COMPILATION_CACHE_DIR says."""
    import jax

    return jax.config.jax_compilation_cache_dir or str(Path(store_dir).absolute() / "compiled")


def cache_compiled(store_dir: str | Path) -> None:
    """Keep compiled programs beside the stores: a second start reads them instead of compiling again.

    A folder that jax already has (JAX_COMPILATION_CACHE_DIR) stays, with jax's own limits on what it keeps. So does
    that of an earlier run in this process: jax opens only one. Raises InputError for a path that jax cannot take.
    """
    import jax

    check_folder("store_dir", store_dir)
    if jax.config.jax_compilation_cache_dir is not None:
        return
    folder = cache_folder(store_dir)
    check_read_as_utf8(folder, "--store-dir: ")
    for path in Path(folder).glob("*-cache"):
        with suppress(OSError):  # another process may be quicker
            if not path.stat().st_size:  # of a full disk; jax would never write it again
                path.unlink()
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def missing_flags(given: str, flags: Sequence[str]) -> list[str]:
    """Those of `flags` whose names are not in `given`, the content of XLA_FLAGS."""
    names = {flag.partition("=")[0] for flag in given.split()}
    return [flag for flag in flags if flag.partition("=")[0] not in names]


def has_nvidia_driver(root: Path) -> bool:
    """Whether the machine has an NVIDIA driver; nothing is started to find out."""
    return any((root / path).exists() for path in ("proc/driver/nvidia/version", "dev/nvidiactl"))


def card_names(root: Path) -> list[str]:
    """The model names of the NVIDIA cards, from their driver; empty if it does not tell."""
    files = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    try:
        lines = [line for path in files for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def device_lines(added: Sequence[str], compute_dtype: str | None, root: Path = Path("/")) -> list[str]:
    """Console lines on what the devices are, what was set for them, and what would make better use of them.

    Starts the jax backend. `added`: what `tune_device` returned. `compute_dtype`: the model's, None for a custom
    model.
    """
    import jax

    devices = jax.devices()
    if devices[0].platform == "gpu":
        stats = devices[0].memory_stats() or {}
        return gpu_lines(len(devices), devices[0].device_kind, stats.get("bytes_limit"), added, compute_dtype)
    if devices[0].platform != "cpu":
        return [f"  devices    {len(devices)} x {devices[0].device_kind}"]
    num, num_processes = len(devices), jax.process_count()
    what = "the CPU" if num == 1 else f"{num} simulated on the CPU"
    if num_processes > 1:
        what = f"{num} on the CPUs of {num_processes} processes"
    lines = [f"  devices    {what}"]
    if has_nvidia_driver(root) and "cpu" not in (jax.config.jax_platforms or ""):
        install = f"pip install 'jax[cuda13]=={jax.__version__}' (an older driver: cuda12)"
        lines.append(f"             jax sees no GPU, though the machine has an NVIDIA driver: {install}")
    return lines


def gpu_lines(
    num_devices: int, kind: str, bytes_limit: int | None, added: Sequence[str], compute_dtype: str | None
) -> list[str]:
    """`device_lines` for GPUs; `bytes_limit` is what jax may use of each card's memory, None if unknown."""
    memory = "" if bytes_limit is None else f", {bytes_limit / 1e9:.1f} GB of each for jax (XLA_CLIENT_MEM_FRACTION)"
    lines = [f"  devices    {num_devices} x {kind}{memory}"]
    if added:
        lines.append(f"             added to XLA_FLAGS: {' '.join(added)} (docs/gpu.md)")
    if compute_dtype == "float32":
        lines.append(
            "             model.compute_dtype: bfloat16 takes less than half the time of float32 (docs/gpu.md)"
        )
    return lines


def tune_malloc() -> None:
    """Make glibc keep freed memory, so that XLA's temporaries cost no page faults; without glibc do nothing.

    To be called before the process starts threads or compiles. The memory of the largest program then stays with the
    process, up to three times over (docs/performance.md). Where the kernel gives huge pages to those who ask, what
    is allocated from then on lies in such, up to half of the machine's memory.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    m_mmap_max, m_trim_threshold, m_top_pad, m_arena_max = -4, -1, -2, -8  # malloc.h
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, -1)  # as a size_t the largest threshold: never trim
    libc.mallopt(m_top_pad, 64 << 20)
    # A thread with an arena of its own would take large blocks from mmap all the same.
    libc.mallopt(m_arena_max, 1)
    if _can_ask_for_huge_pages():
        _ask_for_huge_pages(libc)


def _can_ask_for_huge_pages(root: Path = Path("/")) -> bool:
    """Whether the kernel gives huge pages to those alone who ask, and addresses that are reserved cost nothing.

    They cost something if they are limited (`ulimit -v`, `-d`), if the kernel counts them as memory, or if glibc is to
    fill what it allocates (MALLOC_PERTURB_). A huge page of a kernel with pages of 64 KiB is 512 MiB: too large.
    """
    import resource  # not on Windows

    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    if any(limit != resource.RLIM_INFINITY for limit in limits) or "MALLOC_PERTURB_" in os.environ:
        return False
    files = ("sys/kernel/mm/transparent_hugepage/enabled", "sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    try:
        enabled, size, overcommit = (
            (root / path).read_text(encoding="utf-8") for path in (*files, "proc/sys/vm/overcommit_memory")
        )
    except OSError:
        return False
    return "[madvise]" in enabled and int(size) <= LARGEST_HUGE_PAGE_BYTES and overcommit.strip() != "2"


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """Ask for huge pages for what the heap will grow by.

    A block of half of the machine's memory is reserved and freed untouched. As nothing is trimmed, the heap keeps its
    addresses, and what is allocated later lies there.
    """
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes, libc.madvise.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page, madv_hugepage = os.sysconf("SC_PAGE_SIZE"), 14  # asm-generic/mman-common.h
    num_bytes = os.sysconf("SC_PHYS_PAGES") // 2 * page
    if (block := libc.malloc(num_bytes)) is not None:
        libc.madvise(-(-block // page) * page, num_bytes - page, madv_hugepage)
        libc.free(block)
