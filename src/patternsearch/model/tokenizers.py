# SPDX-License-Identifier: Apache-2.0
"""The tokenizer's digest: what turns text into ids, and nothing else.

Chat templates and library settings are left out, since saving a tokenizer again rewrites them;
what they did to the calibration text is in the samples' own digests.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from patternsearch.errors import ModelError
from patternsearch.model.gguf_header import read_gguf_header
from patternsearch.model.sources import ModelSource

__all__ = ["tokenizer_digest"]

_PLAIN_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")
_SETTINGS_THAT_CHANGE = ("truncation", "padding")


def tokenizer_digest(source: ModelSource) -> str | None:
    """Return the SHA-256 of a checkpoint's tokenizer, or None where there is none.

    ``tokenizer.json`` counts by content (its formatting, truncation and padding do not matter);
    without it the vocabulary files count by bytes; a ``.gguf`` file counts by its
    ``tokenizer.ggml.*`` fields.

    Raises:
        ModelError: If the tokenizer's file cannot be read.
    """
    if source.gguf_file is not None:
        return _gguf_digest(source.weight_files[0])
    document = source.folder / "tokenizer.json"
    if document.is_file():
        return _json_digest(document)
    digest = hashlib.sha256()
    found = [name for name in _PLAIN_FILES if (source.folder / name).is_file()]
    for name in found:
        content = hashlib.sha256((source.folder / name).read_bytes()).hexdigest()
        digest.update(f"{name}\t{content}\n".encode())
    return digest.hexdigest() if found else None


def _json_digest(path: Path) -> str:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kept = {key: value for key, value in document.items() if key not in _SETTINGS_THAT_CHANGE}
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{path} is no tokenizer ({error}); fetch the file again") from None
    canonical = json.dumps(kept, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _gguf_digest(path: Path) -> str:
    digest = hashlib.sha256()
    fields = read_gguf_header(path).fields
    with path.open("rb") as stream:
        for name in sorted(key for key in fields if key.startswith("tokenizer.ggml.")):
            first, last = fields[name]
            stream.seek(first)
            digest.update(f"{name}\t{last - first}\n".encode())
            digest.update(stream.read(last - first))
    return digest.hexdigest()
