"""What is missing or broken is found before it is needed."""

import sys

import pytest

from engine.kernels import attention_backends
from engine.kernels.attention_backends import flash_attn_fault, import_fault, triton_fault

METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: 2.8.3\n"


def install(folder, distribution, source):
    """A package flash_attn, as a distribution of some name would have it; None: a namespace."""
    info = folder / f"{distribution.replace('-', '_')}-2.8.3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA.format(distribution))
    (folder / "flash_attn").mkdir()
    if source is not None:
        (folder / "flash_attn" / "__init__.py").write_text(source)


@pytest.mark.parametrize(
    ("distribution", "source", "fault"),
    [
        ("flash-attn-4", None, "no flash_attn"),
        ("flash-attn", "raise ImportError('undefined symbol: _ZN3c10')", "_ZN3c10"),
        ("flash-attn", None, "not imported: ImportError"),
        ("flash-attn", "flash_attn_varlen_func = print", None),
    ],
)
def test_flash_attn_counts_if_its_function_imports(
    distribution, source, fault, tmp_path, monkeypatch
):
    install(tmp_path, distribution, source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    import_fault.cache_clear()
    found = flash_attn_fault()
    import_fault.cache_clear()
    assert found is fault is None or fault in found
    assert "flash_attn" not in sys.modules


def test_an_import_that_kills_its_python_or_never_ends_is_a_fault(monkeypatch):
    assert import_fault("import os; os.kill(os.getpid(), 11)") == "not imported: exit code -11"
    monkeypatch.setattr(attention_backends, "_IMPORT_LIMIT_S", 0.1)
    assert "timed out" in import_fault("import time; time.sleep(9)")


def test_triton_needs_a_compiler_and_pythons_headers(tmp_path):
    pytest.importorskip("triton")
    (tmp_path / "Python.h").touch()
    there = {"CC": "/opt/cc"}
    assert triton_fault(there, tmp_path) is None
    assert triton_fault(there, tmp_path / "elsewhere") == "no Python.h for triton"
    assert triton_fault({"PATH": str(tmp_path)}, tmp_path) == "no C compiler for triton"
    compiler = tmp_path / "gcc"
    compiler.write_text("")
    compiler.chmod(0o755)
    assert triton_fault({"PATH": str(tmp_path)}, tmp_path) is None
