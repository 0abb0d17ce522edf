# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding as it will run: parameters, inverse frequencies and attention factor.

The values come from the model's own rotary module, built anew on the CPU from its configuration,
so no family's formula is written here a second time. Where they depend on the length (``dynamic``
and ``longrope``), they are those in force at the model's maximum number of positions.
"""

import json
from typing import Any

import torch

from patternsearch.errors import ModelError
from patternsearch.model.support import layer_types
from patternsearch.schema.config import Rope

__all__ = ["check_rope_exact", "rope_of"]

_LIBRARY_NAMES = {"full": "full_attention", "sliding": "sliding_attention"}
_DEPENDS_ON_LENGTH = ("dynamic", "longrope")


def rope_of(model: Any) -> dict[str, Rope]:
    """Return the rotary embedding of each attention layer type; empty for a model without one.

    Args:
        model: A transformers model; its parameters may be on the meta device.

    Raises:
        ModelError: If the model has several rotary modules that no layer type tells apart.
    """
    live = _rotary_module(model)
    if live is None:
        return {}
    rotary = type(live)(config=live.config)
    wanted = sorted({name for name in layer_types(model.config) if name != "linear"})
    if isinstance(rotary.rope_type, dict):  # a type that is not in it has no rotary embedding
        wanted = [name for name in wanted if _LIBRARY_NAMES[name] in rotary.rope_type]
    return {name: _rope(rotary, name) for name in wanted}


def check_rope_exact(model: Any) -> None:
    """Refuse a model in memory whose inverse frequencies are not what its configuration gives.

    ``model.to(torch.bfloat16)`` rounds them, which turns far keys by wrong angles.

    Raises:
        ModelError: Naming the buffer that differs.
    """
    live = _rotary_module(model)
    if live is None:
        return
    fresh = dict(type(live)(config=live.config).named_buffers())
    for name, buffer in live.named_buffers():
        if not name.endswith("original_inv_freq"):
            continue
        expected = fresh[name].to(buffer.device)
        if buffer.dtype != expected.dtype or not torch.allclose(buffer, expected, rtol=1e-6):
            raise ModelError(
                f"the rotary buffer {name} ({buffer.dtype}) is not what the configuration gives "
                "(model.to(dtype) rounds it); load or build the model in its dtype instead"
            )


def _rotary_module(model: Any) -> Any | None:
    modules = {
        type(module): module
        for name, module in model.named_modules()
        if "rotary" in name and hasattr(module, "rope_type")
    }
    if len(modules) > 1:
        names = ", ".join(sorted(kind.__name__ for kind in modules))
        raise ModelError(f"the model has several rotary embeddings ({names}); one is expected")
    return next(iter(modules.values()), None)


def _rope(rotary: Any, layer_type: str) -> Rope:
    config = rotary.config
    library_name = _LIBRARY_NAMES[layer_type]
    by_type = isinstance(rotary.rope_type, dict)
    if by_type:
        rope_type = rotary.rope_type[library_name]
        parameters = config.rope_parameters[library_name]
        frequencies = getattr(rotary, f"{library_name}_inv_freq")
        factor = getattr(rotary, f"{library_name}_attention_scaling")
    else:
        rope_type, parameters = rotary.rope_type, config.rope_parameters
        frequencies, factor = rotary.inv_freq, rotary.attention_scaling
    if rope_type in _DEPENDS_ON_LENGTH and config.max_position_embeddings:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](
            config,
            "cpu",
            seq_len=config.max_position_embeddings,
            layer_type=library_name if by_type else None,
        )
    return Rope(
        rope_type=str(rope_type),
        parameters=json.loads(json.dumps(dict(parameters), default=float, sort_keys=True)),
        attention_factor=float(factor),
        inverse_frequencies=tuple(frequencies.double().tolist()),
    )
