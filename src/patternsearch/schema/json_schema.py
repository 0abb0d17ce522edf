# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of the config document, for editors and for readers in other languages."""

import json
from typing import Any

from patternsearch.schema.config import CONFIG_SCHEMA_VERSION, PatternConfig

__all__ = ["config_json_schema", "config_json_schema_text"]


def config_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the current config version.

    It cannot say what spans parts of the document (as many layers in ``heads`` as the model
    has); loading checks that too.
    """
    schema = PatternConfig.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"patternsearch/config/{CONFIG_SCHEMA_VERSION}",
        **schema,
    }


def config_json_schema_text() -> str:
    """Return the schema as the text that is committed under ``configs/schema``."""
    return json.dumps(config_json_schema(), indent=2, ensure_ascii=False) + "\n"
