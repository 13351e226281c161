"""What doctor says of installed packages, with packages of the test's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from appliance.doctor.packages import cuda_bytes, packages, sharing

GIB = 1 << 30
CUDA = {"nvidia-cublas": GIB, "nvidia_cudnn_cu13": GIB, "cuda-bindings": 5, "triton": 7}
OTHERS = {"nvidia-ml-py": GIB, "numpy": GIB, "triton-kernels": GIB}


def install(folder: Path, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        info = folder / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "RECORD").write_text(f"{name}/lib.so,sha256=0,{size}\n{name}/made.pyc,,\n")


@pytest.mark.parametrize(
    ("sizes", "has_gpus", "verdict"),
    [
        (CUDA | OTHERS, False, "note"),
        (CUDA, True, "ok"),
        (OTHERS, False, "ok"),
        ({"nvidia-nvtx": GIB - 1}, False, "ok"),
    ],
)
def test_gigabytes_of_cuda_are_told_where_no_gpu_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sizes, has_gpus, verdict
) -> None:
    install(tmp_path, sizes | {"penstock": 1, "torch": 1})
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = packages(has_gpus=has_gpus)
    assert found.verdict == verdict
    assert bool(found.hint) == (verdict == "note")
    assert cuda_bytes() == sum(
        size for name, size in sizes.items() if name in {*CUDA, "nvidia-nvtx"}
    )


def test_another_package_with_a_folder_named_as_ours_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(tmp_path, {"penstock": 1, "torch": 1, "engine": 1, "sloppy": 1, "engines": 1})
    owned = {"penstock": "engine\ntui\n", "engine": "engine\n", "sloppy": "sloppy\nmigrations\n"}
    for name, folders in owned.items():
        (tmp_path / f"{name}-1.dist-info" / "top_level.txt").write_text(folders)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert sharing() == ["engine", "sloppy"]
    found = packages(has_gpus=True)
    assert found.verdict == "note"
    assert found.hint


def test_a_missing_package_is_bad(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path, {"penstock": 1})
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert packages(has_gpus=True).verdict == "bad"
