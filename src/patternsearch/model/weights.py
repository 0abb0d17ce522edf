# SPDX-License-Identifier: Apache-2.0
"""Digests of weights: canonical over sharding, streamed from disk by several threads.

The digest of a checkpoint is SHA-256 over one line a tensor, sorted by name::

    name <TAB> dtype <TAB> shape (comma-separated) <TAB> SHA-256 of the tensor's bytes <LF>

so it does not depend on how tensors are spread over files or ordered in them. Dtypes are written
as safetensors writes them (``BF16``); a GGUF tensor has its ggml type's name and its shape as
stored. The digest of a layer's attention is the same over that layer's attention tensors.
"""

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patternsearch.errors import ModelError
from patternsearch.model.gguf_header import read_gguf_header
from patternsearch.model.sources import ModelSource
from patternsearch.progress import Progress, Silent

if TYPE_CHECKING:
    import torch

__all__ = [
    "StoredTensor",
    "WeightDigests",
    "attention_layer",
    "digest_state",
    "digest_weights",
    "list_tensors",
]

_STORED_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}

_CHUNK_BYTES = 8 << 20
_MAX_HEADER_BYTES = 100_000_000
_TASK = "weights digest"

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|blk)\.(\d+)\.(.+)$")
_ATTENTION = re.compile(
    r"^(?:self_attn|attn|attention|self_attention|linear_attn|mamba|mixer|temporal_block)\."
    r"|^(?:attn_(?:q|k|v|qkv|output)(?:_norm)?|ssm_[a-z0-9]+)(?:\.|$)"
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file: its bytes are ``size_bytes`` at ``offset``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WeightDigests:
    """SHA-256 of a checkpoint and of each layer's attention tensors, in hexadecimal."""

    weights_sha256: str
    attention_sha256: tuple[str, ...]


def attention_layer(name: str) -> int | None:
    """Return the layer that a tensor is an attention (or linear-attention) tensor of, or None."""
    match = _LAYER.search(name)
    if match is None or not _ATTENTION.match(match[2]):
        return None
    return int(match[1])


def list_tensors(source: ModelSource) -> tuple[StoredTensor, ...]:
    """Return the tensors of a checkpoint from its files' headers, sorted by name.

    Raises:
        ModelError: If a file is truncated or malformed, or a tensor is stored twice.
    """
    tensors: list[StoredTensor] = []
    for file in source.weight_files:
        if source.weights_format == "safetensors":
            tensors += _safetensors_header(file)
        elif source.weights_format == "gguf":
            tensors += _gguf_tensors(file)
        else:
            raise ModelError(
                f"{file.name} is a pickle, which has no header to read; convert the checkpoint to "
                "safetensors to get its digests"
            )
    tensors.sort(key=lambda tensor: tensor.name)
    for one, other in pairwise(tensors):
        if one.name == other.name:
            raise ModelError(
                f"the tensor {one.name} is stored in both {one.file.name} and {other.file.name}; "
                "remove the shard that does not belong to this checkpoint"
            )
    return tuple(tensors)


def digest_weights(
    tensors: Sequence[StoredTensor],
    num_layers: int,
    *,
    progress: Progress | None = None,
    threads: int | None = None,
) -> WeightDigests:
    """Read every tensor once and digest it, several at a time.

    Args:
        tensors: All tensors of the checkpoint.
        num_layers: Layers of the model; each gets an attention digest.
        progress: Told about bytes done.
        threads: Readers at a time; by default twice the CPUs, at most 16.

    Raises:
        ModelError: If a file ends early or cannot be read.
    """
    progress = progress or Silent()
    threads = threads or min(16, 2 * (os.cpu_count() or 1))
    lines: dict[str, str] = {}
    progress.start(_TASK, sum(tensor.size_bytes for tensor in tensors), "B")
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        largest_first = sorted(tensors, key=lambda tensor: -tensor.size_bytes)
        pending: dict[Future[str], StoredTensor] = {
            pool.submit(_digest, tensor): tensor for tensor in largest_first
        }
        try:
            while pending:
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    tensor = pending.pop(future)
                    lines[tensor.name] = _line(
                        tensor.name, tensor.dtype, tensor.shape, future.result()
                    )
                    progress.advance(_TASK, tensor.size_bytes, tensor.name)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    progress.finish(_TASK)
    return _combine(lines, num_layers)


def digest_state(state: Mapping[str, "torch.Tensor"], num_layers: int) -> WeightDigests:
    """Digest tensors in memory, to the same values as a safetensors file that stores them."""
    import torch

    lines = {}
    for name, tensor in state.items():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        content = hashlib.sha256(flat.numpy().data).hexdigest()
        dtype = _STORED_DTYPES[str(tensor.dtype).removeprefix("torch.")]
        lines[name] = _line(name, dtype, tensor.shape, content)
    return _combine(lines, num_layers)


def _combine(lines: Mapping[str, str], num_layers: int) -> WeightDigests:
    by_layer: list[list[str]] = [[] for _ in range(num_layers)]
    for name, line in lines.items():
        layer = attention_layer(name)
        if layer is not None and layer < num_layers:
            by_layer[layer].append(line)
    return WeightDigests(_digest_of_lines(lines.values()), tuple(map(_digest_of_lines, by_layer)))


def _digest_of_lines(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in sorted(lines):
        digest.update(line.encode())
    return digest.hexdigest()


def _line(name: str, dtype: str, shape: Iterable[int], content: str) -> str:
    return f"{name}\t{dtype}\t{','.join(map(str, shape))}\t{content}\n"


def _digest(tensor: StoredTensor) -> str:
    """Hash a tensor's bytes; reading and hashing both release the interpreter lock."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(tensor.size_bytes, 1))))
    position, end = tensor.offset, tensor.offset + tensor.size_bytes
    try:
        descriptor = os.open(tensor.file, os.O_RDONLY)
        try:
            while position < end:
                count = os.preadv(descriptor, [buffer[: end - position]], position)
                if not count:
                    raise ModelError(
                        f"{tensor.file} ends inside the tensor {tensor.name}; fetch the file again"
                    )
                digest.update(buffer[:count])
                position += count
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ModelError(f"{tensor.file} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _safetensors_header(file: Path) -> list[StoredTensor]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"its header claims {length} bytes")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = [_stored(file, 8 + length, name, entry) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(f"{file} is no safetensors file ({error}); fetch the file again") from None
    end = max((tensor.offset + tensor.size_bytes for tensor in tensors), default=8 + length)
    if end != size:
        raise ModelError(
            f"{file} has {size:,} bytes but its header describes {end:,}: it is truncated or "
            "damaged; fetch the file again"
        )
    return tensors


def _stored(file: Path, base: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    shape = tuple(int(size) for size in entry["shape"])
    first, last = (int(offset) for offset in entry["data_offsets"])
    if not 0 <= first <= last:
        raise ValueError(f"the tensor {name} has offsets {first}–{last}")
    return StoredTensor(name, str(entry["dtype"]), shape, file, base + first, last - first)


def _gguf_tensors(file: Path) -> list[StoredTensor]:
    return [
        StoredTensor(
            tensor.name, tensor.type_name, tensor.shape, file, tensor.offset, tensor.size_bytes
        )
        for tensor in read_gguf_header(file).tensors
    ]
