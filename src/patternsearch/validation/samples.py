# SPDX-License-Identifier: Apache-2.0
"""The prompts that a config is judged on: the held-out samples of its calibration, drawn again.

First choice is the recorded tokens beside the config (``x.scores``), held against the digests in
the config; else the recipe is drawn again with the recorded seed and lengths. Another recipe may be
given; its masses then have no record to be equal to, and the report says so.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from patternsearch.calibration.plan import ResolvedRecipe, Slot, plan_slots, resolve
from patternsearch.calibration.recipes import load_recipe, recipe_path
from patternsearch.calibration.samples import Sample, draw_slots
from patternsearch.errors import InputError, ScoresError
from patternsearch.model.loading import LoadedModel
from patternsearch.progress import Progress
from patternsearch.schema.config import Calibration, PatternConfig
from patternsearch.schema.scores import scores_folder_of

__all__ = ["JudgingSamples", "judging_samples"]


@dataclass(frozen=True, slots=True)
class JudgingSamples:
    """What to judge on.

    Attributes:
        samples: lengths ascending.
        complete_lengths: lengths whose recorded held-out samples are all here, token for token,
            so that recorded means must come out again.
        origin: where they come from, in words.
        split: whose recorded masses they compare with.
    """

    samples: tuple[Sample, ...]
    complete_lengths: frozenset[int]
    origin: str
    split: str = "heldout"


def judging_samples(
    config: PatternConfig,
    loaded: LoadedModel,
    *,
    config_path: Path | None = None,
    recipe: str | None = None,
    lengths: Sequence[int] | None = None,
    max_samples: int | None = None,
    progress: Progress | None = None,
) -> JudgingSamples:
    """Find or draw the samples.

    Args:
        config: the config.
        loaded: the model, with its tokenizer where samples must be drawn.
        config_path: where the config lies; its scores folder is looked for beside it.
        recipe: another recipe, path or name; None is the config's own.
        lengths: tokens; None is the calibrated lengths.
        max_samples: at most so many for each length; None is all.
        progress: told about drawing.

    Raises:
        InputError: there is no calibration to take samples from, a length was not calibrated, or
            the recipe gives other tokens than the recorded ones.
        RecipeError: the recipe cannot be drawn.
    """
    if recipe is not None:
        chosen = tuple(sorted(set(lengths))) if lengths else None
        samples = _draw(recipe, loaded, chosen, progress)
        kept = _first(samples, max_samples)
        return JudgingSamples(kept, frozenset(), f"held-out samples of recipe {recipe}")
    calibration = config.calibration
    if calibration is None:
        raise InputError(
            "the config was imported, so it has no calibration samples to be judged on: "
            "name a recipe (--recipe)"
        )
    wanted = tuple(sorted(set(lengths or calibration.lengths)))
    if strange := [length for length in wanted if length not in calibration.lengths]:
        raise InputError(
            f"length {strange[0]} was not calibrated (lengths {list(calibration.lengths)}): "
            "name calibrated lengths, or another recipe (--recipe)"
        )
    split = _split(calibration)
    stored = _stored(config_path, calibration, wanted, split)
    if stored is not None:
        samples, origin = stored, f"recorded {split} samples"
    else:
        samples = _redrawn(calibration, loaded, wanted, split, progress)
        origin = f"{split} samples of recipe {calibration.recipe}, drawn again"
    kept = _first(samples, max_samples)
    return JudgingSamples(kept, _complete(kept, calibration, split), origin, split)


def _split(calibration: Calibration) -> str:
    splits = {sample.split for sample in calibration.samples}
    return "heldout" if "heldout" in splits else "calibration"


def _stored(
    config_path: Path | None, calibration: Calibration, lengths: Sequence[int], split: str
) -> list[Sample] | None:
    if config_path is None:
        return None
    path = scores_folder_of(config_path).samples
    if not path.is_file():
        return None
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise ScoresError(
            f"{path} cannot be read ({error}): restore it, or name a recipe (--recipe)"
        ) from None
    recorded = {sample.sample_id: sample.sha256 for sample in calibration.samples}
    samples = []
    for row in rows:
        if row["split"] != split or row["length"] not in lengths:
            continue
        ids = np.asarray(row["token_ids"], dtype=np.int32)
        digest = hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
        if recorded.get(row["sample_id"]) != digest:
            raise ScoresError(
                f"{path}: sample {row['sample_id']} is not the one the config was calibrated on: "
                "the folder belongs to another run; move it away, or name a recipe (--recipe)"
            )
        samples.append(
            Sample(
                sample_id=row["sample_id"],
                source=row["source"],
                split=row["split"],
                length=row["length"],
                num_tokens=row["num_tokens"],
                sha256=digest,
                token_ids=ids,
                documents=(),
                task=None,
            )
        )
    return samples or None


def _draw(
    recipe: str,
    loaded: LoadedModel,
    lengths: tuple[int, ...] | None,
    progress: Progress | None,
) -> list[Sample]:
    """Draw the held-out samples of a recipe, or all if it holds none out."""
    resolved = resolve(load_recipe(recipe), lengths=lengths)
    slots = plan_slots(resolved)
    heldout = [slot for slot in slots if slot.split == "heldout"]
    return _draw_slots(recipe, resolved, heldout or slots, loaded, progress)


def _redrawn(
    calibration: Calibration,
    loaded: LoadedModel,
    lengths: Sequence[int],
    split: str,
    progress: Progress | None,
) -> list[Sample]:
    """Draw the recorded samples of a split again."""
    resolved = _recorded_plan(calibration)
    slots = [s for s in plan_slots(resolved) if s.split == split and s.length in lengths]
    samples = _draw_slots(calibration.recipe, resolved, slots, loaded, progress)
    recorded = {sample.sample_id: sample.sha256 for sample in calibration.samples}
    changed = [s for s in samples if recorded.get(s.sample_id) != s.sha256]
    if changed:
        raise InputError(
            f"recipe {calibration.recipe} now gives other tokens for {len(changed)} of "
            f"{len(samples)} samples (first: {changed[0].sample_id}): its text, its packages or "
            "the tokenizer changed; restore them, or judge on the new text with --recipe"
        )
    return samples


def _recorded_plan(calibration: Calibration) -> ResolvedRecipe:
    """Resolve the recipe as the calibration did; its digest tells whether it still is that one."""
    recipe = load_recipe(calibration.recipe)
    counts = {
        sum(s.length == length and s.split == "calibration" for s in calibration.samples)
        for length in calibration.lengths
    }
    for samples in (None, *sorted(counts - {0})):
        resolved = resolve(
            recipe, lengths=calibration.lengths, samples=samples, seed=calibration.seed
        )
        if resolved.sha256 == calibration.recipe_sha256:
            return resolved
    raise InputError(
        f"recipe {calibration.recipe} is not the one of the calibration any more (or a source of "
        "it is missing here): restore it, or judge on another with --recipe"
    )


def _draw_slots(
    recipe: str,
    resolved: ResolvedRecipe,
    slots: Sequence[Slot],
    loaded: LoadedModel,
    progress: Progress | None,
) -> list[Sample]:
    if loaded.tokenizer is None:
        raise InputError("samples must be drawn but the model was loaded without a tokenizer")
    return draw_slots(
        resolved,
        slots,
        loaded.tokenizer,
        base_dir=recipe_path(recipe).parent,
        progress=progress,
    )


def _first(samples: Sequence[Sample], limit: int | None) -> tuple[Sample, ...]:
    counts: dict[int, int] = {}
    kept = []
    for sample in samples:
        counts[sample.length] = counts.get(sample.length, 0) + 1
        if limit is None or counts[sample.length] <= limit:
            kept.append(sample)
    return tuple(kept)


def _complete(samples: Sequence[Sample], calibration: Calibration, split: str) -> frozenset[int]:
    have = {sample.sample_id for sample in samples}
    return frozenset(
        length
        for length in {sample.length for sample in samples}
        if all(
            record.sample_id in have
            for record in calibration.samples
            if record.length == length and record.split == split
        )
    )
