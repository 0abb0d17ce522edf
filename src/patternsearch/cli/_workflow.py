# SPDX-License-Identifier: Apache-2.0
"""What ``patternsearch`` alone says: the order in which its commands are used."""

from patternsearch._version import __version__

__all__ = ["STEPS", "workflow"]

STEPS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("decide", (("calibrate MODEL -o x.yaml", "score heads, write config"),)),
    (
        "look",
        (
            ("show x.yaml", "on one screen"),
            ("report x.yaml -o x.html", "as a page, opens offline"),
        ),
    ),
    (
        "tune",
        (
            ("bench -o gpu.json", "time kernels on the GPU"),
            ("select x.scores -o x.yaml --timings gpu.json", "choose by measured time"),
            ("frontier x.scores", "what a target costs"),
        ),
    ),
    (
        "prove",
        (
            ("validate x.yaml MODEL", "do the weights still fit"),
            ("evaluate MODEL --config x.yaml", "dense against sparse"),
        ),
    ),
    (
        "ship",
        (
            ("export x.yaml --to vllm -o p.json", "for another engine"),
            ("diff old.yaml new.yaml", "what changed, by meaning"),
        ),
    ),
)
"""(step, (command line, what it does)) in the order of use."""


def workflow() -> str:
    """Return the screen, at most 80 columns wide."""
    lines = [f"patternsearch {__version__}: sparse-attention patterns for every head of a model"]
    width = max(len(line) for _, commands in STEPS for line, _ in commands)
    for step, commands in STEPS:
        lines.append("")
        for place, (line, meaning) in enumerate(commands):
            lines.append(f"{step if place == 0 else '':<8}{line:<{width}}  {meaning}")
    lines += ["", "patternsearch COMMAND --help explains one; patternsearch --help lists all.", ""]
    return "\n".join(lines)
