"""Tiny random models of many families, with a tiny tokenizer, as checkpoint folders or in memory.

Weights depend only on (family, sizes, seed, tensor name), so they are the same on every machine.
They are wide enough that attention is far from uniform.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

__all__ = ["FAMILIES", "HYBRIDS", "REFUSED", "tiny_config", "tiny_model", "tiny_model_dir"]

VOCAB_SIZE = 320

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_sliding": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": None},
    "phi3": {"head_dim": None, "hidden_size": 384},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"head_dim": 32, "sliding_window": 24},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "head_dim": None,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    },
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    "bart": {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
    },
}

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3", "mixtral")
"""Families that must work."""

HYBRIDS = ("gemma3", "qwen2_sliding")
"""Families with sliding-window layers (window 24) beside full ones."""

REFUSED = ("gemma2", "gpt_oss", "deepseek_v3", "t5", "bart")
"""Families that must be refused by name."""


def tiny_config(family: str = "llama", **overrides: Any) -> Any:
    """Return the family's transformers config; overrides are config fields (None drops one)."""
    values = {"model_type": family.removesuffix("_sliding"), **_COMMON, **_FAMILIES[family]}
    if family in ("t5", "bart"):
        values = {"model_type": family, "vocab_size": VOCAB_SIZE, **_FAMILIES[family]}
    values = {name: value for name, value in (values | overrides).items()
              if value is not None or name == "sliding_window"}  # fmt: skip
    return AutoConfig.for_model(**values)


def tiny_model(
    family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Any:
    """Return a tiny random model in evaluation mode on the CPU."""
    config = tiny_config(family, **overrides)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_weight(name, tuple(parameter.shape), seed))
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)  # model.to would round the rotary buffers
    model.tie_weights()
    return model.eval()


def tiny_model_dir(
    path: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a tiny random checkpoint with its tokenizer into a folder and return the folder.

    Args:
        path: The folder; a pytest ``tmp_path`` gets a sub-folder named after the family.
        family: A key of the table above.
        seed: Other seeds give other weights.
        dtype: Of the stored tensors.
        max_shard_size: Such as "50KB", to get a sharded checkpoint.
        tokenizer: False leaves the tokenizer out.
        overrides: Config fields.
    """
    folder = Path(path) / family
    tiny_model(family, seed=seed, dtype=dtype, **overrides).save_pretrained(
        folder, max_shard_size=max_shard_size
    )
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer of 320 entries with a chat template; no BOS is added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
    merges = []
    words = "the and ing ion ent for her that with this from have not are was def return self"
    for word in words.split():
        pieces = ["Ġ", *word]
        while len(pieces) > 1 and len(vocabulary) < VOCAB_SIZE:
            pair = (pieces[0], pieces[1])
            pieces[:2] = ["".join(pair)]
            if pieces[0] not in vocabulary:
                vocabulary[pieces[0]] = len(vocabulary)
                merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{{ message['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _weight(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}:{name}:{shape}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:8], "little")))
    values = generator.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        scale, offset = 0.1, 0.0 if name.endswith("bias") else 1.0
    else:
        sharp = any(part in name for part in ("q_proj", "k_proj", "qkv_proj"))
        scale, offset = (2.0 if sharp else 1.0) / shape[-1] ** 0.5, 0.0
    if "embed" in name:
        scale = 1.0
    return torch.from_numpy(values * np.float32(scale) + np.float32(offset))
