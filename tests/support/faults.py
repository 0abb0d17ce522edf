"""Plant faults in checkpoints and configs, each the smallest of its kind."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file

from patternsearch.schema.config import PatternConfig
from patternsearch.schema.io import dump_config, load_config


def copy_model(folder, to):
    """Copy a checkpoint folder."""
    shutil.copytree(folder, to)
    return to


def edit_json(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def edit_tensors(folder, change):
    """Rewrite a single-file checkpoint after `change(tensors)`."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata={"format": "pt"})


def flip_one_bit(folder, name):
    """Flip the lowest mantissa bit of the first element of one tensor."""

    def flip(tensors):
        integers = {4: torch.int32, 2: torch.int16}[tensors[name].element_size()]
        tensors[name].view(integers).view(-1)[0] ^= 1

    edit_tensors(folder, flip)


def permute_query_heads(folder, name, order, head_dim):
    """Reorder the heads of one q_proj weight."""

    def permute(tensors):
        heads = tensors[name].view(-1, head_dim, tensors[name].shape[-1])
        tensors[name] = heads[order].reshape(tensors[name].shape)

    edit_tensors(folder, permute)


def truncate(path, num_bytes=7):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - num_bytes)


def edit_config(source, target, change):
    """Write a config after `change(document)` and return its path."""
    document = load_config(source).model_dump(mode="json")
    change(document)
    dump_config(PatternConfig.model_validate(document), target)
    return target


def swap_entries(layer, a, b):
    """Return a change that exchanges two heads' entries, fingerprints left alone."""

    def change(document):
        entries = document["heads"][layer]
        entries[a], entries[b] = entries[b], entries[a]

    return change
