# SPDX-License-Identifier: Apache-2.0
"""What a config is bound to, found from files' headers and ``config.json``: no weight is loaded.

The model's modules are built without storage (on the meta device), because scale, head sizes and
rotary embedding are decided by modelling code, not by ``config.json`` alone.
"""

import os
from collections import Counter
from typing import Any, Literal

from patternsearch.errors import EnvironmentLacks, ModelError, UnsupportedModel
from patternsearch.model.load_errors import one_line
from patternsearch.model.rope import rope_of
from patternsearch.model.sources import ModelSource, resolve_model
from patternsearch.model.support import (
    attention_modules,
    check_supported,
    check_supported_modules,
    layer_types,
    sliding_window,
)
from patternsearch.model.tokenizers import tokenizer_digest
from patternsearch.model.weights import (
    StoredTensor,
    WeightDigests,
    digest_weights,
    list_tensors,
)
from patternsearch.progress import Progress
from patternsearch.schema.config import ModelIdentity

__all__ = [
    "build_skeleton",
    "describe_model",
    "describe_skeleton",
    "digest_source",
    "identify",
    "read_config",
]

_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def describe_model(
    reference: str | os.PathLike[str] | ModelSource,
    *,
    weights: bool = True,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    offline: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
) -> ModelIdentity:
    """Describe a checkpoint without loading it.

    Args:
        reference: A checkpoint folder, ``.gguf`` file, ``package:NAME/FILE`` or hub id, or an
            already resolved source.
        weights: False skips the weights' digests, which read every byte.
        allow_pickle: Accept a ``.bin`` checkpoint.
        trust_remote_code: Run modelling code that the checkpoint brings.
        offline: Resolve a hub id from the local cache only.
        progress: Told about the digest's bytes.
        threads: Readers at a time for the digests.

    Returns:
        The identity. ``dtype`` is that of the stored weights, whatever a run computes in.

    Raises:
        ModelError: If it is no checkpoint, or files are damaged.
        UnsupportedModel: If its attention cannot be searched.
        EnvironmentLacks: If a hub id or a needed package cannot be had.
    """
    if isinstance(reference, ModelSource):
        source = reference
    else:
        source = resolve_model(
            reference, weights=weights, allow_pickle=allow_pickle, offline=offline
        )
    config = read_config(source, trust_remote_code=trust_remote_code)
    skeleton = build_skeleton(config, trust_remote_code=trust_remote_code)
    return describe_skeleton(source, skeleton, weights=weights, progress=progress, threads=threads)


def describe_skeleton(
    source: ModelSource,
    skeleton: Any,
    *,
    weights: bool = True,
    progress: Progress | None = None,
    threads: int | None = None,
) -> ModelIdentity:
    """Describe a checkpoint whose modules :func:`build_skeleton` already built.

    Raises:
        ModelError: If files are damaged.
    """
    tensors: tuple[StoredTensor, ...] = ()
    if source.weight_files and source.weights_format != "pytorch":
        tensors = list_tensors(source)
    digests: WeightDigests | None = None
    if weights and (tensors or source.weights_format == "pytorch"):
        num_layers = int(skeleton.config.num_hidden_layers)
        digests = digest_source(source, num_layers, progress=progress, threads=threads)
    return identify(
        skeleton,
        reference=source.reference,
        weights_format=source.weights_format,
        dtype=_stored_dtype(tensors, skeleton.config),
        tokenizer_sha256=tokenizer_digest(source),
        digests=digests,
    )


def digest_source(
    source: ModelSource,
    num_layers: int,
    *,
    progress: Progress | None = None,
    threads: int | None = None,
) -> WeightDigests:
    """Digest the weights of a checkpoint, which reads every byte.

    Args:
        source: The checkpoint.
        num_layers: Layers of the model.
        progress: Told about the bytes (not of a ``.bin`` checkpoint).
        threads: Readers at a time.

    Raises:
        ModelError: If files are damaged.
    """
    if source.weights_format == "pytorch":
        return _pickle_digests(source, num_layers)
    return digest_weights(list_tensors(source), num_layers, progress=progress, threads=threads)


def read_config(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """Return the transformers configuration of a checkpoint that is supported.

    Raises:
        ModelError: If there is none, or it needs code that is not trusted.
        UnsupportedModel: See :func:`patternsearch.model.support.check_supported`.
        EnvironmentLacks: If reading a ``.gguf`` file needs a missing package.
    """
    from transformers import AutoConfig

    keywords = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        config = AutoConfig.from_pretrained(
            source.folder,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            **keywords,
        )
    except ImportError as error:
        raise EnvironmentLacks(f"{source.reference}: {one_line(error)}") from None
    except Exception as error:  # the library and its validators raise many kinds
        raise ModelError(
            f"the configuration of {source.reference} cannot be used: {one_line(error)}"
        ) from error
    check_supported(config)
    return config


def build_skeleton(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Return the model without storage, checked to be supported.

    Raises:
        ModelError: If its class cannot be built.
        UnsupportedModel: See :func:`patternsearch.model.support.check_supported_modules`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except UnsupportedModel:
        raise
    except Exception as error:  # modelling code raises anything for a wrong config.json
        raise ModelError(
            f"the model ({config.model_type}) cannot be built from its configuration: "
            f"{type(error).__name__}: {one_line(error)}"
        ) from error
    check_supported_modules(model)
    return model


def identify(
    model: Any,
    *,
    reference: str,
    weights_format: Literal["safetensors", "gguf", "pytorch", "random"],
    dtype: str,
    tokenizer_sha256: str | None = None,
    digests: WeightDigests | None = None,
) -> ModelIdentity:
    """Return the identity of a model whose modules exist, on any device.

    Args:
        model: A transformers causal language model.
        reference: What the user named.
        weights_format: safetensors, gguf, pytorch or random.
        dtype: Of the stored weights.
        tokenizer_sha256: Of the tokenizer, None without one.
        digests: Of the weights, None where not computed.
    """
    config = model.config
    types = layer_types(config)
    module = attention_modules(model)[types.index("full")]
    num_query_heads = int(config.num_attention_heads)
    head_dim = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
    return ModelIdentity(
        reference=reference,
        architecture=type(model).__name__,
        model_type=str(config.model_type),
        num_layers=len(types),
        layer_types=types,
        num_query_heads=num_query_heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or num_query_heads),
        head_dim=int(head_dim or config.hidden_size // num_query_heads),
        attention_scale=float(module.scaling),
        logit_softcap=None,
        sliding_window=sliding_window(config) if "sliding" in types else None,
        dtype=dtype,
        rope=rope_of(model),
        max_positions=getattr(config, "max_position_embeddings", None),
        vocab_size=int(config.vocab_size),
        tokenizer_sha256=tokenizer_sha256,
        weights_format=weights_format,
        weights_sha256=digests.weights_sha256 if digests else None,
        attention_sha256=digests.attention_sha256 if digests else (),
    )


def _stored_dtype(tensors: tuple[StoredTensor, ...], config: Any) -> str:
    """Return the dtype that holds most bytes; ``config.json``'s word where no header was read."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.size_bytes
    if sizes:
        name = sizes.most_common(1)[0][0]
        return _TORCH_NAMES.get(name, name.lower())
    return str(config.dtype or "float32").removeprefix("torch.")


def _pickle_digests(source: ModelSource, num_layers: int) -> WeightDigests:
    import torch

    from patternsearch.model.weights import digest_state

    state: dict[str, torch.Tensor] = {}
    for file in source.weight_files:
        try:
            state |= torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise ModelError(
                f"{file} cannot be read as plain tensors: {one_line(error)}; convert the "
                "checkpoint to safetensors"
            ) from None
    return digest_state(state, num_layers)
