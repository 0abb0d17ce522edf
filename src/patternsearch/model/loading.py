# SPDX-License-Identifier: Apache-2.0
"""Load a model for capture: only what is supported, complete, and from plain tensors."""

import copy
import os
from dataclasses import dataclass
from typing import Any

import torch

from patternsearch.errors import EnvironmentLacks, InputError, ModelError, UnsupportedModel
from patternsearch.model.background import Background
from patternsearch.model.identity import (
    build_skeleton,
    describe_skeleton,
    digest_source,
    identify,
    read_config,
)
from patternsearch.model.load_errors import one_line
from patternsearch.model.placement import check_device
from patternsearch.model.quiet import quiet_library
from patternsearch.model.rope import check_rope_exact
from patternsearch.model.sources import ModelSource, resolve_model
from patternsearch.model.support import check_supported, check_supported_modules
from patternsearch.model.weights import digest_state
from patternsearch.progress import Progress
from patternsearch.schema.config import ModelIdentity

__all__ = [
    "LoadedModel",
    "OpenedModel",
    "adopt_model",
    "default_dtype",
    "load_model",
    "open_model",
]

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what it is.

    Attributes:
        model: The transformers causal language model, in evaluation mode, without gradients.
        tokenizer: Its tokenizer, or None where none was asked for.
        identity: What a config is bound to; its dtype is that of the stored weights.
        dtype: What the model computes in.
        device: Where its input ids go.
        tensor_parallel: Ranks that this copy of the model is spread over; this process holds the
            heads of one.
    """

    model: Any
    tokenizer: Any | None
    identity: ModelIdentity
    dtype: torch.dtype
    device: torch.device
    tensor_parallel: int = 1

    @property
    def backbone(self) -> Any:
        """The decoder without the language-model head."""
        return self.model.base_model

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers whose attention is captured."""
        types = self.identity.layer_types
        return tuple(layer for layer, name in enumerate(types) if name == "full")


@dataclass(frozen=True)
class OpenedModel:
    """A checkpoint that is known to be supported, before its weights are read.

    Attributes:
        source: Its files.
        config: The transformers configuration.
        tokenizer: Its tokenizer, or None where none was asked for.
        identity: What a config is bound to, without the weights' digests.
        where: The device asked for.
        dtype: What the model will compute in.
        trust_remote_code: Run modelling code that the checkpoint brings.
        tensor_parallel: Ranks that will hold one copy of the model.
    """

    source: ModelSource
    config: Any
    tokenizer: Any | None
    identity: ModelIdentity
    where: str
    dtype: torch.dtype
    trust_remote_code: bool = False
    tensor_parallel: int = 1

    def load(self, *, digests: bool = True, progress: Progress | None = None) -> LoadedModel:
        """Read the weights; while they are loaded, other threads digest them.

        Args:
            digests: False skips the weights' digests in the identity.
            progress: Told about the digest's bytes.

        Raises:
            ModelError: If the weights are not complete.
            EnvironmentLacks: If a package cannot be had.
        """
        if not digests:
            return self._loaded(self._weights(), self.identity)
        num_layers = self.identity.num_layers
        with Background(
            lambda tell: digest_source(self.source, num_layers, progress=tell), progress
        ) as digesting:
            model = self._weights()
            found = digesting.result()
        identity = self.identity.model_copy(
            update={
                "weights_sha256": found.weights_sha256,
                "attention_sha256": found.attention_sha256,
            }
        )
        return self._loaded(model, identity)

    def _weights(self) -> Any:
        return _load_weights(
            self.source,
            self.config,
            self.where,
            self.dtype,
            self.trust_remote_code,
            self.tensor_parallel,
        )

    def _loaded(self, model: Any, identity: ModelIdentity) -> LoadedModel:
        device = _input_device(model)
        return LoadedModel(
            model, self.tokenizer, identity, self.dtype, device, self.tensor_parallel
        )


def load_model(
    reference: str | os.PathLike[str] | ModelSource,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    require_tokenizer: bool = True,
    digests: bool = True,
    allow_pickle: bool = False,
    offline: bool = False,
    tensor_parallel: int = 1,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a checkpoint folder, a ``.gguf`` file, ``package:NAME/FILE`` or a hub id.

    Args:
        reference: What to load. A path that exists wins over a hub id.
        device: ``cpu``, ``cuda``, ``cuda:1``, or ``auto`` to spread over all devices.
        dtype: ``float32``, ``float16`` or ``bfloat16``; by default the checkpoint's on CUDA and
            float32 on the CPU.
        trust_remote_code: Run modelling code that the checkpoint brings.
        require_tokenizer: False accepts a checkpoint without one.
        digests: False skips the weights' digests in the identity.
        allow_pickle: Accept a ``.bin`` checkpoint, read with ``weights_only=True``.
        offline: Resolve a hub id from the local cache only.
        tensor_parallel: Ranks of the default torch.distributed group, which hold one copy of the
            model together, each its heads; 1 needs no group.
        progress: Told about the digest's bytes.

    Raises:
        InputError: If the heads cannot be split over the ranks.
        ModelError: If it is no complete checkpoint, or the tokenizer is missing.
        UnsupportedModel: If its attention cannot be searched; before any weight is read.
        EnvironmentLacks: If a device, a package or the hub cannot be had.
    """
    opened = open_model(
        reference,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        require_tokenizer=require_tokenizer,
        allow_pickle=allow_pickle,
        offline=offline,
        tensor_parallel=tensor_parallel,
    )
    return opened.load(digests=digests, progress=progress)


def open_model(
    reference: str | os.PathLike[str] | ModelSource,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    require_tokenizer: bool = True,
    allow_pickle: bool = False,
    offline: bool = False,
    tensor_parallel: int = 1,
) -> OpenedModel:
    """Do all of :func:`load_model` that reads no weights; arguments and errors are the same."""
    where = check_device(device)
    source = (
        reference
        if isinstance(reference, ModelSource)
        else resolve_model(reference, allow_pickle=allow_pickle, offline=offline)
    )
    config = read_config(source, trust_remote_code=trust_remote_code)
    skeleton = build_skeleton(config, trust_remote_code=trust_remote_code)
    tokenizer = _load_tokenizer(source, trust_remote_code) if require_tokenizer else None
    identity = describe_skeleton(source, skeleton, weights=False)
    run_dtype = _check_dtype(dtype) or default_dtype(identity, where)
    _check_tensor_parallel(source, skeleton, identity, tensor_parallel)
    return OpenedModel(
        source=source,
        config=config,
        tokenizer=tokenizer,
        identity=identity,
        where=where,
        dtype=run_dtype,
        trust_remote_code=trust_remote_code,
        tensor_parallel=tensor_parallel,
    )


def adopt_model(
    model: Any, *, tokenizer: Any | None = None, reference: str = "memory", digests: bool = False
) -> LoadedModel:
    """Take a transformers model that is already in memory, such as one with random weights.

    The model is put into evaluation mode and its gradients are turned off.

    Args:
        model: A causal language model with its weights on any device.
        tokenizer: Its tokenizer, if there is one.
        reference: A name for it.
        digests: Digest the parameters in memory (their names, not the checkpoint's).

    Raises:
        UnsupportedModel: If its attention cannot be searched.
        ModelError: If its rotary buffers were rounded.
    """
    check_supported(model.config)
    check_supported_modules(model)
    check_rope_exact(model)
    identity = identify(
        model,
        reference=reference,
        weights_format="random",
        dtype=str(model.dtype).removeprefix("torch."),
        digests=digest_state(dict(model.named_parameters()), int(model.config.num_hidden_layers))
        if digests
        else None,
    )
    model.eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, identity, model.dtype, _input_device(model))


def default_dtype(identity: ModelIdentity, device: str | torch.device) -> torch.dtype:
    """Return what to compute in: float32 on the CPU, else the stored dtype or bfloat16."""
    if str(device) == "cpu":
        return torch.float32
    return _DTYPES.get(identity.dtype, torch.bfloat16)


def _check_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise InputError(f"{name!r} is no dtype to run in; name one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _check_tensor_parallel(
    source: ModelSource, skeleton: Any, identity: ModelIdentity, size: int
) -> None:
    if size == 1:
        return
    if source.weights_format == "gguf":
        raise InputError(
            f"{source.reference}: a .gguf file cannot be split over {size} ranks while it is "
            "loaded: use a safetensors checkpoint, or one rank"
        )
    if identity.num_kv_heads % size or identity.num_query_heads % size:
        raise InputError(
            f"{identity.num_query_heads} query heads and {identity.num_kv_heads} kv heads cannot "
            f"be split over {size} ranks: choose a number that divides both"
        )
    if not skeleton.supports_tp_plan:
        raise UnsupportedModel(
            f"transformers has no tensor-parallel plan for {identity.architecture}: run it on one "
            "rank, or with the device auto"
        )


def _load_tokenizer(source: ModelSource, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    if not source.has_tokenizer:
        raise ModelError(
            f"{source.reference} has no tokenizer (tokenizer.json or tokenizer.model); copy the "
            "tokenizer files into the checkpoint folder"
        )
    keywords = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        return AutoTokenizer.from_pretrained(
            source.folder, trust_remote_code=trust_remote_code, local_files_only=True, **keywords
        )
    except ImportError as error:
        raise EnvironmentLacks(
            f"the tokenizer of {source.reference} needs a package: {one_line(error)}"
        ) from None
    except Exception as error:  # tokenizer libraries raise anything for a damaged file
        raise ModelError(
            f"the tokenizer of {source.reference} cannot be read: {one_line(error)}; copy the "
            "tokenizer files again"
        ) from error


def _load_weights(
    source: ModelSource,
    config: Any,
    device: str,
    dtype: torch.dtype,
    trust_remote_code: bool,
    tensor_parallel: int,
) -> Any:
    from transformers import AutoModelForCausalLM

    keywords: dict[str, Any] = {}
    if source.weights_format == "gguf":
        from transformers import GgufConfig

        keywords = {
            "gguf_file": source.gguf_file,
            "quantization_config": GgufConfig(dequantize=True),
        }
    else:
        keywords = {"use_safetensors": source.weights_format == "safetensors"}
    if tensor_parallel > 1:
        from transformers.distributed import DistributedConfig

        keywords["distributed_config"] = DistributedConfig(tp_size=tensor_parallel, tp_plan="auto")
    elif device == "auto":
        keywords["device_map"] = "auto"
    try:
        with quiet_library():
            model, info = AutoModelForCausalLM.from_pretrained(
                source.folder,
                config=copy.deepcopy(config),
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                **keywords,
            )
    except ImportError as error:
        raise EnvironmentLacks(
            f"loading {source.reference} needs a package: {one_line(error)}"
        ) from None
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise ModelError(
            f"the weights of {source.reference} cannot be loaded: {one_line(error)}"
        ) from error
    for name, what in (("missing_keys", "lacks"), ("mismatched_keys", "has misshapen")):
        keys = sorted(str(key) for key in info.get(name, ()))
        if keys:
            raise ModelError(
                f"the checkpoint {source.reference} {what} {len(keys)} tensors, such as {keys[0]}; "
                "complete it (config.json and weights must belong together)"
            )
    if device != "auto" and tensor_parallel == 1:
        model = model.to(device)
    return model.eval().requires_grad_(False)


def _input_device(model: Any) -> torch.device:
    return torch.device(model.get_input_embeddings().weight.device)
