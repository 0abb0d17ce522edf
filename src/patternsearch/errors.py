# SPDX-License-Identifier: Apache-2.0
"""Errors a user can act on; the command line maps each to an exit code and one sentence.

Invariants that only this project can break are ``assert`` statements, not these.
"""

__all__ = [
    "BackendMissing",
    "CheckFailed",
    "ConfigError",
    "EnvironmentLacks",
    "InputError",
    "ModelError",
    "PatternsearchError",
    "RecipeError",
    "ScoresError",
    "TimingError",
    "UnsupportedModel",
]


class PatternsearchError(Exception):
    """Base of all errors raised for a user's sake.

    The message has three parts: the value seen, the rule, the way out.
    """

    exit_code = 2


class InputError(PatternsearchError, ValueError):
    """An argument, file or value the user gave breaks a rule (exit code 2)."""


class ConfigError(InputError):
    """A pattern config or a consumer's file cannot be read as what it claims to be."""


class RecipeError(InputError):
    """A calibration recipe, or a source it names, cannot be used."""


class ScoresError(InputError):
    """A scores folder is incomplete, foreign, or does not fit the request."""


class TimingError(InputError):
    """A timing table is invalid or does not cover what is asked of it."""


class ModelError(InputError):
    """The model cannot be loaded or gives values that cannot be scored."""


class UnsupportedModel(ModelError):
    """The model's attention has a feature that patternsearch refuses by name."""


class EnvironmentLacks(PatternsearchError, RuntimeError):
    """The machine lacks something the request needs, such as a GPU or a package (exit code 3)."""

    exit_code = 3


class BackendMissing(UserWarning):
    """A backend that a timing table names is not here or cannot run; another runs instead."""


class CheckFailed(PatternsearchError):
    """A check was carried out and says no (exit code 1)."""

    exit_code = 1
