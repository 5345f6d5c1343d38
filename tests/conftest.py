"""What holds for every test: no deadlines; programs that compile quickly, in one folder for all of a session. And what
tests of prepared text begin with.
"""

import gc
import importlib.util
import os
import shutil
import signal
import tempfile
from importlib.metadata import version

import pytest
from hypothesis import HealthCheck, settings
from packaging.version import Version

# A slow machine is no failure.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
gc.set_threshold(50_000, 20, 20)  # tracing makes many objects that stay

# Machine code that is not worth its making for models this small: an update of one layer of width 16 takes a tenth of
# the processor's time to compile. Runs that are compared are compiled alike. The slow tests train for longer, and as a
# user does. jaxlib 0.11.1 has no other emitters any more, and ends the process at a flag that it does not know.
QUICK_TO_COMPILE = ("--xla_backend_optimization_level=0",)
if Version(version("jaxlib")) < Version("0.11.1"):
    QUICK_TO_COMPILE += ("--xla_cpu_use_fusion_emitters=false",)

# Files that take longest, first: so that the workers end together.
LONGEST = (
    "test_kill_and_resume.py", "test_lora.py", "test_mesh.py",
    "test_trainer.py", "test_rollback_after_resume.py", "test_verdicts.py", "test_divergence.py", "test_branch.py",
    "test_library.py", "test_report.py", "test_formulation.py", "test_generate.py", "test_adaptation.py",
    "test_plan_resumed.py", "test_cli.py", "test_averages.py", "test_side_effects.py", "test_optimizer.py",
    "test_bad_input.py", "test_transformer.py", "test_evaluate.py", "test_memory.py",
)  # fmt: skip

# What the tests write goes to memory where there is enough of it: each checkpoint waits for the disk some 60 times.
IN_MEMORY, NEEDED_BYTES = "/dev/shm", 6 << 30

# What imports and exports are held against, of the extras parity and judge: tests that need one of them are skipped where
# it is not installed, which the last lines say. With REQUIRE_PARITY=1, as the check sets it, that is an error.
PARITY = ("torch", "transformers", "peft", "lm_eval")

COMPILED, WRITTEN = pytest.StashKey[str](), pytest.StashKey[str]()


@pytest.fixture
def sources(tmp_path):
    """Two sources of text, as `write_sources` makes them."""
    from prepared_sources import write_sources

    return write_sources(tmp_path)


@pytest.fixture
def store_dir(tmp_path):
    return tmp_path / "prepared"


def pytest_configure(config):
    """Compiling is most of what runs cost here. The folder is new, so that no session depends on one before it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background, and so all that it starts
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):  # of xdist: the environment is that of the process that started it
        return
    if os.environ.get("REQUIRE_PARITY") == "1" and (missing := not_installed()):
        raise pytest.UsageError(f"{', '.join(missing)}: not installed, and REQUIRE_PARITY is 1; `make parity` does it")
    # Devices are simulated. On a card float32 products are exact enough at the highest precision alone, and workers and
    # what they start share it.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if os.environ["JAX_PLATFORMS"] != "cpu":
        os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch: each worker takes a core already
    config.stash[COMPILED] = tempfile.mkdtemp(prefix="compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = config.stash[COMPILED]
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    memory = os.path.isdir(IN_MEMORY) and os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free
    if config.option.basetemp is None and memory and memory > NEEDED_BYTES:
        config.option.basetemp = config.stash[WRITTEN] = tempfile.mkdtemp(prefix="pytest-", dir=IN_MEMORY)
    if config.option.markexpr not in ("slow", "quickstart"):
        os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *QUICK_TO_COMPILE])


def not_installed() -> list[str]:
    return [name for name in PARITY if importlib.util.find_spec(name) is None]


def pytest_terminal_summary(terminalreporter):
    if missing := not_installed():
        told = f"{', '.join(missing)} not installed: what is held against them was skipped; `make parity` installs them"
        terminalreporter.section("parity")
        terminalreporter.line(told)


def pytest_unconfigure(config):
    for folder in (COMPILED, WRITTEN):
        if folder in config.stash:
            shutil.rmtree(config.stash[folder], ignore_errors=True)


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))
