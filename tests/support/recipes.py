"""Recipes and tokenizers for calibration tests."""

import functools
import tempfile
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from patternsearch.calibration.recipes import Recipe
from support.tiny_models import write_tokenizer


@functools.cache
def tiny_tokenizer():
    """Byte-level tokenizer with a chat template that adds no BOS."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return AutoTokenizer.from_pretrained(folder)


@functools.cache
def bos_tokenizer():
    """The same tokens behind a BOS token, and no chat template."""
    from tokenizers import Tokenizer, processors

    inner = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def recipe(*sources, **changes):
    """A recipe of two lengths with the given sources."""
    return Recipe.model_validate(recipe_document(*sources, **changes))


def recipe_document(*sources, **changes):
    document = {
        "format": "patternsearch/recipe",
        "schema_version": 1,
        "name": "test",
        "seed": 7,
        "heldout_fraction": 0.25,
        "lengths": [{"tokens": 300, "samples": 2}, {"tokens": 500, "samples": 2}],
        "sources": list(sources) or [needle()],
    }
    return document | changes


def needle(name="needle", **fields):
    return {"kind": "synthetic", "name": name, "task": "needle"} | fields


def text_files(name="notes", paths=("*.txt",), **fields):
    return {"kind": "files", "name": name, "format": "text", "paths": list(paths)} | fields


def stdlib(name="stdlib", files=("typing.py", "ast.py", "pickle.py", "inspect.py"), **fields):
    return {"kind": "package", "name": name, "package": "stdlib", "files": list(files)} | fields


def paragraphs(seed, count=20):
    """Different text for every seed."""
    return "\n".join(
        f"Line {i} of text {seed}: {(i + 3) * (seed + 11) ** 2}." for i in range(count)
    )
