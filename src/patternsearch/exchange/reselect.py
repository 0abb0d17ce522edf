# SPDX-License-Identifier: Apache-2.0
"""A config selected anew from its scores, under what one engine can run.

The scores must have been taken with that engine in mind: of its estimators and of the keys that
its kernels read. A score of another set is no evidence for it.
"""

from typing import TYPE_CHECKING, Any

from patternsearch.errors import InputError, ScoresError
from patternsearch.exchange.consumers import CONSUMERS, ConsumerName
from patternsearch.exchange.ranks import rank_layout
from patternsearch.schema.config import PatternConfig, Selection
from patternsearch.schema.scores import ScoresFolder

if TYPE_CHECKING:
    from patternsearch.selection.cost import CostModel
    from patternsearch.selection.options import SelectionOptions

__all__ = ["reselect"]


def reselect(
    config: PatternConfig,
    to: ConsumerName,
    scores: ScoresFolder,
    cost: "CostModel | None" = None,
) -> PatternConfig:
    """Select every head anew for an engine, by the rule that the config was selected by.

    Args:
        config: a calibrated config.
        to: the engine.
        scores: the config's scores.
        cost: measured times; without, pairs executed decide and the result is not measured.

    Raises:
        InputError: the config cannot be selected again.
        ScoresError: the scores belong to another config, or were not taken for this engine.
    """
    if config.calibration is None or config.selection is None:
        raise InputError(
            "the config was imported and has no scores to select from: calibrate the model with "
            f"--consumer {to}"
        )
    _check_samples(config, scores)
    scored_for = config.calibration.consumer
    if scored_for not in CONSUMERS:
        raise ScoresError(
            f"{scores.root} holds scores of {scored_for}'s physical sets and estimators, which "
            f"say nothing about what {to} reads: calibrate with --consumer {to} --grid minference"
        )
    # The selection package loads pandas.
    from patternsearch.selection.select import select_heads

    options = _options(config.selection, to, is_measured=cost is not None)
    chosen = select_heads(scores, options, cost, num_layers=config.model.num_layers)
    changes: dict[str, Any] = {
        "heads": chosen.heads,
        "selection": chosen.record,
        "tensor_parallel": rank_layout(config.model, chosen.heads, config.tensor_parallel.size),
    }
    return PatternConfig.model_validate(dict(config) | changes)


def _options(selection: Selection, to: ConsumerName, *, is_measured: bool) -> "SelectionOptions":
    from patternsearch.selection.options import SelectionOptions

    is_mass = selection.objective == "mass"
    fraction = selection.budget_fraction if is_mass else None
    if is_mass and fraction is None and (selection.budget_ms is None or not is_measured):
        raise InputError(
            "the config was selected for most mass within a time budget, which needs --timings: "
            f"run `patternsearch select` with --consumer {to} and export its config"
        )
    known = {} if selection.tie_tolerance is None else {"tie_tolerance": selection.tie_tolerance}
    return SelectionOptions(
        target_mass=selection.target_mass,
        objective="mass" if is_mass else "time",
        budget_ms=selection.budget_ms if is_mass and fraction is None else None,
        budget_fraction=fraction,
        statistic=selection.statistic,
        regions=selection.regions,
        kinds=selection.kinds,
        consumer=to,
        max_density=selection.max_density,
        dense_layers=selection.dense_layers,
        tp_size=selection.tp_size,
        **known,
    )


def _check_samples(config: PatternConfig, scores: ScoresFolder) -> None:
    import pandas as pd

    assert config.calibration is not None
    if not scores.samples.exists():
        raise ScoresError(f"{scores.samples} does not exist: give the config's scores folder")
    found = set(pd.read_parquet(scores.samples, columns=["sha256"])["sha256"])
    wanted = {sample.sha256 for sample in config.calibration.samples}
    if found != wanted:
        raise ScoresError(
            f"{scores.root} holds {len(found)} samples of which {len(found & wanted)} are among "
            f"the config's {len(wanted)}: the scores belong to another run"
        )
