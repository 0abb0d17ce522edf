"""Faults of the machine under a run: full disk, lost permission, jumping clock; nothing is lost."""

import os
import shutil
import subprocess
import time

import pytest

from patternsearch.errors import PatternsearchError
from patternsearch.schema.scores import scores_folder_of
from support.calibrated import At, run_tiny, snapshot


def mount(*arguments):
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 400 KiB; without the right to mount there is none."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if shutil.which("mount") is None or not mount("-t", "tmpfs", "-o", "size=400k", "tmpfs", disk):
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_full_disk_is_said_and_the_run_resumes_with_room(model, undisturbed, small_disk):
    output = small_disk / "c.yaml"
    ballast = small_disk / "ballast"
    fill = At(4, lambda: ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 8192)))
    with pytest.raises(PatternsearchError, match=r"(?i)space"):
        run_tiny(model, output, progress=fill)
    assert not output.exists()
    parts = list(scores_folder_of(output).scores.glob("part-*.parquet"))
    assert parts  # the sample that was finished before
    assert not list(small_disk.rglob("*.tmp"))
    ballast.unlink()
    outcome = run_tiny(model, output)
    assert outcome.run.num_resumed == len(parts)
    assert snapshot(output) == snapshot(undisturbed)


def test_permission_lost_is_said_and_the_run_resumes_with_it(model, undisturbed, tmp_path):
    output = tmp_path / "c.yaml"
    folder = scores_folder_of(output)
    is_root = os.geteuid() == 0

    def lose():
        if is_root:
            os.seteuid(65534)  # root writes anywhere; from here on somebody else does
        else:
            folder.scores.chmod(0o555)

    try:
        with pytest.raises(PatternsearchError, match=r"Permission denied"):
            run_tiny(model, output, progress=At(5, lose))
    finally:
        if is_root:
            os.seteuid(0)
        else:
            folder.scores.chmod(0o755)
    assert list(folder.scores.glob("part-*.parquet"))
    run_tiny(model, output)
    assert snapshot(output) == snapshot(undisturbed)


@pytest.mark.parametrize("jump_s", [-3e8, 3e8])
def test_clock_that_jumps_changes_nothing(model, undisturbed, tmp_path, monkeypatch, jump_s):
    output = tmp_path / "c.yaml"
    real = time.time

    def jump():
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)

    run_tiny(model, output, progress=At(2, jump))
    assert snapshot(output) == snapshot(undisturbed)
