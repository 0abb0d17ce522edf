"""Exports are accepted by readers that behave as the engines do, and run what the config says."""

import json

import pytest

from patternsearch.exchange.export import export_config, write_export
from patternsearch.exchange.ranks import rank_layout
from patternsearch.patterns.candidates import Dense, VerticalSlashLastQ
from patternsearch.patterns.geometry import effective_slash, effective_vertical
from support.configs import MINFERENCE_PATTERNS, VERTICAL_SLASH_PATTERNS, make_config
from support.consumer_readers import DualChunkReader, MInferenceReader

LOW_BUDGETS = (
    VerticalSlashLastQ(vertical=0, slash=0, tile=64),
    VerticalSlashLastQ(vertical=30, slash=100, tile=64),
    VerticalSlashLastQ(vertical=31, slash=99, tile=64),
)
PATTERNS = {
    "minference": (*MINFERENCE_PATTERNS, *LOW_BUDGETS),
    "vllm": (*VERTICAL_SLASH_PATTERNS, *LOW_BUDGETS, Dense()),
    "sglang": (*VERTICAL_SLASH_PATTERNS, *LOW_BUDGETS, Dense()),
}
READERS = {"minference": MInferenceReader, "vllm": DualChunkReader, "sglang": DualChunkReader}


def _claimed(pattern, consumer, n):
    """What the config says that a head runs at n tokens."""
    match pattern.kind:
        case "dense":
            return "vertical_and_slash", n, n
        case "a_shape":
            return "stream_llm", pattern.sink, pattern.window
        case "block_sparse":
            return "block_sparse", pattern.blocks
    vertical = effective_vertical(n, pattern.vertical)
    if consumer != "minference" and n > 30 and vertical == 30:
        vertical = 31  # 30 cannot be said: the engine would run 130
    return "vertical_and_slash", vertical, effective_slash(n, pattern.slash)


@pytest.mark.parametrize("consumer", ["minference", "vllm", "sglang"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [20, 120, 40_000, 1_000_000])
def test_every_rank_runs_the_heads_that_we_claim(tmp_path, consumer, size, n):
    config = make_config(3, 16, 4, patterns=PATTERNS[consumer], consumer="minference")
    path, _ = write_export(export_config(config, consumer), tmp_path / "x.json")
    reader = READERS[consumer](path)
    for rank in rank_layout(config.model, config.heads, size).ranks:
        first, last = rank.query_heads
        for layer, heads in enumerate(config.heads):
            assert reader.rank_runs(layer, rank.rank, 16 // size, n) == [
                _claimed(head.pattern, consumer, n) for head in heads[first:last]
            ]


@pytest.mark.parametrize("consumer", ["minference", "vllm", "sglang"])
def test_the_file_is_a_bare_list_of_every_global_head(tmp_path, consumer):
    config = make_config(3, 16, 4, patterns=PATTERNS[consumer], consumer="minference", tp_size=4)
    path, _ = write_export(export_config(config, consumer), tmp_path / "x.json")
    document = json.loads(path.read_text())
    assert isinstance(document, list)
    assert len(document) == 3
    for layer, heads in zip(document, config.heads, strict=True):
        assert list(layer) == [str(head) for head in range(16)]
        for value, head in zip(layer.values(), heads, strict=True):
            name, vertical, slash, score = value
            assert isinstance(name, str)
            assert type(vertical) is type(slash) is int
            assert score == head.lengths[-1].mass_mean
            if name == "vertical_and_slash":
                assert vertical >= 30
                assert slash >= 100


def test_minference_never_falls_back_to_its_default(tmp_path):
    config = make_config(2, 4, 2, patterns=PATTERNS["minference"], consumer="minference")
    path, _ = write_export(export_config(config, "minference"), tmp_path / "x.json")
    reader = MInferenceReader(path)
    assert all(str(head) in reader.best_pattern[layer] for layer in range(2) for head in range(4))
