"""What a step costs where nobody has measured: operations and bytes over what the device gets of its peaks.

Matrix products cost the larger, smoothly, of computing and of reading the weights once; attention of prompts computes,
attention of rows reads their KV; tensor parallelism adds two all-reduces a layer. Sources: DistServe appendix A for the
terms, data sheets for peaks, `planner.hardware.Yield` for what is reached. No numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.hardware import Device
from planner.shape import Shape
from planner.terms import Batch, Link, Split

SHARPNESS = 4.0  # of the smooth maximum (x^p + y^p)^(1/p): at the ridge 19 % above either side
TOUCHED = 16.0  # how often a step reads or writes a token's hidden state besides the products, per layer


@dataclass(frozen=True, slots=True)
class Roofline:
    """Coefficients of one instance, in seconds; `planner.terms.Cost`, and monotone since none is negative.

    `fixed` per step; `weights` reading all matrices once; `product` per token (prompt or row) in products; `logit` per
    row of logits; `square` per square of prompt tokens; `context` per token of context that rows read; `touch` per
    token besides products, all-reduces included.
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

    def work_s(self, batch: Batch) -> float:
        """Seconds of all stages together, without hops; 0 for an empty batch."""
        tokens = batch.tokens + batch.rows
        if not tokens:
            return 0.0
        compute = self.product * tokens + self.logit * (batch.rows + (batch.tokens > 0))
        products: float = (self.weights**SHARPNESS + compute**SHARPNESS) ** (1 / SHARPNESS)
        attention = self.square * batch.squares + self.context * batch.context
        return self.fixed + products + attention + self.touch * tokens

    def across(self, links: int, link: Link, state_bytes: float) -> Roofline:
        """With `links` of the ways between stages slower: each hands every token's hidden state over `link`."""
        handed = links * state_bytes / link.bytes_per_s
        return replace(self, touch=self.touch + handed, hop_s=self.hop_s + links * link.latency_s / self.pp)

    def step_s(self, batch: Batch) -> float:
        work = self.work_s(batch)
        return work + self.pp * self.hop_s if self.pp > 1 and work else work

    def stage_s(self, batch: Batch) -> float:
        work = self.work_s(batch)
        return work / self.pp + self.hop_s if self.pp > 1 and work else work


def roofline(shape: Shape, split: Split, device: Device) -> Roofline:
    """The analytic cost of `shape` on `split.devices` devices.

    Stages hand hidden states over the node's inner link; all-reduces leave the node only where tp does not fit in it.
    """
    gets, node, tp, layers = device.gets, device.node, split.tp, shape.layers
    matrix = layers * shape.layer_weights(split)
    tables = shape.table / (tp if shape.table_split else 1)
    memory = device.bytes_per_s * gets.bytes
    flops = device.rate(shape.weight_bytes) * gets.flops
    state = shape.hidden * shape.table_bytes  # bytes of a token's hidden state
    link = node.intra if tp <= node.devices_per_node else node.inter
    reduces = 2 * layers * (tp > 1)
    passed = 2 * (tp - 1) / tp * state / (link.bytes_per_s * gets.link)  # ring or two-shot all-reduce
    heads = shape.heads * shape.head_dim / tp
    handed = split.pp * state / node.intra.bytes_per_s if split.pp > 1 else 0.0  # to the next stage, and back
    return Roofline(
        fixed=gets.step_s + layers * gets.layer_s + reduces * gets.reduce_s,
        weights=(matrix * shape.weight_bytes + tables * shape.table_bytes) / memory,
        product=2 * matrix / flops,
        logit=2 * tables / (device.flops * gets.flops),
        square=2 * layers * heads / (device.flops * gets.attention),
        context=layers * 2 * shape.kv_bytes * shape.device_kv_heads(split) * shape.head_dim / memory,
        touch=layers * TOUCHED * state / tp / memory + reduces * passed + handed,
        pp=split.pp,
        hop_s=0.0 if split.pp == 1 else node.intra.latency_s,
    )
