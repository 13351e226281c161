"""Builds the compiled CPU kernels, one extension module for each instruction set.

The same C files are compiled once per level, as many levels at a time as there are cores;
`engine/kernels/cpu.py` imports the best one that the machine can run. All are optional: without a C
compiler the install succeeds and torch computes.
"""

import copy
import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("engine/kernels")
COMMON = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
VARIABLE = "PENSTOCK_BUILD_KERNELS"
"""`all` levels, or `none`."""
X86_LEVELS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl")]
    + ["-mfma", "-mf16c", "-mprefer-vector-width=512"],
}
X86_LEVELS["avx512bf16"] = [*X86_LEVELS["avx512"], "-mavx512bf16"]
X86_LEVELS["amx"] = [*X86_LEVELS["avx512bf16"], "-mamx-tile", "-mamx-bf16"]


def levels() -> dict[str, list[str]]:
    """The compiler's flags for each level that this architecture can have."""
    is_x86 = platform.machine() in {"x86_64", "AMD64"}
    known = {"portable": []} | (X86_LEVELS if is_x86 else {})
    return known if os.environ.get(VARIABLE, "all") == "all" else {}


class BuildLevels(build_ext):
    """Builds several at a time, each in a folder of its own: their object files have one name."""

    def finalize_options(self) -> None:
        """As many at a time as there are cores, unless somebody says how many."""
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        """One level, by a builder that others do not share."""
        apart = copy.copy(self)
        apart.build_temp = os.path.join(self.build_temp, ext.name)
        build_ext.build_extension(apart, ext)


setup(
    cmdclass={"build_ext": BuildLevels},
    ext_modules=[
        Extension(
            f"engine.kernels._{level}",
            sources=sorted(str(path) for path in FOLDER.glob("*.c")),
            depends=sorted(str(path) for path in FOLDER.glob("*.h")),
            define_macros=[("LEVEL", level)],
            extra_compile_args=COMMON + flags,
            extra_link_args=["-pthread"],
            optional=True,
        )
        for level, flags in levels().items()
    ],
)
