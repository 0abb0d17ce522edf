"""Loading: what is accepted, and a one-line refusal with a way out for what is not."""

import json
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from patternsearch.errors import EnvironmentLacks, InputError, ModelError, UnsupportedModel
from patternsearch.model.capture import run_with_capture
from patternsearch.model.identity import describe_model
from patternsearch.model.loading import adopt_model, default_dtype, load_model
from patternsearch.model.packages import package_file
from patternsearch.model.sources import resolve_model
from patternsearch.model.support import check_supported
from support.closeness import assert_close
from support.tiny_models import REFUSED, tiny_config, tiny_model, tiny_model_dir


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*arguments, **keywords):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_load_model_gives_a_model_ready_to_run(tmp_path, no_network):
    folder = tiny_model_dir(tmp_path, dtype=torch.bfloat16, max_shard_size="50KB")
    loaded = load_model(folder)
    assert loaded.dtype == loaded.model.dtype == torch.float32
    assert loaded.identity == describe_model(folder)
    assert loaded.identity.dtype == "bfloat16"
    assert loaded.full_layers == (0, 1, 2)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    ids = torch.tensor([loaded.tokenizer.encode("the and ing")])
    model = tiny_model()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    expected = run_with_capture(adopt_model(model), ids, lambda inputs: None)
    assert torch.equal(run_with_capture(loaded, ids, lambda inputs: None), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", torch.float16])
def test_load_model_takes_a_dtype(dtype, tmp_path):
    loaded = load_model(tiny_model_dir(tmp_path), dtype=dtype, digests=False)
    assert str(loaded.model.dtype).endswith(str(dtype).removeprefix("torch."))
    assert loaded.identity.weights_sha256 is None


def test_load_model_reads_pickles_only_when_told(tmp_path):
    folder = tiny_model_dir(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="--allow-pickle"):
        load_model(folder)
    loaded = load_model(folder, allow_pickle=True)
    assert torch.equal(loaded.model.lm_head.weight, tiny_model().lm_head.weight)


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def _write_gguf(model, path):
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    for name, parameter in model.named_parameters():
        for ours, theirs in _GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, parameter.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_load_model_reads_gguf(tmp_path, capfd, no_network):
    model = tiny_model("qwen2")
    _write_gguf(model, tmp_path / "tiny.gguf")
    loaded = load_model(tmp_path / "tiny.gguf", require_tokenizer=False)
    assert capfd.readouterr().err.count("it/s") == 0
    identity, expected = loaded.identity, adopt_model(model).identity
    assert (identity.weights_format, identity.dtype) == ("gguf", "float32")
    assert identity.rope == expected.rope
    assert identity.layer_types == expected.layer_types
    assert len(set(identity.attention_sha256)) == 3
    assert identity.tokenizer_sha256
    ids = torch.arange(300)[None]
    ours = run_with_capture(loaded, ids, lambda inputs: None)
    assert_close(ours, run_with_capture(adopt_model(model), ids, lambda inputs: None))


def test_default_dtype_is_the_stored_one_on_cuda(tmp_path):
    identity = adopt_model(tiny_model(dtype=torch.float16)).identity
    assert default_dtype(identity, "cuda:0") == torch.float16
    assert default_dtype(identity, "cpu") == torch.float32
    quantised = identity.model_copy(update={"dtype": "q4_1"})
    assert default_dtype(quantised, "cuda") == torch.bfloat16


def test_adopt_model_refuses_rounded_rotary_buffers():
    with pytest.raises(ModelError, match=r"model\.to\(dtype\) rounds it"):
        adopt_model(tiny_model().to(torch.bfloat16))
    with pytest.raises(ModelError, match=r"model\.to\(dtype\) rounds it"):
        adopt_model(tiny_model("gemma3").to(torch.bfloat16).float())


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: None, r"does not exist; name a checkpoint folder"),
        (lambda folder: folder.mkdir(), r"has no config\.json"),
        (lambda folder: folder.write_text("x"), r"is a file but no \.gguf"),
    ],
    ids=["missing", "empty folder", "other file"],
)
def test_load_model_refuses_what_is_no_checkpoint(spoil, message, tmp_path, no_network):
    spoil(tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "model")


def _remove(*names):
    def spoil(folder):
        for name in names:
            (folder / name).unlink()

    return spoil


def _index(content):
    def spoil(folder):
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        (folder / "model.safetensors.index.json").write_text(content)

    return spoil


def _rewrite(change):
    def spoil(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_remove("model.safetensors"), "has config.json but no weights"),
        (_remove("tokenizer.json", "tokenizer_config.json"), "has no tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer .*cannot be read"),
        (
            _rewrite(lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight")),
            r"lacks 1 tensors, such as model\.layers\.1\.self_attn\.q_proj\.weight",
        ),
        (
            _rewrite(lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)})),
            r"model\.norm\.weight|cannot be loaded",
        ),
        (_index("[]"), "is no weight index"),
        (_index('{"weight_map": {"a": 3}}'), "not a file beside it"),
        (
            _index('{"weight_map": {"a": "gone.safetensors"}}'),
            r"shard gone\.safetensors .* missing",
        ),
        (_index('{"weight_map": {"a": "../x/model.safetensors"}}'), "not a file beside it"),
    ],
    ids=[
        "no weights",
        "no tokenizer",
        "bad tokenizer",
        "tensor missing",
        "tensor misshapen",
        "bad index",
        "bad shard name",
        "shard missing",
        "shard elsewhere",
    ],
)
def test_load_model_refuses_an_incomplete_checkpoint(spoil, message, tmp_path):
    folder = tiny_model_dir(tmp_path)
    spoil(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_load_model_can_do_without_a_tokenizer(tmp_path):
    folder = tiny_model_dir(tmp_path, tokenizer=False)
    assert load_model(folder, require_tokenizer=False).tokenizer is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "tpu9"}, InputError, "no device"),
        ({"dtype": "int4"}, InputError, "no dtype to run in"),
        pytest.param(
            {"device": "cuda"},
            EnvironmentLacks,
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device"),
        ),
    ],
)
def test_load_model_refuses_options(options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        load_model(tiny_model_dir(tmp_path), **options)


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_hub_id_offline_is_refused_without_the_network(how, monkeypatch, no_network, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    if how == "environment":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EnvironmentLacks, match="not in the local cache") as caught:
        load_model("no-owner/no-model", offline=how == "argument")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ("package:patternsearch-nowhere/x.gguf", EnvironmentLacks, "pip install"),
        ("package:pytest/no_such_file", InputError, "has no file named"),
        ("package:pytest/__init__.py", InputError, r"has \d+ files named"),
        ("package:pytest", InputError, "does not name a file"),
        ("./no/such/model", ModelError, "does not exist"),
        ("missing.gguf", ModelError, "does not exist"),
        ("dir/missing.gguf", ModelError, "does not exist"),
    ],
)
def test_resolve_model_refuses_a_reference(reference, error, message, no_network):
    with pytest.raises(error, match=message):
        resolve_model(reference)


def test_package_file_finds_by_path_and_by_name():
    path = package_file("pytest", "pytest/py.typed")
    assert path.is_file()
    assert package_file("pytest", "pytester.py").name == "pytester.py"


# --- unsupported attention -----------------------------------------------------------------------

NAMES = {
    "gemma2": "caps attention logits",
    "gpt_oss": "attention sinks",
    "deepseek_v3": "multi-head latent attention",
    "t5": "encoder-decoder",
    "bart": "encoder-decoder",
}


@pytest.mark.parametrize("family", REFUSED)
def test_unsupported_attention_is_refused_by_name_before_weights(family, tmp_path, monkeypatch):
    folder = tiny_model_dir(tmp_path, family)
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were read")
    )
    for function in (load_model, describe_model):
        with pytest.raises(UnsupportedModel, match=NAMES[family]) as caught:
            function(folder)
        assert family in str(caught.value)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("mistral", {"sliding_window": 24}, "no full-attention layer"),
        ("llama", {"kv_lora_rank": 8}, "latent attention"),
        ("llama", {"index_topk": 8}, "indexer"),
        ("llama", {"is_causal": False}, "both directions"),
        ("gemma3", {"use_bidirectional_attention": True}, "both directions"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layers of type chunked_attention"),
    ],
)
def test_check_supported_names_the_feature(family, fields, message):
    config = tiny_config(family)
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedModel, match=message):
        check_supported(config)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("bert", "both directions|registry|causal"),
        ("bloom", "registry"),
        ("mpt", "registry"),
        ("gemma3", "other modalities"),
        ("vit", "no causal language model|registry"),
    ],
)
def test_check_supported_refuses_other_architectures(model_type, message):
    from transformers import AutoConfig

    with pytest.raises(UnsupportedModel, match=message):
        check_supported(AutoConfig.for_model(model_type))


def test_attention_sinks_of_an_unknown_type_are_seen_in_the_modules():
    model = tiny_model()
    for layer in model.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(UnsupportedModel, match="attention sinks"):
        adopt_model(model)


@pytest.mark.parametrize(("field", "value"), [("scaling", 0.5), ("head_dim", 8)])
def test_layers_that_differ_are_refused(field, value):
    model = tiny_model()
    setattr(model.model.layers[2].self_attn, field, value)
    with pytest.raises(UnsupportedModel, match=f"{field} that differs"):
        adopt_model(model)


def test_config_json_of_a_tiny_model_is_plain(tmp_path):
    assert json.loads((tiny_model_dir(tmp_path) / "config.json").read_text())["head_dim"] == 16
