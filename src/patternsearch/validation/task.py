# SPDX-License-Identifier: Apache-2.0
"""The task level: the whole model, dense against sparse, on text and on retrieval.

Perplexity hardly notices lost far context, so it is never the only witness: logits are compared
position by position, continuations token by token, and planted facts must still be found.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patternsearch.calibration.recipes import TaskName
from patternsearch.calibration.samples import Sample
from patternsearch.calibration.synthetic import TaskPrompt, build_task
from patternsearch.calibration.tokens import Encoder
from patternsearch.errors import InputError, RecipeError
from patternsearch.model.loading import LoadedModel
from patternsearch.progress import Progress, Silent
from patternsearch.runtime.attach import attach, default_min_length
from patternsearch.schema.config import PatternConfig
from patternsearch.validation.samples import JudgingSamples
from patternsearch.validation.task_report import (
    GreedyAgreement,
    LogitAgreement,
    Retrieval,
    ShortPrompt,
    TaskReport,
)

__all__ = ["TaskOptions", "measure_task"]

_TASK = "tasks"
_BUCKETS = 8
_DECIDED = math.log(2)
"""Nats by which dense attention prefers its token to any other where it has decided: between
equals rounding alone chooses."""
_RETRIEVAL_TASKS: tuple[TaskName, ...] = ("needle", "multikey")


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """How much to run.

    Attributes:
        positions: logits compared for each sample, spread evenly over its positions.
        new_tokens: greedy tokens compared for each sample.
        depths: where the retrieved fact stands, as fractions of the prompt.
        prompts: retrieval prompts for each task, length and depth.
        seed: of the retrieval prompts.
    """

    positions: int = 512
    new_tokens: int = 16
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    prompts: int = 2
    seed: int = 1


@dataclass
class _LogitSums:
    count: int = 0
    kl: float = 0.0
    agree: int = 0
    decided: int = 0
    decided_agree: int = 0
    dense_loss: float = 0.0
    sparse_loss: float = 0.0
    losses: int = 0


def measure_task(
    loaded: LoadedModel,
    config: PatternConfig,
    judging: JudgingSamples,
    *,
    options: TaskOptions | None = None,
    progress: Progress | None = None,
) -> TaskReport:
    """Run the whole model dense and sparse and compare what comes out.

    Prompts of the calibrated lengths run sparse whatever the config's ``min_length``; the short
    prompts are run with it.

    Args:
        loaded: the model with its tokenizer.
        config: the config; its shape must be the model's.
        judging: the held-out samples.
        options: how much to run.
        progress: told about prompts.
    """
    options = options or TaskOptions()
    progress = progress or Silent()
    prompts = list(_retrieval_prompts(loaded, judging, options))
    progress.start(_TASK, float(len(judging.samples) + len(prompts)), "prompts")

    def sparse() -> AbstractContextManager[Any]:
        return attach(loaded.model, config, strict=False, min_length=1)

    sums: dict[tuple[int, int], _LogitSums] = defaultdict(_LogitSums)
    greedy: dict[int, list[float]] = defaultdict(list)
    for sample in judging.samples:
        _compare_logits(loaded, sample, sparse, options, sums)
        greedy[sample.length].append(_agreeing_prefix(loaded, sample, sparse, options.new_tokens))
        progress.advance(_TASK, 1.0, sample.sample_id)
    counts: dict[tuple[str, int, float], list[int]] = defaultdict(lambda: [0, 0, 0])
    for prompt, depth in prompts:
        found = counts[prompt.task, len(prompt.token_ids), depth]
        found[0] += 1
        found[1] += _answers(loaded, prompt, nullcontext)
        found[2] += _answers(loaded, prompt, sparse)
        progress.advance(_TASK, 1.0, f"{prompt.task}, {len(prompt.token_ids)} tokens")
    progress.finish(_TASK)
    return TaskReport(
        origin=judging.origin,
        min_length=default_min_length(config),
        logits=tuple(_logit_rows(sums)),
        retrieval=tuple(
            Retrieval(
                task=task,
                length=length,
                depth=depth,
                num_prompts=count,
                dense_correct=dense,
                sparse_correct=right,
            )
            for (task, length, depth), (count, dense, right) in sorted(counts.items())
        ),
        greedy=tuple(
            GreedyAgreement(
                length=length,
                num_prompts=len(shares),
                num_tokens=options.new_tokens,
                agreeing_prefix=float(np.mean(shares)),
            )
            for length, shares in sorted(greedy.items())
        ),
        short=tuple(_short_prompts(loaded, config, judging.samples)),
    )


# --- logits --------------------------------------------------------------------------------


def _compare_logits(
    loaded: LoadedModel,
    sample: Sample,
    sparse: Callable[[], AbstractContextManager[Any]],
    options: TaskOptions,
    sums: dict[tuple[int, int], _LogitSums],
) -> None:
    n = sample.num_tokens
    places = np.unique(np.linspace(0, n - 1, options.positions).round().astype(np.int64))
    dense_logits = _logits_at(loaded, sample.token_ids, places)
    with sparse():
        sparse_logits = _logits_at(loaded, sample.token_ids, places)
    dense_log, sparse_log = dense_logits.log_softmax(-1), sparse_logits.log_softmax(-1)
    kl = (dense_log.exp() * (dense_log - sparse_log)).sum(-1).clamp(min=0).cpu().numpy()
    # Both by argmax: of equal logits, frequent in bfloat16, topk may name another.
    agree = (dense_log.argmax(-1) == sparse_log.argmax(-1)).cpu().numpy()
    first, second = dense_log.topk(2, dim=-1).values.unbind(-1)
    decided = (first - second >= _DECIDED).cpu().numpy()
    has_next = places < n - 1
    following = torch.from_numpy(
        sample.token_ids[np.minimum(places + 1, n - 1)].astype(np.int64)
    ).to(dense_log.device)[:, None]
    dense_loss = -dense_log.gather(1, following)[:, 0].cpu().numpy()
    sparse_loss = -sparse_log.gather(1, following)[:, 0].cpu().numpy()
    bucket = places * _BUCKETS // n
    for number in range(_BUCKETS):
        here = bucket == number
        part = sums[sample.length, number]
        part.count += int(here.sum())
        part.kl += float(kl[here].sum())
        part.agree += int(agree[here].sum())
        part.decided += int(decided[here].sum())
        part.decided_agree += int((agree & decided)[here].sum())
        part.losses += int((here & has_next).sum())
        part.dense_loss += float(dense_loss[here & has_next].sum())
        part.sparse_loss += float(sparse_loss[here & has_next].sum())


@torch.inference_mode()
def _logits_at(loaded: LoadedModel, token_ids: Any, places: Any) -> Tensor:
    """Return float32 logits [places, vocabulary]."""
    ids = torch.from_numpy(np.asarray(token_ids, dtype=np.int64))[None].to(loaded.device)
    keep = torch.from_numpy(places).to(loaded.device)
    logits: Tensor = loaded.model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits
    return logits[0].float()


def _logit_rows(sums: dict[tuple[int, int], _LogitSums]) -> Iterator[LogitAgreement]:
    for length in sorted({length for length, _ in sums}):
        parts = [sums[length, number] for number in range(_BUCKETS)]
        bounds = [-(-number * length // _BUCKETS) for number in range(_BUCKETS + 1)]
        yield _logit_row(length, "all", parts)
        for number, part in enumerate(parts):
            if part.count:
                yield _logit_row(length, f"{bounds[number]}–{bounds[number + 1] - 1}", [part])


def _logit_row(length: int, bucket: str, parts: Sequence[_LogitSums]) -> LogitAgreement:
    count, losses = sum(p.count for p in parts), max(1, sum(p.losses for p in parts))
    decided = sum(p.decided for p in parts)
    return LogitAgreement(
        length=length,
        bucket=bucket,
        num_positions=count,
        kl=sum(p.kl for p in parts) / count,
        top1_agreement=sum(p.agree for p in parts) / count,
        decided=decided / count,
        decided_agreement=sum(p.decided_agree for p in parts) / decided if decided else None,
        dense_perplexity=math.exp(sum(p.dense_loss for p in parts) / losses),
        sparse_perplexity=math.exp(sum(p.sparse_loss for p in parts) / losses),
    )


# --- continuations -------------------------------------------------------------------------


def _agreeing_prefix(
    loaded: LoadedModel,
    sample: Sample,
    sparse: Callable[[], AbstractContextManager[Any]],
    num_tokens: int,
) -> float:
    dense = _continue(loaded, sample.token_ids, num_tokens)
    with sparse():
        ours = _continue(loaded, sample.token_ids, num_tokens)
    same = dense == ours
    return float(same.cumprod(0).float().mean())


@torch.inference_mode()
def _continue(loaded: LoadedModel, token_ids: Any, num_tokens: int) -> Tensor:
    """Return ``num_tokens`` greedy tokens; no end token stops them."""
    ids = torch.from_numpy(np.asarray(token_ids, dtype=np.int64))[None].to(loaded.device)
    tokens: Tensor = loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return tokens[0, ids.shape[1] :].cpu()


def _retrieval_prompts(
    loaded: LoadedModel, judging: JudgingSamples, options: TaskOptions
) -> Iterator[tuple[TaskPrompt, float]]:
    """Build the retrieval prompts; a length too short for a task is left out."""
    if loaded.tokenizer is None:
        raise InputError("the task level needs the model's tokenizer: copy it into the checkpoint")
    template = getattr(loaded.tokenizer, "chat_template", None) is not None
    encoder = Encoder(loaded.tokenizer, chat_template=template)
    for task in _RETRIEVAL_TASKS:
        for length in sorted({sample.length for sample in judging.samples}):
            for depth in options.depths:
                for number in range(options.prompts):
                    key = ("validation", options.seed, task, length, str(depth), number)
                    try:
                        prompt = build_task(task, encoder, length=length, depth=depth, key=key)
                    except RecipeError:
                        continue
                    yield prompt, depth


def _answers(
    loaded: LoadedModel, prompt: TaskPrompt, how: Callable[[], AbstractContextManager[Any]]
) -> bool:
    """Return whether the greedy continuation holds the answer."""
    assert loaded.tokenizer is not None
    answer_ids = loaded.tokenizer.encode(prompt.answer, add_special_tokens=False)
    with how():
        tokens = _continue(loaded, prompt.token_ids, len(answer_ids) + 8)
    return prompt.answer.strip() in loaded.tokenizer.decode(tokens.tolist())


# --- short prompts -------------------------------------------------------------------------


def _short_prompts(
    loaded: LoadedModel, config: PatternConfig, samples: Sequence[Sample]
) -> Iterator[ShortPrompt]:
    longest = default_min_length(config) - 1
    for n in sorted({1, 2, 63, min(longest, 1000), longest}):
        source = next((s for s in samples if s.num_tokens >= n), None)
        if n < 1 or n > longest or source is None:
            continue
        ids = source.token_ids[:n]
        last = np.asarray([n - 1], dtype=np.int64)
        dense = _logits_at(loaded, ids, last)
        with attach(loaded.model, config, strict=False):
            ours = _logits_at(loaded, ids, last)
        yield ShortPrompt(num_tokens=n, largest_difference=float((dense - ours).abs().max()))
