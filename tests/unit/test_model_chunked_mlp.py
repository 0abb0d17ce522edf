"""Feed-forward blocks in slices: the same hidden states, less memory, everything put back."""

import pytest
import torch

from patternsearch.model.chunked_mlp import chunked_mlps, token_wise_mlps
from support.tiny_models import tiny_model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3"])
def test_slices_change_nothing(family):
    model = tiny_model(family)
    assert len(token_wise_mlps(model)) == model.config.num_hidden_layers
    ids = torch.arange(100)[None] % 300
    sizes = []
    for module in token_wise_mlps(model):
        module.down_proj.register_forward_hook(lambda m, i, o: sizes.append(o.shape[1]))
    with torch.inference_mode():
        expected = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        sizes.clear()
        with chunked_mlps(model, rows=33):
            ours = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        assert sizes == [33, 33, 33, 1] * model.config.num_hidden_layers
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
        sizes.clear()
        model.base_model(input_ids=ids, use_cache=False)
    assert set(sizes) == {100}
    assert all("forward" not in module.__dict__ for module in token_wise_mlps(model))


def test_short_inputs_run_as_they_are():
    model = tiny_model()
    ids = torch.arange(50)[None]
    with torch.inference_mode():
        expected = model.base_model(input_ids=ids).last_hidden_state
        with chunked_mlps(model, rows=50):
            assert torch.equal(model.base_model(input_ids=ids).last_hidden_state, expected)


def test_mixtures_of_experts_are_left_alone():
    assert token_wise_mlps(tiny_model("mixtral")) == []


def test_blocks_are_put_back_after_an_error():
    model = tiny_model()
    with pytest.raises(KeyError), chunked_mlps(model):
        raise KeyError
    assert all("forward" not in module.__dict__ for module in token_wise_mlps(model))
