"""Builds the compiled kernels, each instruction set's file with its own flags.

Metadata is in pyproject.toml. Without a working C++ compiler the build succeeds without
them, and the numba and numpy kernels stand in.
"""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from glob import glob

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

# No -march=native: the file must run on other machines; and nothing that may change the
# bits of a result. -fno-math-errno only lets a root be one instruction.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-pthread",
]
# GCC warns of the deliberately undefined values in its own AVX-512 header (bug 105593).
AVX512_FLAGS = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512_FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
ISA_FLAGS = {
    "kernels/cpu/avx2.cpp": ["-mavx2", "-mf16c"],
    "kernels/cpu/avx512.cpp": AVX512_FLAGS,
}
PARALLEL_COMPILES = 2


class BuildKernels(build_ext):
    """Compiles the sources of an extension in parallel, each with its own flags."""

    def build_extension(self, ext: Extension) -> None:
        target = self.get_ext_fullpath(ext.name)
        if not (self.force or newer_group([*ext.sources, *ext.depends], target, "newer")):
            return
        try:
            with ThreadPoolExecutor(PARALLEL_COMPILES) as executor:
                objects = list(executor.map(lambda s: self._compile(ext, s), ext.sources))
            self.compiler.link_shared_object(
                objects, target, extra_postargs=ext.extra_link_args, target_lang="c++"
            )
        except Exception:
            # Raised again: setuptools warns, and goes on because the extension is optional.
            print("deep-optimizer-states: built WITHOUT its C++ kernels; numba or numpy will do")
            raise

    def _compile(self, ext: Extension, source: str) -> str:
        (compiled,) = self.compiler.compile(
            [source],
            output_dir=self.build_temp,
            include_dirs=ext.include_dirs,
            extra_postargs=[*ext.extra_compile_args, *ISA_FLAGS.get(source, [])],
        )
        return str(compiled)


def kernel_sources(machine: str) -> list[str]:
    """C++ files for a kind of machine, the slowest to compile first."""
    x86_64 = machine.lower() in {"x86_64", "amd64"}
    parts = [s for s in sorted(glob("kernels/cpu/*.cpp")) if x86_64 or s not in ISA_FLAGS]
    return ["kernels/bindings.cpp", *parts]


if __name__ == "__main__":  # scripts/native_tests.py reads the flags above
    setup(
        # Explicit: dos/kernels is a link to kernels, which must not become a package "kernels".
        packages=[
            "dos",
            "dos.doctor",
            "dos.execute",
            "dos.kernels",
            "dos.kernels.gpu",
            "dos.memory",
            "dos.plan",
            "perfmodel",
        ],
        package_data={"dos": ["py.typed"], "dos.kernels": ["*.pyi"]},
        ext_modules=[
            Extension(
                "dos.kernels._native",
                sources=kernel_sources(platform.machine()),
                depends=glob("kernels/cpu/*.hpp"),
                include_dirs=[pybind11.get_include()],
                extra_compile_args=FLAGS,
                extra_link_args=["-pthread"],
                language="c++",
                optional=True,
            )
        ],
        cmdclass={"build_ext": BuildKernels},
    )
