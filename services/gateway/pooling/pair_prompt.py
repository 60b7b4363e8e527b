"""Makes the prompt with which a model scores a pair: by its own template if that has a query and a document, else as
Qwen3's rerankers expect it.
"""

from __future__ import annotations

import re

from services.gateway.tokenization.tokenizer import GatewayTokenizer

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# What Qwen3-Reranker was trained with.
QWEN3_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
PAIR_ROLES = [re.compile(f"""["']{role}["']""") for role in ("query", "document")]


def render_pair(tokenizer: GatewayTokenizer, query: str, document: str, instruction: str | None) -> str:
    """The prompt text of a pair. `instruction` says what makes it a good one; None: the template's own.

    Raises:
        RequestError: 400, the model's template refuses it.
    """
    template = tokenizer.template
    if template is not None and all(role.search(template.source) for role in PAIR_ROLES):
        said = [] if instruction is None else [{"role": "system", "content": instruction}]
        pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return tokenizer.render_conversation([*said, *pair], True, False)
    said_text = DEFAULT_INSTRUCTION if instruction is None else instruction
    return QWEN3_PROMPT.format(instruction=said_text, query=query, document=document)
