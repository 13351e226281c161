"""The best attention that a machine has is taken, and what is passed over is named."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels import attention_needs
from engine.kernels.attention_backends import (
    ATTENTION_BACKENDS,
    AttentionNeeds,
    Machine,
    choose_attention,
    this_machine,
)
from engine.kernels.attention_needs import flash_attn_fault, import_fault, triton_fault

LLAMA = AttentionNeeds("bfloat16", 128, has_softcap=False)
UNEVEN = "no layers that differ in their heads"
TOO_OLD = "needs compute capability 8.0"


def machine(torch=(2, 13), packages=("triton", "flash_attn"), capability=(9, 0)):
    faults = {name: f"no {name}" for name in ("triton", "flash_attn") if name not in packages}
    return Machine(torch, faults, capability)


@pytest.mark.parametrize(
    ("needs", "there", "name", "reasons"),
    [
        (LLAMA, machine(), "flash", []),
        (LLAMA, machine(packages=["triton"]), "torch_varlen", ["no flash_attn"]),
        (LLAMA, machine((2, 12), ["triton"]), "triton", ["no flash_attn", "needs torch 2.13"]),
        (
            AttentionNeeds("bfloat16", 256, has_softcap=True),
            machine(packages=["triton"]),
            "triton",
            ["no flash_attn", "no softcap"],
        ),
        (
            AttentionNeeds("float32", 128, has_softcap=False),
            machine(),
            "triton",
            ["no float32"] * 2,
        ),
        (
            AttentionNeeds("bfloat16", 128, has_softcap=False, block_size=64),
            machine(),
            "triton",
            ["blocks of 256"] * 2,
        ),
        (
            AttentionNeeds("float16", 100, has_softcap=False),
            machine(capability=None),
            "triton",
            ["no heads of 100"] * 2,
        ),
        (
            AttentionNeeds("bfloat16", 64, has_softcap=False, has_sinks=True),
            machine(),
            "triton",
            ["no sinks"] * 2,
        ),
        (
            AttentionNeeds("bfloat16", 256, has_softcap=False, has_uneven_heads=True),
            machine(),
            "torch",
            [UNEVEN] * 3,
        ),
        (
            AttentionNeeds("float16", 64, has_softcap=False),
            machine(capability=(7, 5)),
            "torch",
            [TOO_OLD] * 3,
        ),
        (LLAMA, machine(packages=[]), "torch", ["no triton"] * 3),
    ],
)
def test_the_first_that_can_is_taken_and_says_why_not_a_better_one(needs, there, name, reasons):
    chosen = choose_attention(needs, there)
    better = [backend.name for backend in ATTENTION_BACKENDS[: len(reasons)]]
    told = [f"{other}: {reason}" for other, reason in zip(better, reasons, strict=True)]
    assert (chosen.backend.name, list(chosen.passed_over)) == (name, told)
    assert chosen.title == (f"{name} ({'; '.join(told)})" if told else name)


@given(
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    head_dim=st.integers(1, 512),
    has_softcap=st.booleans(),
    torch=st.sampled_from([(2, 12), (2, 13), (3, 0)]),
    packages=st.sets(st.sampled_from(["triton", "flash_attn"])),
)
def test_a_pool_sized_for_the_chosen_one_does_not_change_the_choice(
    dtype, head_dim, has_softcap, torch, packages
):
    there = machine(torch, packages, None)
    chosen = choose_attention(AttentionNeeds(dtype, head_dim, has_softcap), there).backend
    sized = AttentionNeeds(dtype, head_dim, has_softcap, chosen.default_block_size)
    assert choose_attention(sized, there).backend is chosen


def test_what_is_installed_is_found_without_importing_it():
    found = this_machine()
    assert found.torch >= (2, 11)
    assert found.faults.keys() <= {"triton", "flash_attn"}


def test_a_library_that_does_not_import_is_passed_over_with_the_reason():
    fault = "not imported: ImportError: undefined symbol: _ZN3c10"
    there = Machine((2, 11), {"flash_attn": fault}, (9, 0))
    title = f"triton (flash: {fault}; torch_varlen: needs torch 2.13)"
    assert choose_attention(LLAMA, there).title == title
    there = Machine((2, 11), {"triton": "no C compiler for triton"}, (9, 0))
    assert choose_attention(LLAMA, there).backend.name == "torch"


def test_every_backend_likes_a_block_that_it_can_use():
    assert all(b.default_block_size % b.block_multiple == 0 for b in ATTENTION_BACKENDS)


# --------------------------------------------------------------------------------------------------
# What is missing or broken is found before it is needed.

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


def test_an_import_that_kills_its_python_or_never_ends_is_a_fault(monkeypatch, caplog):
    assert import_fault("import os; os.kill(os.getpid(), 11)").endswith(" exit code -11")
    for name, value in (("LIMIT", 0.15), ("TOLD", 0.05), ("LOOK", 0.05)):
        monkeypatch.setattr(attention_needs, f"_IMPORT_{name}_S", value)
    caplog.set_level("INFO", "penstock")
    assert "timed out" in import_fault("import time; time.sleep(9)")
    (told,) = caplog.messages
    assert told.endswith(" 0.15 s")


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
