"""The first ten minutes on a GPU: python benchmarks/gpu/gpu.py [--out FOLDER] [--toy] [--parts NAME,...].

Runs the parts of ``gpu_parts.py``, the most informative first, each in a process of its own with a time limit, and
writes what each found to ``FOLDER/NAME.json``. A part that fails or takes too long has its reason there, and the next
one runs. Nothing is installed: the Python that runs this has torch, the repository is imported where it is, and
packages that this Python lacks are imported from the wheels in ``wheels/`` (``make wheels`` downloads simpy, cattrs).

``--toy`` runs every part on the CPU at toy size: ``make test`` does, so that the first run on a GPU is not the first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMITS_S = {
    "versions": 90, "parity": 90, "steps": 150, "calls": 90, "queues": 30, "loading": 30, "nccl": 60, "offload": 60,
    "prediction": 180, "compiled_steps": 300, "graphs": 110,
}  # fmt: skip
"""Part → most seconds. ``gpu_parts.py`` defines the parts; this file imports nothing that may be missing."""


def environment(folder: Path) -> dict[str, str]:
    """The environment of a part: it imports the repository as ``panpipe``, and packages from wheels."""
    link = folder / "panpipe"
    link.symlink_to(ROOT, target_is_directory=True)
    wheels = sorted(map(str, (ROOT / "wheels").glob("*.whl")))
    known = os.environ.get("PYTHONPATH")
    paths = [str(folder), *wheels, *([known] if known else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PANPIPE_CACHE": ""}


def run(part: str, out: Path, toy: bool, variables: dict[str, str]) -> dict[str, Any]:
    """Run a part in a process of its own; what it found, or why it found nothing."""
    file, limit_s = out / f"{part}.json", LIMITS_S[part]
    file.unlink(missing_ok=True)
    command = [sys.executable, str(HERE / "gpu_parts.py"), part, str(file), *(["--toy"] if toy else [])]
    started = time.monotonic()
    try:
        done = subprocess.run(command, env=variables, timeout=limit_s, capture_output=True, text=True, check=False)
        reason = None if done.returncode == 0 else done.stderr[-4000:]
    except subprocess.TimeoutExpired:
        reason = f"it took more than {limit_s} s"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if reason is not None:
        found["failure"] = reason
    found["seconds"] = round(time.monotonic() - started, 1)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu", help="the folder for the results")
    parser.add_argument("--toy", action="store_true", help="on the CPU, at toy size")
    parser.add_argument("--parts", default=",".join(LIMITS_S), help="names with commas between")
    options = parser.parse_args()
    parts = options.parts.split(",")
    unknown = [part for part in parts if part not in LIMITS_S]
    if unknown:
        print(f"there is no part '{unknown[0]}': known are {', '.join(LIMITS_S)}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(Path(folder))
        for part in parts:
            found = run(part, options.out, options.toy, variables)
            failed |= "failure" in found
            print(json.dumps({part: found}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
