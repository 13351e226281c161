import importlib

import pytest


@pytest.fixture(scope="session", autouse=True)
def triton_interpreter():
    """Triton 3.6, which torch 2.11 brings, takes arrays of one for numbers, as NumPy 2.4 does not.

    Mended as 3.7 is.
    """
    try:
        interpreter = importlib.import_module("triton.runtime.interpreter")
    except ImportError:
        return
    version = importlib.import_module("triton").__version__
    if tuple(map(int, version.split(".")[:2])) >= (3, 7):
        return
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)  # which notes what was there, to be put back
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_and_mend
