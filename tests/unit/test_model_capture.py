"""The captured q, k, v are the model's own: they rebuild the attention that the model computes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from patternsearch.errors import InputError, ModelError, UnsupportedModel
from patternsearch.model.capture import run_with_capture
from patternsearch.model.loading import adopt_model
from support.closeness import assert_close
from support.tiny_models import FAMILIES, HYBRIDS, tiny_model

SUPPORTED = tuple(dict.fromkeys(FAMILIES + HYBRIDS))


def _ids(n, seed=0):
    return torch.randint(0, 320, (1, n), generator=torch.Generator().manual_seed(seed))


def _capture(loaded, ids, **options):
    """Run with capture and return (hidden states, copies of what was handed over)."""
    captured = []
    hidden = run_with_capture(loaded, ids, captured.append, **options)
    return hidden, captured


def _library(loaded, ids, implementation):
    loaded.model.set_attn_implementation(implementation)
    with torch.inference_mode():
        return loaded.backbone(
            input_ids=ids, use_cache=False, output_attentions=implementation == "eager"
        )


def _probabilities(inputs, kv_head_of):
    """Softmax of the captured logits, n × n, with an explicit kv head for every query head."""
    q, k = inputs.q[0].double(), inputs.k[0].double()
    n = q.shape[1]
    heads = torch.tensor([kv_head_of(head) for head in range(len(q))])
    logits = q @ k[heads].mT * inputs.scale
    return logits.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)


@pytest.fixture(scope="module", params=SUPPORTED)
def loaded(request):
    return adopt_model(tiny_model(request.param))


@pytest.mark.parametrize("n", [1, 2, 24, 25, 100])
def test_capture_rebuilds_eager_attention(loaded, n):
    ids = _ids(n)
    hidden, captured = _capture(loaded, ids)
    eager = _library(loaded, ids, "eager")
    assert_close(hidden, eager.last_hidden_state, dtype=torch.float32, what="hidden states")
    identity = loaded.identity
    group = identity.num_query_heads // identity.num_kv_heads
    assert [inputs.layer for inputs in captured] == list(loaded.full_layers)
    for inputs in captured:
        assert inputs.q.shape == (1, identity.num_query_heads, n, identity.head_dim)
        assert inputs.k.shape == (1, identity.num_kv_heads, n, identity.head_dim)
        assert inputs.lse is None
        p = _probabilities(inputs, lambda head: head // group)
        assert_close(p, eager.attentions[inputs.layer][0], what=f"layer {inputs.layer}")
        out = p @ inputs.v[0].double().repeat_interleave(group, 0)
        size = out.abs().max()
        assert_close(inputs.output[0] / size, out / size, what=f"output of layer {inputs.layer}")


def test_capture_leaves_hidden_states_as_sdpa(loaded):
    ids = _ids(200)
    hidden, _ = _capture(loaded, ids)
    assert_close(hidden, _library(loaded, ids, "sdpa").last_hidden_state)


def test_capture_tells_a_wrong_head_mapping(loaded):
    """The mapping h % Hkv would be noticed: the tests above can fail."""
    ids = _ids(40)
    _, captured = _capture(loaded, ids)
    wrong = _probabilities(captured[0], lambda head: head % loaded.identity.num_kv_heads)
    eager = _library(loaded, ids, "eager").attentions[captured[0].layer][0]
    assert (wrong - eager).abs().max() > 0.01


@pytest.mark.parametrize("family", HYBRIDS)
def test_sliding_layers_matter_beyond_the_window(family):
    """With a window as long as the sample the hidden states differ: the band is really cut."""
    narrow, wide = (
        adopt_model(tiny_model(family, sliding_window=window, seed=3)) for window in (24, 512)
    )
    for n, same in ((24, True), (60, False)):
        difference = (_capture(narrow, _ids(n))[0] - _capture(wide, _ids(n))[0]).abs().max()
        assert (difference < 1e-4) == same


def test_capture_hands_on_the_injected_attention():
    loaded = adopt_model(tiny_model())
    calls = []

    def dense(q, k, v, *, scale):
        calls.append(scale)
        lse = torch.full(q.shape[1:3], float(len(calls)))
        return torch.zeros_like(q), lse, "zeros"

    _, captured = _capture(loaded, _ids(9), dense_attention=dense)
    assert calls == [loaded.identity.attention_scale] * 3
    assert [float(inputs.lse[0, 0]) for inputs in captured] == [1.0, 2.0, 3.0]
    assert all(not inputs.output.any() for inputs in captured)


def test_capture_reports_every_attention_layer():
    loaded = adopt_model(tiny_model("gemma3"))
    layers = []
    _capture(loaded, _ids(9), on_layer=layers.append)
    assert layers == [0, 1, 2, 3]


class _LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_capture_builds_nothing_quadratic(family):
    loaded = adopt_model(tiny_model(family, num_attention_heads=2, num_key_value_heads=1))
    n = 3000
    with _LargestTensor() as largest:
        run_with_capture(loaded, _ids(n), lambda inputs: None)
    assert n * 64 <= largest.numel < n * 1024  # hidden and head sizes, far below n per row


def test_capture_turns_dropout_off():
    model = tiny_model(attention_dropout=0.5).train()
    loaded = adopt_model(model)
    first, _ = _capture(loaded, _ids(30))
    again, _ = _capture(loaded, _ids(30))
    assert torch.equal(first, again)
    assert not first.requires_grad


@pytest.mark.parametrize(
    ("projection", "row", "message"),
    [
        ("q_proj", 2 * 16 + 3, "layer 1 has values that are not finite in q, query heads 2:"),
        ("k_proj", 16, "layer 1 has values that are not finite in k, kv heads 1:"),
        ("v_proj", 0, "layer 1 has values that are not finite in v, kv heads 0:"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_capture_names_layer_and_head_of_non_finite_values(projection, row, message, value):
    model = tiny_model()
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, projection).weight[row, 0] = value
    loaded = adopt_model(model)
    handed = []
    with pytest.raises(ModelError, match=message):
        run_with_capture(loaded, _ids(9), lambda inputs: handed.append(inputs.layer))
    assert handed == [0]
    assert loaded.model.config._attn_implementation == "sdpa"


def test_capture_restores_the_attention_implementation():
    loaded = adopt_model(tiny_model())
    loaded.model.set_attn_implementation("eager")
    _capture(loaded, _ids(3))
    assert loaded.model.config._attn_implementation == "eager"


def test_capture_notices_a_layer_that_never_ran():
    loaded = adopt_model(tiny_model())
    loaded.model.config.num_hidden_layers = 2
    with pytest.raises(ModelError, match=r"layers \[2\] ran without"):
        _capture(loaded, _ids(3))


def test_capture_refuses_a_feature_asked_for_at_run_time():
    model = tiny_model("gemma2")
    model.config.attn_logit_softcapping = None
    loaded = adopt_model(model)
    for layer, cap in zip(model.model.layers, (None, 30.0, None), strict=True):
        layer.self_attn.attn_logit_softcapping = cap
    with pytest.raises(UnsupportedModel, match=r"layer 1 .* logit softcap"):
        _capture(loaded, _ids(3))


def test_capture_refuses_a_window_that_would_cut():
    """A window as long as the model's positions counts as full, until a sample exceeds it."""
    loaded = adopt_model(tiny_model("mistral", sliding_window=64, max_position_embeddings=64))
    assert loaded.identity.layer_types == ("full",) * 3
    assert len(_capture(loaded, _ids(64))[1]) == 3
    with pytest.raises(UnsupportedModel, match=r"window of 64 tokens .* at most 64"):
        _capture(loaded, _ids(65))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(2, 5, dtype=torch.long), r"shape \[2, 5\]"),
        (torch.zeros(5, dtype=torch.long), r"shape \[5\]"),
        (torch.zeros(1, 0, dtype=torch.long), r"shape \[1, 0\]"),
        (torch.tensor([[0, 320]]), "0..320 but the model's vocabulary has 320"),
        (torch.tensor([[-1]]), "-1..-1"),
    ],
)
def test_capture_refuses_token_ids(ids, message):
    with pytest.raises(InputError, match=message):
        run_with_capture(adopt_model(tiny_model()), ids, lambda inputs: None)
