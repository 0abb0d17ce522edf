"""Planted mapping faults are named; rounding and small changes are not."""

import itertools

import numpy as np
import pytest
import torch

from patternsearch.errors import InputError
from patternsearch.model.capture import run_with_capture
from patternsearch.model.fingerprints import attention_features, fingerprint_heads
from patternsearch.model.loading import adopt_model
from patternsearch.model.probe import probe_token_ids
from patternsearch.runtime.mapping import compare_mapping
from patternsearch.schema.config import Fingerprints, ModelIdentity
from support.configs import make_model
from support.tiny_models import tiny_model

LAYERS, HEADS, KV = 6, 8, 2
IDENTITY = ModelIdentity.model_validate(make_model(LAYERS, HEADS, KV))


@pytest.fixture(scope="module")
def recorded():
    """Fingerprints of random heads, masses summing to one like real ones."""
    random = np.random.default_rng(5)
    masses = random.dirichlet(np.full(10, 0.4), size=(LAYERS, HEADS))
    sink = random.uniform(0, 1, (LAYERS, HEADS, 1))
    return np.concatenate([sink, masses, random.uniform(0.1, 0.9, (LAYERS, HEADS, 1))], axis=-1)


def prints(values, seed=0):
    return Fingerprints(seed=seed, num_tokens=512, values=values.tolist())


def noisy(values, size=0.003, seed=0):
    random = np.random.default_rng(seed)
    return np.abs(values + size * np.sqrt(values) * random.standard_normal(values.shape))


def compare(recorded, found, **keywords):
    return compare_mapping(prints(recorded), prints(found), IDENTITY, **keywords)


def only(report, kind):
    assert [finding.kind for finding in report.findings] == [kind], report.findings
    assert not report.ok
    return report.findings[0]


def test_rounding_is_the_same_weights(recorded):
    report = compare(recorded, noisy(recorded))
    assert report.ok
    assert report.verdict == "same weights"
    assert report.first_departure is None
    assert all(layer.holders == tuple(range(HEADS)) for layer in report.layers)


def test_identical_fingerprints_have_similarity_one(recorded):
    report = compare(recorded, recorded)
    assert report.similarity == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        (None, "same weights"),
        (False, "same weights"),
        (True, "fine-tuned, patterns plausibly hold"),
    ],
)
def test_digests_have_the_last_word(recorded, changed, verdict):
    assert compare(recorded, noisy(recorded), weights_changed=changed).verdict == verdict


def test_a_larger_change_is_a_fine_tune(recorded):
    report = compare(recorded, noisy(recorded, 0.05))
    assert report.verdict == "fine-tuned, patterns plausibly hold"
    assert report.ok


def test_other_heads_are_a_different_model(recorded):
    other = np.random.default_rng(9).permuted(recorded.reshape(-1, 12), axis=0)
    report = compare(recorded, other.reshape(recorded.shape))
    assert report.verdict == "different model"
    assert not report.ok


def test_every_single_swap_is_named(recorded):
    for layer, (a, b) in itertools.product(range(LAYERS), itertools.combinations(range(HEADS), 2)):
        found = noisy(recorded)
        found[layer, [a, b]] = found[layer, [b, a]]
        finding = only(compare(recorded, found), "swapped heads")
        assert finding.text == f"layer {layer}: heads {a} and {b} are swapped"


def test_a_cycle_is_named_as_places(recorded):
    found = noisy(recorded)
    found[2, [1, 3, 6]] = found[2, [3, 6, 1]]
    finding = only(compare(recorded, found), "permuted heads")
    assert finding.text == (
        "layer 2: place 1 holds head 3, place 3 holds head 6, place 6 holds head 1"
    )


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("copied", ["found", "recorded"])
def test_tensor_parallel_offset_is_named(recorded, size, copied):
    per_rank = HEADS // size
    for rank in range(1, size):
        faulty = recorded.copy()
        faulty[:, rank * per_rank : (rank + 1) * per_rank] = recorded[:, :per_rank]
        pair = (recorded, noisy(faulty)) if copied == "found" else (faulty, noisy(recorded))
        finding = only(compare(*pair), "tensor-parallel offset")
        assert finding.text == (
            f"rank {rank} of {size} reads heads 0–{per_rank - 1} instead of "
            f"{rank * per_rank}–{(rank + 1) * per_rank - 1}"
        )


def test_shifted_heads_are_named(recorded):
    finding = only(compare(recorded, np.roll(noisy(recorded), -3, axis=1)), "shifted heads")
    assert "place 0 holds head 3" in finding.text
    assert finding.layers == tuple(range(LAYERS))


def test_permuted_kv_groups_are_named(recorded):
    identity = ModelIdentity.model_validate(make_model(LAYERS, HEADS, 4))
    found = recorded[:, [2, 3, 0, 1, 4, 5, 6, 7]]
    report = compare_mapping(prints(recorded), prints(noisy(found)), identity)
    finding = only(report, "kv groups permuted")
    assert "group 0 holds group 1, group 1 holds group 0" in finding.text


def test_permuted_layers_are_named(recorded):
    found = noisy(recorded)[[0, 3, 2, 1, 4, 5]]
    finding = only(compare(recorded, found), "layers permuted")
    assert finding.layers == (1, 3)
    assert "layer 1 holds layer 3" in finding.text


def test_one_replaced_layer_is_named(recorded):
    found = noisy(recorded)
    found[3] = np.random.default_rng(11).permuted(found.reshape(-1, 12), axis=0)[:HEADS]
    finding = only(compare(recorded, found), "changed layers")
    assert finding.layers == (3,)


def test_wrong_gqa_map_is_named():
    """Recompute the fingerprints with kv head h % Hkv in place of h // g."""
    loaded = adopt_model(tiny_model("llama", num_attention_heads=8, num_key_value_heads=4))
    recorded = fingerprint_heads(loaded, 0, num_tokens=256)
    wrong = [()] * 3

    def describe(inputs):
        heads = torch.arange(8)
        k = inputs.k[:, heads % 4]
        features = attention_features(inputs.q, k, scale=inputs.scale)
        wrong[inputs.layer] = tuple(map(tuple, features.tolist()))

    ids = probe_token_ids(0, loaded.identity.vocab_size, 256)
    run_with_capture(loaded, torch.tensor([ids]), describe)
    found = recorded.model_copy(update={"values": tuple(wrong)})
    report = compare_mapping(recorded, found, loaded.identity)
    finding = next(f for f in report.findings if f.kind == "gqa map")
    assert "h % 4 instead of h // 2" in finding.text


def test_another_probe_is_refused(recorded):
    with pytest.raises(InputError, match="different probes"):
        compare_mapping(prints(recorded), prints(recorded, seed=1), IDENTITY)


def test_another_shape_is_refused(recorded):
    with pytest.raises(InputError, match="one shape"):
        compare(recorded, recorded[:, :4])


def test_layers_without_full_attention_are_left_out(recorded):
    values = [layer.tolist() for layer in recorded]
    values[1] = []
    both = Fingerprints(seed=0, num_tokens=512, values=values)
    report = compare_mapping(both, both, IDENTITY)
    assert [layer.layer for layer in report.layers] == [0, 2, 3, 4, 5]
    assert report.ok
