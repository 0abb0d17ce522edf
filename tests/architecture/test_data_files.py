"""Every recipe, grid and config that is committed loads at the current schema."""

from pathlib import Path

import pytest

from patternsearch.calibration.recipes import load_recipe
from patternsearch.schema.io import dumps_config, load_config, load_grid

ROOT = Path(__file__).parents[2]


def files(folder):
    return sorted((ROOT / folder).glob("*.yaml")) + sorted((ROOT / folder).glob("*.json"))


@pytest.mark.parametrize("path", files("calib"), ids=lambda path: path.stem)
def test_committed_recipe_loads(path):
    assert load_recipe(path).name == path.stem


@pytest.mark.parametrize("path", files("configs/grids"), ids=lambda path: path.stem)
def test_committed_grid_loads_and_expands(path):
    grid, _ = load_grid(path)
    assert grid.name == path.stem
    assert len(grid.expand()) > 1


@pytest.mark.parametrize("path", files("configs/models"), ids=lambda path: path.stem)
def test_committed_config_loads_and_is_canonical(path):
    assert dumps_config(load_config(path)) == path.read_text()
