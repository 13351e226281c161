"""Every family on a real GPU, in bfloat16 and float32: transformers' tokens, or tied ones."""

import pytest

from tests.checkpoints import FAMILIES
from tests.engine.gpu_worker import DTYPES, check_family


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_yields_transformers_tokens(family, dtype, cuda_device, tmp_path):
    check_family(tmp_path / family, family, dtype, cuda_device)
