# SPDX-License-Identifier: Apache-2.0
"""Drawings of single heads: where a head looks on one sample, and what its pattern reads there.

The scores hold no attention maps, so the model runs again, dense, on a sample of the calibration.
Rows are reduced in chunks; no n × n array is built. The same pass gives the mass that the best
choice of as many keys in every row could hold (dense top-k).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from patternsearch.errors import InputError
from patternsearch.kernels.index import reference as index
from patternsearch.model.capture import AttentionInputs, run_with_capture
from patternsearch.model.loading import LoadedModel
from patternsearch.patterns import geometry
from patternsearch.patterns.candidates import (
    AShape,
    BlockSparse,
    Candidate,
    Dense,
    VerticalSlashLastQ,
    VerticalSlashSpread,
)
from patternsearch.report.packing import pack_fractions, pack_integers
from patternsearch.schema.config import PatternConfig
from patternsearch.schema.scores import ScoresFolder

__all__ = ["HeadDrawing", "draw_head", "draw_heads", "pick_heads"]

MAX_TOKENS = 16384
"""Longest sample that is drawn; the tile masses of a head then take 256 × 256."""

_MAP_TILES = 96
_CHUNK = 64

Family = Literal["patternsearch", "minference"]


@dataclass(frozen=True, slots=True)
class HeadDrawing:
    """One head on one sample.

    Attributes:
        tile: positions a side of a map cell.
        mass_map: float64 [tiles, tiles], mass of each cell, mean over its query rows.
        read: bool [tiles, tiles], cells of which a whole tile is read (any of it, if cells are
            larger than the pattern's tiles).
        columns: keys gathered one by one, ascending.
        mass: captured mass of the physical set, mean over rows.
        top_k: mass of each row's largest entries, as many as the set reads there, mean over rows.
    """

    tile: int
    mass_map: NDArray[np.float64]
    read: NDArray[np.bool_]
    columns: tuple[int, ...]
    mass: float
    top_k: float


def draw_head(
    q: Tensor, k: Tensor, *, scale: float, pattern: Candidate, family: Family = "patternsearch"
) -> HeadDrawing:
    """Reduce one head's attention to a drawing.

    Args:
        q: [1, 1, n, d], one query head, any float dtype; computed in float32.
        k: [1, 1, n, d], its kv head.
        scale: factor of the logits.
        pattern: what the head runs.
        family: whose kernels read: MInference's read other keys for the same slashes.
    """
    n = q.shape[2]
    tiles, columns = _choice(q, k, scale, pattern, family)
    keys = q.new_zeros(n, dtype=torch.bool)
    keys[torch.as_tensor(columns, dtype=torch.long, device=q.device)] = True
    tile = getattr(pattern, "tile", 64)
    cell = 64 * max(1, -(-geometry.num_tiles(n, 64) // _MAP_TILES))
    cells = geometry.num_tiles(n, cell)
    mass_map = np.zeros((cells, cells))
    key_cell = torch.arange(n, device=q.device) // cell
    captured = top = 0.0
    for first in range(0, n, _CHUNK):
        rows = torch.arange(first, min(first + _CHUNK, n), device=q.device)
        seen = int(rows[-1]) + 1
        logits = (q[0, 0, rows].float() @ k[0, 0, :seen].float().T) * scale
        causal = torch.arange(seen, device=q.device) <= rows[:, None]
        p = logits.masked_fill(~causal, float("-inf")).softmax(-1)
        by_cell = p.new_zeros(len(rows), cells).index_add_(1, key_cell[:seen], p)
        mass_map[first // cell] += by_cell.sum(0).double().cpu().numpy()
        reads = (tiles[first // tile, :seen] | keys[:seen]) & causal
        captured += float((p * reads).sum())
        best = p.sort(-1, descending=True).values.cumsum(-1)
        top += float(best.gather(1, reads.sum(-1, keepdim=True) - 1).sum())
    counts = geometry.tile_rows(n, cell)
    return HeadDrawing(
        tile=cell,
        mass_map=mass_map / counts[:, None],
        read=_cells(tiles, n, tile, cell),
        columns=tuple(columns),
        mass=captured / n,
        top_k=top / n,
    )


def _cells(tiles: Tensor, n: int, tile: int, cell: int) -> NDArray[np.bool_]:
    """Return which map cells are read; a cell of whole tiles counts if any key of it is."""
    cells = geometry.num_tiles(n, cell)
    read: NDArray[np.bool_] = np.zeros((cells, cells), dtype=np.bool_)
    wanted = tiles.cpu().numpy()
    pad = np.zeros((wanted.shape[0], cells * cell), dtype=np.bool_)
    pad[:, :n] = wanted
    by_cell: NDArray[np.bool_] = np.asarray(pad.reshape(len(wanted), cells, cell).any(axis=-1))
    for u in range(cells):
        first, last = u * cell // tile, -(-min((u + 1) * cell, n) // tile)
        read[u] = by_cell[first:last].any(axis=0)
    return np.asarray(np.tril(read), dtype=np.bool_)


def _choice(
    q: Tensor, k: Tensor, scale: float, pattern: Candidate, family: Family
) -> tuple[Tensor, list[int]]:
    """Return the keys of each query tile's chosen tiles, bool [tiles, n], and the columns."""
    n = q.shape[2]
    match pattern:
        case Dense():
            return _keys(np.tril(np.ones((geometry.num_tiles(n, 64),) * 2, np.bool_)), n, 64, q), []
        case AShape():
            mask = geometry.a_shape_tiles(n, pattern.tile, pattern.sink, pattern.window)
            return _keys(mask, n, pattern.tile, q), []
        case BlockSparse():
            scores = index.block_scores(
                q, k, scale=scale, tile=pattern.tile, estimator=pattern.estimator
            )
            order = index.rank_blocks(scores)[0]
            budget = geometry.effective_blocks(n, pattern.tile, pattern.blocks)
            mask = np.zeros(order.shape, dtype=np.bool_)
            np.put_along_axis(mask, order[:, :budget].cpu().numpy(), True, axis=1)
            return _keys(np.tril(mask), n, pattern.tile, q), []
        case VerticalSlashSpread():
            column, by_diagonal = index.spread_scores(
                q, k, scale=scale, last_q=pattern.last_q, spread_rows=pattern.spread_rows,
                tile=pattern.tile,
            )  # fmt: skip
            budget = geometry.effective_diagonals(n, pattern.tile, pattern.diagonals)
            diagonals = index.rank(by_diagonal[0], geometry.FORCED_DIAGONALS)[:budget]
            return (
                _diagonals(diagonals.cpu().numpy(), n, pattern.tile, q),
                _columns(column, n, pattern.vertical),
            )
        case VerticalSlashLastQ():
            column, by_offset = index.last_q_scores(q, k, scale=scale, last_q=pattern.last_q)
            budget = geometry.effective_slash(n, pattern.slash)
            offsets = index.rank(by_offset[0], geometry.FORCED_SLASHES)[:budget].cpu().numpy()
            columns = _columns(column, n, pattern.vertical)
            if family == "minference":
                return _offset_ranges(offsets, n, pattern.tile, q), columns
            touched = geometry.slash_diagonals(offsets, pattern.tile)
            return _diagonals(touched, n, pattern.tile, q), columns


def _columns(scores: Tensor, n: int, vertical: int) -> list[int]:
    budget = geometry.effective_vertical(n, vertical)
    order: list[int] = index.rank(scores[0], geometry.FORCED_COLUMNS)[:budget].tolist()
    return sorted(order)


def _keys(mask: NDArray[np.bool_], n: int, tile: int, q: Tensor) -> Tensor:
    keys = np.repeat(mask, tile, axis=1)[:, :n]
    return torch.from_numpy(np.ascontiguousarray(keys)).to(q.device)


def _diagonals(diagonals: NDArray[np.int64], n: int, tile: int, q: Tensor) -> Tensor:
    u = np.arange(geometry.num_tiles(n, tile))
    return _keys(np.isin(u[:, None] - u[None, :], diagonals), n, tile, q)


def _offset_ranges(offsets: NDArray[np.int64], n: int, tile: int, q: Tensor) -> Tensor:
    """Return the keys T·u − δ … T·u + T − 1 − δ of every query tile u and offset δ."""
    starts = np.arange(geometry.num_tiles(n, tile))[:, None] * tile - offsets[None, :]
    edges = np.zeros((len(starts), n + tile + 1), dtype=np.int64)
    rows = np.broadcast_to(np.arange(len(starts))[:, None], starts.shape)
    np.add.at(edges, (rows, np.clip(starts, 0, n)), 1)
    np.add.at(edges, (rows, np.clip(starts + tile, 0, n)), -1)
    return torch.from_numpy(edges.cumsum(axis=1)[:, :n] > 0).to(q.device)


# --- whole pages -----------------------------------------------------------------------------


def pick_heads(config: PatternConfig, per_kind: int = 2) -> tuple[tuple[int, int], ...]:
    """Return the heads worth drawing when the user names none: each kind's worst by mass."""
    by_kind: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
    for layer, heads in enumerate(config.heads):
        for head, entry in enumerate(heads or ()):
            worst = min((at.mass_worst_region for at in entry.lengths), default=1.0)
            by_kind[entry.pattern.kind].append((worst, layer, head))
    chosen = [place[1:] for places in by_kind.values() for place in sorted(places)[:per_kind]]
    return tuple(sorted((layer, head) for layer, head in chosen))


def draw_heads(
    config: PatternConfig,
    folder: ScoresFolder,
    loaded: LoadedModel,
    heads: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """Run the model on one calibration sample and draw heads of its config.

    Args:
        config: the config.
        folder: its scores folder, for the sample's tokens.
        loaded: the model; its weights must be the config's.
        heads: (layer, global query head) pairs.

    Returns:
        What the page needs, as plain JSON values.

    Raises:
        InputError: a head does not exist, the weights are others, or every sample is too long.
    """
    _check(config, loaded, heads)
    sample = _sample(folder)
    tokens = torch.tensor([sample["token_ids"].tolist()], dtype=torch.long, device=loaded.device)
    wanted = defaultdict(list)
    for layer, head in heads:
        wanted[layer].append(head)
    group = config.model.num_query_heads // config.model.num_kv_heads
    consumer = config.calibration.consumer if config.calibration else "patternsearch"
    family: Family = "patternsearch" if consumer == "patternsearch" else "minference"
    drawn: list[dict[str, Any]] = []

    def on_attention(inputs: AttentionInputs) -> None:
        for head in wanted.get(inputs.layer, ()):
            entries = config.heads[inputs.layer]
            assert entries is not None
            kv = head // group
            drawing = draw_head(
                inputs.q[:, head : head + 1],
                inputs.k[:, kv : kv + 1],
                scale=inputs.scale,
                pattern=entries[head].pattern,
                family=family,
            )
            drawn.append(
                {
                    "layer": inputs.layer,
                    "head": head,
                    "sample": sample["sample_id"],
                    "num_tokens": int(sample["num_tokens"]),
                    "tile": drawing.tile,
                    "tiles": len(drawing.read),
                    "mass_map": pack_fractions(drawing.mass_map),
                    "read": pack_integers(drawing.read.astype(np.int64)),
                    "columns": list(drawing.columns),
                    "mass": round(drawing.mass, 6),
                    "top_k": round(drawing.top_k, 6),
                }
            )

    run_with_capture(loaded, tokens, on_attention)
    return {"heads": drawn}


def _check(config: PatternConfig, loaded: LoadedModel, heads: Sequence[tuple[int, int]]) -> None:
    for layer, head in heads:
        entries = config.heads[layer] if 0 <= layer < len(config.heads) else None
        if entries is None or not 0 <= head < len(entries):
            raise InputError(
                f"head {layer}:{head} is not in the config: name layer:head of full-attention "
                f"layers, heads 0..{config.model.num_query_heads - 1}"
            )
    expected, found = config.model.weights_sha256, loaded.identity.weights_sha256
    if expected is not None and found is not None and expected != found:
        raise InputError(
            f"the weights ({found[:12]}) are not the config's ({expected[:12]}): draw with the "
            "model that was calibrated"
        )


def _sample(folder: ScoresFolder) -> Any:
    """Return the first calibration sample of the shortest length."""
    samples = pd.read_parquet(folder.samples)
    usable = samples[(samples["split"] == "calibration") & (samples["num_tokens"] <= MAX_TOKENS)]
    if usable.empty:
        raise InputError(
            f"every sample is longer than {MAX_TOKENS} tokens, too long to draw: calibrate with a "
            "shorter length as well"
        )
    return usable.sort_values("num_tokens", kind="stable").iloc[0]
