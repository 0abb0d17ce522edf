# SPDX-License-Identifier: Apache-2.0
"""Everything an engine that reads MInference's pattern files would trip over with this config.

Several of these faults pass the engine's start-up and show at the first long prompt, or never:
a pattern name that is only checked when it runs, a default for a missing head, a file that
nothing reads. What each engine does was read from its source
(:mod:`patternsearch.exchange.consumers`).
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patternsearch.errors import ConfigError
from patternsearch.exchange.consumers import (
    CONSUMERS,
    SPARSE_FILE_NAME,
    Consumer,
    ConsumerName,
    is_writable,
)
from patternsearch.exchange.export import export_config, name_heads
from patternsearch.exchange.pattern_file import read_pattern_file
from patternsearch.patterns.candidates import AShape, Candidate, Dense, VerticalSlashLastQ, describe
from patternsearch.patterns.forced import FORCED_COLUMNS, FORCED_SLASHES
from patternsearch.runtime.fit import Status
from patternsearch.schema.config import PatternConfig
from patternsearch.validation.checks import Check

__all__ = ["check_consumer"]

_TRITON_HEAD_DIMS = (16, 32, 64, 128)
_DEFAULT_THRESHOLD = 32768
_DUAL_CHUNK = "dual_chunk_attention_config"


def check_consumer(
    config: PatternConfig, name: ConsumerName, *, model_folder: Path | None = None, tp_size: int = 1
) -> tuple[Check, ...]:
    """Check a config against what one engine reads and runs.

    Args:
        config: the config.
        name: the engine.
        model_folder: the checkpoint's folder, whose ``config.json`` and pattern file vLLM and
            SGLang read; None cannot tell about them.
        tp_size: tensor-parallel size of the deployment.
    """
    consumer = CONSUMERS[name]
    checks = [
        _layer_types(config, consumer),
        _patterns(config, consumer),
        _forced(config, consumer),
        _scored_for(config, consumer),
        _head_dim(config, consumer),
        _heads_of_ranks(config, tp_size),
        _engine(consumer),
    ]
    if consumer.bumped_vertical is not None:
        checks.append(_bumped(config, consumer))
    if consumer.in_model_folder:
        checks += _model_folder(config, consumer, model_folder)
    else:
        checks.append(_prompts(config))
    return tuple(checks)


def _check(name: str, status: Status, expected: str, found: str, advice: str = "") -> Check:
    return Check(
        group="consumer", name=name, status=status, expected=expected, found=found, advice=advice
    )


def _heads(config: PatternConfig) -> Iterator[tuple[int, int, Candidate]]:
    for layer, entries in enumerate(config.heads):
        for head, entry in enumerate(entries or ()):
            yield layer, head, entry.pattern


def _layer_types(config: PatternConfig, consumer: Consumer) -> Check:
    others = [layer for layer, heads in enumerate(config.heads) if heads is None]
    return _check(
        "an entry for every head of every layer",
        "differs" if others else "ok",
        f"{config.model.num_layers} full-attention layers",
        f"layers {', '.join(map(str, others[:8]))} are not full attention"
        if others
        else f"{config.model.num_layers} layers of {config.model.num_query_heads} heads",
        f"{consumer.name} would run them as full attention: this model cannot be served by it so"
        if others
        else "",
    )


def _patterns(config: PatternConfig, consumer: Consumer) -> Check:
    bad: dict[Candidate, list[tuple[int, int]]] = {}
    for layer, head, pattern in _heads(config):
        if not is_writable(pattern, consumer):
            bad.setdefault(pattern, []).append((layer, head))
    expected = "only " + ", ".join(consumer.entry_names)
    if not bad:
        kinds = Counter(pattern.kind for _, _, pattern in _heads(config))
        found = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        return _check("patterns the engine can run", "ok", expected, found)
    count = sum(map(len, bad.values()))
    shown = [f"{describe(p)}: {name_heads(at, 6)}" for p, at in list(bad.items())[:3]]
    more = [f"and {len(bad) - 3} more patterns"] if len(bad) > 3 else []
    late = "" if consumer.name == "minference" else " (asserted at the first long prompt only)"
    return _check(
        "patterns the engine can run",
        "differs",
        expected + late,
        f"{count} heads it cannot run: " + "; ".join(shown + more),
        f"select again from scores calibrated with --consumer {consumer.name}",
    )


def _forced(config: PatternConfig, consumer: Consumer) -> Check:
    low = [
        (layer, head)
        for layer, head, pattern in _heads(config)
        if isinstance(pattern, VerticalSlashLastQ)
        and (pattern.vertical < FORCED_COLUMNS or pattern.slash < FORCED_SLASHES)
    ]
    return _check(
        "budgets cover the forced entries",
        "ok",
        f"vertical ≥ {FORCED_COLUMNS}, slash ≥ {FORCED_SLASHES}",
        f"{len(low)} heads ask for less; `export` raises them" if low else "all do",
    )


def _bumped(config: PatternConfig, consumer: Consumer) -> Check:
    heads = [
        (layer, head)
        for layer, head, pattern in _heads(config)
        if isinstance(pattern, VerticalSlashLastQ)
        and max(pattern.vertical, FORCED_COLUMNS) == consumer.bumped_vertical
    ]
    return _check(
        f"vertical budgets of {consumer.bumped_vertical}",
        "ok",
        f"none ({consumer.name} runs {consumer.bumped_vertical} as "
        f"{(consumer.bumped_vertical or 0) + 100})",
        f"{len(heads)} heads; `export` writes {(consumer.bumped_vertical or 0) + 1} for them"
        if heads
        else "none",
    )


def _scored_for(config: PatternConfig, consumer: Consumer) -> Check:
    scored = config.calibration.consumer if config.calibration else None
    sparse = any(not isinstance(pattern, Dense) for _, _, pattern in _heads(config))
    family = {"vllm", "sglang"} if consumer.name != "minference" else {"minference"}
    name = "masses of the sets it reads"
    if scored is None:
        return _check(
            name,
            "cannot tell",
            f"scored for {consumer.name}",
            "imported, nothing was measured here",
            f"calibrate with --consumer {consumer.name} to know the masses",
        )
    if scored in family or not sparse:
        return _check(name, "ok", f"scored for {consumer.name}", f"scored for {scored}")
    return _check(
        name,
        "differs",
        f"scored for {consumer.name}",
        f"scored for {scored}, which reads other keys for the same entry",
        f"calibrate with --consumer {consumer.name}",
    )


def _head_dim(config: PatternConfig, consumer: Consumer) -> Check:
    head_dim = config.model.head_dim
    name = "head_dim of its kernels"
    expected = f"one of {', '.join(map(str, _TRITON_HEAD_DIMS))}"
    if head_dim in _TRITON_HEAD_DIMS:
        return _check(name, "ok", expected, str(head_dim))
    if head_dim > _TRITON_HEAD_DIMS[-1]:
        return _check(
            name, "differs", expected, str(head_dim), "its sparse kernels refuse this model"
        )
    a_shape = any(isinstance(pattern, AShape) for _, _, pattern in _heads(config))
    if consumer.name == "minference" and a_shape:
        return _check(
            name,
            "differs",
            expected,
            f"{head_dim}, with A-shape heads",
            "its A-shape kernel scales by the padded head_dim: use Vertical-Slash only",
        )
    return _check(
        name,
        "cannot tell",
        expected,
        str(head_dim),
        "inputs are padded to the next size: compare with dense before trusting",
    )


def _heads_of_ranks(config: PatternConfig, tp_size: int) -> Check:
    heads, kv_heads = config.model.num_query_heads, config.model.num_kv_heads
    fits = heads % tp_size == 0 and (kv_heads % tp_size == 0 or tp_size % kv_heads == 0)
    return _check(
        "heads of a rank",
        "ok" if fits else "differs",
        "rank r looks up heads r·Hq/T … in the one global file",
        f"{heads} query heads, {kv_heads} kv heads over {tp_size}",
        "" if fits else "choose a tensor-parallel size that divides the heads",
    )


def _engine(consumer: Consumer) -> Check:
    name = "an engine that uses the file"
    if consumer.name == "vllm":
        return _check(
            name,
            "cannot tell",
            "vLLM up to 0.10.x on its V0 engine",
            "the version that will serve is not known here",
            "newer engines load the file and use nothing of it: watch the time to first token",
        )
    if consumer.name == "sglang":
        return _check(
            name,
            "cannot tell",
            "the dual_chunk_flash_attn backend",
            "the version that will serve is not known here",
            "some versions keep one layer's entries for all: check with `evaluate`'s prompts",
        )
    return _check(name, "ok", consumer.title, "reads a path given as config_path")


def _prompts(config: PatternConfig) -> Check:
    least = config.selection.min_length if config.selection else None
    return _check(
        "short and padded prompts",
        "cannot tell",
        "batch 1, no left padding, whole prompts",
        f"sparse at every length (the config's break-even: {least or 'not measured'})",
        "it ignores the attention mask and runs chunked prefill as decoding: route such "
        "requests, and prompts below the break-even, to dense",
    )


# --- the model's folder --------------------------------------------------------------------


def _model_folder(
    config: PatternConfig, consumer: Consumer, folder: Path | None
) -> Iterator[Check]:
    settings, problem = _dual_chunk_settings(folder)
    name = f"{_DUAL_CHUNK} in config.json"
    expected = "chunk_size, local_size and sparse_attention settings"
    if settings is None:
        unknown = folder is None
        yield _check(
            name,
            "cannot tell" if unknown else "differs",
            expected,
            problem,
            f"without it {consumer.name} never looks for the pattern file",
        )
    else:
        yield _settings(config, settings, name, expected)
    yield _pattern_file(config, consumer, folder)


def _dual_chunk_settings(folder: Path | None) -> tuple[dict[str, Any] | None, str]:
    if folder is None:
        return None, "the model is no folder"
    try:
        document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, f"config.json cannot be read ({error})"
    settings = document.get(_DUAL_CHUNK)
    if not isinstance(settings, dict):
        return None, "absent" if _DUAL_CHUNK not in document else f"{settings!r}"
    return settings, ""


def _settings(config: PatternConfig, settings: dict[str, Any], name: str, expected: str) -> Check:
    threshold = int(settings.get("sparse_attention_threshold", _DEFAULT_THRESHOLD))
    last_q = int(settings.get("sparse_attention_last_q", 64))
    chunk = int(settings.get("chunk_size", 8192)) - int(settings.get("local_size", 1024))
    faults, longest = [], max(config.calibration.lengths) if config.calibration else None
    if settings.get("sparse_attention_enabled") is False:
        faults.append("sparse_attention_enabled is false: everything runs dense")
    if last_q != 64:
        faults.append(f"sparse_attention_last_q is {last_q}, the entries were scored with 64")
    if longest is not None and longest <= threshold:
        faults.append(
            f"sparse only beyond {threshold} tokens, the longest calibrated length is {longest}"
        )
    if longest is not None and longest > chunk:
        faults.append(
            f"positions are remapped and the index is built again beyond {chunk} tokens a chunk, "
            f"so masses at {longest} do not carry over"
        )
    found = f"threshold {threshold}, last_q {last_q}, chunk {chunk}"
    return _check(
        name,
        "differs" if faults else "ok",
        expected,
        found,
        "; ".join(faults),
    )


def _pattern_file(config: PatternConfig, consumer: Consumer, folder: Path | None) -> Check:
    name = f"{SPARSE_FILE_NAME} in the model's folder"
    expected = "this config's export"
    if folder is None:
        return _check(name, "cannot tell", expected, "the model is no folder", "export into it")
    path = folder / SPARSE_FILE_NAME
    if not path.exists():
        return _check(
            name,
            "differs",
            expected,
            "absent: everything runs dense without a word",
            f"patternsearch export CONFIG --to {consumer.name} -o {folder}",
        )
    try:
        file = read_pattern_file(path)
    except ConfigError as error:
        return _check(
            name, "differs", expected, f"another tool's file: {error}", "move it, then export"
        )
    try:
        mine = export_config(config, consumer.name).text
    except ConfigError:
        return _check(
            name,
            "cannot tell",
            expected,
            f"a pattern file of {len(file.layers)} layers",
            "this config cannot be exported, see the patterns above",
        )
    same = path.read_text(encoding="utf-8") == mine
    return _check(
        name,
        "ok" if same else "differs",
        expected,
        "this config's export" if same else "the export of another config",
        "" if same else "patternsearch diff says what differs; export again",
    )
