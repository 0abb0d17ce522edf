# SPDX-License-Identifier: Apache-2.0
"""``attach`` and ``detach``: run a config in a transformers model, after checking that it fits.

A config for another model raises no shape error; it gives each head another head's pattern. So
attaching compares the model's description with the one the config is bound to and, unless told
otherwise, runs the config's 512-token probe and looks whether every head finds itself.
"""

import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch

from patternsearch.errors import BackendMissing, InputError, ModelError, TimingError
from patternsearch.model.fingerprints import fingerprint_heads
from patternsearch.model.identity import identify
from patternsearch.model.loading import LoadedModel
from patternsearch.model.support import check_supported, check_supported_modules
from patternsearch.patterns.tensor_parallel import query_head_range
from patternsearch.runtime.attachment import Attachment, attached_to
from patternsearch.runtime.fit import compare_identity, structural
from patternsearch.runtime.mapping import compare_mapping
from patternsearch.runtime.sparse import SparseBackend
from patternsearch.schema.config import ModelIdentity, PatternConfig
from patternsearch.schema.io import load_config
from patternsearch.timing.execution import Execution, execution_on
from patternsearch.timing.table import TimingTable, load_timings

__all__ = ["attach", "default_min_length", "detach"]


def attach(
    model: Any,
    config: PatternConfig | str | os.PathLike[str],
    *,
    strict: bool = True,
    probe: bool = True,
    min_length: int | None = None,
    layers: Iterable[int] | None = None,
    tp_rank: int | None = None,
    tp_size: int | None = None,
    backend: Literal["auto"] | SparseBackend = "auto",
    timings: TimingTable | str | os.PathLike[str] | None = None,
) -> Attachment:
    """Run long prompts through a config; everything else stays dense and is counted.

    Sparse is a plain causal prefill of at least ``min_length`` real tokens in a full-attention
    layer: nothing cached before it, any batch size, padding at the right end or none. Decoding,
    short prompts, chunked prefill, left padding, packed sequences, custom masks, sliding-window
    layers and training run dense, exactly as transformers' sdpa attention would.

    Args:
        model: a transformers causal language model in evaluation mode.
        config: the config or its path.
        strict: raise when the config does not fit; False attaches as long as shapes allow it.
        probe: also compare head fingerprints (one dense pass over 512 tokens). Left out where
            the config has none, with ``strict=False``, and under tensor parallelism.
        min_length: tokens; None takes the config's measured one, else its shortest calibrated
            length (an imported config: 1).
        layers: full layers that run sparse; None is all.
        tp_rank: this process's rank when the model's heads are sharded; None asks the model.
        tp_size: number of ranks; None asks the model.
        backend: ``auto`` is triton on CUDA and torch (slow) elsewhere.
        timings: this GPU's timing table or its path: kernels are launched, and heads run on the
            backends, as it measured to be fastest. It never changes which pairs are read. A
            backend that it measured fastest and that is not installed is named in a warning.
            None takes what is known to be good.

    Returns:
        The attachment: its ``stats``, ``backends`` and ``detach``; it is a context manager too.

    Raises:
        InputError: the config does not fit this model, or an argument is out of range.
        TimingError: the table was measured on another device, with other kernels, or for other
            dtypes or head sizes.
        UnsupportedModel: the model's attention is refused by name.
    """
    if not isinstance(config, PatternConfig):
        config = load_config(config)
    if attached_to(model) is not None:
        raise InputError(
            "a config is already attached to this model: detach it first "
            "(patternsearch.detach(model))"
        )
    if model.training:
        raise InputError("the model is in training mode: call model.eval() first")
    check_supported(model.config)
    check_supported_modules(model)
    identity = identify(
        model,
        reference="memory",
        weights_format="random",
        dtype=str(model.dtype).removeprefix("torch."),
    )
    _check_shapes(config.model, identity)
    rank, size = _tensor_parallel(model, tp_rank, tp_size)
    heads = _heads(identity, rank, size)
    if strict:
        _check_fit(config, identity)
        if probe and size == 1 and config.fingerprints is not None:
            _check_mapping(config, model, identity)
    attachment = Attachment(
        model,
        tuple(
            None if entries is None else tuple(entry.pattern for entry in entries)
            for entries in config.heads
        ),
        layer_types=identity.layer_types,
        sliding_window=identity.sliding_window,
        min_length=_min_length(config, min_length),
        layers=_layers(identity, layers),
        head_dim=identity.head_dim,
        heads=heads,
        backend=backend,
        execution=_execution(timings, model, identity.head_dim),
    )
    attachment.connect()
    return attachment


def detach(model: Any) -> bool:
    """Give a model its former attention back; returns whether a config was attached."""
    attachment = attached_to(model)
    if attachment is None:
        return False
    attachment.detach()
    return True


def default_min_length(config: PatternConfig) -> int:
    """Return the tokens below which a config runs dense (see :func:`attach`)."""
    if config.selection is not None and config.selection.min_length is not None:
        return config.selection.min_length
    return min(config.calibration.lengths) if config.calibration is not None else 1


def _execution(timings: Any, model: Any, head_dim: int) -> Execution | None:
    if timings is None:
        return None
    table = timings if isinstance(timings, TimingTable) else load_timings(timings)
    execution = execution_on(table, torch.device(model.device))
    dtype = str(model.dtype).removeprefix("torch.")
    had = {(row.dtype, row.head_dim) for row in table.rows}
    if (dtype, head_dim) not in had:
        raise TimingError(
            f"the timing table of {table.device} has no {dtype} head_dim {head_dim} times, which "
            f"this model runs (it has {', '.join(f'{d} head_dim {h}' for d, h in sorted(had))}): "
            f"measure them with `patternsearch bench --dtype {dtype} --head-dims {head_dim}`, or "
            "leave timings out"
        )
    lack = execution.lack(dtype, head_dim)
    if lack is not None:
        warnings.warn(lack, BackendMissing, stacklevel=3)
    return execution


def _min_length(config: PatternConfig, given: int | None) -> int:
    if given is None:
        return default_min_length(config)
    if given < 1:
        raise InputError(f"min_length {given} is no length: give at least 1 token")
    return given


def _layers(identity: ModelIdentity, given: Iterable[int] | None) -> Sequence[int]:
    full = [layer for layer, kind in enumerate(identity.layer_types) if kind == "full"]
    if given is None:
        return full
    chosen = sorted(set(given))
    if strange := [layer for layer in chosen if layer not in full]:
        raise InputError(
            f"layer {strange[0]} has no full attention to make sparse: choose among {full}"
        )
    return chosen


def _check_shapes(expected: ModelIdentity, found: ModelIdentity) -> None:
    """Refuse what no ``strict=False`` can run: another number of layers or heads."""
    for field in ("num_layers", "num_query_heads", "num_kv_heads", "layer_types"):
        old, new = getattr(expected, field), getattr(found, field)
        if old != new:
            raise InputError(
                f"the config is for a model with {field} {old}, this one has {new}: "
                "calibrate this model"
            )


def _check_fit(config: PatternConfig, identity: ModelIdentity) -> None:
    differences = structural(compare_identity(config.model, identity))
    if differences:
        said = "; ".join(f"{d.name}: config {d.expected}, model {d.found}" for d in differences)
        raise InputError(
            f"the config does not fit this model ({said}): calibrate this model, or attach with "
            "strict=False to run it all the same"
        )


def _check_mapping(config: PatternConfig, model: Any, identity: ModelIdentity) -> None:
    assert config.fingerprints is not None
    loaded = LoadedModel(model, None, identity, model.dtype, torch.device(model.device))
    found = fingerprint_heads(
        loaded, config.fingerprints.seed, num_tokens=config.fingerprints.num_tokens
    )
    report = compare_mapping(config.fingerprints, found, config.model)
    if not report.ok:
        raise InputError(
            f"the config's heads are not this model's heads ({report.summary}): look with "
            "`patternsearch validate --level mapping`, or attach with strict=False to run it all "
            "the same"
        )


def _tensor_parallel(model: Any, rank: int | None, size: int | None) -> tuple[int, int]:
    if (rank is None) != (size is None):
        raise InputError(f"tp_rank {rank} and tp_size {size} must be given together")
    if rank is not None and size is not None:
        if not 0 <= rank < size:
            raise InputError(f"tp_rank {rank} is not in 0..{size - 1}")
        return rank, size
    found = getattr(model, "tp_size", None) or 1
    if found == 1:
        return 0, 1
    if not torch.distributed.is_initialized():
        raise ModelError(
            f"the model says it is sharded over {found} ranks but torch.distributed is not "
            "initialised: pass tp_rank and tp_size"
        )
    mesh = getattr(model, "device_mesh", None) or getattr(model, "_device_mesh", None)
    if mesh is not None and getattr(mesh, "ndim", 1) == 1:
        return int(mesh.get_local_rank()), int(found)
    return torch.distributed.get_rank() % int(found), int(found)


def _heads(identity: ModelIdentity, rank: int, size: int) -> tuple[int, int]:
    try:
        return query_head_range(identity.num_query_heads, size, rank)
    except ValueError as error:
        raise InputError(f"tensor-parallel size {size}: {error}") from None
