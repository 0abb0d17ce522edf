"""A model is described from headers and config.json, as the running model would describe itself."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from patternsearch.errors import ModelError
from patternsearch.model.identity import describe_model
from patternsearch.model.loading import adopt_model
from patternsearch.schema.config import ModelIdentity
from support.closeness import assert_close
from support.tiny_models import FAMILIES, tiny_config, tiny_model, tiny_model_dir


@pytest.mark.parametrize("family", FAMILIES)
def test_describe_model_states_the_shapes(family, tmp_path, monkeypatch):
    folder = tiny_model_dir(tmp_path, family, dtype=torch.bfloat16)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", _never)
    identity = describe_model(folder)
    head_dim = {"qwen3": 32, "phi3": 96, "gemma3": 256}.get(family, 16)
    hybrid = family == "gemma3"
    assert (identity.num_query_heads, identity.num_kv_heads) == (4, 2)
    assert identity.head_dim == head_dim
    assert identity.attention_scale == head_dim**-0.5
    assert identity.layer_types == (("sliding", "full") * 2 if hybrid else ("full",) * 3)
    assert identity.sliding_window == (24 if hybrid else None)
    assert identity.dtype == "bfloat16"
    assert identity.max_positions == 4096
    assert identity.vocab_size == 320
    assert identity.model_type == ("gemma3_text" if hybrid else family)
    assert identity.architecture.endswith("ForCausalLM")
    assert identity.weights_format == "safetensors"
    assert identity.tokenizer_sha256
    assert identity.weights_sha256
    assert len(set(identity.attention_sha256)) == identity.num_layers
    assert ModelIdentity.model_validate_json(identity.model_dump_json()) == identity


def _never(*arguments, **keywords):
    raise AssertionError("a weight was loaded")


def test_describe_model_can_leave_the_weights_unread(tmp_path):
    folder = tiny_model_dir(tmp_path)
    full, quick = describe_model(folder), describe_model(folder, weights=False)
    assert quick.weights_sha256 is None
    assert quick.attention_sha256 == ()
    assert quick == full.model_copy(update={"weights_sha256": None, "attention_sha256": ()})


def test_describe_model_agrees_with_the_model_in_memory(tmp_path):
    folder = tiny_model_dir(tmp_path, "gemma3")
    from_files = describe_model(folder, weights=False)
    from_memory = adopt_model(tiny_model("gemma3")).identity
    differing = {"reference", "weights_format", "tokenizer_sha256"}
    assert from_files.model_dump(exclude=differing) == from_memory.model_dump(exclude=differing)


ROPES = {
    "default": {"rope_theta": 10000.0},
    "linear": {"rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "llama3": {
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "longrope": {
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + 0.5 * index for index in range(8)],
        "original_max_position_embeddings": 1024,
    },
}
"""Parameters by rope type, for head_dim 16 and 4096 positions."""


def _rope(tmp_path, rope_type):
    parameters = {"rope_type": rope_type, **ROPES[rope_type]}
    model = tiny_model(rope_parameters=parameters)
    return model, adopt_model(model).identity.rope["full"]


@pytest.mark.parametrize("rope_type", ROPES)
def test_rope_is_what_the_model_rotates_by(rope_type, tmp_path):
    """cos and sin at the last position equal those computed from the recorded values."""
    model, rope = _rope(tmp_path, rope_type)
    positions = torch.tensor([[0, 1, 4095]])
    cos, sin = model.model.rotary_emb(torch.zeros(1, 3, 64), positions)
    angle = positions[0, :, None].double() * torch.tensor(rope.inverse_frequencies).double()
    angle = torch.cat([angle, angle], -1).float()
    assert_close(cos[0], angle.cos() * rope.attention_factor, dtype=torch.bfloat16)
    assert_close(sin[0], angle.sin() * rope.attention_factor, dtype=torch.bfloat16)
    assert rope.rope_type == rope_type
    for name, value in ROPES[rope_type].items():
        assert rope.parameters[name] == value


def test_rope_default_follows_the_formula(tmp_path):
    _, rope = _rope(tmp_path, "default")
    assert_close(rope.inverse_frequencies, [10000.0 ** (-2 * index / 16) for index in range(8)])
    assert rope.attention_factor == 1.0


def test_rope_yarn_and_longrope_state_their_attention_factor(tmp_path):
    assert _rope(tmp_path, "yarn")[1].attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    _, rope = _rope(tmp_path, "longrope")
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1024)))
    default = torch.tensor(_rope(tmp_path, "default")[1].inverse_frequencies)
    long = torch.tensor(ROPES["longrope"]["long_factor"])
    assert_close(rope.inverse_frequencies, default / long)


def test_rope_differs_by_layer_type_where_the_model_does():
    rope = adopt_model(tiny_model("gemma3")).identity.rope
    assert set(rope) == {"full", "sliding"}
    assert rope["full"].parameters["rope_theta"] == 1_000_000.0
    assert rope["sliding"].parameters["rope_theta"] == 10_000.0
    for part in rope.values():
        theta = part.parameters["rope_theta"]
        assert_close(part.inverse_frequencies, [theta ** (-2 * i / 256) for i in range(128)])


def test_rope_covers_the_rotated_part_only():
    rope = adopt_model(
        tiny_model("phi3", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.75})
    ).identity.rope["full"]
    assert len(rope.inverse_frequencies) == 36


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 63, "head_dim": None}, "cannot be"),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"num_attention_heads": "many"}, "cannot be used"),
        ({"layer_types": ["full_attention"]}, "layer"),
    ],
    ids=["sizes", "unknown type", "wrong field", "layer count"],
)
def test_describe_model_refuses_a_wrong_config(changes, message, tmp_path):
    folder = tiny_model_dir(tmp_path, "qwen2")
    document = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match=message):
        describe_model(folder)


def test_describe_model_refuses_a_config_that_is_no_json(tmp_path):
    folder = tiny_model_dir(tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="configuration"):
        describe_model(folder)


def test_describe_model_runs_no_code_of_the_checkpoint(tmp_path):
    folder = tiny_model_dir(tmp_path)
    document = json.loads((folder / "config.json").read_text())
    document |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (folder / "config.json").write_text(json.dumps(document))
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    with pytest.raises(ModelError, match="custom code"):
        describe_model(folder)
    assert not (tmp_path / "ran").exists()


def test_tokenizer_digest_ignores_formatting_but_not_content(tmp_path):
    folder = tiny_model_dir(tmp_path)
    before = describe_model(folder, weights=False).tokenizer_sha256
    document = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(
        json.dumps(document | {"truncation": {"max_length": 5}}, indent=3)
    )
    (folder / "tokenizer_config.json").write_text("{}")
    assert describe_model(folder, weights=False).tokenizer_sha256 == before
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    assert describe_model(folder, weights=False).tokenizer_sha256 != before


def test_tokenizer_digest_counts_vocabulary_files_without_a_tokenizer_json(tmp_path):
    folder = tiny_model_dir(tmp_path, tokenizer=False)
    assert describe_model(folder, weights=False).tokenizer_sha256 is None
    (folder / "vocab.json").write_text('{"a": 0}')
    first = describe_model(folder, weights=False).tokenizer_sha256
    (folder / "merges.txt").write_text("a b\n")
    assert first
    assert describe_model(folder, weights=False).tokenizer_sha256 not in (None, first)


def test_tiny_models_are_the_same_every_time():
    first, again = (tiny_model("qwen3").state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert tiny_config("qwen3").head_dim == 32
