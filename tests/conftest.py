import gc
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import hypothesis
import pytest

from tests.checkpoints import make_checkpoint, use_one_thread
from tests.daemons import ARMS, QUICK_TORCH, Daemon

# without a GPU Triton interprets its kernels; it asks when it is imported
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    Daemon.python_path = QUICK_TORCH

# tests start some thousand processes: each would compile the modules that it imports again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# machines are shared: no test fails because it was slow, and what fails once fails again;
# other examples than the usual ones: pytest --hypothesis-profile explore
hypothesis.settings.register_profile("penstock", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("penstock")


LONGEST = (
    "test_recovery.py",
    "test_exactness.py",
    "test_swaps.py",
    "test_several_gpus.py",
    "test_daemon_death.py",
    "scheduler/test_router.py",
    "tests/test_prefix_cache.py",
    "test_kernel_memory.py",
    "test_ssd_cache.py",
    "hub/test_download.py",
    "test_manners.py",
    "test_quantisation.py",
    "test_kernels_compile.py",
    "test_int8_kv.py",
    "test_sweep.py",
    "worker/test_family_modes.py",
    "worker/test_recurrent_modes.py",
    "model/test_transformer.py",
    "model/test_row_bits.py",
    "tui/test_keys.py",
    "prefixes/test_prefix_cache.py",
    "test_replay.py",
    "tui/test_replay_console.py",
    "test_booted.py",
)
"""Files that take longest, in this order, where no durations are recorded: a process that began one
of them at the end would work on it alone. xdist's own order begins with the quickest."""
DURATIONS = Path(os.environ.get("TEST_DURATIONS", os.devnull))
"""A file outside the tree, named by `.ci/run`: the seconds of each file in the last whole run."""
_seconds: Counter[str] = Counter()


def pytest_collection_modifyitems(items):
    recorded = json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}

    def rank(item):
        file = item.nodeid.partition("::")[0]
        if recorded:
            return -recorded.get(file, 0)
        found = (i for i, name in enumerate(LONGEST) if file.endswith(f"/{name}"))
        return next(found, len(LONGEST))

    items.sort(key=rank)  # others, and the tests of a file, stay in their order


def pytest_runtest_logreport(report):
    _seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish(session):
    """Record the durations, once: where xdist's processes report to."""
    if "TEST_DURATIONS" in os.environ and not hasattr(session.config, "workerinput"):
        DURATIONS.parent.mkdir(parents=True, exist_ok=True)
        rounded = {file: round(seconds, 2) for file, seconds in _seconds.most_common()}
        DURATIONS.write_text(json.dumps(rounded, indent=1) + "\n")


def pytest_collection():
    gc.disable()  # while modules load and items are made: a million objects, and no garbage


def pytest_collection_finish():
    """Where torch was imported; where it is later, the makers of checkpoints see to its threads."""
    gc.freeze()  # none of them is looked at again
    gc.enable()
    if "torch" in sys.modules:
        use_one_thread()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Let a test draw the same numbers, whatever its process ran before."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def runtime_folder(tmp_path_factory):
    """Give sockets and claims of cores a folder of their own: a daemon in use is left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        yield


@pytest.fixture
def in_time():
    """Let a test that waits for ever fail, as one that opens a pipe nobody writes to."""

    def end(*_):
        has_ended.append(True)
        raise TimeoutError

    has_ended = []
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 120, 1)  # again, where the first was taken for a refusal
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    assert not has_ended, "the test may have taken it for a refusal"


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """A float32 Llama of 3 layers and 2,048 positions, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    return make_checkpoint(folder, max_position_embeddings=2048)


@pytest.fixture
def start_daemon(tmp_path):
    """Start daemons that are stopped, and shown to have stopped, at the end of the test."""
    started = []

    def start(*args, folder=None, **kwargs):
        daemon = Daemon(folder or tmp_path / f"d{len(started)}", *args, **kwargs)
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.kill()
        daemon.http.close()


@pytest.fixture(scope="module", params=["shm", "colocated", "elastic"])
def arm(request):
    return request.param


@pytest.fixture(scope="module")
def daemon(arm, tiny_llama, tmp_path_factory):
    """A ready daemon on the tiny model; drained at the end.

    The one with elastic roles has one pool: switched to static ones it is the arm `alias`.
    """
    daemon = Daemon(tmp_path_factory.mktemp(arm), *ARMS[arm], model=tiny_llama).wait_ready()
    yield daemon
    daemon.assert_all_free()
    assert daemon.stop() == 0
