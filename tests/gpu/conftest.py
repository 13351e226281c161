import os
from pathlib import Path

import pytest

# workers are processes of their own, which do not see pytest's path where nothing is installed
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parent.parent.parent), os.environ.get("PYTHONPATH")))
)


def pytest_collection_modifyitems(items):
    import torch

    reason = None if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def uuid():
    """Of the first GPU that torch sees, as the driver has it."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


@pytest.fixture
def cuda_device(uuid):
    from engine.worker.device import CudaDevice

    return CudaDevice(uuid)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    from engine.checkpoint.checkpoint import Checkpoint
    from tests.checkpoints import make_checkpoint

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    return Checkpoint.open(make_checkpoint(folder, max_position_embeddings=2048))
