"""Configs that fit tiny models, and what their attention must give."""

import torch

from patternsearch.model.fingerprints import fingerprint_heads
from patternsearch.model.loading import adopt_model
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.schema.config import PatternConfig
from support.closeness import assert_close
from support.configs import make_document, make_head

SMALL_PATTERNS = (
    VerticalSlashSpread(vertical=40, diagonals=2, tile=64),
    AShape(sink=16, window=64, tile=64),
    BlockSparse(blocks=2, tile=64),
    Dense(),
    VerticalSlashLastQ(vertical=32, slash=100, tile=64),
)
"""Budgets that leave most of a prompt of a few hundred tokens out."""


def config_for(model, patterns=SMALL_PATTERNS, *, lengths=(256,), fingerprints=True, **changes):
    """Return a config bound to a model in memory, patterns dealt out in turn.

    `changes` replace fields of the model's identity.
    """
    loaded = adopt_model(model)
    identity = loaded.identity
    document = make_document(
        identity.num_layers,
        identity.num_query_heads,
        identity.num_kv_heads,
        layer_types=identity.layer_types,
        lengths=lengths,
        fingerprints=False,
    )
    document["model"] = identity.model_dump() | changes
    kinds = iter(range(10**6))
    document["heads"] = [
        None
        if kind != "full"
        else [
            make_head(patterns[next(kinds) % len(patterns)], lengths)
            for _ in range(identity.num_query_heads)
        ]
        for kind in identity.layer_types
    ]
    if fingerprints:
        document["fingerprints"] = fingerprint_heads(loaded, 7, num_tokens=128).model_dump()
    return PatternConfig.model_validate(document)


def all_dense(config):
    """Return the config with every head dense."""
    document = config.model_dump()
    for entries in document["heads"]:
        for entry in entries or ():
            entry["pattern"] = {"kind": "dense"}
    return PatternConfig.model_validate(document)


def random_ids(num_tokens, *, batch=1, seed=0, vocab_size=320):
    """Return int64 token ids [batch, num_tokens]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocab_size, (batch, num_tokens), generator=generator)


@torch.inference_mode()
def logits_of(model, ids, **keywords):
    """Return the logits [batch, n, vocabulary] in float32."""
    return model(input_ids=ids, **keywords).logits.float()


def assert_logits_close(found, expected, what="logits"):
    """Compare whole-model outputs on the scale of the largest logit."""
    largest = expected.abs().max()
    assert_close(found / largest, expected / largest, what=what)
