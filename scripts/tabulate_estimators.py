"""Print the estimator table of docs/algorithm.md from scores of the grid `estimators`.

    patternsearch calibrate MODEL -o est.yaml --grid estimators --oracle --lengths 4k --samples 2
    python scripts/tabulate_estimators.py est.scores [--timings TABLE] [--index-at 32768,131072]

With a timing table there is a column of one head's index time for each length of --index-at.
"""

import argparse
from pathlib import Path

from patternsearch.patterns.candidates import BlockSparse, VerticalSlashLastQ, VerticalSlashSpread
from patternsearch.schema.scores import ScoresFolder
from patternsearch.selection.document import load_run_record
from patternsearch.selection.frontier import frontier
from patternsearch.selection.options import SelectionOptions
from patternsearch.timing.model import load_time_model


def candidate_of(row):
    """Return a candidate with the row's index; its budgets are the grid's."""
    if row.kind == "block_sparse":
        return BlockSparse(blocks=8, tile=row.tile, estimator=row.estimator)
    if row.estimator == "last_q":
        return VerticalSlashLastQ(vertical=128, slash=512, tile=row.tile, last_q=row.last_q)
    return VerticalSlashSpread(
        vertical=128, diagonals=8, tile=row.tile, last_q=row.last_q, spread_rows=row.spread_rows
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scores", type=Path)
    parser.add_argument("--timings", type=Path)
    parser.add_argument("--serve-dtype", help="by default the checkpoint's")
    parser.add_argument("--index-at", default="32768,131072")
    parser.add_argument("--target-mass", type=float, default=0.95)
    options = parser.parse_args()
    folder = ScoresFolder(options.scores)
    identity = load_run_record(folder).model
    model, lengths = None, []
    if options.timings is not None:
        lengths = [int(length) for length in options.index_at.split(",")]
        model = load_time_model(
            options.timings,
            dtype=options.serve_dtype or identity.dtype,
            head_dim=identity.head_dim,
        )
    found = frontier(folder, SelectionOptions(target_mass=options.target_mass))
    names = ["estimator", "last_q", "spread rows", "density", "online", "oracle", "gap",
             "QK products of the index", f"pairs at target {options.target_mass:g}",
             *(f"index at {length}, µs" for length in lengths)]  # fmt: skip
    print("| " + " | ".join(names) + " |")
    print("|" + "---|" * len(names))
    for row in found.estimators:
        cells = [
            f"`{row.estimator}`",
            str(row.last_q or "–"),
            str(row.spread_rows or "–"),
            f"{row.density:.3f}",
            f"{row.mass_online:.3f}",
            "–" if row.mass_oracle is None else f"{row.mass_oracle:.3f}",
            "–" if row.gap is None else f"{row.gap:+.3f}",
            f"{row.index_cost / 1e6:.2f} M",
            f"{row.cost_at_target:.3f}",
        ]
        for length in lengths:
            cost = model.index_cost([candidate_of(row)], length)
            cells.append(f"{1e3 * float(cost[0]):.1f}")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
