"""Every causal language model of the installed library is captured right, or refused by name."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from patternsearch.errors import PatternsearchError
from patternsearch.model.capture import run_with_capture
from patternsearch.model.loading import adopt_model
from patternsearch.model.support import check_supported

UNFIT = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError,
         StrictDataclassError, TypeError, ValueError)  # fmt: skip
"""What a class of the library says when these fields do not make a configuration or a model."""

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rotary_dim": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 32,
}

PEERS_OF_NOTE = {"llama", "qwen2", "qwen3", "qwen3_moe", "phi3", "mixtral", "gemma", "glm4", "gpt2"}


def _small_config(config_class):
    """Return the class's configuration at toy size, or None where these fields do not make one."""
    try:
        defaults = config_class()
        fields = {name: size for name, size in SMALL.items() if hasattr(defaults, name)}
        if getattr(defaults, "head_dim", None):
            fields["head_dim"] = 16
        if getattr(defaults, "sliding_window", None):
            fields["sliding_window"] = 24
        return config_class(**fields)
    except UNFIT:
        return None


def _outcome(config):
    """Return "right", "wrong", "refused" or "not built" for one configuration."""
    try:
        check_supported(config)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    except PatternsearchError:
        return "refused"
    except UNFIT:
        return "not built"
    ids = torch.randint(3, 320, (1, 150), generator=torch.Generator().manual_seed(0))
    try:
        loaded = adopt_model(model.float())
        hidden = run_with_capture(loaded, ids, lambda inputs: None)
    except PatternsearchError:
        return "refused"
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        eager = loaded.backbone(input_ids=ids, use_cache=False).last_hidden_state
    return "right" if (hidden - eager).norm() <= 1e-5 * eager.norm() else "wrong"


@pytest.mark.slow
def test_every_family_is_right_or_refused():
    outcomes = {
        config_class.model_type: _outcome(config)
        for config_class in MODEL_FOR_CAUSAL_LM_MAPPING
        if (config := _small_config(config_class)) is not None
    }
    right = {name for name, outcome in outcomes.items() if outcome == "right"}
    assert not [name for name, outcome in outcomes.items() if outcome == "wrong"]
    assert right >= PEERS_OF_NOTE
    assert len(right) > 50, outcomes
