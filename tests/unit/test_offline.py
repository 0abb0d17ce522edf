"""With ``offline`` nothing opens a connection; every attempt to would fail these tests."""

import socket

import pytest

from patternsearch.errors import InputError, PatternsearchError
from support.calibrated import run_tiny
from support.tiny_models import tiny_model_dir


@pytest.fixture
def no_network(monkeypatch):
    """Fail whoever resolves a name or connects; returns the list of attempts."""
    attempts = []

    def refuse(*arguments, **keywords):
        attempts.append(arguments)
        raise AssertionError(f"a connection was tried: {arguments}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("create_connection", "getaddrinfo", "gethostbyname"):
        monkeypatch.setattr(socket, name, refuse)
    return attempts


def test_calibration_from_local_files_opens_no_connection(tmp_path, no_network):
    model = tiny_model_dir(tmp_path / "m")
    outcome = run_tiny(model, tmp_path / "c.yaml", samples=1, offline=True)
    assert outcome.config_path.exists()
    assert no_network == []


def test_hub_id_is_looked_up_in_the_cache_only(tmp_path, no_network, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(PatternsearchError, match="nobody/nothing"):
        run_tiny("nobody/nothing", tmp_path / "c.yaml", offline=True)
    assert no_network == []


def test_recipe_that_streams_is_refused(tmp_path, no_network):
    model = tiny_model_dir(tmp_path / "m")
    with pytest.raises(InputError, match="--offline forbids"):
        run_tiny(model, tmp_path / "c.yaml", recipe="longcontext", offline=True)
    assert no_network == []
