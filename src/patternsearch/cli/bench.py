# SPDX-License-Identifier: Apache-2.0
"""``patternsearch bench``: measure this GPU's timing table.

Example: patternsearch bench -o h200.json
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patternsearch.cli._options import JsonOpt, parse_lengths
from patternsearch.cli._output import Output, stderr_console
from patternsearch.cli._progress import progress_for
from patternsearch.errors import InputError

if TYPE_CHECKING:
    from patternsearch.timing.cases import Plan
    from patternsearch.timing.table import TimingTable


def bench(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="TABLE", help="Table to write (.json).")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer shapes: sooner done, and rougher.")
    ] = False,
    lengths: Annotated[
        str | None, typer.Option(metavar="LIST", help="Lengths in tokens, such as 4k,32k,128k.")
    ] = None,
    head_dims: Annotated[
        str | None, typer.Option(metavar="LIST", help="Head sizes, such as 64,128.")
    ] = None,
    heads: Annotated[
        str, typer.Option(metavar="Q/KV", help="Query and kv heads of one layer.")
    ] = "32/8",
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Torch dtype.")] = "bfloat16",
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Continue a run that died, or discard it.")
    ] = True,
    as_json: JsonOpt = False,
) -> None:
    """Measure dense attention, index building and the sparse kernels on this machine's GPU.

    Every kernel must first give the right output in the same run. The table is what --timings
    takes. Measurements are kept beside it while it grows: the same command continues a run that
    was killed. What does not fit this GPU is skipped, and the table says so.

    Example: patternsearch bench -o h200.json
    """
    from patternsearch.timing.bench import run_bench
    from patternsearch.timing.table import check_output, dump_timings

    out = Output(as_json=as_json)
    check_output(output)
    plan = _plan(quick, lengths, head_dims, heads, dtype)
    journal = output.with_name(f"{output.name}.partial")
    if not resume:
        journal.unlink(missing_ok=True)
    try:
        with progress_for(stderr_console()) as progress:
            table = run_bench(plan, progress=progress, note=out.note, journal=journal)
    except KeyboardInterrupt:
        out.note(f"interrupted: {journal} keeps what is measured; the same command continues")
        raise typer.Exit(130) from None
    dump_timings(table, output)
    journal.unlink(missing_ok=True)
    out.show(*_summary(table), f"table     {output}")
    out.data({"table": str(output), **table.model_dump(mode="json", exclude={"rows"})})


def _plan(
    quick: bool, lengths: str | None, head_dims: str | None, heads: str, dtype: str
) -> "Plan":
    from dataclasses import replace

    from patternsearch.timing.cases import FULL, QUICK, between

    plan = QUICK if quick else FULL
    chosen = parse_lengths(lengths)
    if chosen is not None:
        plan = replace(plan, lengths=chosen, held_out_lengths=between(chosen))
    if head_dims is not None:
        plan = replace(plan, head_dims=_numbers(head_dims, ",", "head dims", "64,128"))
    counts = _numbers(heads, "/", "heads", "32/8")
    if len(counts) != 2:
        raise InputError(f"heads {heads!r}: write query and kv heads as 32/8")
    return replace(plan, num_query_heads=counts[0], num_kv_heads=counts[1], dtype=dtype)


def _numbers(text: str, separator: str, what: str, example: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(separator)]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise InputError(f"{what} {text!r}: write them as {example}")
    return tuple(int(word) for word in words)


def _summary(table: "TimingTable") -> list[Any]:
    from patternsearch.cli._tables import plain_table

    title = f"{table.device}, fastest dense, one head"
    dense = plain_table(title, "head_dim", "tokens", "backend", "ms")
    rows = [row for row in table.rows if row.op == "dense"]
    for shape in sorted({(row.head_dim, row.num_tokens) for row in rows}):
        best = min(
            (row for row in rows if (row.head_dim, row.num_tokens) == shape),
            key=lambda row: row.p50_ms,
        )
        dense.add_row(str(shape[0]), str(shape[1]), best.backend, f"{best.head_ms:.4f}")
    words = ("operation", "backend", "case and reason")
    skipped = plain_table(
        "Skipped: does not run here", *words[:2], "head_dim", "tokens", words[2], left=words
    )
    for lack in table.skipped:
        skipped.add_row(
            lack.op,
            lack.backend or "–",
            str(lack.head_dim),
            str(lack.num_tokens),
            f"{lack.case}\n{lack.reason}",
        )
    title = "Error of the time model on held-out points"
    errors = plain_table(title, "operation", "points", "median", "worst", left=("operation",))
    for error in table.errors:
        errors.add_row(error.op, str(error.num_rows), f"{error.median:.1%}", f"{error.worst:.1%}")
    return [dense, _measured(table), errors, *([skipped] if table.skipped else [])]


def _measured(table: "TimingTable") -> Any:
    """Say by name which backends each operation was timed on."""
    from patternsearch.cli._tables import plain_table

    found = plain_table(
        "Measured", "operation", "backends", "times", left=("operation", "backends")
    )
    for op in sorted({row.op for row in table.rows}):
        names = [row.backend for row in table.rows if row.op == op]
        found.add_row(op, ", ".join(sorted(set(names))), str(len(names)))
    return found


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("bench")(bench)
