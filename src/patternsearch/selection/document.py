# SPDX-License-Identifier: Apache-2.0
"""From a scores folder alone to a whole config: selecting again never runs the model."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from patternsearch.errors import InputError, ScoresError
from patternsearch.patterns.candidates import KINDS
from patternsearch.patterns.tensor_parallel import kv_head_range, query_head_range
from patternsearch.schema.config import (
    CONFIG_FORMAT,
    CONFIG_SCHEMA_VERSION,
    Calibration,
    Fingerprints,
    ModelIdentity,
    PatternConfig,
    Provenance,
    RankSlice,
    TensorParallel,
)
from patternsearch.schema.scores import ScoresFolder
from patternsearch.selection.cost import CostModel
from patternsearch.selection.options import SelectionOptions
from patternsearch.selection.select import SelectedHeads, select_heads

__all__ = ["RunRecord", "SelectedConfig", "build_config", "load_run_record", "select_config"]

_RUN_FORMAT = "patternsearch/run"


class RunRecord(BaseModel):
    """The part of run.json that a config is made of; other keys are for people."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model: ModelIdentity
    calibration: Calibration
    fingerprints: Fingerprints
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class SelectedConfig:
    """A config and how it was selected."""

    config: PatternConfig
    selected: SelectedHeads

    def as_document(self) -> dict[str, Any]:
        """Return the selection's report as a JSON-able mapping; the config is its own document."""
        selected = self.selected
        heads = [entry for layer in selected.heads for entry in layer or ()]
        return {
            "selection": selected.record.model_dump(mode="json"),
            "measured": selected.record.measured,
            "unit": selected.unit,
            "dense_cost": selected.dense_cost,
            "cost": selected.cost,
            "backends": dict(selected.backends),
            "heads_by_kind": {k: sum(e.pattern.kind == k for e in heads) for k in KINDS},
            "ranks_before": asdict(selected.ranks_before),
            "ranks_after": asdict(selected.ranks_after),
            "shadow_price": selected.shadow_price,
            "optimality_gap": selected.optimality_gap,
            "upgrades": [asdict(upgrade) for upgrade in selected.upgrades],
        }


def load_run_record(folder: ScoresFolder) -> RunRecord:
    """Read what a finished calibration recorded beside its scores.

    Raises:
        ScoresError: run.json is missing, damaged, foreign, or of an unfinished run.
    """
    try:
        document = json.loads(folder.run.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ScoresError(
            f"{folder.run} cannot be read ({error}): give the scores folder that "
            f"`patternsearch calibrate` wrote beside its config"
        ) from None
    if not isinstance(document, dict) or document.get("format") != _RUN_FORMAT:
        raise ScoresError(f"{folder.run} is not a patternsearch run file: name another folder")
    missing = sorted(name for name in RunRecord.model_fields if name not in document)
    if missing:
        raise ScoresError(
            f"{folder.run} has no {', '.join(missing)}: the calibration has not finished; run "
            f"`patternsearch calibrate` with the same arguments to complete it"
        )
    try:
        return RunRecord.model_validate_json(json.dumps(document))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise ScoresError(
            f"{folder.run}: {where}: {fault['msg']}; it was written by another version: run "
            f"`patternsearch calibrate` again"
        ) from None


def select_config(
    folder: ScoresFolder,
    options: SelectionOptions,
    cost: CostModel | None = None,
    record: RunRecord | None = None,
) -> SelectedConfig:
    """Select from a scores folder and put the config together.

    Args:
        folder: scores of a finished calibration.
        options: the rule's parameters; a consumer must be the one that was scored.
        cost: cost model; None is counted work.
        record: what run.json says, if it was read already.

    Raises:
        ScoresError: the folder is bad, or was scored for another consumer.
        InputError, TimingError: see :func:`patternsearch.selection.select.select_heads`.
    """
    record = record if record is not None else load_run_record(folder)
    scored_for = record.calibration.consumer
    if options.consumer != scored_for:
        raise ScoresError(
            f"{folder.root} holds scores of what {scored_for} reads, not {options.consumer}: "
            f"calibrate with --consumer {options.consumer}, or select for {scored_for}"
        )
    selected = select_heads(folder, options, cost, num_layers=record.model.num_layers)
    return SelectedConfig(build_config(record, selected, tp_size=options.tp_size), selected)


def build_config(record: RunRecord, selected: SelectedHeads, *, tp_size: int) -> PatternConfig:
    """Put a config together.

    Raises:
        InputError: the model's heads cannot be laid out on ``tp_size`` ranks.
    """
    parts: dict[str, Any] = {
        "format": CONFIG_FORMAT,
        "schema_version": CONFIG_SCHEMA_VERSION,
        "provenance": record.provenance,
        "model": record.model,
        "tensor_parallel": _layout(record.model, selected, tp_size),
        "calibration": record.calibration,
        "selection": selected.record,
        "imported": None,
        "fingerprints": record.fingerprints,
        "heads": selected.heads,
    }
    try:
        return PatternConfig.model_validate(parts)
    except ValidationError as error:
        raise ScoresError(
            f"the scores do not fit the model that run.json names "
            f"({error.errors(include_url=False)[0]['msg']}): the folder mixes two runs"
        ) from None


def _layout(model: ModelIdentity, selected: SelectedHeads, size: int) -> TensorParallel:
    costs = selected.ranks_after.by_rank
    try:
        return TensorParallel(
            size=size,
            ranks=tuple(
                RankSlice(
                    rank=rank,
                    query_heads=query_head_range(model.num_query_heads, size, rank),
                    kv_heads=kv_head_range(model.num_query_heads, model.num_kv_heads, size, rank),
                    predicted_ms=round(costs[rank], 6) if selected.record.measured else None,
                )
                for rank in range(size)
            ),
        )
    except ValueError as error:
        raise InputError(f"tensor-parallel size {size} does not fit the model: {error}") from None
