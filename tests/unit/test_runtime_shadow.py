"""Watching compares both outputs and changes nothing that is served."""

import pytest
import torch

from patternsearch.errors import InputError
from patternsearch.runtime.attach import attach
from patternsearch.runtime.attachment import attached_to
from patternsearch.runtime.shadow import shadow
from support.runtime import all_dense, config_for, logits_of, random_ids
from support.tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def config(model):
    return config_for(model)


def test_dense_serving_is_watched_and_unchanged(model, config):
    ids = random_ids(300)
    expected = logits_of(model, ids)
    with shadow(model, config, rate=1.0, layers=[0, 2]) as watch:
        assert torch.equal(logits_of(model, ids), expected)
        logits_of(model, random_ids(300, seed=1))
        seen = watch.statistics()
    assert attached_to(model) is None
    assert (seen.num_requests, seen.num_sampled) == (2, 2)
    assert [part.layer for part in seen.layers] == [0, 2]
    for part in seen.layers:
        assert part.num_compared == 2
        entries = config.heads[part.layer]
        for entry, error, cosine in zip(entries, part.mean_error, part.mean_cosine, strict=True):
            if entry.pattern.kind == "dense":
                assert error < 1e-5
                assert cosine > 0.99999
            else:
                assert 1e-3 < error < 2
    assert seen.worst_head() is not None


def test_errors_are_those_of_the_outputs(model, config):
    """The statistics of one request equal the error computed from captured inputs."""
    from patternsearch.model.capture import run_with_capture
    from patternsearch.model.loading import adopt_model
    from patternsearch.runtime.sparse import sparse_attention_of

    ids = random_ids(300)
    expected = []

    def look(inputs):
        if inputs.layer == 0:
            patterns = [entry.pattern for entry in config.heads[0]]
            out = sparse_attention_of(
                patterns, inputs.q, inputs.k, inputs.v, scale=inputs.scale, backend="torch"
            )
            error = (out - inputs.output).norm(dim=(2, 3)) / inputs.output.norm(dim=(2, 3))
            expected.extend(error[0].tolist())

    run_with_capture(adopt_model(model), ids, look)
    with shadow(model, config, rate=1.0, layers=[0]) as watch:
        logits_of(model, ids)
        assert watch.statistics().layers[0].mean_error == pytest.approx(expected, rel=1e-4)


def test_sparse_serving_stays_sparse(model, config):
    ids = random_ids(300)
    with attach(model, config) as attachment:
        expected = logits_of(model, ids)
        with shadow(model, config, rate=1.0, layers=[1]) as watch:
            assert torch.equal(logits_of(model, ids), expected)
            assert watch.statistics().num_sampled == 1
        assert attached_to(model) is attachment
        assert attachment.stats.sparse_calls == 6


def test_rate_is_the_sampled_fraction(model, config):
    with shadow(model, all_dense(config), rate=0.5, layers=[0]) as watch:
        for seed in range(40):
            logits_of(model, random_ids(256, seed=seed))
        seen = watch.statistics()
    assert seen.num_requests == 40
    assert 10 <= seen.num_sampled <= 30
    assert seen.layers[0].num_compared == seen.num_sampled


def test_rate_zero_compares_nothing(model, config):
    with shadow(model, config, rate=0.0) as watch:
        logits_of(model, random_ids(300))
        assert watch.statistics().layers == ()
        assert watch.statistics().num_requests == 1
        assert watch.statistics().worst_head() is None


def test_short_prompts_are_no_requests(model, config):
    with shadow(model, config, rate=1.0) as watch:
        logits_of(model, random_ids(100))
        assert watch.statistics().num_requests == 0


@pytest.mark.parametrize(
    ("keywords", "word"), [({"rate": 1.5}, "no fraction"), ({"layers": [9]}, "runs no patterns")]
)
def test_bad_arguments_are_refused(model, config, keywords, word):
    with pytest.raises(InputError, match=word):
        shadow(model, config, **keywords)


def test_an_attachment_without_layers_is_refused(model, config):
    with attach(model, config, layers=[]), pytest.raises(InputError, match="no layer runs"):
        shadow(model, config)


def test_two_shadows_are_refused(model, config):
    with shadow(model, config), pytest.raises(InputError, match="watched already"):
        shadow(model, config)
