# SPDX-License-Identifier: Apache-2.0
"""From what the user names to files: a checkpoint folder, a ``.gguf`` file, or a hub id.

Nothing here reads weights. The network is touched only for a hub id, never for a path.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from patternsearch.errors import EnvironmentLacks, ModelError
from patternsearch.model.packages import PACKAGE_PREFIX, package_reference

__all__ = ["ModelSource", "WeightsFormat", "resolve_model"]

WeightsFormat = Literal["safetensors", "gguf", "pytorch"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "*.py")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a checkpoint lies.

    Attributes:
        reference: What the user named.
        folder: Holds ``config.json``; for a ``.gguf`` file, the folder it is in.
        weights_format: What the weights are stored as.
        weight_files: The files that hold tensors, symlinks resolved, sorted by name. Empty when
            a hub id was resolved without its weights.
        gguf_file: The file's name inside ``folder``, or None.
    """

    reference: str
    folder: Path
    weights_format: WeightsFormat
    weight_files: tuple[Path, ...]
    gguf_file: str | None = None

    @property
    def has_tokenizer(self) -> bool:
        """Whether tokenizer files are there (a ``.gguf`` file carries its own)."""
        if self.gguf_file is not None:
            return True
        return any((self.folder / name).is_file() for name in _TOKENIZER_FILES)


def resolve_model(
    reference: str | os.PathLike[str],
    *,
    weights: bool = True,
    allow_pickle: bool = False,
    offline: bool = False,
) -> ModelSource:
    """Find the files of a model.

    Args:
        reference: A checkpoint folder, a ``.gguf`` file, ``package:NAME/FILE.gguf``, or a hub id
            ``owner/name`` or ``owner/name@revision``. A path that exists wins over a hub id.
        weights: False is content with a hub id's small files.
        allow_pickle: Accept a checkpoint that has only ``.bin`` files (read with
            ``weights_only=True``).
        offline: Use the hub cache only. ``HF_HUB_OFFLINE=1`` does the same.

    Raises:
        ModelError: If nothing is there, or what is there is no checkpoint.
        EnvironmentLacks: If a hub id cannot be fetched, or is not in the cache when offline.
    """
    name = os.fspath(reference)
    path = package_reference(name) if name.startswith(PACKAGE_PREFIX) else Path(name).expanduser()
    if path.is_dir():
        return _folder(name, path, allow_pickle, weights=True)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(
                f"{path} is a file but no .gguf; name the checkpoint's folder, a .gguf file or a "
                "hub id"
            )
        return ModelSource(name, path.parent, "gguf", (path.resolve(),), path.name)
    if _HUB_ID.fullmatch(name) and path.suffix.lower() != ".gguf":
        return _folder(name, _snapshot(name, weights, allow_pickle, offline), allow_pickle, weights)
    raise ModelError(
        f"{name!r} does not exist; name a checkpoint folder, a .gguf file or a hub id (owner/name)"
    )


def _folder(name: str, folder: Path, allow_pickle: bool, weights: bool) -> ModelSource:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json, so it is no checkpoint folder; name the folder that "
            "holds config.json and the weights"
        )
    for stem, suffix, kind in (
        ("model", "safetensors", "safetensors"),
        ("pytorch_model", "bin", "pytorch"),
    ):
        files = _weight_files(folder, stem, suffix)
        if not files:
            continue
        if kind == "pytorch" and not allow_pickle:
            raise ModelError(
                f"{folder} has only .bin weights, which are pickles; convert them to safetensors "
                "or allow pickle explicitly with --allow-pickle (read with weights_only=True)"
            )
        return ModelSource(name, folder, "pytorch" if kind == "pytorch" else "safetensors", files)
    if weights:
        raise ModelError(
            f"{folder} has config.json but no weights (model.safetensors or "
            "model.safetensors.index.json); complete the checkpoint"
        )
    return ModelSource(name, folder, "safetensors", ())


def _weight_files(folder: Path, stem: str, suffix: str) -> tuple[Path, ...]:
    """Return the files that transformers would load, symlinks resolved."""
    single = folder / f"{stem}.{suffix}"
    if single.is_file():
        return (single.resolve(),)
    index = folder / f"{stem}.{suffix}.index.json"
    if not index.is_file():
        return ()
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is no weight index ({error}); fetch the file again") from None
    files = []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index} names the shard {name!r}, which is not a file beside it")
        if not (folder / name).is_file():
            raise ModelError(
                f"the shard {name} named in {index} is missing; complete the checkpoint"
            )
        files.append((folder / name).resolve())
    return tuple(files)


def _snapshot(name: str, weights: bool, allow_pickle: bool, offline: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    patterns = list(_SMALL_FILES)
    if weights:
        patterns += ["*.safetensors", *(("*.bin",) if allow_pickle else ())]
    offline = offline or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=patterns,
                local_files_only=offline,
            )
        )
    except LocalEntryNotFoundError:
        reason = "is not in the local cache" if offline else "cannot be reached and is not cached"
        raise EnvironmentLacks(
            f"{name!r} is no local path, and as a hub id it {reason}; check the path, or fetch it "
            f"with: hf download {repository}"
        ) from None
    except (HfHubHTTPError, HFValidationError) as error:
        raise ModelError(
            f"{name!r} is no local path, and the hub refuses it as an id: "
            f"{str(error).splitlines()[0]}; check the name, or log in with: hf auth login"
        ) from None
    except OSError as error:
        raise EnvironmentLacks(
            f"{name!r} is no local path, and the hub cannot be reached ({error}); check the path "
            "or the network"
        ) from None
