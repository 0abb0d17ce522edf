# SPDX-License-Identifier: Apache-2.0
"""What the task level measured: the whole model, dense against sparse."""

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["GreedyAgreement", "LogitAgreement", "Retrieval", "ShortPrompt", "TaskReport"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LogitAgreement(_Part):
    """Logits at sampled positions of one length, in one bucket of positions or in all."""

    length: int
    bucket: str = Field(description="``first-last`` position, or ``all``")
    num_positions: int
    kl: float = Field(description="mean KL(dense ‖ sparse), nats")
    top1_agreement: float = Field(
        description="share of positions where both models find the same token most likely"
    )
    decided: float = Field(
        description="share of positions where dense finds one token at least twice as likely as "
        "any other; elsewhere rounding alone may change which is first"
    )
    decided_agreement: float | None = Field(
        description="share of the decided positions where sparse finds the same token most "
        "likely; null where dense decided nothing"
    )
    dense_perplexity: float = Field(description="over the sampled positions")
    sparse_perplexity: float


class Retrieval(_Part):
    """One kind of retrieval task at one length and depth."""

    task: str
    length: int
    depth: float
    num_prompts: int
    dense_correct: int
    sparse_correct: int


class GreedyAgreement(_Part):
    """Greedy continuation of held-out prompts of one length."""

    length: int
    num_prompts: int
    num_tokens: int
    agreeing_prefix: float = Field(description="mean share of new tokens before the first change")


class ShortPrompt(_Part):
    """A prompt below min_length, which must not change at all."""

    num_tokens: int
    largest_difference: float


class TaskReport(_Part):
    """The whole measurement."""

    origin: str
    min_length: int
    logits: tuple[LogitAgreement, ...]
    retrieval: tuple[Retrieval, ...]
    greedy: tuple[GreedyAgreement, ...]
    short: tuple[ShortPrompt, ...]
