# SPDX-License-Identifier: Apache-2.0
"""patternsearch: decide, prove and keep honest the sparse-attention pattern of every head.

The names below are the Python API. They are loaded when first used, so that importing the package
loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from patternsearch._version import __version__

if TYPE_CHECKING:
    from patternsearch.calibration.api import calibrate
    from patternsearch.calibration.request import CalibrationRequest
    from patternsearch.errors import PatternsearchError
    from patternsearch.exchange.diff import diff_files as diff
    from patternsearch.report.build import report_page
    from patternsearch.runtime.attach import attach, detach
    from patternsearch.runtime.shadow import shadow
    from patternsearch.schema.config import PatternConfig
    from patternsearch.schema.io import dump_config, load_config
    from patternsearch.schema.scores import ScoresFolder
    from patternsearch.selection.document import select_config as select
    from patternsearch.selection.options import SelectionOptions
    from patternsearch.timing.model import load_time_model
    from patternsearch.validation.api import ValidationRequest, validate

__all__ = [
    "CalibrationRequest",
    "PatternConfig",
    "PatternsearchError",
    "ScoresFolder",
    "SelectionOptions",
    "ValidationRequest",
    "__version__",
    "attach",
    "calibrate",
    "detach",
    "diff",
    "dump_config",
    "load_config",
    "load_time_model",
    "report_page",
    "select",
    "shadow",
    "validate",
]

_HOMES = {
    "CalibrationRequest": ("calibration.request", "CalibrationRequest"),
    "PatternConfig": ("schema.config", "PatternConfig"),
    "PatternsearchError": ("errors", "PatternsearchError"),
    "ScoresFolder": ("schema.scores", "ScoresFolder"),
    "SelectionOptions": ("selection.options", "SelectionOptions"),
    "ValidationRequest": ("validation.api", "ValidationRequest"),
    "attach": ("runtime.attach", "attach"),
    "calibrate": ("calibration.api", "calibrate"),
    "detach": ("runtime.attach", "detach"),
    "diff": ("exchange.diff", "diff_files"),
    "dump_config": ("schema.io", "dump_config"),
    "load_config": ("schema.io", "load_config"),
    "load_time_model": ("timing.model", "load_time_model"),
    "report_page": ("report.build", "report_page"),
    "select": ("selection.document", "select_config"),
    "shadow": ("runtime.shadow", "shadow"),
    "validate": ("validation.api", "validate"),
}
"""public name: module below this package, name there."""


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'patternsearch' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(import_module(f"patternsearch.{module}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
