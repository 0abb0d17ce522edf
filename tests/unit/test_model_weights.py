"""Weight digests: canonical over sharding and links, exact about what changed, and safe to read."""

import hashlib
import json
import struct

import numpy as np
import pytest
import torch
from safetensors import safe_open

from patternsearch.errors import ModelError
from patternsearch.model.gguf_header import read_gguf_header
from patternsearch.model.identity import describe_model
from patternsearch.model.loading import adopt_model
from patternsearch.model.sources import resolve_model
from patternsearch.model.weights import attention_layer, digest_weights, list_tensors
from support.tiny_models import tiny_model, tiny_model_dir


def _digests(folder, **options):
    return digest_weights(list_tensors(resolve_model(folder)), 3, **options)


def _flip_bit(folder, tensor_name):
    (tensor,) = (t for t in list_tensors(resolve_model(folder)) if t.name == tensor_name)
    data = bytearray(tensor.file.read_bytes())
    data[tensor.offset + tensor.size_bytes // 2] ^= 1
    tensor.file.write_bytes(data)


def test_weights_digest_follows_its_definition(tmp_path):
    folder = tiny_model_dir(tmp_path, dtype=torch.bfloat16)
    lines = []
    with safe_open(folder / "model.safetensors", "pt") as stored:
        for name in sorted(stored.keys()):
            tensor = stored.get_tensor(name)
            content = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
            shape = ",".join(str(size) for size in tensor.shape)
            lines.append(f"{name}\tBF16\t{shape}\t{content}\n")
    expected = hashlib.sha256("".join(lines).encode()).hexdigest()
    attention = hashlib.sha256("".join(x for x in lines if "layers.1.self_attn" in x).encode())
    digests = _digests(folder)
    assert digests.weights_sha256 == expected
    assert digests.attention_sha256[1] == attention.hexdigest()


@pytest.mark.parametrize("shard_size", ["20KB", "100KB"])
def test_weights_digest_is_the_same_however_sharded(shard_size, tmp_path):
    whole = tiny_model_dir(tmp_path / "whole")
    sharded = tiny_model_dir(tmp_path / "sharded", max_shard_size=shard_size)
    assert len(resolve_model(sharded).weight_files) > 3
    assert _digests(sharded) == _digests(whole)


def test_weights_digest_resolves_links(tmp_path):
    """As a hub cache has it: the snapshot's files are links to blobs."""
    blobs, snapshot = tiny_model_dir(tmp_path), tmp_path / "snapshot"
    snapshot.mkdir()
    for file in list(blobs.iterdir()):
        blob = file.rename(file.with_name(hashlib.sha256(file.name.encode()).hexdigest()))
        (snapshot / file.name).symlink_to(blob)
    assert _digests(snapshot) == _digests(tiny_model_dir(tmp_path / "plain"))
    assert resolve_model(snapshot).weight_files[0].parent == blobs


@pytest.mark.parametrize("threads", [1, 3])
def test_weights_digest_reports_every_byte_and_ignores_threads(threads, tmp_path):
    folder = tiny_model_dir(tmp_path)
    seen = []

    class Watch:
        def start(self, task, total, unit):
            seen.append(("start", total, unit))

        def advance(self, task, amount, note=""):
            seen.append(("advance", amount, note))

        def finish(self, task):
            seen.append(("finish", 0, ""))

    assert _digests(folder, threads=threads, progress=Watch()) == _digests(folder)
    tensors = list_tensors(resolve_model(folder))
    assert seen[0] == ("start", sum(t.size_bytes for t in tensors), "B")
    assert seen[-1][0] == "finish"
    advances = [x for x in seen if x[0] == "advance"]
    assert sum(x[1] for x in advances) == seen[0][1]
    assert {x[2] for x in advances} == {t.name for t in tensors}


@pytest.mark.parametrize(
    ("name", "changed_layers"),
    [
        ("model.layers.1.self_attn.k_proj.weight", [1]),
        ("model.layers.2.self_attn.o_proj.weight", [2]),
        ("model.layers.0.mlp.up_proj.weight", []),
        ("model.embed_tokens.weight", []),
    ],
)
def test_one_flipped_bit_names_the_layer(name, changed_layers, tmp_path):
    folder = tiny_model_dir(tmp_path)
    before = _digests(folder)
    _flip_bit(folder, name)
    after = _digests(folder)
    assert after.weights_sha256 != before.weights_sha256
    pairs = zip(before.attention_sha256, after.attention_sha256, strict=True)
    assert [layer for layer, (one, other) in enumerate(pairs) if one != other] == changed_layers


def test_digest_of_a_model_in_memory_equals_the_file(tmp_path):
    identity = adopt_model(tiny_model(), digests=True).identity
    stored = describe_model(tiny_model_dir(tmp_path))
    assert identity.weights_sha256 == stored.weights_sha256
    assert identity.attention_sha256 == stored.attention_sha256


def test_pickled_weights_need_a_word_and_digest_the_same(tmp_path):
    folder = tiny_model_dir(tmp_path)
    expected = describe_model(folder)
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="pickles"):
        describe_model(folder)
    identity = describe_model(folder, allow_pickle=True)
    assert identity.weights_format == "pytorch"
    assert identity.weights_sha256 == expected.weights_sha256


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    folder = tiny_model_dir(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"weight": _Runs(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="plain tensors"):
        describe_model(folder, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


class _Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.self_attn.q_proj.weight", 12),
        ("layers.0.self_attn.q_norm.weight", 0),
        ("transformer.h.3.attn.c_attn.weight", 3),
        ("gpt_neox.layers.4.attention.dense.bias", 4),
        ("model.layers.5.linear_attn.in_proj.weight", 5),
        ("blk.7.attn_q.weight", 7),
        ("blk.7.attn_k_norm.weight", 7),
        ("blk.7.attn_norm.weight", None),
        ("model.layers.2.input_layernorm.weight", None),
        ("model.layers.2.post_attention_layernorm.weight", None),
        ("model.layers.2.mlp.gate_proj.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_attention_layer_reads_names(name, layer):
    assert attention_layer(name) == layer


# --- damaged files -----------------------------------------------------------------------------


def _header(data, header):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no safetensors file"),
        (b"\x00" * 7, "no safetensors file"),
        (struct.pack("<Q", 2**62) + b"{}", "claims"),
        (struct.pack("<Q", 2) + b"{]", "no safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "no safetensors file"),
        (_header(b"", {"a": {"dtype": "F32", "shape": [1]}}), "no safetensors file"),
        (_header(b"1234", {"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}), "no safe"),
        (_header(b"1234", {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}), "4–0"),
        (
            _header(b"12", {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}),
            "truncated",
        ),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "no safetensors"),
    ],
)
def test_a_damaged_safetensors_file_is_named(content, message, tmp_path):
    folder = tiny_model_dir(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        describe_model(folder)
    assert "model.safetensors" in str(caught.value)


def test_a_truncated_shard_is_named(tmp_path):
    folder = tiny_model_dir(tmp_path, max_shard_size="100KB")
    shard = resolve_model(folder).weight_files[1]
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(ModelError, match=f"{shard.name} has .* truncated"):
        describe_model(folder)


def test_a_tensor_stored_twice_is_refused(tmp_path):
    folder = tiny_model_dir(tmp_path, max_shard_size="100KB")
    first, second, *_ = resolve_model(folder).weight_files
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match="stored in both"):
        describe_model(folder)


# --- GGUF --------------------------------------------------------------------------------------


def _write_gguf(path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_token_list(["<s>", "é", "token"])
    writer.add_array("tokenizer.ggml.token_type", [1, 2, 3])
    values = np.arange(64 * 4, dtype=np.float32).reshape(4, 64)
    writer.add_tensor("blk.0.attn_q.weight", values)
    writer.add_tensor("blk.1.attn_k.weight", values.astype(np.float16))
    packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("blk.1.attn_v.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf


def test_gguf_header_agrees_with_the_gguf_package(tmp_path):
    path = tmp_path / "model.gguf"
    gguf = _write_gguf(path)
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    assert set(header.fields) == {name for name in reader.fields if not name.startswith("GGUF.")}
    assert len(header.tensors) == len(reader.tensors) == 3
    for ours, theirs in zip(header.tensors, reader.tensors, strict=True):
        assert ours.name == theirs.name
        assert ours.type_name == theirs.tensor_type.name
        assert ours.shape == tuple(theirs.shape)
        assert (ours.offset, ours.size_bytes) == (theirs.data_offset, theirs.n_bytes)
    known = {q.name: (q.value, *gguf.GGML_QUANT_SIZES[q]) for q in gguf.GGMLQuantizationType}
    from patternsearch.model.gguf_header import _TENSOR_TYPES

    for number, (name, block, size) in _TENSOR_TYPES.items():
        assert known[name] == (number, block, size)


def test_gguf_digest_sees_types_and_bytes(tmp_path):
    path = tmp_path / "model.gguf"
    _write_gguf(path)
    tensors = list_tensors(resolve_model(path))
    assert [t.dtype for t in tensors] == ["F32", "F16", "Q4_1"]
    before = digest_weights(tensors, 2)
    data = bytearray(path.read_bytes())
    data[tensors[2].offset + 3] ^= 1
    path.write_bytes(data)
    after = digest_weights(tensors, 2)
    assert before.attention_sha256[0] == after.attention_sha256[0]
    assert before.attention_sha256[1] != after.attention_sha256[1]


@pytest.mark.parametrize("size", [0, 3, 10, 30, 200, -1])
def test_a_truncated_gguf_file_is_named(size, tmp_path):
    path = tmp_path / "model.gguf"
    _write_gguf(path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"model\.gguf is no usable GGUF file"):
        list_tensors(resolve_model(path))
