"""The real 135M model with its own config: passes, and each planted fault is named exactly."""

import itertools

import pytest
import torch

from patternsearch.errors import ModelError
from patternsearch.model.fingerprints import fingerprint_heads
from patternsearch.model.loading import load_model
from patternsearch.runtime.mapping import compare_mapping
from patternsearch.schema.io import load_config
from patternsearch.validation.api import ValidationRequest, validate
from support.calibrated import run_tiny
from support.faults import (
    copy_model,
    edit_config,
    edit_json,
    flip_one_bit,
    permute_query_heads,
    swap_entries,
    truncate,
)
from support.real_model import smollm2_dir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("smollm2")


@pytest.fixture(scope="module")
def config(folder):
    path = folder / "c.yaml"
    run_tiny(smollm2_dir(), path, lengths=(1024,), samples=1)
    return path


@pytest.fixture
def changed(tmp_path):
    return copy_model(smollm2_dir(), tmp_path / "m")


def faults(config, model, level="mapping"):
    report = validate(ValidationRequest(config=config, model=model, level=level))
    return {check.name: check for check in report.checks if check.status == "differs"}


def test_own_config_passes_quality(config):
    assert faults(config, smollm2_dir(), "quality") == {}


def test_two_swapped_entries_are_named(config, folder):
    heads = load_config(config).heads
    layer, a, b = next(
        (layer, a, b)
        for layer, entries in enumerate(heads)
        for a, b in itertools.combinations(range(9), 2)
        if entries[a].pattern != entries[b].pattern
        and abs(entries[a].lengths[0].heldout_mean - entries[b].lengths[0].heldout_mean) > 0.03
    )
    swapped = edit_config(config, folder / "swapped.yaml", swap_entries(layer, a, b))
    found = faults(swapped, smollm2_dir(), "quality")["captured mass against the record"]
    assert f"layer {layer}: the entries of heads {a} and {b} are swapped" in found.advice


def test_scaled_rope_theta_is_named(config, changed):
    def scale(document):
        document["rope_parameters"]["rope_theta"] *= 2

    edit_json(changed / "config.json", scale)
    assert {"RoPE: rope_theta", "RoPE: inverse frequencies"} <= set(faults(config, changed))


def test_permuted_q_proj_is_named(config, changed):
    order = [2, 1, 0, 3, 4, 5, 6, 7, 8]  # heads 0 and 2, of one kv group
    permute_query_heads(changed, "model.layers.5.self_attn.q_proj.weight", order, 64)
    found = faults(config, changed)
    assert found["attention weights"].found == "changed in layers 5"
    assert found["swapped heads"].found == "layer 5: heads 0 and 2 are swapped"


def test_another_tokenizer_is_named(config, changed):
    def swap(document):
        vocabulary = document["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    edit_json(changed / "tokenizer.json", swap)
    assert set(faults(config, changed, "identity")) == {"tokenizer"}


def test_truncated_shard_is_named(config, changed):
    truncate(changed / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        faults(config, changed, "identity")


def test_one_flipped_bit_is_named(config, changed):
    flip_one_bit(changed, "model.layers.17.self_attn.v_proj.weight")
    found = faults(config, changed, "identity")
    assert set(found) == {"weights", "attention weights"}
    assert found["attention weights"].found == "changed in layers 17"


def test_single_swaps_are_found_and_rounding_is_not():
    """The bar: no false alarm in bfloat16, and at least 99 % of all single swaps named."""
    loaded = load_model(smollm2_dir(), dtype=torch.float32, digests=False)
    recorded = fingerprint_heads(loaded, 1)
    halved = load_model(smollm2_dir(), dtype=torch.bfloat16, digests=False)
    found = fingerprint_heads(halved, 1)
    assert not compare_mapping(recorded, found, loaded.identity).findings
    named = tried = 0
    for layer, (a, b) in itertools.product(range(30), itertools.combinations(range(9), 2)):
        heads = list(found.values[layer])
        heads[a], heads[b] = heads[b], heads[a]
        values = (*found.values[:layer], tuple(heads), *found.values[layer + 1 :])
        faulty = found.model_copy(update={"values": values})
        texts = [f.text for f in compare_mapping(recorded, faulty, loaded.identity).findings]
        named += texts == [f"layer {layer}: heads {a} and {b} are swapped"]
        tried += 1
    assert named >= 0.99 * tried, (named, tried)
