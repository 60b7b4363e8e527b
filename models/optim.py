"""Muon for the hidden matrices, AdamW for embeddings and norms.

Muon (Jordan et al., 2024): momentum, then the nearest orthogonal matrix by five Newton-Schulz steps.
Matrices of one shape are stepped as one batch, which on a CPU is most of the cost.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn


def orthogonalize(x: Tensor, steps: int = 5) -> Tensor:
    """x: [matrices, rows, columns]; singular values come out between about 0.7 and 1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[1] > x.shape[2]
    y = x.bfloat16().mT if tall else x.bfloat16()
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = y @ y.mT
        y = a * y + (b * square + c * (square @ square)) @ y
    out: Tensor = (y.mT if tall else y).to(x.dtype)
    return out


class Muon:
    def __init__(
        self, parameters: list[nn.Parameter], rate: float, momentum: float = 0.95, decay: float = 0.1
    ) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            groups[parameter.shape].append(parameter)
        self.groups = list(groups.values())
        self.rate, self.momentum, self.decay = rate, momentum, decay
        self.averages = [torch.zeros(len(group), *group[0].shape) for group in self.groups]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """`scale` is the schedule's share of the full rate."""
        rate = self.rate * scale
        for group, average in zip(self.groups, self.averages, strict=True):
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            average.lerp_(gradient, 1 - self.momentum)
            update = orthogonalize(gradient.lerp(average, self.momentum))
            rows, columns = group[0].shape
            reach = rate * max(1.0, rows / columns) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self.decay).sub_(change, alpha=reach)


class Optimizer:
    """Both optimizers behind one `step`."""

    def __init__(self, model: nn.Module, muon_rate: float = 0.02, adam_rate: float = 0.003) -> None:
        hidden: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            (hidden if parameter.dim() == 2 and "embed" not in name else rest).append(parameter)
        self.muon = Muon(hidden, muon_rate)
        self.adam = torch.optim.AdamW(rest, lr=adam_rate, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.01)
        self.adam_rate = adam_rate

    def step(self, scale: float) -> None:
        self.muon.step(scale)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for parameters in self.muon.groups:
            for parameter in parameters:
                parameter.grad = None

    def state(self) -> dict[str, Any]:
        return {"muon": self.muon.averages, "adam": self.adam.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.muon.averages = state["muon"]
        self.adam.load_state_dict(state["adam"])
