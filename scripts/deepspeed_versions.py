"""Runs the tests of ZeRO-3 on every supported end of DeepSpeed's versions.

Each version goes into a folder of its own below `.deepspeed`, first on the path; the one that is
installed, and all that it needs, stays as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
OTHERS = ("0.18.0", "0.19.6")


def install(release: str) -> Path:
    """The folder with that version, made if it is not there."""
    folder = ROOT / ".deepspeed" / release
    if not (folder / f"deepspeed-{release}.dist-info").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        target = ["--no-build-isolation", "--target", str(folder), f"deepspeed=={release}"]
        subprocess.run([*pip, *target], check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    return folder


def main() -> int:
    """Run pytest on each, with the arguments of the command line; the number that failed."""
    failed = []
    for release in (*OTHERS, version("deepspeed")):
        path = [str(install(release))] if release in OTHERS else []
        path += [os.environ[key] for key in ("PYTHONPATH",) if key in os.environ]
        print(f"== DeepSpeed {release}", flush=True)
        tests = [sys.executable, "-m", "pytest", "-q", "tests/integration/zero3", *sys.argv[1:]]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        if subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode:
            failed.append(release)
    print(f"failed: {', '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
