"""Upper bounds on what one request may ask for."""

from __future__ import annotations

import msgspec

MAX_SEQUENCES = 64
# Most prompts that one request may have pooled: OpenAI's bound.
MAX_INPUTS = 2048
# Number of bodies of the largest size that fit into the memory for bodies.
MAX_HELD_BODIES = 32
# Most bytes of the bodies that have no prompt. That of a batch has 37,000 bytes of metadata at most; the replanner's
# report has counters of a few names; an operator's order has one field.
MAX_BATCH_BYTES = 64 << 10
MAX_REPORT_BYTES = 64 << 10
MAX_ORDER_BYTES = 4 << 10


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that are checked before any work is done. The ranges of single numbers are in `request_schema`."""

    max_body_bytes: int = 8 << 20
    # Seconds within which a whole body must have arrived.
    body_s: float = 30.0
    # Most levels of nesting in a JSON body.
    max_depth: int = 64
    max_n: int = 8
    max_prompts: int = 32
    # Most sequences of a request: prompts times best_of.
    max_sequences: int = MAX_SEQUENCES
    # Most prompts of a request that are pooled.
    max_inputs: int = MAX_INPUTS
    max_stop_chars: int = 256
    max_schema_bytes: int = 64 << 10
    max_schema_depth: int = 32
    max_pattern_chars: int = 1024
    # Most bytes of all answers that wait to be sent.
    max_answer_bytes: int = 256 << 20
    # Most bytes of one stream that may wait for a slow client.
    max_stream_bytes: int = 1 << 20

    @property
    def max_bodies_bytes(self) -> int:
        """Bound of the sum of all bodies that are being read, parsed or tokenized."""
        return MAX_HELD_BODIES * self.max_body_bytes
