"""Builds the compiled kernels, each instruction set's file with its own flags.

Metadata is in pyproject.toml. Without a working C++ compiler the build succeeds without
them, and the numba and numpy kernels stand in.
"""

from __future__ import annotations

import platform
import subprocess
import tempfile
from collections.abc import Sequence
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

USES_LIBURING = "#include <liburing.h>\nint main() { return io_uring_queue_init(0, nullptr, 0); }\n"
# Its archive first: a wheel with that runs where no liburing is installed.
LIBURING_LINKS = (["-l:liburing.a", "-Wl,--exclude-libs,ALL"], ["-luring"])


def liburing(compiler: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags to compile and to link with liburing; none where this compiler does not find it."""
    with tempfile.TemporaryDirectory() as folder:
        for link in LIBURING_LINKS:
            command = [*compiler, "-x", "c++", "-", "-o", f"{folder}/program", *link]
            done = subprocess.run(command, input=USES_LIBURING, capture_output=True, text=True)
            if done.returncode == 0:
                return ["-DDOS_HAVE_LIBURING"], link
    return [], []


class BuildKernels(build_ext):
    """Compiles the sources of an extension in parallel, each with its own flags."""

    def build_extension(self, ext: Extension) -> None:
        target = self.get_ext_fullpath(ext.name)
        if not (self.force or newer_group([*ext.sources, *ext.depends], target, "newer")):
            return
        try:
            compile_flags, link_flags = liburing(self.compiler.compiler_cxx)
            if not link_flags:
                print("deep-optimizer-states: without liburing; checkpoints will use threads")
            ext.extra_compile_args += compile_flags
            with ThreadPoolExecutor(PARALLEL_COMPILES) as executor:
                objects = list(executor.map(lambda s: self._compile(ext, s), ext.sources))
            self.compiler.link_shared_object(
                objects,
                target,
                extra_postargs=[*ext.extra_link_args, *link_flags],
                target_lang="c++",
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
    return [*sorted(glob("kernels/*.cpp")), *parts, *sorted(glob("kernels/io/*.cpp"))]


if __name__ == "__main__":  # scripts/native_tests.py reads the flags above
    setup(
        # Explicit: dos/kernels is a link to kernels, which must not become a package "kernels".
        packages=[
            "dos",
            "dos.bench",
            "dos.checkpoint",
            "dos.doctor",
            "dos.execute",
            "dos.integrations",
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
                depends=glob("kernels/**/*.hpp", recursive=True),
                include_dirs=[pybind11.get_include()],
                extra_compile_args=[*FLAGS],
                extra_link_args=["-pthread"],
                language="c++",
                optional=True,
            )
        ],
        cmdclass={"build_ext": BuildKernels},
    )
