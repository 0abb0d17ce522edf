"""Draw the figures of docs/concepts.md from the project's own geometry.

python scripts/draw_concepts.py
"""

from pathlib import Path

import numpy as np

from patternsearch.patterns import geometry

TARGET = Path(__file__).parents[1] / "docs" / "assets"
INK, MUTED, EMPTY, LINE = "#1b2330", "#5b6675", "#eceff3", "#ffffff"
COLORS = {"a_shape": "#d9822b", "vertical_slash": "#2f6fd0", "block_sparse": "#17916f"}
TILES, SIDE = 12, 16


def main():
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("patterns.svg", patterns()),
        ("logical-physical.svg", logical_physical()),
        ("gaps.svg", gaps()),
    ):
        (TARGET / name).write_text(text)


def svg(width, height, label, body):
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{label}" font-family="system-ui, sans-serif">\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def text(x, y, content, size=13, color=INK, anchor="start", weight="normal"):
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{content}</text>'
    )


def rect(x, y, w, h, fill, extra=""):
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" {extra}/>'


def tile_map(x0, y0, mask, color, columns=()):
    """A causal triangle of tiles; chosen ones coloured, loose columns as thin lines."""
    side = len(mask)
    for u in range(side):
        for v in range(u + 1):
            fill = color if mask[u][v] else EMPTY
            yield rect(x0 + v * SIDE, y0 + u * SIDE, SIDE - 1, SIDE - 1, fill)
    for column in columns:
        x, top = x0 + column * SIDE, int(column)
        yield rect(x, y0 + top * SIDE, 2.5, (side - top) * SIDE - 1, color)


def patterns():
    n, tile = TILES * 64, 64
    a_shape = geometry.a_shape_tiles(n, tile, 64, 2 * 64)
    u, v = np.indices((TILES, TILES))
    slash = np.isin(u - v, (0, 1, 5)) & (v <= u)
    rng = np.random.default_rng(4)
    blocks = np.zeros((TILES, TILES), bool)
    for row in range(TILES):
        blocks[row, rng.permutation(row + 1)[: min(row + 1, 3)]] = True
        blocks[row, row] = True
    body = []
    for place, (title, what, mask, kind, columns) in enumerate(
        (
            ("A-shape", "sink and window", a_shape, "a_shape", ()),
            ("Vertical-Slash", "columns and diagonals", slash, "vertical_slash", (0.1, 2.4, 3.7)),
            ("Block-Sparse", "tiles a query tile", blocks, "block_sparse", ()),
        )
    ):
        x = 30 + place * 240
        body += [text(x, 30, title, 15, weight="600"), text(x, 48, what, 12, MUTED)]
        body += tile_map(x, 62, mask, COLORS[kind], columns)
        body.append(text(x, 276, "keys j →   queries i ↓", 11, MUTED))
    return svg(740, 290, "The three patterns as tiles of the causal matrix", body)


def logical_physical():
    """One slash and one column, by element and by what the kernel reads."""
    size, tile, step = 36, 6, 6
    offsets, column = (7,), 3
    touched = set(geometry.slash_diagonals(np.array(offsets), tile).tolist()) | {0}
    body = []
    for place, (title, what) in enumerate(
        (("Logical set", "the pairs that the pattern names"),
         ("Physical set", "the pairs that the kernel reads"))
    ):  # fmt: skip
        x0, y0 = 30 + place * 300, 62
        body += [text(x0, 30, title, 15, weight="600"), text(x0, 48, what, 12, MUTED)]
        for i in range(size):
            for j in range(i + 1):
                logical = i - j in offsets or i == j or j == column
                physical = (i // tile - j // tile) in touched or j == column
                fill = COLORS["vertical_slash"] if (physical if place else logical) else EMPTY
                body.append(rect(x0 + j * step, y0 + i * step, step - 1, step - 1, fill))
        if place:
            for line in range(0, size + 1, tile):
                at = line * step - 0.5
                body.append(
                    f'<path d="M{x0 - 0.5} {y0 + at}h{size * step}M{x0 + at} {y0 - 0.5}v'
                    f'{size * step}" stroke="{MUTED}" stroke-width=".6" fill="none"/>'
                )
    body.append(text(30, 300, "A slash between two tile diagonals makes the kernel read both.", 12,
                     MUTED))  # fmt: skip
    return svg(600, 314, "The same pattern as logical and as physical set", body)


def gaps():
    bars = (
        ("online index", 0.62, "what the runtime chooses", "#2f6fd0"),
        ("oracle index", 0.76, "same geometry, chosen with full attention", "#1a7f4b"),
        ("dense top-k", 0.9, "any pairs, as many in each row", "#8a93a1"),
        ("dense", 1.0, "all pairs: 1", "#c9ced6"),
    )
    body = [text(30, 30, "Captured mass at equal budget (a sketch)", 15, weight="600")]
    for place, (name, value, what, color) in enumerate(bars):
        y = 48 + place * 44
        body += [
            text(30, y + 17, name, 13),
            rect(140, y, 400 * value, 24, color, 'rx="3"'),
            text(140, y + 37, what, 11, MUTED),
        ]
    for place, label in ((0, "the estimator's loss"), (1, "the pattern family's loss")):
        y, left, right = 48 + place * 44, 140 + 400 * bars[place][1], 140 + 400 * bars[place + 1][1]
        body.append(
            f'<path d="M{left:g} {y + 12}h{right - left:g}" stroke="#b3261e" stroke-width="2" '
            f'stroke-dasharray="4 3"/>'
        )
        body.append(text(right + 8, y + 16, label, 12, "#b3261e"))
    return svg(720, 234, "The gap from online to oracle and from oracle to dense top-k", body)


if __name__ == "__main__":
    main()
