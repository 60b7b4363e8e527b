"""Estimates step costs of unmeasured hardware by a roofline: FLOPs and bytes over the rates that a device reaches.

Matrix products cost the (smooth) maximum of computing and of reading the weights once. Prefill attention is bound by
compute, decode attention by reading KV. Tensor parallelism adds two all-reduces per layer. Sources: DistServe
appendix A for the terms, data sheets for peak rates, `planner.hardware.Efficiency` for the share reached. No numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.costs.model import ModelDims
from planner.hardware import Device
from planner.types import LinkSpec, Parallelism, StepBatch

# Exponent p of the smooth maximum (x^p + y^p)^(1/p); where x = y the result is 19 % above either.
SHARPNESS = 4.0
# How many times a step reads or writes a token's hidden state in one layer, outside of matrix products.
TOUCHED = 16.0


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """The step cost of one instance (a `planner.types.CostModel`). It never falls, since no coefficient is negative.

    Coefficients are in seconds: `fixed` per step; `weights` for reading all matrices once; `product` per token (prompt
    or row) for matrix products; `logit` per row of logits; `square` per squared prompt token; `context` per token of
    context that decode rows attend to; `touch` per token for everything else, all-reduces included.
    """

    fixed: float
    weights: float
    product: float
    logit: float
    square: float
    context: float
    touch: float
    pp: int = 1
    hop_s: float = 0.0

    def work_s(self, batch: StepBatch) -> float:
        """Seconds of all stages together, without hops; 0 for an empty batch."""
        tokens = batch.tokens + batch.rows
        if not tokens:
            return 0.0
        compute = self.product * tokens + self.logit * (batch.rows + (batch.tokens > 0))
        products: float = (self.weights**SHARPNESS + compute**SHARPNESS) ** (1 / SHARPNESS)
        attention = self.square * batch.squares + self.context * batch.context
        return self.fixed + products + attention + self.touch * tokens

    def across(self, links: int, link: LinkSpec, state_bytes: float) -> RooflineCost:
        """The cost if `links` of the links between pipeline stages are `link`, which carries each hidden state."""
        handed = links * state_bytes / link.bytes_per_s
        return replace(self, touch=self.touch + handed, hop_s=self.hop_s + links * link.latency_s / self.pp)

    def step_s(self, batch: StepBatch) -> float:
        """Seconds of a step through all stages, with the hops between them (see `CostModel`)."""
        work = self.work_s(batch)
        return work + self.pp * self.hop_s if self.pp > 1 and work else work

    def stage_s(self, batch: StepBatch) -> float:
        """Seconds for which the step occupies one stage (see `CostModel`)."""
        work = self.work_s(batch)
        return work / self.pp + self.hop_s if self.pp > 1 and work else work


def roofline_cost(dims: ModelDims, parallelism: Parallelism, device: Device) -> RooflineCost:
    """The analytic cost of `dims` on `parallelism.devices` devices.

    Stages hand hidden states over the node's inner link; all-reduces leave the node only where tp does not fit in it.
    """
    gets, node, tp, layers = device.gets, device.node, parallelism.tp, dims.layers
    matrix = layers * dims.layer_weights(parallelism)
    tables = dims.table / (tp if dims.table_split else 1)
    memory = device.bytes_per_s * gets.bytes
    flops = device.rate(dims.weight_bytes) * gets.flops
    # Bytes of one token's hidden state.
    state = dims.hidden * dims.state_bytes
    link = node.intra if tp <= node.devices_per_node else node.inter
    reduces = 2 * layers * (tp > 1)
    # Seconds per token of a ring or two-shot all-reduce.
    passed = 2 * (tp - 1) / tp * state / (link.bytes_per_s * gets.link)
    heads = dims.heads * dims.head_dim / tp
    # Each stage sends hidden states to the next, and the last one sends the sampled tokens' states back.
    handed = parallelism.pp * state / node.intra.bytes_per_s if parallelism.pp > 1 else 0.0
    return RooflineCost(
        fixed=gets.step_s + layers * gets.layer_s + reduces * gets.reduce_s,
        weights=(matrix * dims.weight_bytes + tables * dims.table_bytes) / memory,
        product=2 * matrix / flops,
        logit=2 * tables / (device.flops * gets.flops),
        square=2 * layers * heads / (device.flops * gets.attention),
        context=layers * 2 * dims.kv_bytes * dims.device_kv_heads(parallelism) * dims.head_dim / memory,
        touch=layers * TOUCHED * state / tp / memory + reduces * passed + handed,
        pp=parallelism.pp,
        hop_s=0.0 if parallelism.pp == 1 else node.intra.latency_s,
    )
