"""The network, in plain torch, with the parameter names of Hugging Face's LlamaForCausalLM.

Training only: no cache and no sampling. What it saves loads anywhere a Llama loads.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    layers: int = 6
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    mlp: int = 768
    vocabulary: int = 4096
    context_tokens: int = 2048
    # Each head has 16 frequencies. With this base many of them turn slowly enough to match content far away.
    rope_theta: float = 1e6
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in the half-split layout of Hugging Face. x: [batch, heads, tokens, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class SelfAttention(nn.Module):
    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        width, group = self.shape.head_dim, self.shape.heads // self.shape.kv_heads
        q = self.q_proj(x).view(batch, tokens, -1, width).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, -1, width).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, -1, width).transpose(1, 2)
        q, k = apply_rope(q, cos, sin).to(v.dtype), apply_rope(k, cos, sin).to(v.dtype)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class GatedMlp(nn.Module):
    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class TransformerLayer(nn.Module):
    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden, shape.norm_eps)
        self.self_attn = SelfAttention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden, shape.norm_eps)
        self.mlp = GatedMlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LlamaBody(nn.Module):
    """The `model.` prefix of Hugging Face's names."""

    def __init__(self, shape: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(TransformerLayer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden, shape.norm_eps)


class OutputLoss(torch.autograd.Function):
    """Output layer and weighted cross-entropy at once, gradients included, a few rows at a time.

    The logits of a batch (128 MiB in fp32) never exist together, which saves a tenth of a training step.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, table: Tensor, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        share, h, t = weights / weights.sum(), hidden.bfloat16(), table.bfloat16()
        each, to_hidden, to_table = torch.empty_like(share), torch.empty_like(h), torch.zeros_like(table)
        for start in range(0, len(h), 512):
            rows = slice(start, start + 512)
            logits = (h[rows] @ t.T).float()  # [rows, vocabulary]
            total = logits.logsumexp(-1, keepdim=True)
            each[rows] = (total - logits.gather(1, targets[rows, None]))[:, 0]
            slope = logits.sub_(total).exp_()
            slope[torch.arange(len(slope)), targets[rows]] -= 1
            slope = slope.mul_(share[rows, None]).bfloat16()
            to_hidden[rows] = slope @ t
            to_table += (slope.T @ h[rows]).float()
        ctx.save_for_backward(to_hidden, to_table)
        ctx.mark_non_differentiable(each)
        return (each * share).sum(), each

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None, None]:
        to_hidden, to_table = ctx.saved_tensors
        return to_hidden.float() * slopes[0], to_table * slopes[0], None, None


class Llama(nn.Module):
    """Tied embeddings, no biases; `forward` returns logits, `loss` their weighted cross-entropy in nats."""

    def __init__(self, shape: LlamaConfig, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.model = LlamaBody(shape)
        source = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 if "embed" in name else parameter.shape[1] ** -0.5 * (0.3 if out else 0.6)
                nn.init.normal_(parameter, std=std, generator=source)

    def angles(self, tokens: int) -> tuple[Tensor, Tensor]:
        width = self.shape.head_dim
        speeds = self.shape.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        turns = torch.outer(torch.arange(tokens, dtype=torch.float32), speeds).repeat(1, 2)
        # [tokens, head_dim] each.
        return turns.cos(), turns.sin()

    def hidden(self, ids: Tensor) -> Tensor:
        """What the output layer sees: [batch, tokens, hidden]."""
        cos, sin = self.angles(ids.shape[1])
        x: Tensor = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.model.norm(x)
        return out

    def forward(self, ids: Tensor) -> Tensor:
        return functional.linear(self.hidden(ids), self.model.embed_tokens.weight)

    def tail(self, ids: Tensor, count: int) -> Tensor:
        """Logits of the last `count` positions only."""
        return functional.linear(self.hidden(ids)[:, -count:], self.model.embed_tokens.weight)

    def loss(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """(weighted mean, loss of each token [batch, tokens - 1]); `weights[:, i]` belongs to `ids[:, i]`."""
        hidden = self.hidden(ids[:, :-1]).flatten(0, 1)
        targets, kept = ids[:, 1:].flatten(), weights[:, 1:].flatten()
        mean, each = OutputLoss.apply(hidden, self.model.embed_tokens.weight, targets, kept)  # type: ignore[no-untyped-call]
        return mean, each.view(ids.shape[0], -1)


def hf_config(shape: LlamaConfig, end_ids: list[int], pad_id: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end_ids[0],
        "dtype": "float16",
        "eos_token_id": end_ids,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.mlp,
        "max_position_embeddings": shape.context_tokens,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": pad_id,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }


def save_model(model: Llama, folder: Path, end_ids: list[int], pad_id: int) -> None:
    """Write config, generation config and fp16 weights; the weights appear at once or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(model.shape, end_ids, pad_id)
    generation = {
        "bos_token_id": end_ids[0],
        "eos_token_id": end_ids,
        "pad_token_id": pad_id,
        "do_sample": False,
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tensors = {
        name: value.detach().to(torch.float16).contiguous() for name, value in model.state_dict().items()
    }
    partial = folder / "model.safetensors.partial"
    save_file(tensors, str(partial), metadata={"format": "pt"})
    # `save_file` makes the file private.
    partial.chmod(0o644)
    os.replace(partial, folder / "model.safetensors")


def load_model(folder: Path) -> Llama:
    """The saved model in fp32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = LlamaConfig(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        mlp=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        context_tokens=config["max_position_embeddings"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )
    model = Llama(shape)
    model.load_state_dict(
        {name: value.float() for name, value in load_file(str(folder / "model.safetensors")).items()}
    )
    return model
