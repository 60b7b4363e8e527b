"""The names of a request: our id of the HTTP request, the id that its client gave it, and the name of each sequence.

    req_1f…                  the HTTP request; `x-request-id` of its answer
    chatcmpl-1f…, cmpl-1f…   its answer, and its only sequence
    resp_1f…, msg_1f…        the same, of the routes `/v1/responses` and `/v1/messages`
    chatcmpl-1f….2           the third of several sequences

All have the same digits, so the log of any process can be searched for each of them.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

REQUEST_PREFIX = "req_"
SEQUENCE_PATTERN = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)([0-9a-f]{32})(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class RequestIds:
    """What a log line says about its request; "" for what is not known. `client` is the client's own id."""

    request: str = ""
    client: str = ""
    sequence: str = ""

    def as_fields(self) -> dict[str, str]:
        """The known ids, under the names that they have in all logs."""
        named = {"request_id": self.request, "client_request_id": self.client, "sequence": self.sequence}
        return {name: value for name, value in named.items() if value}


def new_request_id() -> str:
    """An id for an HTTP request. It is random, so clients cannot guess those of others."""
    return f"{REQUEST_PREFIX}{secrets.token_hex(16)}"


def answer_id(prefix: str, request_id: str) -> str:
    """The id of the answer to an HTTP request: `prefix` ("chatcmpl-", …) with the digits of the request's id."""
    return f"{prefix}{request_id.removeprefix(REQUEST_PREFIX) or secrets.token_hex(16)}"


def ids_of_sequence(sequence: str, client: str = "") -> RequestIds:
    """The ids of the request that a sequence belongs to; canaries belong to none."""
    match = SEQUENCE_PATTERN.fullmatch(sequence)
    return RequestIds(f"{REQUEST_PREFIX}{match[1]}" if match else "", client, sequence)
