"""Every recipe, grid, config and timing table that is committed loads and is current."""

from pathlib import Path

import numpy as np
import pytest

from patternsearch.calibration.recipes import load_recipe
from patternsearch.patterns.candidates import AShape, Dense
from patternsearch.patterns.geometry import a_shape_counts
from patternsearch.schema.io import dumps_config, load_config, load_grid
from patternsearch.timing.model import TimeModel, held_out_errors
from patternsearch.timing.table import load_timings

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


@pytest.mark.parametrize("path", files("configs/timings"), ids=lambda path: path.stem)
def test_committed_timing_table_prices_the_default_grid_with_these_kernels(path):
    table = load_timings(path)
    assert table.is_of_these_kernels, (
        "the kernels have changed since the table was measured: measure it again, "
        f"`patternsearch bench -o {path.relative_to(ROOT)}`"
    )
    assert not table.is_quick
    assert all(row.p50_ms > 0 for row in table.rows)
    assert table.errors == held_out_errors(table)
    everything = table.errors[-1]
    assert everything.op == "all"
    assert everything.median <= 0.10
    assert everything.worst <= 0.25
    grid, _ = load_grid("default")
    for dtype, head_dim in {(row.dtype, row.head_dim) for row in table.rows}:
        model = TimeModel(table, dtype=dtype, head_dim=head_dim)
        lengths = [2048, 4096, 5000, 8192, 32768, 131072]
        model.require((Dense(), *grid.expand()), lengths)
        used = {
            (setting.tile, setting.has_columns)
            for setting in table.settings
            if setting.is_used and (setting.dtype, setting.head_dim) == (dtype, head_dim)
        }
        assert used == {(64, False), (64, True), (128, False), (128, True)}
        for candidate in (Dense(), AShape(sink=128, window=1024, tile=128)):
            costs = [
                float(
                    model.head_cost((candidate,), n, counts(candidate, n), np.zeros((1, 1)))[0, 0]
                )
                for n in lengths
            ]
            assert costs == sorted(costs)
            assert costs[0] > 0


def counts(candidate, n):
    """Return the tiles that a candidate reads, [[tiles]]."""
    if isinstance(candidate, Dense):
        return np.zeros((1, 1))
    return np.array(
        [[float(a_shape_counts(n, candidate.tile, candidate.sink, candidate.window)[0])]]
    )
