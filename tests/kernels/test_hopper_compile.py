"""What the compiler makes of the Hopper score kernel; needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from patternsearch.kernels.score.triton_launch import _FIRST_TRITON, _LAST_TRITON

TESTS = Path(__file__).parents[1]
DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
RELEASE = tuple(int(part) for part in triton.__version__.split(".")[:2])


@pytest.mark.skipif(not DISASSEMBLER.exists(), reason="this Triton has no disassembler")
@pytest.mark.skipif(
    not _FIRST_TRITON <= RELEASE <= _LAST_TRITON, reason="not a Triton that runs this kernel"
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_products_stay_in_flight_and_two_programs_fit(head_dim):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(TESTS)
    run = subprocess.run(
        [sys.executable, TESTS / "support" / "hopper_compile.py", str(head_dim)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    # Four query tiles, two halves, 128 / 64 · head_dim / 16 instructions a product.
    assert found["products"] == 4 * 2 * 2 * head_dim // 16
    # A wait for each product, none for each instruction: else ptxas has serialised them.
    assert found["waits"] <= 2 * 4 + 2
    assert found["registers"] * 128 * 2 <= 65536
    assert 2 * (found["shared"] + 1024) <= 228 * 1024
