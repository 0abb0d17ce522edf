"""Atomic writing: the old or the new content, never a part, never a left-over."""

import errno
import os

import pytest

from patternsearch.errors import EnvironmentLacks, InputError
from patternsearch.schema.files import write_atomic


def test_write_atomic_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "x.yaml"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["x.yaml"]


def test_write_atomic_follows_a_symlink(tmp_path):
    target = tmp_path / "target.yaml"
    link = tmp_path / "link.yaml"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomic(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (errno.ENOSPC, EnvironmentLacks, "free some space"),
        (errno.EROFS, InputError, "may write to"),
        (errno.EACCES, InputError, "may write to"),
        (errno.EIO, EnvironmentLacks, "cannot write"),
    ],
)
def test_write_atomic_failure_keeps_the_old_file(tmp_path, monkeypatch, code, error, words):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"old")

    def fail(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(error, match=words):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.yaml"]


def test_write_atomic_names_a_missing_folder(tmp_path):
    with pytest.raises(InputError, match=r"folder .*missing does not exist"):
        write_atomic(tmp_path / "missing" / "x.yaml", b"")
    with pytest.raises(InputError, match="is a folder"):
        write_atomic(tmp_path, b"")
