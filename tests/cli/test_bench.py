"""``patternsearch bench`` without a GPU: it says so before anything else, or says what is wrong."""

import re

import pytest
import torch
import typer
from typer.testing import CliRunner

from patternsearch.cli import bench as command
from patternsearch.errors import EnvironmentLacks, InputError, TimingError
from support.timings_factory import timing_rows, timing_table, with_flash4


def run(*arguments):
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_bench_without_a_gpu_exits_with_three(no_gpu, tmp_path):
    output = tmp_path / "gpu.json"
    result = run("-o", output, "--quick")
    assert isinstance(result.exception, EnvironmentLacks)
    assert result.exception.exit_code == 3
    assert "needs a CUDA GPU" in str(result.exception)
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["-o", "x.yaml"], TimingError, "ends in .json"),
        (["-o", "nowhere/x.json"], TimingError, "does not exist"),
        (["-o", "x.json", "--lengths", "long"], InputError, "whole number of tokens"),
        (["-o", "x.json", "--head-dims", "64;128"], InputError, "64,128"),
        (["-o", "x.json", "--heads", "32"], InputError, "32/8"),
        (["-o", "x.json", "--heads", "8/²"], InputError, "32/8"),
        (["-o", "x.json", "--lengths", "4²"], InputError, "whole number of tokens"),
        (["-o", "x.json", "--dtype", "half"], TimingError, "bfloat16, float16 or float32"),
    ],
)
def test_bench_refuses(no_gpu, monkeypatch, tmp_path, arguments, error, message):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert isinstance(result.exception, error)
    assert message in str(result.exception)


def test_bench_writes_what_was_measured(monkeypatch, tmp_path):
    plans = []

    def measure(plan, **_):
        plans.append(plan)
        return timing_table(with_flash4(timing_rows()))

    monkeypatch.setattr("patternsearch.timing.bench.run_bench", measure)
    output = tmp_path / "gpu.json"
    result = run("-o", output, "--lengths", "2k,8k", "--head-dims", "64", "--heads", "9/3")
    assert result.exit_code == 0, result.output
    (plan,) = plans
    assert (plan.lengths, plan.held_out_lengths) == ((2048, 8192), (5120,))
    assert (plan.head_dims, plan.num_query_heads, plan.num_kv_heads) == ((64,), 9, 3)
    assert "sdpa_cudnn" in result.stdout
    assert "held-out points" in result.stdout
    measured = dict(re.findall(r"^(\w+) +(\w+(?:, \w+)*) +\d+ *$", result.stdout, re.MULTILINE))
    assert measured["dense"] == "sdpa_cudnn, sdpa_flash"
    assert measured["attend_a_shape"] == "flash4, triton"
    assert output.exists()
