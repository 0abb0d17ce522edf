"""``patternsearch show``: one screen, one layer, one rank."""

import json

import pytest

from patternsearch.exchange.words import LETTERS
from patternsearch.schema import io
from support.configs import PATTERNS, VERTICAL_SLASH_PATTERNS, make_config
from support.program import run_program


@pytest.fixture
def config():
    return make_config(4, 8, 2, patterns=PATTERNS, measured=True)


@pytest.fixture
def path(config, tmp_path):
    io.dump_config(config, tmp_path / "c.yaml")
    return tmp_path / "c.yaml"


def test_one_screen_tells_model_selection_totals_map_and_worst(capsys, path, config, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = run_program(capsys, "show", path).out
    lines = out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    for words in ("tests/model", "smoke, 4 samples (2 held out) at 2048, 4096 tokens",
                  "target mass 0.95", "4 layers × 8 query heads over 2 kv heads"):  # fmt: skip
        assert words in out
    for layer, heads in enumerate(config.heads):
        letters = "".join(LETTERS[head.pattern.kind] for head in heads)
        assert f"{layer}  {letters}" in out
    worst = min(
        (at.mass_worst_region, layer, head)
        for layer, heads in enumerate(config.heads)
        for head, entry in enumerate(heads)
        for at in entry.lengths
    )
    first = lines[next(i for i, line in enumerate(lines) if "Worst heads" in line) + 2].split()
    assert first[:3] == [str(worst[1]), str(worst[2]), f"{worst[0]:.4f}"]


def test_json_has_totals_and_map(capsys, path, config):
    document = json.loads(run_program(capsys, "show", path, "--json").out)
    assert sum(document["totals"]["kinds"].values()) == 32
    assert len(document["worst_heads"]) == 10
    last = [head.lengths[-1] for heads in config.heads for head in heads]
    assert document["totals"]["predicted_ms"] == pytest.approx(sum(at.predicted_ms for at in last))
    assert document["map"][0] == "".join(LETTERS[h.pattern.kind] for h in config.heads[0])


def test_layer_lists_every_head(capsys, path, config):
    out = run_program(capsys, "show", path, "--layer", 2).out
    assert "Layer 2" in out
    document = json.loads(run_program(capsys, "show", path, "--layer", 2, "--json").out)
    assert [head["pattern"] for head in document["heads"]] == [
        head.pattern.model_dump() for head in config.heads[2]
    ]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_partition_the_heads_and_their_time(capsys, path, config, size):
    ranks = [
        json.loads(
            run_program(capsys, "show", path, "--tp-size", size, "--rank", rank, "--json").out
        )
        for rank in range(size)
    ]
    whole = ["".join(LETTERS[h.pattern.kind] for h in heads) for heads in config.heads]
    assert ["".join(parts) for parts in zip(*(r["map"] for r in ranks), strict=True)] == whole
    total = sum(h.lengths[-1].predicted_ms for heads in config.heads for h in heads)
    assert sum(rank["predicted_ms"] for rank in ranks) == pytest.approx(total, abs=1e-5)
    slowest = max(rank["predicted_ms"] for rank in ranks)
    assert all(rank["slowest"]["predicted_ms"] == slowest for rank in ranks)
    kv = [rank["kv_heads"] for rank in ranks]
    assert kv[0][0] == 0
    assert kv[-1][1] == 2


def test_rank_without_times_says_not_measured(capsys, tmp_path):
    io.dump_config(make_config(2, 4, 2), tmp_path / "c.yaml")
    out = run_program(capsys, "show", tmp_path / "c.yaml", "--rank", 0).out
    assert "not measured" in out
    assert "query heads 0-3" in out


def test_hybrid_models_and_equal_layers(capsys, tmp_path):
    config = make_config(
        4,
        4,
        2,
        patterns=VERTICAL_SLASH_PATTERNS,
        layer_types=["full", "sliding", "sliding", "full"],
    )
    io.dump_config(config, tmp_path / "c.yaml")
    out = run_program(capsys, "show", tmp_path / "c.yaml").out
    assert "1-2  sliding attention" in out
    outcome = run_program(capsys, "show", tmp_path / "c.yaml", "--layer", 1)
    assert outcome.code == 2
    assert "layer 1 is sliding attention" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layer", "9"), "the model has layers 0..3"),
        (("--layer", "1", "--rank", "0"), "different questions"),
        (("--tp-size", "2"), "needs --rank"),
        (("--tp-size", "2", "--rank", "2"), "ranks of size 2 are 0..1"),
        (("--tp-size", "3", "--rank", "0"), "does not fit"),
    ],
)
def test_wrong_questions_are_refused(capsys, path, arguments, words):
    outcome = run_program(capsys, "show", path, *arguments)
    assert outcome.code == 2
    assert words in outcome.err
