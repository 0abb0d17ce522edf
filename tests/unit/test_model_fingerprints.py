"""Fingerprints say what they claim, and every planted mix-up of heads is found by matching."""

import hashlib
import itertools

import numpy as np
import pytest
import torch

from patternsearch.errors import InputError
from patternsearch.model.fingerprints import attention_features, fingerprint_heads
from patternsearch.model.loading import adopt_model, load_model
from patternsearch.model.matching import (
    head_distances,
    match_heads,
    match_heads_within_layers,
)
from patternsearch.model.probe import probe_token_ids
from patternsearch.schema.config import Fingerprints
from support.closeness import assert_close
from support.real_model import smollm2_dir
from support.tiny_models import tiny_model


def test_probe_is_fixed_for_ever():
    ids = probe_token_ids(0, 49152, 512)
    assert ids[:4] == [
        int.from_bytes(hashlib.sha256(f"patternsearch-probe:0:{t}".encode()).digest()[:8], "little")
        % 49152
        for t in range(4)
    ]
    assert hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest() == PROBE_SHA256
    assert probe_token_ids(0, 49152, 100) == ids[:100]
    assert probe_token_ids(1, 49152, 512) != ids
    assert set(probe_token_ids(0, 3, 512)) == {0, 1, 2}


PROBE_SHA256 = "c10b292832743c378a333c2296234eb62b2ec7b48192b52923f2b0fad7be5611"


@pytest.mark.parametrize(("vocab_size", "num_tokens"), [(0, 5), (5, 0)])
def test_probe_is_never_empty(vocab_size, num_tokens):
    with pytest.raises(InputError, match="empty"):
        probe_token_ids(0, vocab_size, num_tokens)


@pytest.mark.parametrize("n", [1, 2, 3, 65, 512])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2)])
def test_attention_features_equal_loops_over_pairs(n, num_heads, num_kv_heads):
    generator = torch.Generator().manual_seed(n)
    q = torch.randn(1, num_heads, n, 8, generator=generator)
    k = torch.randn(1, num_kv_heads, n, 8, generator=generator)
    features = attention_features(q, k, scale=0.7)
    assert features.shape == (num_heads, 12)
    k = k.repeat_interleave(num_heads // num_kv_heads, 1)
    logits = (q.double() @ k.double().mT)[0] * 0.7
    p = logits.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1).numpy()
    for head in range(num_heads):
        bands = np.zeros(10)
        for i in range(n):
            for j in range(i + 1):
                bands[0 if i == j else int(i - j).bit_length()] += p[head, i, j]
        entropies = [
            -sum(x * np.log(x) for x in p[head, i, : i + 1] if x > 0) / np.log(i + 1)
            for i in range(1, n)
        ]
        expected = [p[head, :, 0].mean(), *(bands / n), sum(entropies) / max(n - 1, 1)]
        assert_close(features[head], expected, what=f"head {head}")


def test_attention_features_of_uniform_attention():
    features = attention_features(torch.zeros(1, 1, 512, 4), torch.zeros(1, 1, 512, 4), scale=1.0)
    assert float(features[0, 11]) == pytest.approx(1.0)
    assert float(features[0, 1:11].sum()) == pytest.approx(1.0, abs=1e-5)


@pytest.fixture(scope="module")
def wide():
    """A model of 8 query heads in 4 groups, and its fingerprints."""
    loaded = adopt_model(tiny_model(num_attention_heads=8, num_key_value_heads=4))
    return loaded, fingerprint_heads(loaded)


def test_fingerprint_heads_covers_full_layers_only():
    prints = fingerprint_heads(adopt_model(tiny_model("gemma3")), seed=5)
    assert [len(layer) for layer in prints.values] == [0, 4, 0, 4]
    assert (prints.seed, prints.num_tokens) == (5, 512)


def test_fingerprint_heads_fits_the_probe_to_short_models():
    prints = fingerprint_heads(adopt_model(tiny_model(max_position_embeddings=100)))
    assert prints.num_tokens == 100


def test_every_head_finds_itself(wide):
    loaded, prints = wide
    assert fingerprint_heads(loaded) == prints
    for match in (*match_heads(prints, prints), *match_heads_within_layers(prints, prints)):
        assert match.is_at_home
        assert match.distance == match.own_distance == pytest.approx(0.0, abs=1e-6)
        assert match.runner_up_distance > match.distance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_head_finds_itself_in_another_dtype(wide, dtype):
    model = tiny_model(num_attention_heads=8, num_key_value_heads=4, dtype=dtype)
    found = fingerprint_heads(adopt_model(model))
    assert all(match.is_at_home for match in match_heads(wide[1], found))


def _with(prints, layers):
    return prints.model_copy(update={"values": tuple(tuple(layer) for layer in layers)})


def test_every_swap_of_two_heads_is_found_exactly(wide):
    _, prints = wide
    for layer, (a, b) in itertools.product(range(3), itertools.combinations(range(8), 2)):
        layers = [list(heads) for heads in prints.values]
        layers[layer][a], layers[layer][b] = layers[layer][b], layers[layer][a]
        away = {
            (m.layer, m.head): (m.found_layer, m.found_head)
            for m in match_heads(prints, _with(prints, layers))
            if not m.is_at_home
        }
        assert away == {(layer, a): (layer, b), (layer, b): (layer, a)}


def test_permuted_layers_are_found(wide):
    _, prints = wide
    found = _with(prints, [prints.values[2], prints.values[0], prints.values[1]])
    matches = match_heads(prints, found)
    assert [(m.found_layer, m.found_head) for m in matches] == [
        ((m.layer + 1) % 3, m.head) for m in matches
    ]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_shifted_tensor_parallel_rank_is_found(size, wide):
    _, prints = wide
    shift = 8 // size
    found = _with(prints, [layer[shift:] + layer[:shift] for layer in prints.values])
    for match in match_heads_within_layers(prints, found):
        assert match.found_head == (match.head - shift) % 8


def test_swapped_weights_of_two_heads_are_found(wide):
    """The same through a model: rows of q_proj and columns of o_proj of heads 4 and 5 swapped."""
    model = tiny_model(num_attention_heads=8, num_key_value_heads=4)
    attention = model.model.layers[1].self_attn
    order = torch.arange(128)
    order[64:80], order[80:96] = torch.arange(80, 96), torch.arange(64, 80)
    with torch.no_grad():
        attention.q_proj.weight.copy_(attention.q_proj.weight[order])
        attention.o_proj.weight.copy_(attention.o_proj.weight[:, order])
    away = [
        (m.layer, m.head, m.found_layer, m.found_head)
        for m in match_heads(wide[1], fingerprint_heads(adopt_model(model)))
        if not m.is_at_home
    ]
    assert away == [(1, 4, 1, 5), (1, 5, 1, 4)]


def test_matching_is_one_to_one():
    """Two heads nearest to the same one get different partners, at the least total distance."""
    expected = Fingerprints(seed=0, num_tokens=9, values=(((0.1,) * 12, (0.2,) * 12),))
    found = Fingerprints(seed=0, num_tokens=9, values=(((0.15,) * 12, (0.9,) * 12),))
    matches = match_heads(expected, found)
    assert sorted(m.found_head for m in matches) == [0, 1]
    distances = head_distances(np.array(expected.values[0]), np.array(found.values[0]))
    straight, crossed = distances.trace(), distances[0, 1] + distances[1, 0]
    assert sum(m.distance for m in matches) == pytest.approx(min(straight, crossed))


def test_matching_refuses_what_cannot_be_compared(wide):
    loaded, prints = wide
    with pytest.raises(InputError, match="different probes"):
        match_heads(prints, fingerprint_heads(loaded, seed=1))
    with pytest.raises(InputError, match="one shape"):
        match_heads(prints, _with(prints, prints.values[:2]))


@pytest.mark.slow
def test_every_head_of_a_real_model_finds_itself_in_another_dtype():
    expected = fingerprint_heads(load_model(smollm2_dir(), dtype="float32", digests=False))
    found = fingerprint_heads(load_model(smollm2_dir(), dtype="bfloat16", digests=False))
    matches = match_heads(expected, found)
    assert len(matches) == 270
    assert all(match.is_at_home for match in matches)
