"""An attached config runs exactly where it may, and nothing else changes."""

import copy

import pytest
import torch

from patternsearch.errors import InputError, ModelError, UnsupportedModel
from patternsearch.model.capture import run_with_capture
from patternsearch.model.loading import adopt_model
from patternsearch.patterns.candidates import AShape
from patternsearch.runtime.attach import attach, default_min_length, detach
from patternsearch.runtime.attachment import ATTENTION_NAME, attached_to
from patternsearch.schema.config import PatternConfig
from support.closeness import assert_close
from support.configs import make_config
from support.runtime import all_dense, assert_logits_close, config_for, logits_of, random_ids
from support.tiny_models import FAMILIES, HYBRIDS, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def config(model):
    return config_for(model)


@pytest.fixture
def attached(model, config):
    with attach(model, config) as attachment:
        yield attachment


def test_sparse_prefill_differs_from_dense_and_is_counted(model, config):
    ids = random_ids(300)
    dense = logits_of(model, ids)
    with attach(model, config) as attachment:
        sparse = logits_of(model, ids)
        assert attachment.stats.sparse_calls == 3
        assert attachment.stats.sparse_tokens == 900
        assert not attachment.stats.dense_calls
    assert (dense - sparse).abs().max() > 1e-3
    assert torch.equal(logits_of(model, ids), dense), "detaching gives the model back"


def test_sparse_prefill_reads_exactly_the_pattern(model, config):
    """One A-shape everywhere: the whole model must equal masked dense attention."""
    n, pattern = 300, AShape(sink=10, window=70, tile=64)
    only = config_for(model, (pattern,))
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    u, v = i // 64, j // 64
    mask = (j <= i) & ((v * 64 < 10) | (((u - v) * 64 - 63).clamp(min=0) < 70))
    ids = random_ids(n)
    expected = logits_of(model, ids, attention_mask=mask[None, None])
    with attach(model, only):
        assert_logits_close(logits_of(model, ids), expected)


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS[1:]])
def test_all_dense_config_equals_the_model_in_every_family(family):
    model = tiny_model(family)
    config = all_dense(config_for(model))
    ids = random_ids(200, seed=3)
    expected = logits_of(model, ids)
    with attach(model, config, min_length=1) as attachment:
        assert_logits_close(logits_of(model, ids), expected, what=family)
    assert attachment.stats.sparse_calls == sum(t == "full" for t in config.model.layer_types)
    assert attachment.stats.dense_calls["sliding layer"] == config.model.layer_types.count(
        "sliding"
    )


def test_hybrid_models_stay_dense_in_sliding_layers():
    model = tiny_model("gemma3")
    config = config_for(model)
    with attach(model, config) as attachment:
        logits_of(model, random_ids(300))
        assert attachment.stats.sparse_calls == 2
        assert attachment.stats.dense_calls == {"sliding layer": 2}
        logits_of(model, random_ids(40))
        assert attachment.stats.sparse_calls == 2


def test_short_prompts_are_bit_equal_to_dense(model, config, attached):
    ids = random_ids(255)
    sparse = logits_of(model, ids)
    assert attached.stats.dense_calls == {"short": 3}
    attached.detach()
    assert torch.equal(sparse, logits_of(model, ids))


def test_min_length_counts_real_tokens(model, config):
    assert default_min_length(config) == 256
    with attach(model, config, min_length=300) as attachment:
        logits_of(model, random_ids(299))
        assert attachment.stats.sparse_calls == 0
        logits_of(model, random_ids(300))
        assert attachment.stats.sparse_calls == 3


def test_measured_min_length_wins_over_calibrated_lengths(config):
    document = config.model_dump()
    document["selection"]["min_length"] = 1000
    assert default_min_length(PatternConfig.model_validate(document)) == 1000


def test_prefill_then_decode_through_the_cache(model, attached):
    ids = random_ids(300)
    with torch.inference_mode():
        first = model(input_ids=ids, use_cache=True)
        step = model(input_ids=ids[:, :1], past_key_values=first.past_key_values)
    assert attached.stats.sparse_calls == 3
    assert attached.stats.dense_calls == {"decode": 3}
    assert torch.equal(first.logits.float(), logits_of(model, ids))
    assert step.logits.shape == (1, 1, 320)


def test_decode_attends_to_everything_in_the_cache(model, config):
    """With all heads dense, decoding after a sparse-path prefill equals one dense pass."""
    ids = random_ids(301)
    expected = logits_of(model, ids)[:, -1]
    with attach(model, all_dense(config)), torch.inference_mode():
        cache = model(input_ids=ids[:, :300], use_cache=True).past_key_values
        step = model(input_ids=ids[:, 300:], past_key_values=cache).logits[:, -1].float()
    assert_logits_close(step, expected)


def test_generate_prefills_sparse_and_decodes_dense(model, attached):
    tokens = model.generate(random_ids(300), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, 304)
    assert attached.stats.sparse_calls == 3
    assert attached.stats.dense_calls == {"decode": 9}


def test_chunked_prefill_runs_dense_and_right(model, config):
    ids = random_ids(600)
    with torch.inference_mode():
        cache = model(input_ids=ids[:, :300], use_cache=True).past_key_values
        expected = model(input_ids=ids[:, 300:], past_key_values=cache).logits.float()
    with attach(model, all_dense(config)) as attachment, torch.inference_mode():
        cache = model(input_ids=ids[:, :300], use_cache=True).past_key_values
        found = model(input_ids=ids[:, 300:], past_key_values=cache).logits.float()
    assert attachment.stats.dense_calls == {"chunked prefill": 3}
    assert_logits_close(found, expected)


def test_batch_rows_equal_single_prompts(model, attached):
    ids = random_ids(300, batch=2)
    together = logits_of(model, ids)
    assert attached.stats.sparse_calls == 6
    for row in range(2):
        assert_logits_close(together[row], logits_of(model, ids[row : row + 1])[0])


@pytest.mark.parametrize("use_cache", [False, True])
def test_right_padding_equals_the_unpadded_prompts(model, attached, use_cache):
    ids = random_ids(400, batch=3)
    lengths = (400, 301, 120)
    mask = torch.arange(400)[None] < torch.tensor(lengths)[:, None]
    padded = logits_of(model, ids, attention_mask=mask.long(), use_cache=use_cache)
    assert attached.stats.sparse_calls == 6
    assert attached.stats.dense_calls == {"short": 3}
    for row, n in enumerate(lengths):
        assert_logits_close(padded[row, :n], logits_of(model, ids[row : row + 1, :n])[0])
    assert padded.isfinite().all()


def test_left_padding_runs_dense_and_right(model, attached):
    ids = random_ids(400, batch=2)
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, :50] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    assert attached.stats.dense_calls == {"padding": 6}
    attached.detach()
    expected = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_sequences_run_as_without_us(model, attached, use_cache):
    ids = random_ids(600)
    positions = torch.cat([torch.arange(280), torch.arange(320)])[None]
    found = logits_of(model, ids, position_ids=positions, use_cache=use_cache)
    assert attached.stats.sparse_calls == 0
    assert attached.stats.dense_calls == {"packed": 3}
    attached.detach()
    expected = logits_of(model, ids, position_ids=positions, use_cache=use_cache)
    assert torch.equal(found, expected)


def test_custom_4d_mask_is_obeyed(model, attached):
    ids = random_ids(300)
    mask = torch.ones(300, 300, dtype=torch.bool).tril()[None, None].clone()
    mask[..., 100:, 5:50] = False
    found = logits_of(model, ids, attention_mask=mask)
    assert attached.stats.dense_calls == {"custom mask": 3}
    attached.detach()
    assert torch.equal(found, logits_of(model, ids, attention_mask=mask))


def test_static_cache_prefill_is_right(model, attached):
    """Sparse; dense where an older transformers insists on a mask for a static cache."""
    from transformers import StaticCache

    ids = random_ids(300)
    cache = StaticCache(config=model.config, max_cache_len=512)
    found = logits_of(model, ids, past_key_values=cache, use_cache=True)
    if attached.stats.sparse_calls:
        assert attached.stats.sparse_calls == 3
    else:
        assert attached.stats.dense_calls == {"custom mask": 3}
        attached.detach()
    assert_logits_close(found, logits_of(model, ids))


def test_gradients_run_dense(model, attached):
    embeddings = model.get_input_embeddings()(random_ids(300)).detach().requires_grad_(True)
    model(inputs_embeds=embeddings).logits.sum().backward()
    assert attached.stats.dense_calls == {"training": 3}
    assert embeddings.grad.abs().sum() > 0


def test_layers_choose_which_run_sparse(model, config):
    with attach(model, config, layers=[1]) as attachment:
        logits_of(model, random_ids(300))
        assert attachment.stats.sparse_calls == 1
        assert attachment.stats.dense_calls == {"layer not attached": 2}


def test_a_failed_forward_leaves_no_route_behind(model, attached):
    with pytest.raises(IndexError):
        logits_of(model, random_ids(300).fill_(9999))
    assert not attached._router.prefills


# --- refusals ------------------------------------------------------------------------------


def test_attach_twice_is_refused(model, config, attached):
    with pytest.raises(InputError, match="already attached"):
        attach(model, config)


def test_detach_says_whether_there_was_one(model, config):
    assert detach(model) is False
    before = model.config._attn_implementation
    attach(model, config)
    assert attached_to(model) is not None
    assert model.config._attn_implementation == ATTENTION_NAME
    assert detach(model) is True
    assert model.config._attn_implementation == before


def test_training_mode_is_refused(config):
    with pytest.raises(InputError, match="eval"):
        attach(tiny_model("llama").train(), config)


def test_refused_families_are_refused_by_name(config):
    with pytest.raises(UnsupportedModel, match="gemma2"):
        attach(tiny_model("gemma2"), config)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"attention_scale": 0.5}, "attention scale"),
        ({"head_dim": 32}, "head_dim"),
        ({"max_positions": 9}, "max positions"),
    ],
)
def test_a_config_of_another_model_is_refused_unless_not_strict(model, changes, word):
    config = config_for(model, **changes)
    with pytest.raises(InputError, match=word):
        attach(model, config)
    attach(model, config, strict=False).detach()


def test_scaled_rope_theta_is_refused(config):
    other = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 40000.0})
    with pytest.raises(InputError, match="RoPE: rope_theta"):
        attach(other, config)


def test_other_weights_are_refused_by_the_probe(config):
    other = tiny_model("llama", seed=1)
    with pytest.raises(InputError, match="not this model's heads"):
        attach(other, config)
    attach(other, config, probe=False).detach()


def test_other_head_counts_are_refused_even_if_not_strict(model):
    with pytest.raises(InputError, match="num_layers"):
        attach(model, make_config(), strict=False)


def test_a_copy_of_an_attached_model_is_refused(model, attached):
    with pytest.raises(ModelError, match="copied or re-loaded"):
        logits_of(copy.deepcopy(model), random_ids(300))


def test_unknown_layer_is_refused(model, config):
    with pytest.raises(InputError, match="no full attention"):
        attach(model, config, layers=[7])


def test_an_attached_model_can_still_be_captured(model, attached):
    seen = []
    run_with_capture(adopt_model(model), random_ids(64), lambda inputs: seen.append(inputs.layer))
    assert seen == [0, 1, 2]
    assert attached_to(model) is attached
    assert model.config._attn_implementation == ATTENTION_NAME


# --- tensor parallelism --------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_runs_its_slice_of_the_heads(model, config, rank):
    """Two ranks, emulated: the sliced q and k of a layer give the same slice of its output."""
    from patternsearch.runtime.attachment import Attachment

    attachment = Attachment(
        model,
        tuple(tuple(entry.pattern for entry in entries) for entries in config.heads),
        layer_types=config.model.layer_types,
        sliding_window=None,
        min_length=1,
        layers=(0, 1, 2),
        head_dim=config.model.head_dim,
        heads=(2 * rank, 2 * rank + 2),
    )
    captured = []
    run_with_capture(
        adopt_model(model),
        random_ids(300),
        lambda x: captured.append([t.clone() for t in (x.q, x.k, x.v)]),
    )
    q, k, v = captured[0]
    whole = attachment_output(model, config, q, k, v)
    part = attachment._row(
        0, "full", None, q[:, 2 * rank : 2 * rank + 2], k[:, rank : rank + 1],
        v[:, rank : rank + 1], scale=16**-0.5,
    )  # fmt: skip
    assert_close(part, whole[:, :, 2 * rank : 2 * rank + 2])


def attachment_output(model, config, q, k, v):
    from patternsearch.runtime.sparse import sparse_attention_of

    patterns = [entry.pattern for entry in config.heads[0]]
    return sparse_attention_of(patterns, q, k, v, scale=16**-0.5, backend="torch").transpose(1, 2)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (0, 3), (None, 2)])
def test_impossible_ranks_are_refused(model, config, rank, size):
    with pytest.raises(InputError):
        attach(model, config, tp_rank=rank, tp_size=size)


def test_a_rank_with_other_heads_than_announced_is_refused(model, config):
    with attach(model, config, tp_rank=1, tp_size=2), pytest.raises(ModelError, match="heads 2–3"):
        logits_of(model, random_ids(300))
