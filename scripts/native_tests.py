"""Builds and runs the programs of tests/native: under sanitizers, or for AArch64 under qemu.

Run from the root of the tree, as the verbs do:

    python -m scripts.native_tests sanitize [--if-possible]
    python -m scripts.native_tests arm

Each tests/native/*.cpp is a program of its own, linked with the library's C++ sources. It is run
in an empty folder, is told where the golden vectors lie, and succeeds by ending with 0.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from glob import glob
from pathlib import Path
from types import ModuleType

from tests.native import golden

BUILD = Path("build/native")
GOLDEN = BUILD / "golden"
# Not a test of the library: it does what the sanitizers must notice.
FAULTS = "tests/native/faults.cpp"
RUN_LIMIT_S = 120.0
COMPILE_LIMIT_S = 300.0
ARM_COMPILER = "aarch64-linux-gnu-g++"
ARM_EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")


@cache
def setup() -> ModuleType:
    """setup.py as a module, for its sources and flags."""
    spec = importlib.util.spec_from_file_location("setup", "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def liburing(compiler: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Flags to compile and to link with liburing, where this compiler has it."""
    compile_flags, link_flags = setup().liburing(compiler)
    return compile_flags, link_flags


@dataclass(frozen=True)
class Build:
    """A way to build the programs and to run them."""

    name: str
    compiler: tuple[str, ...]
    flags: tuple[str, ...]
    machine: str = platform.machine()
    emulator: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sanitizer:
    """A compiler's option, and by which of its reports each fault must be caught."""

    name: str
    option: str
    faults: tuple[tuple[str, str], ...]


SANITIZERS = (
    Sanitizer(
        "asan+ubsan",
        "-fsanitize=address,undefined",
        (("overflow", "AddressSanitizer: heap-buffer-overflow"), ("undefined", "runtime error")),
    ),
    Sanitizer("tsan", "-fsanitize=thread", (("race", "ThreadSanitizer: data race"),)),
)
SANITIZER_FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")


class Failed(Exception):
    """A program that did not compile, or did not do what it should; says all it printed."""


def call(command: list[str], limit_s: float, cwd: str | None = None) -> str:
    """What a command prints; Failed with that if it ends with anything but 0."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise Failed(f"{command[0]} is not there") from error
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{command[0]} has not ended after {limit_s:.0f} s") from error
    if done.returncode:
        raise Failed(f"{done.stdout}{shlex.join(command)} ended with {done.returncode}")
    return done.stdout


def made(build: Build, name: str, command: list[str], inputs: list[str]) -> str:
    """The file that ``command -o FILE`` makes; not made again while nothing changes.

    Its name carries a digest of the compiler, the command and the contents of ``inputs``.
    """
    digest = hashlib.sha256(call([*build.compiler, "--version"], COMPILE_LIMIT_S).encode())
    digest.update(shlex.join(command).encode())
    for path in inputs:
        digest.update(Path(path).read_bytes())
    folder = BUILD / build.name
    target = folder / f"{name}-{digest.hexdigest()[:16]}"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{name}-*"):
            old.unlink(missing_ok=True)
        # Renamed when whole, since the compiler may be interrupted.
        part = target.with_name(f"part-{os.getpid()}-{target.name}")
        call([*build.compiler, *command, "-o", str(part)], COMPILE_LIMIT_S)
        part.rename(target)
    return str(target)


def compiled(build: Build, source: str) -> str:
    """The object file of a source."""
    headers = sorted(glob("kernels/**/*.hpp", recursive=True) + glob("tests/native/*.hpp"))
    flags = [*setup().FLAGS, *setup().ISA_FLAGS.get(source, []), *build.flags]
    flags += liburing(build.compiler)[0]
    name = source.removesuffix(".cpp").replace("/", "_") + ".o"
    return made(build, name, [*flags, "-I.", "-c", source], [source, *headers])


def linked(build: Build, source: str, library: list[str]) -> str:
    """The program made of a test's source and the library's objects."""
    objects = [compiled(build, source), *library]
    libraries = liburing(build.compiler)[1]
    return made(build, Path(source).stem, [*build.flags, "-pthread", *objects, *libraries], [])


def library_sources(build: Build) -> list[str]:
    """The library's C++ without what needs Python."""
    return [s for s in setup().kernel_sources(build.machine) if Path(s).parent.name != "kernels"]


def build_all(build: Build) -> list[str]:
    """Compile everything and link the programs; returns their paths."""
    tests = [path for path in sorted(glob("tests/native/*.cpp")) if path != FAULTS]
    with ThreadPoolExecutor(setup().PARALLEL_COMPILES) as executor:
        objects = executor.map(lambda s: compiled(build, s), [*library_sources(build), *tests])
        library = list(objects)[: -len(tests)]
        return list(executor.map(lambda s: linked(build, s, library), tests))


def run(build: Build, program: str, argument: str) -> str:
    """Run a program in an empty folder; returns what it prints."""
    command = [*build.emulator, str(Path(program).resolve()), argument]
    with tempfile.TemporaryDirectory() as folder:
        try:
            return call(command, RUN_LIMIT_S, folder)
        except Failed as failed:
            # The thread sanitizer wants its shadow where some kernels put other things.
            if "unexpected memory mapping" not in str(failed) or not shutil.which("setarch"):
                raise
            return call(["setarch", "-R", *command], RUN_LIMIT_S, folder)


def report(build: Build, what: str, start_s: float) -> None:
    """One line for the reader."""
    print(f"{build.name:10}  {what:36}  {time.monotonic() - start_s:5.1f} s", flush=True)


def test(build: Build) -> None:
    """Build and run all programs, a line for each; Failed at the first that fails."""
    start_s = time.monotonic()
    GOLDEN.mkdir(parents=True, exist_ok=True)
    golden.write(GOLDEN)
    programs = build_all(build)
    report(build, f"{len(programs)} programs built", start_s)
    for program in programs:
        start_s = time.monotonic()
        run(build, program, str(GOLDEN.resolve()))
        report(build, f"{Path(program).name.rpartition('-')[0]} passed", start_s)


def catches(build: Build, program: str, fault: str, words: str) -> bool:
    """Does the sanitizer stop a program with this fault?"""
    try:
        run(build, program, fault)
    except Failed as failed:
        return words in str(failed)
    return False


def sanitize(if_possible: bool) -> None:
    """Test under each sanitizer, after a proof that it catches what it is for."""
    compiler = tuple(shlex.split(os.environ.get("CXX", "g++")))
    for sanitizer in SANITIZERS:
        build = Build(sanitizer.name, compiler, (*SANITIZER_FLAGS, sanitizer.option))
        start_s = time.monotonic()
        try:
            faults = linked(build, FAULTS, [])
            run(build, faults, "none")
        except Failed as failed:
            if not if_possible:
                raise
            reason = str(failed).strip().splitlines()[0]
            print(f"{build.name:10}  LEFT OUT: {shlex.join(compiler)} cannot: {reason}")
            continue
        missed = [f for f, words in sanitizer.faults if not catches(build, faults, f, words)]
        if missed:
            raise Failed(f"{sanitizer.option} does not notice: {', '.join(missed)}")
        report(build, f"{' and '.join(f for f, _ in sanitizer.faults)} caught", start_s)
        test(build)


def arm_emulator() -> str | None:
    """The emulator of AArch64 programs; None if it or the cross compiler is missing."""
    found = next(filter(None, map(shutil.which, ARM_EMULATORS)), None)
    return found if shutil.which(ARM_COMPILER) else None


def arm() -> None:
    """Test the library as AArch64 runs it, with the flags that it is shipped with."""
    emulator = arm_emulator()
    if emulator is None:
        raise Failed(
            f"{ARM_COMPILER} or {ARM_EMULATORS[0]} is missing; "
            "to add them: apt-get install g++-aarch64-linux-gnu qemu-user-static"
        )
    test(Build("arm", (ARM_COMPILER,), ("-static",), "aarch64", (emulator,)))


def main() -> None:
    """What the command line asks for; 1 and the reason if something fails."""
    try:
        match sys.argv[1:]:
            case ["sanitize", *rest] if rest in ([], ["--if-possible"]):
                sanitize(if_possible=bool(rest))
            case ["arm"]:
                arm()
            case _:
                sys.exit(__doc__)
    except Failed as failed:
        sys.exit(str(failed))


if __name__ == "__main__":
    main()
