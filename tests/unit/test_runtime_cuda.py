"""An attached config on a CUDA device: the kernels give what the PyTorch path gives."""

import pytest
import torch

from patternsearch.model.fingerprints import fingerprint_heads
from patternsearch.model.loading import adopt_model
from patternsearch.patterns.candidates import AShape
from patternsearch.runtime.attach import attach
from patternsearch.runtime.mapping import compare_mapping
from patternsearch.runtime.prefill_timing import (
    DENSE_KERNELS,
    time_dense_prefill,
    time_prefill,
)
from patternsearch.runtime.shadow import shadow
from support.runtime import all_dense, config_for, random_ids
from support.tiny_models import tiny_model

pytestmark = pytest.mark.gpu


def hidden(model, ids, **keywords):
    with torch.inference_mode():
        return model.base_model(input_ids=ids, **keywords).last_hidden_state.float()


def relative(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


@pytest.fixture(scope="module", params=[torch.float16, torch.bfloat16])
def model(request):
    return tiny_model(
        "llama", dtype=request.param, head_dim=64, num_attention_heads=8, num_key_value_heads=2
    ).cuda()


@pytest.fixture(scope="module")
def config(model):
    return config_for(model)


def both_backends(model, config, ids):
    found = []
    for backend in ("triton", "torch"):
        with attach(model, config, backend=backend) as attachment:
            found.append(hidden(model, ids))
            assert attachment.stats.sparse_calls == 3
    return found


@pytest.mark.parametrize("n", [256, 1000, 2048])
def test_kernels_equal_the_torch_path_on_a_fixed_index(model, n):
    patterns = [AShape(sink=64, window=128, tile=tile) for tile in (64, 128)]
    triton, plain = both_backends(model, config_for(model, patterns), random_ids(n).cuda())
    assert relative(triton, plain) < 3e-2


@pytest.mark.parametrize("n", [256, 1000, 2048])
def test_online_index_loses_as_much_as_the_torch_path(model, config, n):
    """Half precision breaks near-ties of a random model either way: compare the losses."""
    ids = random_ids(n).cuda()
    dense = hidden(model, ids)
    triton, plain = (relative(x, dense) for x in both_backends(model, config, ids))
    assert triton == pytest.approx(plain, rel=0.1, abs=1e-2)


def test_all_dense_equals_the_model(model, config):
    ids = random_ids(1000).cuda()
    expected = hidden(model, ids)
    with attach(model, all_dense(config)) as attachment:
        found = hidden(model, ids)
        assert attachment.stats.sparse_calls == 3
    assert relative(found, expected) < 3e-2


def test_right_padding_equals_the_unpadded_prompt(model, config):
    ids = random_ids(700, batch=2).cuda()
    mask = torch.arange(700, device="cuda")[None] < torch.tensor([[700], [500]], device="cuda")
    with attach(model, config):
        padded = hidden(model, ids, attention_mask=mask.long())
        alone = hidden(model, ids[1:, :500])
    assert relative(padded[1, :500], alone[0]) < 1e-2


def test_generate_prefills_sparse(model, config):
    with attach(model, config) as attachment:
        tokens = model.generate(
            random_ids(512).cuda(), max_new_tokens=3, min_new_tokens=3, do_sample=False
        )
        assert tokens.shape == (1, 515)
        assert attachment.stats.sparse_calls == 3
        assert attachment.stats.dense_calls == {"decode": 6}


def test_devices_and_dtypes_have_the_same_heads(model):
    """Fingerprints on this device against float32 on the CPU: no false alarm."""
    reference = tiny_model("llama", head_dim=64, num_attention_heads=8, num_key_value_heads=2)
    loaded = adopt_model(reference)
    expected = fingerprint_heads(loaded, 3)
    found = fingerprint_heads(adopt_model(model), 3)
    report = compare_mapping(expected, found, loaded.identity)
    assert not report.findings
    assert report.verdict != "different model"


def test_shadow_changes_nothing(model, config):
    ids = random_ids(512).cuda()
    expected = hidden(model, ids)
    with shadow(model, config, rate=1.0) as watch:
        assert torch.equal(hidden(model, ids), expected)
        assert watch.statistics().num_sampled == 1


def test_prefill_time_is_split(model, config):
    ids = random_ids(2048)
    dense = time_dense_prefill(model, config, ids)
    sparse = time_prefill(model, config, ids, run="sparse")
    assert dense.index_ms == 0 < sparse.index_ms
    assert dense.kernel in DENSE_KERNELS
    assert sparse.kernel == "triton"
    for row in (dense, sparse):
        parts = row.projection_ms + row.index_ms + row.attention_ms + row.other_ms
        assert parts == pytest.approx(row.total_ms, rel=0.3)
