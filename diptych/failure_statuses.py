"""Why a request is refused or fails: one type from the place that decides it to the client, the metrics and the logs.

`FailureReason` is the closed list of reasons; `RULES` gives the HTTP status, code and retry time of each, and whose
fault it is. The texts of a `RequestFailure` may quote a client, so they are cut and cleaned here, once, wherever they
come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from diptych.logs.shown_text import shorten_text

TOO_MANY_REQUESTS = 429
OVERLOAD_STATUSES = (TOO_MANY_REQUESTS, 503)
# Most characters of a failure's message and of its cause, and of its field's name.
MAX_MESSAGE_CHARS = 500
MAX_PARAM_CHARS = 200
ERROR_TYPES = {403: "permission_error", 408: "timeout_error", 429: "rate_limit_error", 504: "timeout_error"}


class FailureReason(StrEnum):
    """Every reason why a request is refused or fails. The groups: body, caller, operator's order, load, service."""

    # the body
    INVALID_HTTP = "invalid_http"
    INVALID_JSON = "invalid_json"
    INVALID_VALUE = "invalid_value"
    MISSING_REQUIRED_PARAMETER = "missing_required_parameter"
    UNRECOGNIZED_REQUEST_ARGUMENT = "unrecognized_request_argument"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    INVALID_SCHEMA = "invalid_schema"
    INVALID_GRAMMAR = "invalid_grammar"
    NO_TOKEN_LEFT = "no_token_left"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    BODY_INCOMPLETE = "body_incomplete"
    BODY_TIMEOUT = "body_timeout"
    REQUEST_TOO_LARGE = "request_too_large"
    REQUEST_TOO_COMPLEX = "request_too_complex"
    PREPARATION_OUT_OF_MEMORY = "preparation_out_of_memory"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    HEADERS_TOO_LARGE = "headers_too_large"
    # Refusals because of who sends the request and what it asks for.
    INVALID_API_KEY = "invalid_api_key"
    PRIORITY_NOT_ALLOWED = "priority_not_allowed"
    HOST_NOT_ALLOWED = "host_not_allowed"
    ORIGIN_NOT_ALLOWED = "origin_not_allowed"
    MODEL_NOT_FOUND = "model_not_found"
    FILE_NOT_FOUND = "file_not_found"
    BATCH_NOT_FOUND = "batch_not_found"
    BATCHES_NOT_ENABLED = "batches_not_enabled"
    ONLY_BATCHES = "only_batches"
    ONLY_POOLING = "only_pooling"
    BATCH_HAS_ENDED = "batch_has_ended"
    UNKNOWN_URL = "unknown_url"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    # Refusals of an operator's order.
    WORKER_NOT_FOUND = "worker_not_found"
    NOT_SPLIT = "not_split"
    WORKER_DRAINING = "worker_draining"
    SAME_ROLE = "same_role"
    LAST_WORKER = "last_worker"
    # the load
    TOO_MANY_REQUESTS = "too_many_requests"
    TENANT_REQUESTS_FULL = "tenant_requests_full"
    QUEUE_FULL = "queue_full"
    TENANT_QUEUE_FULL = "tenant_queue_full"
    QUEUE_TOO_LONG = "queue_too_long"
    DISPLACED = "displaced"
    TENANT_PREPARATION_FULL = "tenant_preparation_full"
    PREPARATION_FULL = "preparation_full"
    PREPARATION_TIMEOUT = "preparation_timeout"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    TENANT_CONNECTIONS_FULL = "tenant_connections_full"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    PROMPT_ABOVE_RATE = "prompt_above_rate"
    BODY_MEMORY_FULL = "body_memory_full"
    ANSWER_MEMORY_FULL = "answer_memory_full"
    TOO_MANY_UPLOADS = "too_many_uploads"
    TOO_MANY_BATCHES = "too_many_batches"
    TENANT_STORAGE_FULL = "tenant_storage_full"
    STORAGE_FULL = "storage_full"
    STORAGE_FAILED = "storage_failed"
    OVERLOADED = "overloaded"
    OUT_OF_MEMORY = "out_of_memory"
    # the service
    NO_WORKERS = "no_workers"
    WORKER_LOST = "worker_lost"
    NOT_CONTINUABLE = "not_continuable"
    KV_TRANSFER_FAILED = "kv_transfer_failed"
    SERVER_SHUTTING_DOWN = "server_shutting_down"
    REQUEST_QUARANTINED = "request_quarantined"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    INTERNAL_ERROR = "internal_error"


class Party(StrEnum):
    """Who brings a failure about. Only the service's failures are missed SLOs."""

    CLIENT = "client"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class FailureRule:
    """The HTTP status of a reason, whether its client may retry, and whose fault it is.

    `retry_after_s` is after how many seconds the client may send the same request again; None: it should not. `code` is
    the code for clients and metrics, if it differs from the reason's own name. `party` must be given for a 429; for
    any other status None means what the status says: a 4xx is the client's fault, a 5xx the service's.
    """

    status: int
    retry_after_s: float | None = None
    code: str = ""
    party: Party | None = None

    @property
    def is_clients_fault(self) -> bool:
        """Whether the client brought the failure about, and not the service."""
        if self.party is None:
            return self.status < 500 and self.status != TOO_MANY_REQUESTS
        return self.party is Party.CLIENT


# Retry-After in seconds while a worker restarts: about the time that a restart takes.
RESTART_HINT_S = 5.0
# Retry-After in seconds while the speed of the queue is not known yet.
UNKNOWN_WAIT_S = 2.0

RULES: dict[FailureReason, FailureRule] = {
    FailureReason.INVALID_HTTP: FailureRule(400),
    FailureReason.INVALID_JSON: FailureRule(400),
    FailureReason.INVALID_VALUE: FailureRule(400),
    FailureReason.MISSING_REQUIRED_PARAMETER: FailureRule(400),
    FailureReason.UNRECOGNIZED_REQUEST_ARGUMENT: FailureRule(400),
    FailureReason.UNSUPPORTED_PARAMETER: FailureRule(400),
    FailureReason.INVALID_SCHEMA: FailureRule(400),
    FailureReason.INVALID_GRAMMAR: FailureRule(400),
    # What it bans, and its grammar, leave no token to choose.
    FailureReason.NO_TOKEN_LEFT: FailureRule(400),
    FailureReason.CONTEXT_LENGTH_EXCEEDED: FailureRule(400),
    FailureReason.BODY_INCOMPLETE: FailureRule(400),
    FailureReason.BODY_TIMEOUT: FailureRule(408),
    FailureReason.REQUEST_TOO_LARGE: FailureRule(413),
    FailureReason.REQUEST_TOO_COMPLEX: FailureRule(400),
    FailureReason.PREPARATION_OUT_OF_MEMORY: FailureRule(413, code="request_too_complex"),
    FailureReason.UNSUPPORTED_MEDIA_TYPE: FailureRule(415),
    FailureReason.HEADERS_TOO_LARGE: FailureRule(431),
    FailureReason.INVALID_API_KEY: FailureRule(401),
    FailureReason.PRIORITY_NOT_ALLOWED: FailureRule(403),
    FailureReason.HOST_NOT_ALLOWED: FailureRule(403),
    FailureReason.ORIGIN_NOT_ALLOWED: FailureRule(403),
    FailureReason.MODEL_NOT_FOUND: FailureRule(404),
    FailureReason.FILE_NOT_FOUND: FailureRule(404),
    FailureReason.BATCH_NOT_FOUND: FailureRule(404),
    FailureReason.BATCHES_NOT_ENABLED: FailureRule(404),
    FailureReason.ONLY_BATCHES: FailureRule(404),
    FailureReason.ONLY_POOLING: FailureRule(404),
    FailureReason.BATCH_HAS_ENDED: FailureRule(409),
    FailureReason.UNKNOWN_URL: FailureRule(404),
    FailureReason.METHOD_NOT_ALLOWED: FailureRule(405),
    FailureReason.WORKER_NOT_FOUND: FailureRule(404),
    FailureReason.NOT_SPLIT: FailureRule(409),
    FailureReason.WORKER_DRAINING: FailureRule(409),
    FailureReason.SAME_ROLE: FailureRule(409),
    FailureReason.LAST_WORKER: FailureRule(409),
    FailureReason.TOO_MANY_REQUESTS: FailureRule(429, UNKNOWN_WAIT_S, party=Party.SERVICE),
    FailureReason.TENANT_REQUESTS_FULL: FailureRule(
        429, UNKNOWN_WAIT_S, code="too_many_requests", party=Party.CLIENT
    ),
    FailureReason.QUEUE_FULL: FailureRule(429, UNKNOWN_WAIT_S, party=Party.SERVICE),
    FailureReason.TENANT_QUEUE_FULL: FailureRule(429, UNKNOWN_WAIT_S, code="queue_full", party=Party.CLIENT),
    FailureReason.QUEUE_TOO_LONG: FailureRule(429, UNKNOWN_WAIT_S, party=Party.SERVICE),
    # Its tenant has more than its share.
    FailureReason.DISPLACED: FailureRule(429, UNKNOWN_WAIT_S, party=Party.CLIENT),
    FailureReason.TENANT_PREPARATION_FULL: FailureRule(429, 1.0, code="overloaded", party=Party.CLIENT),
    FailureReason.PREPARATION_FULL: FailureRule(503, 1.0, code="overloaded"),
    FailureReason.PREPARATION_TIMEOUT: FailureRule(503, code="overloaded"),
    FailureReason.TOO_MANY_CONNECTIONS: FailureRule(503),
    FailureReason.TENANT_CONNECTIONS_FULL: FailureRule(
        429, 1.0, code="too_many_connections", party=Party.CLIENT
    ),
    FailureReason.RATE_LIMIT_EXCEEDED: FailureRule(429, 1.0, party=Party.CLIENT),
    # It never fits into the tokens per minute of its key.
    FailureReason.PROMPT_ABOVE_RATE: FailureRule(429, code="rate_limit_exceeded", party=Party.CLIENT),
    FailureReason.BODY_MEMORY_FULL: FailureRule(503, 1.0),
    # Its client asks for more at once than there is memory for.
    FailureReason.ANSWER_MEMORY_FULL: FailureRule(503, party=Party.CLIENT),
    FailureReason.TOO_MANY_UPLOADS: FailureRule(429, 1.0, party=Party.CLIENT),
    FailureReason.TOO_MANY_BATCHES: FailureRule(429, 60.0, party=Party.CLIENT),
    FailureReason.TENANT_STORAGE_FULL: FailureRule(413, party=Party.CLIENT),
    FailureReason.STORAGE_FULL: FailureRule(507),
    FailureReason.STORAGE_FAILED: FailureRule(500),
    FailureReason.OVERLOADED: FailureRule(503, 1.0),
    FailureReason.OUT_OF_MEMORY: FailureRule(503, 1.0),
    FailureReason.NO_WORKERS: FailureRule(503, RESTART_HINT_S),
    FailureReason.WORKER_LOST: FailureRule(503, RESTART_HINT_S),
    # Its worker is gone, and no other one can continue its answer exactly.
    FailureReason.NOT_CONTINUABLE: FailureRule(503, 1.0),
    FailureReason.KV_TRANSFER_FAILED: FailureRule(503, 1.0),
    FailureReason.SERVER_SHUTTING_DOWN: FailureRule(503, 2.0),
    # The request itself is what workers crash on.
    FailureReason.REQUEST_QUARANTINED: FailureRule(500, party=Party.CLIENT),
    FailureReason.DEADLINE_EXCEEDED: FailureRule(504),
    FailureReason.INTERNAL_ERROR: FailureRule(500),
}

# Refusals by the rates of an API key, however much room there is.
RATE_REASONS = frozenset({FailureReason.RATE_LIMIT_EXCEEDED, FailureReason.PROMPT_ABOVE_RATE})


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A request is refused, or has failed.

    `message` is for the client, `param` the invalid field. `wait_s` is how long the client should wait before it tries
    again, if a better value than the rule's is known. `cause` is for the log only: a worker's text, which the client
    must not see. All texts are shortened to their bounds and are printable, also those that came over the wire.
    """

    reason: FailureReason
    message: str
    param: str | None = None
    wait_s: float | None = None
    cause: str = ""

    def __post_init__(self) -> None:
        # The class is frozen, so that nobody can exchange a text for one that is not cut.
        put = object.__setattr__
        put(self, "message", shorten_text(self.message, MAX_MESSAGE_CHARS))
        put(self, "cause", shorten_text(self.cause, MAX_MESSAGE_CHARS))
        if self.param is not None:
            put(self, "param", shorten_text(self.param, MAX_PARAM_CHARS))

    @property
    def status(self) -> int:
        """The HTTP status."""
        return RULES[self.reason].status

    @property
    def code(self) -> str:
        """The stable name for clients, metrics and logs."""
        return RULES[self.reason].code or self.reason.value

    @property
    def kind(self) -> str:
        """OpenAI's `type`, which follows from the status."""
        return ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    @property
    def retry_after_s(self) -> float | None:
        """After how many seconds the client may send the request again; None if it should not."""
        return RULES[self.reason].retry_after_s if self.wait_s is None else self.wait_s

    @property
    def client_may_retry(self) -> bool:
        """Whether the client may send the same request again."""
        return self.retry_after_s is not None

    @property
    def is_clients_fault(self) -> bool:
        """Whether the client brought the failure about, so that it is no missed SLO."""
        return RULES[self.reason].is_clients_fault

    @property
    def is_overload(self) -> bool:
        """Whether the service had no room for the request, as opposed to a fault of the request."""
        return self.status in OVERLOAD_STATUSES and self.reason not in RATE_REASONS

    def error_body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error object, always with all four keys."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
