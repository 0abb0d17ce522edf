"""The task level: dense equals itself, losses are measured, and limits decide."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from patternsearch.calibration.samples import Sample
from patternsearch.calibration.synthetic import TaskPrompt
from patternsearch.model.loading import load_model
from patternsearch.patterns.candidates import AShape
from patternsearch.validation import task as task_module
from patternsearch.validation.samples import JudgingSamples
from patternsearch.validation.task import TaskOptions, measure_task
from patternsearch.validation.task_checks import TaskLimits, check_task
from patternsearch.validation.task_report import LogitAgreement, Retrieval, TaskReport
from support.runtime import all_dense, config_for, logits_of, random_ids
from support.tiny_models import tiny_model_dir

QUICK = TaskOptions(positions=300, new_tokens=6, depths=(0.5,), prompts=1)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(tiny_model_dir(tmp_path_factory.mktemp("task")), digests=False)


@pytest.fixture(scope="module")
def config(loaded):
    return config_for(loaded.model, (AShape(sink=1, window=32, tile=64),), fingerprints=False)


def judging(n=300):
    ids = random_ids(n, seed=5)[0].numpy().astype(np.int32)
    sample = Sample("s", "random", "heldout", n, n, "0" * 64, ids, (), None)
    return JudgingSamples((sample,), frozenset(), "random tokens")


def test_all_dense_loses_nothing(loaded, config):
    report = measure_task(loaded, all_dense(config), judging(), options=QUICK)
    row = report.logits[0]
    assert row.bucket == "all"
    assert row.num_positions == 300
    assert row.kl < 1e-6
    assert row.top1_agreement == 1.0
    assert row.sparse_perplexity == pytest.approx(row.dense_perplexity, rel=1e-4)
    assert report.greedy[0].agreeing_prefix == 1.0
    assert {s.largest_difference for s in report.short} == {0.0}
    assert max(s.num_tokens for s in report.short) == report.min_length - 1
    assert all(c.status in ("ok", "cannot tell") for c in check_task(report))


def test_losses_are_those_of_the_logits(loaded, config):
    """KL, agreement and perplexity against the same numbers from whole logits."""
    from patternsearch.runtime.attach import attach

    report = measure_task(loaded, config, judging(), options=QUICK)
    ids = random_ids(300, seed=5)
    dense = logits_of(loaded.model, ids)[0].log_softmax(-1)
    with attach(loaded.model, config, min_length=1):
        ours = logits_of(loaded.model, ids)[0].log_softmax(-1)
    row = report.logits[0]
    kl = (dense.exp() * (dense - ours)).sum(-1)
    assert row.kl == pytest.approx(float(kl.mean()), rel=1e-3)
    assert row.kl > 1e-3, "this config must lose something"
    agree = (dense.argmax(-1) == ours.argmax(-1)).float().mean()
    assert row.top1_agreement == pytest.approx(float(agree))
    first, second = dense.exp().topk(2, dim=-1).values.unbind(-1)
    decided = first >= 2 * second
    assert row.decided == pytest.approx(float(decided.float().mean()))
    same = (dense.argmax(-1) == ours.argmax(-1))[decided].float().mean()
    assert row.decided_agreement == pytest.approx(float(same))
    assert 0 < row.decided < 1, "both kinds of positions must occur"
    loss = -ours[:-1].gather(1, ids[0, 1:, None]).mean()
    assert row.sparse_perplexity == pytest.approx(float(loss.exp()), rel=1e-4)
    buckets = report.logits[1:]
    assert [b.bucket for b in buckets][:2] == ["0–37", "38–74"]
    assert sum(b.num_positions for b in buckets) == 300
    last = kl[np.arange(300) * 8 // 300 == 7].mean()
    assert buckets[-1].kl == pytest.approx(float(last), rel=1e-3)


def test_equal_logits_agree_and_decide_nothing(loaded, config, monkeypatch):
    tied = torch.zeros(300, 320)
    tied[:, [7, 70, 200]] = 3.0
    monkeypatch.setattr(task_module, "_logits_at", lambda model, ids, places: tied[: len(places)])
    row = measure_task(loaded, config, judging(), options=QUICK).logits[0]
    assert row.top1_agreement == 1.0
    assert row.decided == 0.0
    assert row.decided_agreement is None


def test_an_answer_counts_if_the_continuation_holds_it(loaded, monkeypatch):
    names = {field.name for field in fields(TaskPrompt)}
    values = dict.fromkeys(names) | {"answer": "the", "token_ids": np.arange(5, dtype=np.int32)}
    prompt = TaskPrompt(**values)
    encode = loaded.tokenizer.encode
    for text, right in (("is the one", True), ("is a dog", False)):
        answer = torch.tensor(encode(text, add_special_tokens=False))
        monkeypatch.setattr(task_module, "_continue", lambda *args, a=answer: a)
        assert task_module._answers(loaded, prompt, task_module.nullcontext) is right


def report(**changes):
    row = LogitAgreement(
        length=1000, bucket="all", num_positions=100, kl=0.01, top1_agreement=0.98,
        decided=0.7, decided_agreement=0.99,
        dense_perplexity=10.0, sparse_perplexity=10.1,
    )  # fmt: skip
    values = {
        "origin": "", "min_length": 10,
        "logits": (row, row.model_copy(update={"bucket": "0–999"})),
        "retrieval": (), "greedy": (), "short": (),
    }  # fmt: skip
    return TaskReport(**(values | changes))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"kl": 0.2}, "logits at 1000 tokens"),
        ({"decided_agreement": 0.97}, "logits at 1000 tokens"),
        ({"sparse_perplexity": 11.0}, "perplexity at 1000 tokens"),
    ],
)
def test_limits_decide(change, name):
    rows = tuple(row.model_copy(update=change) for row in report().logits)
    found = [c for c in check_task(report(logits=rows)) if c.status == "differs"]
    assert [c.name for c in found] == [name]
    loose = TaskLimits(kl=1.0, decided_agreement=0.0, perplexity_ratio=2.0)
    assert all(c.status == "ok" for c in check_task(report(logits=rows), loose))


@pytest.mark.parametrize("agreement", [1.0, None])
def test_a_change_between_equals_is_not_held_against_a_config(agreement):
    change = {"top1_agreement": 0.5, "decided": 0.2, "decided_agreement": agreement}
    rows = tuple(row.model_copy(update=change) for row in report().logits)
    assert all(c.status == "ok" for c in check_task(report(logits=rows)))


@pytest.mark.parametrize(
    ("dense", "sparse", "status"),
    [(10, 10, "ok"), (10, 9, "ok"), (10, 8, "differs"), (4, 0, "cannot tell")],
)
def test_lost_answers_decide(dense, sparse, status):
    row = Retrieval(
        task="needle", length=1000, depth=0.5, num_prompts=10, dense_correct=dense,
        sparse_correct=sparse,
    )  # fmt: skip
    (check,) = [c for c in check_task(report(retrieval=(row,))) if "needle" in c.name]
    assert check.status == status
