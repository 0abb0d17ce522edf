# SPDX-License-Identifier: Apache-2.0
"""The file beside an export that carries what the engines' format has no place for.

It holds the whole config and the digest of the exported bytes, so that importing our own export
loses nothing and a hand-edited one is noticed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from patternsearch._version import __version__
from patternsearch.errors import ConfigError
from patternsearch.schema.canonical import canonical_json
from patternsearch.schema.config import PatternConfig
from patternsearch.schema.io import config_digest, config_from_value, config_values
from patternsearch.schema.reading import read_source
from patternsearch.schema.validation import validate_document

__all__ = ["SIDECAR_FORMAT", "Sidecar", "dumps_sidecar", "find_sidecar", "sidecar_path"]

SIDECAR_FORMAT = "patternsearch/export"
_VERSION = 1

_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _SidecarDocument(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["patternsearch/export"]
    schema_version: Literal[1]
    patternsearch: str
    consumer: Literal["minference", "vllm", "sglang"]
    file_sha256: _Sha256
    config_sha256: _Sha256
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What a sidecar says.

    Attributes:
        consumer: whom the export is for.
        file_sha256: of the exported file's bytes.
        config: what was exported.
    """

    consumer: Literal["minference", "vllm", "sglang"]
    file_sha256: str
    config: PatternConfig


def sidecar_path(path: Path) -> Path:
    """Return where the sidecar of an exported file lies: ``x.json`` → ``x.patternsearch.json``."""
    return path.with_name(f"{path.stem}.patternsearch.json")


def dumps_sidecar(sidecar: Sidecar) -> str:
    """Write a sidecar as canonical text."""
    return canonical_json(
        {
            "format": SIDECAR_FORMAT,
            "schema_version": _VERSION,
            "patternsearch": __version__,
            "consumer": sidecar.consumer,
            "file_sha256": sidecar.file_sha256,
            "config_sha256": config_digest(sidecar.config),
            "config": config_values(sidecar.config),
        }
    )


def find_sidecar(path: Path) -> Sidecar | None:
    """Read the sidecar of an exported file; None if there is none.

    Raises:
        ConfigError: the sidecar is damaged, or was edited.
    """
    beside = sidecar_path(path)
    if not beside.exists():
        return None
    source = read_source(beside)
    if not isinstance(source.value, dict) or source.value.get("format") != SIDECAR_FORMAT:
        raise ConfigError(
            f"{beside} lies where the export's own metadata belongs and is something else: "
            "move it away"
        )
    document = validate_document(source, _SidecarDocument)
    config = config_from_value(document.config, f"{beside}: config")
    if config_digest(config) != document.config_sha256:
        raise ConfigError(
            f"{beside}: the config inside does not match its digest, so it was edited: "
            "export again, or remove this file to import the bare patterns"
        )
    return Sidecar(document.consumer, document.file_sha256, config)
