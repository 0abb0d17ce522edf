"""Small faithful readers of pattern files: what each engine does at load and at a long prompt.

Written from descriptions of the engines' behaviour, independent of the package: they import
nothing of it. ``runs`` is what a head's kernel is given for a prompt of ``n`` tokens, in a form
that all readers share: ("vertical_and_slash", columns, slashes), ("stream_llm", sink, window) or
("block_sparse", blocks).
"""

import json


class MInferenceReader:
    """MInference's Hugging Face patch: one process, heads looked up as strings."""

    def __init__(self, path):
        with open(path) as file:
            self.best_pattern = json.load(file)

    def entry(self, layer, head):
        name, vertical, slash, _ = self.best_pattern[layer].get(
            str(head), ("vertical_and_slash", 1000, 6096, 1)
        )
        return name, vertical, slash

    def runs(self, layer, head, n):
        name, vertical, slash = self.entry(layer, head)
        kernels = {
            "stream_llm": lambda v, s: ("stream_llm", v, s),
            "vertical_and_slash": lambda v, s: _vertical_and_slash(n, max(v, 30), max(s, 50)),
            "block_sparse": lambda v, s: ("block_sparse", 100),
        }
        return kernels[name](vertical, slash)

    def rank_runs(self, layer, rank, local_heads, n):
        """MInference's vLLM patch: a rank's first head is rank · (heads of one rank)."""
        first = rank * local_heads
        return [self.runs(layer, first + head, n) for head in range(local_heads)]


class DualChunkReader:
    """vLLM's (V0) and SGLang's dual-chunk attention: integer keys, a slice a rank, one kind."""

    def __init__(self, path):
        with open(path) as file:
            self.sparse_attention_config = json.load(file)

    def rank_runs(self, layer, rank, local_heads, n):
        by_head = {int(i): j for i, j in self.sparse_attention_config[layer].items()}
        start = local_heads * rank
        runs = []
        for name, vertical, slash, _ in [by_head[i] for i in range(start, start + local_heads)]:
            assert name == "vertical_and_slash", "only support slash mode"
            if vertical == 30:
                vertical += 100
            runs.append(_vertical_and_slash(n, vertical, slash))
        return runs


def _vertical_and_slash(n, vertical, slash):
    """Return the numbers of columns and slashes in the top-k with its forced entries.

    The first 30 columns and the last 100 slashes are set to infinity before the top-k; fewer
    slashes than that would be an arbitrary subset of them, and the index conversion is known to
    run out of bounds then.
    """
    vertical, slash = min(n, vertical), min(n, slash)
    assert vertical >= min(n, 30), "forced columns exceed the budget"
    assert slash >= min(n, 100), "forced slashes exceed the budget"
    return "vertical_and_slash", vertical, slash
