"""Every field that a config is bound to is compared, and a difference in it is named."""

import pytest

from patternsearch.schema.config import ModelIdentity
from patternsearch.validation.identity import check_identity, check_tensor_parallel
from support.configs import make_config, make_model, sha

YARN = {
    "full": {
        "rope_type": "yarn",
        "parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
        "attention_factor": 1.1386294,
        "inverse_frequencies": [1.0, 0.1, 0.01],
    }
}


def checks(config=None, *, weights=True, **changes):
    config = config or make_config()
    found = ModelIdentity.model_validate(config.model.model_dump() | changes)
    return {check.name: check for check in check_identity(config, found, weights=weights)}


def differing(table):
    return sorted(name for name, check in table.items() if check.status == "differs")


def test_the_same_model_passes_every_check():
    table = checks()
    assert {check.status for check in table.values()} == {"ok"}
    assert not any(check.advice for check in table.values())


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"architecture": "Qwen2ForCausalLM"}, ["architecture"]),
        ({"model_type": "qwen2"}, ["model type"]),
        ({"num_query_heads": 8}, ["query heads"]),
        ({"num_kv_heads": 4}, ["kv heads"]),
        ({"head_dim": 128}, ["head_dim"]),
        ({"attention_scale": 0.1}, ["attention scale"]),
        ({"logit_softcap": 30.0}, ["logit softcap"]),
        ({"sliding_window": 64}, ["sliding window"]),
        ({"max_positions": 4096}, ["max positions"]),
        ({"vocab_size": 1001}, ["vocabulary size"]),
        ({"dtype": "bfloat16"}, ["dtype of the weights"]),
        ({"tokenizer_sha256": sha("other")}, ["tokenizer"]),
        ({"weights_sha256": sha("other")}, ["weights"]),
        ({"layer_types": ["full", "sliding"]}, ["layer types"]),
        (
            {"num_layers": 1, "layer_types": ["full"], "attention_sha256": [sha("layer 0")]},
            ["layer types", "layers"],
        ),
        ({"rope": {}}, ["RoPE: layer types"]),
    ],
)
def test_a_changed_field_is_named_alone(changes, names):
    table = checks(**changes)
    assert differing(table) == names
    assert all(table[name].advice for name in names)


def test_changed_attention_weights_name_their_layers():
    digests = [sha(f"layer {i}") for i in range(6)]
    config = make_config(num_layers=6)
    assert list(config.model.attention_sha256) == digests
    for layer in (1, 2, 4):
        digests[layer] = sha(f"changed {layer}")
    table = checks(config, attention_sha256=digests)
    assert differing(table) == ["attention weights"]
    assert table["attention weights"].found == "changed in layers 1–2, 4"


def rope_config(rope):
    document = make_config().model_dump()
    document["model"]["rope"] = rope
    return type(make_config()).model_validate(document)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"attention_factor": 1.0}, ["RoPE: attention factor"]),
        ({"inverse_frequencies": [1.0, 0.1001, 0.01]}, ["RoPE: inverse frequencies"]),
        ({"inverse_frequencies": [1.0, 0.1]}, ["RoPE: inverse frequencies"]),
        ({"rope_type": "linear"}, ["RoPE: type"]),
        (
            {"parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}},
            ["RoPE: factor"],
        ),
        (
            {"parameters": {"rope_theta": 10000.0, "factor": 4.0, "beta_fast": 16.0}},
            ["RoPE: beta_fast"],
        ),
    ],
)
def test_rope_is_compared_field_by_field(change, names):
    found = {"full": YARN["full"] | change}
    assert differing(checks(rope_config(YARN), rope=found)) == names


@pytest.mark.parametrize(
    "change",
    [
        {"inverse_frequencies": [1.0, 0.1 * (1 + 5e-8), 0.01]},
        {"parameters": YARN["full"]["parameters"] | {"mscale": None}},
        {"parameters": YARN["full"]["parameters"] | {"rope_theta": 10000}},
    ],
)
def test_rope_spelled_otherwise_is_the_same(change):
    assert differing(checks(rope_config(YARN), rope={"full": YARN["full"] | change})) == []


def test_scaled_theta_shows_in_parameters_and_frequencies():
    found = {"full": YARN["full"] | {
        "parameters": YARN["full"]["parameters"] | {"rope_theta": 20000.0},
        "inverse_frequencies": [1.0, 0.08, 0.006],
    }}  # fmt: skip
    table = checks(rope_config(YARN), rope=found)
    assert differing(table) == ["RoPE: inverse frequencies", "RoPE: rope_theta"]
    assert (table["RoPE: rope_theta"].expected, table["RoPE: rope_theta"].found) == (
        "10000.0",
        "20000.0",
    )
    assert "2 differ; [2] = 0.006" in table["RoPE: inverse frequencies"].found


def test_unknown_digests_are_never_taken_to_match():
    table = checks(weights_sha256=None, attention_sha256=[], tokenizer_sha256=None, weights=False)
    unknown = {name for name, check in table.items() if check.status == "cannot tell"}
    assert unknown == {"weights", "attention weights", "tokenizer"}
    assert "--no-weights" in table["weights"].advice


def test_another_storage_format_cannot_be_told():
    table = checks(weights_format="gguf", weights_sha256=sha("other"))
    assert table["weights"].status == "cannot tell"
    assert "attention weights" not in table


# --- tensor parallelism --------------------------------------------------------------------


def parallel(size, *, num_query=8, num_kv=2, recorded=1):
    config = make_config(num_query_heads=num_query, num_kv_heads=num_kv, tp_size=recorded)
    found = ModelIdentity.model_validate(make_model(2, num_query, num_kv))
    return {check.name: check for check in check_tensor_parallel(config, found, size)}


def test_slices_of_every_rank_are_shown():
    table = parallel(2)
    assert table["heads over 2 ranks"].status == "ok"
    assert "rank 1: query 4–7, kv 1–1" in table["heads over 2 ranks"].found
    assert table["kv heads"].found == "split over the ranks"


def test_replicated_kv_heads_are_shown():
    table = parallel(4)
    assert "rank 1: query 2–3, kv 0–0" in table["heads over 4 ranks"].found
    assert table["kv heads"].found == "each on 2 ranks"


@pytest.mark.parametrize(("num_query", "num_kv", "size"), [(8, 2, 3), (12, 4, 6), (9, 3, 2)])
def test_impossible_sizes_differ_and_name_possible_ones(num_query, num_kv, size):
    table = parallel(size, num_query=num_query, num_kv=num_kv)
    (check,) = table.values()
    assert check.status == "differs"
    assert f"{num_query} % {size} = {num_query % size}" in check.found
    assert "use one of 1," in check.advice


def test_a_layout_recorded_for_another_size_cannot_be_told():
    assert parallel(4, recorded=2)["recorded layout"].status == "cannot tell"
    assert parallel(2, recorded=2)["recorded layout"].status == "ok"


def test_a_wrong_recorded_layout_differs():
    document = make_config(num_query_heads=8, num_kv_heads=2, tp_size=2).model_dump()
    ranks = [dict(rank) for rank in document["tensor_parallel"]["ranks"]]
    ranks[1]["query_heads"] = (0, 4)
    document["tensor_parallel"]["ranks"] = ranks
    config = type(make_config()).model_validate(document)
    table = {c.name: c for c in check_tensor_parallel(config, config.model, 2)}
    assert table["recorded layout"].status == "differs"
