import os
from pathlib import Path

import hypothesis
import pytest

from tests.checkpoints import make_checkpoint
from tests.daemons import ARMS, Daemon

# without a GPU Triton interprets its kernels; it asks when it is imported
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# machines are shared: no test fails because it was slow, and what fails once fails again;
# other examples than the usual ones: pytest --hypothesis-profile explore
hypothesis.settings.register_profile("penstock", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("penstock")


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


@pytest.fixture(scope="module", params=list(ARMS))
def arm(request):
    return request.param


@pytest.fixture(scope="module")
def daemon(arm, tiny_llama, tmp_path_factory):
    """A ready daemon on the tiny model, in each of the three arms; drained at the end."""
    daemon = Daemon(tmp_path_factory.mktemp(arm), *ARMS[arm], model=tiny_llama).wait_ready()
    yield daemon
    daemon.assert_all_free()
    assert daemon.stop() == 0
