"""A config attached on every rank of a model that transformers itself has sharded."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import patternsearch
from patternsearch.schema.config import PatternConfig
from patternsearch.schema.io import dump_config
from support.closeness import assert_close
from support.runtime import config_for, random_ids
from support.tiny_models import tiny_model_dir
from support.tp_attach import start_attach_ranks

NUM_TOKENS = 300


def logits_of(model):
    with torch.inference_mode():
        return model(input_ids=random_ids(NUM_TOKENS)).logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("tp") / "llama")


@pytest.fixture(scope="module")
def alone(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def config(alone):
    return config_for(alone)


@pytest.fixture(scope="module")
def ranks(folder, config, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    dump_config(config, out / "c.yaml")
    process = start_attach_ranks(folder, out / "c.yaml", NUM_TOKENS, out)
    _, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


def test_each_rank_runs_its_own_slice_of_the_heads(ranks, config):
    half = config.model.num_query_heads // 2
    for rank, found in enumerate(ranks):
        assert found["heads"] == (rank * half, (rank + 1) * half)
        kv = config.model.num_kv_heads // 2
        assert found["seen"] == [(layer, half, kv) for layer in range(config.model.num_layers)]
        assert found["stats"]["sparse_calls"] == config.model.num_layers
        assert not found["stats"]["dense_calls"]


def test_ranks_together_give_what_one_process_gives(ranks, alone, config):
    expected_dense = logits_of(alone)
    with patternsearch.attach(alone, config):
        expected = logits_of(alone)
    assert (expected - expected_dense).abs().max() > 0.1  # the patterns do leave something out
    for found in ranks:
        assert_close(found["dense"], expected_dense, what="dense logits")
        assert_close(found["sparse"], expected, what="sparse logits")


def test_the_other_ranks_slice_would_be_noticed(ranks, alone, config):
    """The halves of a layer's heads differ enough that exchanging them changes the logits."""
    document = config.model_dump()
    half = config.model.num_query_heads // 2
    document["heads"] = [heads[half:] + heads[:half] for heads in document["heads"]]
    with patternsearch.attach(alone, PatternConfig.model_validate(document), probe=False):
        exchanged = logits_of(alone)
    assert (ranks[0]["sparse"] - exchanged).abs().max() > 0.1
