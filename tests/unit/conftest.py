"""What several modules start from: a tiny checkpoint, and an undisturbed calibration of it."""

import pytest

from support.calibrated import run_tiny
from support.tiny_models import tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny checkpoint."""
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    """The config of a run over it by one process that nothing disturbs."""
    output = tmp_path_factory.mktemp("undisturbed") / "c.yaml"
    run_tiny(model, output)
    return output
