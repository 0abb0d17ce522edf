# SPDX-License-Identifier: Apache-2.0
"""The heads of running tensor-parallel ranks, beside the entries that each rank reads for them.

Every rank describes the heads that it really holds and says which entries of the config it reads.
A rank that reads another rank's entries, or holds another rank's heads, raises no shape error;
laid side by side the two are far apart, and near to what was exchanged.
"""

from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from patternsearch.calibration.distributed import Team
from patternsearch.model.matching import head_distances
from patternsearch.patterns.tensor_parallel import query_head_range
from patternsearch.runtime.mapping import SAME_MEDIAN_DISTANCE, Finding
from patternsearch.schema.config import Fingerprints

if TYPE_CHECKING:
    from patternsearch.model.loading import LoadedModel

__all__ = ["copied_ranks", "describe_rank", "entries_read", "probe_of"]

Float = NDArray[np.float64]

_ENTRIES = "entries"


def probe_of(recorded: Fingerprints) -> dict[str, int]:
    """Return what every rank must know to describe its heads alike."""
    return {"seed": recorded.seed, "num_tokens": recorded.num_tokens}


def describe_rank(loaded: "LoadedModel", team: Team, probe: dict[str, int]) -> Fingerprints:
    """Describe the heads of all ranks, and report which entries this rank reads for its own.

    The ranks of the model run in step; each must call this.

    Args:
        loaded: this rank's part of the model.
        team: the ranks; all of one copy of the model.
        probe: of :func:`probe_of`.

    Returns:
        The heads that the ranks hold, one rank after another, on every rank.
    """
    from patternsearch.model.fingerprints import fingerprint_heads

    found = fingerprint_heads(loaded, probe["seed"], num_tokens=probe["num_tokens"])
    place = team.rank % team.tp_size
    first, end = query_head_range(loaded.identity.num_query_heads, team.tp_size, place)
    team.finish({_ENTRIES: [first, end]})
    return found


def entries_read(recorded: Fingerprints, team: Team) -> Fingerprints:
    """Return the recorded heads in the order in which the ranks read them; the leader's to ask.

    Of ranks that read what they hold these are the recorded fingerprints.

    Raises:
        PeerError: a rank stopped with an error.
    """
    if team.size == 1:
        return recorded
    team.wait(lambda _ranks: None)
    reports: list[dict[str, Any]] = team.reports()
    slices = [slice(*report[_ENTRIES]) for report in reports]
    values = tuple(
        tuple(head for part in slices for head in layer[part]) for layer in recorded.values
    )
    return recorded.model_copy(update={"values": values})


def copied_ranks(recorded: Fingerprints, found: Fingerprints, size: int) -> tuple[Finding, ...]:
    """Name the ranks that hold the very heads of another rank.

    Such a rank makes every later hidden state wrong, on all ranks, so that beyond the first layer
    nothing resembles the record; but two ranks that hold the same heads resemble each other.

    Args:
        recorded: of the config.
        found: of :func:`describe_rank`.
        size: ranks of the model.
    """
    tables = [
        (layer, np.asarray(old, dtype=np.float64), np.asarray(new, dtype=np.float64))
        for layer, (old, new) in enumerate(zip(recorded.values, found.values, strict=True))
        if len(old)
    ]
    if not tables:
        return ()
    heads = [slice(*query_head_range(len(tables[0][1]), size, rank)) for rank in range(size)]
    _, first_old, first_new = tables[0]
    own = [_mean_distance(first_old[part], first_new[part]) for part in heads]
    return tuple(
        Finding(
            kind="tensor-parallel offset",
            layers=tuple(layer for layer, _, _ in tables),
            text=f"rank {wrong} of {size} holds heads {_span(heads[true])} instead of "
            f"{_span(heads[wrong])}",
        )
        for pair in combinations(range(size), 2)
        for true, wrong in [sorted(pair, key=lambda rank: own[rank])]
        if own[wrong] > SAME_MEDIAN_DISTANCE
        and all(
            _mean_distance(new[heads[true]], new[heads[wrong]]) < SAME_MEDIAN_DISTANCE
            for _, _, new in tables
        )
    )


def _mean_distance(some: Float, others: Float) -> float:
    return float(np.diag(head_distances(some, others)).mean())


def _span(heads: slice) -> str:
    return f"{heads.start}–{heads.stop - 1}"
