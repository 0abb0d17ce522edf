# SPDX-License-Identifier: Apache-2.0
"""Which models work, and a refusal by name for those that do not.

Two looks: :func:`check_supported` at the configuration alone, and
:func:`check_supported_modules` at the modules (built without storage, so before any weight is
read). Together they see every feature that would make a captured q·k something other than the
attention the model runs.
"""

from typing import Any, NoReturn

from patternsearch.errors import UnsupportedModel
from patternsearch.schema.config import LayerType

__all__ = [
    "attention_modules",
    "check_supported",
    "check_supported_modules",
    "layer_types",
    "sliding_window",
]

_LAYER_TYPES: dict[str, LayerType] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "linear_attention": "linear",
    "mamba": "linear",
    "recurrent": "linear",
}
_SOFTCAP_FIELDS = ("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_softcap")
_SINK_TYPES = ("gpt_oss", "mimo_v2_flash", "granite_swa", "granitemoe_swa", "deepseek_v4")
_INDEXER_FIELDS = ("index_topk", "index_n_heads")


def check_supported(hf_config: Any) -> None:
    """Refuse a model whose attention cannot be searched, from its configuration.

    Args:
        hf_config: A transformers configuration.

    Raises:
        UnsupportedModel: Naming the feature: encoder-decoder, several modalities, MLA, an
            attention indexer, attention sinks, logit softcap, attention that is not causal, layer
            types other than full, sliding or linear, no full layer, or a class that does not call
            attention through the library's registry.
    """
    kind = str(getattr(hf_config, "model_type", "") or type(hf_config).__name__)
    if getattr(hf_config, "is_encoder_decoder", False):
        _refuse(kind, "is an encoder-decoder model", "only decoder-only models are searched")
    if hf_config.get_text_config(decoder=True) is not hf_config:
        _refuse(
            kind,
            "wraps a text model with other modalities",
            "save the text model as a checkpoint of its own",
        )
    if _field(hf_config, "kv_lora_rank"):
        _refuse(
            kind,
            "uses multi-head latent attention (kv_lora_rank), without keys of its own per head",
            "no pattern of ours applies to it",
        )
    if any(_field(hf_config, field) for field in _INDEXER_FIELDS):
        _refuse(kind, "already selects keys with an indexer", "it needs no pattern search")
    for field in _SOFTCAP_FIELDS:
        cap = _field(hf_config, field)
        if cap is not None:
            _refuse(
                kind,
                f"caps attention logits ({field}={cap})",
                "scores without the cap would be another model's",
            )
    if kind in _SINK_TYPES:
        _refuse_sinks(kind)
    if getattr(hf_config, "use_bidirectional_attention", False) or not getattr(
        hf_config, "is_causal", True
    ):
        _refuse_both_directions(kind)
    _check_class(hf_config, kind)
    if "full" not in layer_types(hf_config):
        _refuse(
            kind,
            "has no full-attention layer (all are sliding-window or linear)",
            "there is nothing to search",
        )


def check_supported_modules(model: Any) -> None:
    """Refuse a model for what only its modules show; the parameters may be on the meta device.

    Raises:
        UnsupportedModel: For attention sinks, full layers without an attention module of the
            registry, or heads, groups or scales that differ between layers.
    """
    config = model.config
    kind = str(config.model_type)
    if not _uses_registry(type(model)):
        _refuse_registry(kind)
    modules = attention_modules(model)
    for module in modules.values():
        if getattr(module, "sinks", None) is not None:
            _refuse_sinks(kind)
        if not getattr(module, "is_causal", True):
            _refuse_both_directions(kind)
    full = [layer for layer, name in enumerate(layer_types(config)) if name == "full"]
    lacking = [layer for layer in full if layer not in modules]
    if lacking:
        _refuse(
            kind,
            f"has no attention module with a scaling in its full layers {lacking[:4]}",
            "its attention cannot be captured",
        )
    if config.num_attention_heads % _num_kv_heads(config):
        _refuse(
            kind,
            f"has {config.num_attention_heads} query heads for {_num_kv_heads(config)} kv heads",
            "the query heads must be a multiple of the kv heads",
        )
    group = config.num_attention_heads // _num_kv_heads(config)
    for name, expected in (
        ("num_key_value_groups", group),
        ("scaling", modules[full[0]].scaling),
        ("head_dim", getattr(modules[full[0]], "head_dim", None)),
    ):
        seen = {getattr(modules[layer], name, expected) for layer in full}
        if seen != {expected}:
            _refuse(
                kind,
                f"has a {name} that differs between full layers ({sorted(map(str, seen))})",
                "one value must hold for all of them",
            )


def layer_types(hf_config: Any) -> tuple[LayerType, ...]:
    """Return full, sliding or linear for each layer.

    A window at least as long as the model's positions never cuts anything, so its layers are
    full.

    Raises:
        UnsupportedModel: If a layer is of another type, or their number is wrong.
    """
    kind = str(hf_config.model_type)
    count = int(hf_config.num_hidden_layers)
    window = sliding_window(hf_config)
    names = getattr(hf_config, "layer_types", None)
    if names is None:
        names = getattr(hf_config, "layers_block_type", None)
    if names is None:
        names = ["full_attention" if window is None else "sliding_attention"] * count
    unknown = sorted({str(name) for name in names} - set(_LAYER_TYPES))
    if unknown:
        _refuse(
            kind,
            f"has layers of type {', '.join(unknown)}",
            "full, sliding-window and linear attention are known",
        )
    if len(names) != count:
        _refuse(kind, f"names {len(names)} layer types for {count} layers", "mend config.json")
    types = [_LAYER_TYPES[name] for name in names]
    if window is None:
        types = ["full" if name == "sliding" else name for name in types]
    return tuple(types)


def sliding_window(hf_config: Any) -> int | None:
    """Return the window w of sliding layers (key j is read by i if i − j < w), or None."""
    window = getattr(hf_config, "sliding_window", None)
    if window is None or not getattr(hf_config, "use_sliding_window", True):
        return None
    positions = getattr(hf_config, "max_position_embeddings", None)
    return None if positions is not None and window >= positions else int(window)


def attention_modules(model: Any) -> dict[int, Any]:
    """Return the attention module of each layer that has one, by layer index."""
    found: dict[int, Any] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and isinstance(getattr(module, "scaling", None), float):
            found.setdefault(layer, module)
    return found


def _num_kv_heads(hf_config: Any) -> int:
    return int(getattr(hf_config, "num_key_value_heads", None) or hf_config.num_attention_heads)


def _check_class(hf_config: Any, kind: str) -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
    )

    if getattr(hf_config, "auto_map", None):
        return  # code of the checkpoint's own: its modules are looked at
    try:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    except KeyError:
        _refuse(kind, "has no causal language model", "only decoder-only models are searched")
    if type(hf_config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(
        hf_config, "is_decoder", False
    ):
        _refuse_both_directions(kind)
    if not _uses_registry(model_class):
        _refuse_registry(kind)


def _uses_registry(model_class: Any) -> bool:
    """Ask the library; should it be wrong, the capture notices that a layer was not seen."""
    if model_class._supports_attention_backend:
        return True
    can_set = getattr(model_class, "_can_set_attn_implementation", None)
    return bool(can_set()) if can_set is not None else False


def _field(hf_config: Any, name: str) -> Any:
    """Return a field's value or None; some configurations refuse to name one for all layers."""
    try:
        return getattr(hf_config, name, None)
    except Exception:  # the library's own kinds differ by version
        _refuse(
            str(hf_config.model_type),
            f"has a {name} that differs between layers",
            "one value must hold for all of them",
        )


def _refuse_both_directions(kind: str) -> NoReturn:
    _refuse(kind, "attends in both directions", "only causal attention is searched")


def _refuse_sinks(kind: str) -> NoReturn:
    _refuse(
        kind,
        "adds attention sinks to the softmax",
        "scores without them would be another model's",
    )


def _refuse_registry(kind: str) -> NoReturn:
    _refuse(
        kind,
        "does not call attention through transformers' registry",
        "its q, k and v cannot be captured",
    )


def _refuse(kind: str, feature: str, reason: str) -> NoReturn:
    raise UnsupportedModel(f"the model ({kind}) {feature}, which is not supported: {reason}")
