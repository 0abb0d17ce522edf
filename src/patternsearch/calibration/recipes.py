# SPDX-License-Identifier: Apache-2.0
"""The recipe document: which text, how long, how much of it, and from which seed.

A recipe is strict (an unknown key is an error) and versioned. Reading one touches neither the
network nor any source; :mod:`patternsearch.calibration.plan` resolves it for one run and
:mod:`patternsearch.calibration.samples` draws the samples.
"""

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from patternsearch.data import data_path
from patternsearch.errors import RecipeError
from patternsearch.schema.io import load_model_file

__all__ = [
    "RECIPE_FORMAT",
    "RECIPE_SCHEMA_VERSION",
    "FileSource",
    "HubSource",
    "LengthPlan",
    "PackageSource",
    "Recipe",
    "Source",
    "SyntheticSource",
    "TaskName",
    "load_recipe",
    "recipe_path",
]

RECIPE_FORMAT = "patternsearch/recipe"
RECIPE_SCHEMA_VERSION = 1
STDLIB = "stdlib"
"""The package name that stands for Python's own standard library."""

_MAX_RECIPE_BYTES = 1 << 20

TaskName = Literal["needle", "multikey", "variable_tracking", "dialogue", "code"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")]
Pattern = Annotated[str, Field(min_length=1, max_length=1000)]
Depth = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Weighted(_Strict):
    name: Name
    weight: float = Field(default=1.0, gt=0.0, le=1e6)
    heldout: bool = Field(default=True, description="may also give held-out samples")


class _Documents(_Weighted):
    min_chars: int = Field(default=0, ge=0, description="shorter documents are passed over")


class _Rows(_Documents):
    field: str = Field(default="text", min_length=1)
    shuffle_block: int = Field(
        default=1,
        ge=1,
        le=100_000,
        description="documents are shuffled by the seed within blocks of so many",
    )


class HubSource(_Rows):
    """A dataset ``owner/name`` of the Hugging Face hub, streamed: the only source with a network.

    A document is one row's ``field``: a string, or a list of messages with ``role`` and
    ``content``, which is rendered with the chat template (or as a plain transcript).
    """

    kind: Literal["hub"]
    dataset: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$", max_length=200)
    config: str | None = Field(default=None, min_length=1)
    split: str = Field(default="train", pattern=r"^\w[\w.-]*$")
    revision: str | None = Field(default=None, min_length=1)


class FileSource(_Rows):
    """Local files, streamed. Paths are relative to the recipe's folder, or absolute.

    ``text``: each file is a document. ``json`` (also JSON lines) and ``parquet``: each row's
    ``field`` is one, as with a hub dataset. Patterns (``*``, ``**``) are allowed.
    """

    kind: Literal["files"]
    format: Literal["text", "json", "parquet"]
    paths: Annotated[tuple[Pattern, ...], Field(min_length=1)]

    @field_validator("paths")
    @classmethod
    def _stay_inside(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if "\0" in path:
                raise ValueError("a path holds a NUL character")
            if not PurePosixPath(path).is_absolute() and ".." in PurePosixPath(path).parts:
                raise ValueError(
                    f"{path!r} leaves the recipe's folder: give a path inside it, or an absolute "
                    "path if that is meant"
                )
        return paths


class PackageSource(_Documents):
    """Files of an installed Python package, found without importing it.

    ``package: stdlib`` is Python's standard library. ``read: text`` takes each file as a
    document; ``read: python_strings`` takes each string value of the dictionaries that a Python
    file assigns at its top level (such as ``pydoc_data/topics.py``) without running the file.
    """

    kind: Literal["package"]
    package: str = Field(pattern=r"^[A-Za-z_]\w*$", max_length=100)
    files: Annotated[tuple[Pattern, ...], Field(min_length=1)]
    read: Literal["text", "python_strings"] = "text"
    optional: bool = Field(default=False, description="left out, with a note, if not installed")

    @field_validator("files")
    @classmethod
    def _stay_inside(cls, files: tuple[str, ...]) -> tuple[str, ...]:
        for path in files:
            pure = PurePosixPath(path)
            if pure.is_absolute() or ".." in pure.parts or "\0" in path:
                raise ValueError(f"{path!r} leaves the package: give a pattern inside its folder")
        return files


class SyntheticSource(_Weighted):
    """A generated long-context task, a new one for every sample.

    ``depths`` are where the evidence stands, as fractions of the prompt, taken in turn; without
    it they cover [0, 1] evenly.
    """

    kind: Literal["synthetic"]
    task: TaskName
    depths: Annotated[tuple[Depth, ...], Field(min_length=1)] | None = None


Source = Annotated[
    HubSource | FileSource | PackageSource | SyntheticSource, Field(discriminator="kind")
]


class LengthPlan(_Strict):
    """How many calibration samples of one length; held-out samples come on top."""

    tokens: int = Field(ge=32, le=1 << 24)
    samples: int = Field(ge=1, le=10_000)


class Recipe(_Strict):
    """The whole document.

    ``heldout_fraction`` is the share of all samples, and of all documents, that is held out;
    documents and task seeds of the two splits are disjoint. With ``chat_template`` every sample
    is a conversation in the model's own template, else plain text.
    """

    format: Literal["patternsearch/recipe"]
    schema_version: Literal[1]
    name: Name
    description: str = ""
    seed: int = Field(ge=0, lt=1 << 63)
    heldout_fraction: float = Field(ge=0.0, le=0.5)
    chat_template: bool = False
    lengths: Annotated[tuple[LengthPlan, ...], Field(min_length=1)]
    sources: Annotated[tuple[Source, ...], Field(min_length=1, max_length=1000)]

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        names = [source.name for source in self.sources]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"source {repeated[0]} is given twice: names must differ")
        tokens = [plan.tokens for plan in self.lengths]
        if repeated_lengths := sorted({n for n in tokens if tokens.count(n) > 1}):
            raise ValueError(f"length {repeated_lengths[0]} is given twice")
        if self.heldout_fraction > 0 and not any(source.heldout for source in self.sources):
            raise ValueError(
                f"heldout_fraction is {self.heldout_fraction} but no source allows held-out "
                "samples: set it to 0, or heldout: true for a source"
            )
        return self


def recipe_path(path_or_name: str | Path) -> Path:
    """Return the file that a path or the name of a shipped recipe means.

    Raises:
        RecipeError: there is neither such a file nor such a recipe.
    """
    path = Path(path_or_name)
    if path.suffix or len(path.parts) != 1 or path.exists():
        return path
    shipped = data_path("calib")
    named = shipped / f"{path_or_name}.yaml"
    if not named.is_file():
        known = ", ".join(sorted(found.stem for found in shipped.glob("*.yaml"))) or "none"
        raise RecipeError(
            f"recipe {str(path_or_name)!r} is neither a file nor a shipped recipe "
            f"(shipped: {known}): give the path of a .yaml or .json file, or one of these names"
        )
    return named


def load_recipe(path_or_name: str | Path) -> Recipe:
    """Read and check a recipe; a bare name means ``calib/<name>.yaml``.

    Raises:
        RecipeError: the file is missing or breaks a rule; the message names file, place and rule.
    """
    return load_model_file(
        recipe_path(path_or_name), Recipe, error=RecipeError, max_bytes=_MAX_RECIPE_BYTES
    )
