"""Shipped data is found in a checkout and in what a build installs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patternsearch.data import data_path
from patternsearch.errors import EnvironmentLacks

ROOT = Path(__file__).parents[2]


def test_a_checkout_uses_the_folders_at_its_top():
    assert data_path("configs/grids") == ROOT / "configs" / "grids"
    with pytest.raises(EnvironmentLacks, match="configs/nothing"):
        data_path("configs/nothing")


def test_a_build_carries_the_data(tmp_path):
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path),
         "build_py", "--build-lib", str(tmp_path / "lib")],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    built = tmp_path / "lib" / "patternsearch" / "_data"
    for folder in ("configs", "calib"):
        source = {p.relative_to(ROOT) for p in (ROOT / folder).rglob("*") if p.is_file()}
        assert source == {p.relative_to(built) for p in (built / folder).rglob("*") if p.is_file()}
    code = "import patternsearch.schema.io as io; print(io.__file__, io.load_grid('smoke')[0].name)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "lib")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert run.stdout.split() == [str(tmp_path / "lib/patternsearch/schema/io.py"), "smoke"]
