"""Builds the compiled CPU kernels, one extension module for each instruction set.

Every level is compiled from the same C files; `engine/kernels/cpu.py` imports the best one that the
machine can run. An editable install builds `portable` and the best level of this machine, a wheel
builds all levels. PENSTOCK_BUILD_KERNELS=all, native or none says otherwise. A level that was built
from these sources before is kept. Without a C compiler the install succeeds, and torch computes.
"""

import os
import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha1
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, OptionError

FOLDER = Path("engine/kernels")
VARIABLE = "PENSTOCK_BUILD_KERNELS"
COMMON = [
    "-std=gnu11",
    "-O3",
    "-g0",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
]
STABLE_ABI = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"Py_LIMITED_API": "0x030B0000"}
"""The macro for modules that any Python from 3.11 on loads, but one without the lock."""
X86_LEVELS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl")]
    + ["-mfma", "-mf16c", "-mprefer-vector-width=512"],
}
X86_LEVELS["avx512bf16"] = [*X86_LEVELS["avx512"], "-mavx512bf16"]
X86_LEVELS["amx"] = [*X86_LEVELS["avx512bf16"], "-mamx-tile", "-mamx-bf16"]


def levels() -> dict[str, list[str]]:
    """Return the compiler's flags for each level that this architecture can have."""
    is_x86 = sysconfig.get_platform().endswith("x86_64")  # of the machine that it is built for
    return {"portable": []} | (X86_LEVELS if is_x86 else {})


class BuildLevels(build_ext):
    """Builds the levels that are wanted and not here yet, their files in parallel."""

    def finalize_options(self) -> None:
        """Choose the levels: by the variable, else by the kind of install."""
        super().finalize_options()
        self.in_source = bool(self.inplace)
        self.wanted = os.environ.get(VARIABLE) or ("native" if self.in_source else "all")
        if self.wanted not in {"all", "native", "none"}:
            raise OptionError(f"{VARIABLE} is {self.wanted}: all, native and none are possible")

    def build_extensions(self) -> None:
        """Build `portable`, which knows what this machine runs, then the other wanted levels."""
        by_level = {ext.name.rpartition("._")[2]: ext for ext in self.extensions}
        self.build_ids = {ext.name: self.build_id(ext) for ext in self.extensions}
        # Python's own libraries, and where they lay on the machine that built it, are none of ours
        self.compiler.linker_so = [
            word for word in self.compiler.linker_so if not word.startswith(("-L", "-Wl,-rpath"))
        ]
        for ext in self.extensions:
            self.remove_stale(ext)
        with ThreadPoolExecutor(self.parallel or len(os.sched_getaffinity(0))) as self.pool:
            if self.wanted == "all":
                for finish in [self.start(ext) for ext in self.extensions]:
                    finish()
            elif self.wanted == "native" and self.start(by_level["portable"])():
                best_first = self.levels_here(by_level["portable"])
                any(self.start(by_level[level])() for level in best_first)

    def file_in_source(self, ext: Extension) -> Path:
        """Return where an editable install has the module."""
        return FOLDER / Path(self.get_ext_filename(ext.name)).name

    def remove_stale(self, ext: Extension) -> None:
        """Remove modules of older sources, which must not be loaded.

        Also those named for one version of Python, which Python prefers to the stable ABI's.
        """
        pattern = f"{ext.name.rpartition('.')[2]}.*.so"
        stale = set(Path(self.get_ext_fullpath(ext.name)).parent.glob(pattern))
        if self.in_source:
            stale |= set(FOLDER.glob(pattern))
            if self.is_current(ext):
                stale.discard(self.file_in_source(ext))
        for file in stale:
            file.unlink()

    def build_id(self, ext: Extension) -> str:
        """Return a hash of all that the module is made of, which its file will contain."""
        command = [*self.compiler.compiler_so, *ext.extra_compile_args, str(ext.define_macros)]
        sources = [Path(path).read_bytes() for path in sorted([*ext.sources, *ext.depends])]
        return sha1(b"\0".join([" ".join(command).encode(), *sources])).hexdigest()

    def is_current(self, ext: Extension) -> bool:
        """True if the file in the source folder was made of what is there now."""
        file = self.file_in_source(ext)
        return file.exists() and bytes.fromhex(self.build_ids[ext.name]) in file.read_bytes()

    def start(self, ext: Extension):  # noqa: ANN201
        """Start compiling; return a function that ends it and says if there is a module."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        if self.is_current(ext):
            shutil.copy(self.file_in_source(ext), target)
            return lambda: True
        options = {
            "output_dir": os.path.join(self.build_temp, ext.name),
            "macros": ext.define_macros,
            "include_dirs": ext.include_dirs,
            "extra_postargs": ext.extra_compile_args,
        }
        largest_first = sorted(ext.sources, key=os.path.getsize, reverse=True)
        compile_one = self.compiler.compile
        started = [self.pool.submit(compile_one, [path], **options) for path in largest_first]

        def finish() -> bool:
            try:
                objects = [file for each in started for file in each.result()]
                link = [*ext.extra_link_args, f"-Wl,--build-id=0x{self.build_ids[ext.name]}"]
                self.compiler.link_shared_object(objects, str(target), extra_postargs=link)
            except (CCompilerError, BaseError) as error:
                self.warn(f"no kernels for {ext.name.rpartition('._')[2]}: {error}")
                return False
            return True

        return finish

    def levels_here(self, portable: Extension) -> tuple[str, ...]:
        """Ask the module just built which levels this machine runs; return the best first."""
        spec = spec_from_file_location(portable.name, self.get_ext_fullpath(portable.name))
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.supported()


if __name__ == "__main__":
    setup(
        options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
        cmdclass={"build_ext": BuildLevels},
        ext_modules=[
            Extension(
                f"engine.kernels._{level}",
                sources=sorted(str(path) for path in FOLDER.glob("*.c")),
                depends=sorted(str(path) for path in FOLDER.glob("*.h")),
                define_macros=[("LEVEL", level), *STABLE_ABI.items()],
                py_limited_api=bool(STABLE_ABI),
                extra_compile_args=COMMON + flags,
                extra_link_args=["-pthread"],
                optional=True,
            )
            for level, flags in levels().items()
        ],
    )
