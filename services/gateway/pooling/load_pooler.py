"""Loads how the served model pools prompts, at the gateway's start."""

from __future__ import annotations

from diptych.errors import ModelError
from diptych.specs import GatewaySpec
from engine.model.checkpoint import DESCRIPTION_FILES, locate_folder
from engine.model.pooling import ModelPooler, read_pooler
from services.gateway.tokenization.tokenizer import GatewayTokenizer


def load_pooler(spec: GatewaySpec, tokenizer: GatewayTokenizer) -> ModelPooler:
    """How the model pools prompts, or why it does not.

    Raises:
        ModelError: a file that says it cannot be read; or it does not, and there are no decode workers.
    """
    pooler = read_pooler(locate_folder(spec.model, spec.revision, DESCRIPTION_FILES), tokenizer.model)
    if spec.only_pools and pooler.pooling is None:
        fix = "serve a model that embeds or scores, or add --decode 1 to generate answers"
        raise ModelError(
            f"the model {spec.model} cannot pool, and there are no decode workers", pooler.why, fix
        )
    return pooler
