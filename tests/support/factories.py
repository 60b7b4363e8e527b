"""One place that knows how to build the subjects of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# The embedded model's shape, with random weights.
TINY: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_oracle(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A transformers model with random weights, in evaluation mode and float32; `changes` go to its config.

    Every parameter is random, biases and norms too, and large enough that attention is not uniform.
    """
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**(SMALL | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() == 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
    return model


def make_tokenizer(vocab_size: int = 300) -> Any:
    """A byte-level tokenizer without merges: 0 <pad>, 1 <s>, 2 </s>, the 256 bytes, then fillers up to `vocab_size`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<s>", "</s>", *letters]
    names += [f"<extra_{index}>" for index in range(vocab_size - len(names))]
    model = BPE(vocab={name: index for index, name in enumerate(names)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def save_model(path: Path, model: Any, dtype: torch.dtype = torch.float32, shard: str = "1GB") -> Path:
    """Write `model` and a tokenizer to `path` as a Hugging Face folder; `shard` is the largest file's size ("20KB")."""
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(dtype).save_pretrained(path, max_shard_size=shard)
    make_tokenizer(model.config.vocab_size).save_pretrained(path)
    return path


def make_folder(path: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """A random small model folder: what `make_oracle` gives, saved."""
    return save_model(path, make_oracle(family, seed, **changes))
