"""Crash quarantine: finds the requests that crash workers, and refuses them (pure).

    crash ──▶ suspects: all requests that were open there. At most one suspect runs per worker, until
      ├─ it has delivered a few tokens more than at the crash ──▶ cleared
      └─ its worker dies again, with no other suspect there ──▶ held until the worker is back and reports how it ended
            ├─ "crashed"           ──▶ quarantined; all other requests that ran beside it are cleared
            ├─ "killed" or "alive" ──▶ not its fault: it may run again; but repeated kills without progress
            │                          count as a crash (see MAX_EXCUSED_KILLS)
            └─ no report in time   ──▶ it may run again, but the next such death quarantines it

A worker that was killed from outside clears its suspects as soon as it is back, so that requests do not wait long
behind each other when machines fail for other reasons.

Bulk work may be at a worker for hours without being computed. So kills are not held against it if other requests were
open there as well, and online suspects do not wait for suspects of bulk work.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from diptych.request import Request, SamplingParams, token_bytes

# A request that delivers this many tokens after a crash does not crash its worker at once.
CLEAR_TOKENS = 3
QUARANTINE_S = 600.0
MAX_QUARANTINED = 1024
# How a worker's last life ended, as the worker reports when it is back. Two more values have no constant: "alive" (the
# same process came back; only its connection was lost) and "" (unknown). After "killed" and "alive" the requests that
# were open at the worker are no longer suspected.
CRASHED, KILLED = "crashed", "killed"
# A request may be present at this many kills in a row, without progress in between, before they count as crashes. The
# kernel's out-of-memory killer sends SIGKILL too, so the request may be the cause.
MAX_EXCUSED_KILLS = 4


@dataclass(frozen=True, slots=True)
class QuarantineFindings:
    """`released` requests may run again without restrictions; `quarantined` requests must be failed."""

    released: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()


@dataclass(eq=False, slots=True)
class WorkerDeath:
    """One death of a worker. `cause` is None until it is known; `waited` once the time to wait for it is over.

    If it was a kill, it is not held against the requests in `excused`.
    """

    worker: str
    at_s: float
    requests: set[str]
    excused: frozenset[str] = frozenset()
    cause: str | None = None
    waited: bool = False


@dataclass(slots=True)
class SuspectRequest:
    """`delivered` tokens at the latest death; `deaths_alone` are those at which it was the only suspect there."""

    delivered: int
    deaths: list[WorkerDeath] = field(default_factory=list)
    deaths_alone: list[WorkerDeath] = field(default_factory=list)

    @property
    def is_held(self) -> bool:
        """Whether its next attempt waits until the cause of a death is known."""
        if len(self.deaths) < 2 or self.deaths[-1] not in self.deaths_alone:
            return False
        return any(death.cause is None and not death.waited for death in self.deaths)

    @property
    def is_guilty(self) -> bool:
        """Whether a worker crashed while this was the only suspect there, and an earlier death supports it.

        An earlier death supports it if it was a crash, or if its worker did not report a cause in time.
        """
        if not self.deaths or self.is_held:
            return False
        reasons = [death for death in self.deaths if death.cause == CRASHED or death.waited]
        return len(reasons) >= 2 and reasons[-1].cause == CRASHED and reasons[-1] in self.deaths_alone

    @property
    def is_stubborn(self) -> bool:
        """Whether its worker died again with no other suspect there, after such a death stayed unexplained."""
        before = [death for death in self.deaths_alone[:-1] if death.waited and death.cause is None]
        return bool(before) and len(self.deaths) > 2 and self.deaths[-1] in self.deaths_alone


@dataclass(slots=True)
class KillCount:
    """Kills of workers that had the request open, since its last progress; `delivered` tokens at the latest kill."""

    delivered: int
    count: int = 0


class CrashQuarantine:
    """All suspects and the deaths behind the suspicion.

    `at(worker)` names the requests that run on a worker or are planned for it. `recovery_s` bounds the wait for the
    cause of a death, `quarantine_s` is how long a question is refused. `is_bulk(request)` tells bulk work.
    """

    def __init__(
        self,
        at: Callable[[str], Iterable[str]],
        *,
        recovery_s: float = 15.0,
        quarantine_s: float = QUARANTINE_S,
        is_bulk: Callable[[str], bool] = lambda request: False,
        salt: bytes | None = None,
    ) -> None:
        self._is_bulk = is_bulk
        self._at, self._recovery_s, self._quarantine_s = at, recovery_s, quarantine_s
        self._salt = secrets.token_bytes(16) if salt is None else salt
        self._suspects: dict[str, SuspectRequest] = {}
        self._kills: dict[str, KillCount] = {}
        # Deaths of unknown cause, the oldest first.
        self._open_deaths: list[WorkerDeath] = []
        self._refused_until_s: dict[bytes, float] = {}
        self.num_quarantined = 0

    # ---- queries

    def may_run(self, request: str, worker: str) -> bool:
        """Whether the request may be sent to this worker, or planned for it, now."""
        suspect = self._suspects.get(request)
        if suspect is None:
            return True
        if suspect.is_held:
            return False
        bulk = self._is_bulk(request)
        beside = (other for other in self._at(worker) if other != request and self.is_suspected(other))
        return all(self._is_bulk(other) and not bulk for other in beside)

    def is_suspected(self, request: str) -> bool:
        """Whether the request was open at a worker's death and has not been cleared."""
        return request in self._suspects

    def is_held(self, request: str) -> bool:
        """Whether the request may run nowhere until the cause of a death is known."""
        return request in self._suspects and self._suspects[request].is_held

    def __len__(self) -> int:
        return len(self._suspects)

    # ---- events

    def record_crash(self, worker: str, requests: Mapping[str, int], now_s: float) -> QuarantineFindings:
        """A worker died with these requests open there; the values are the tokens that each has delivered.

        A request is quarantined at once if it was the only suspect there and an earlier such death stayed unexplained.
        """
        if not requests:
            return QuarantineFindings()
        excused = frozenset(filter(self._is_bulk, requests)) if len(requests) > 1 else frozenset()
        death = WorkerDeath(worker, now_s, set(requests), excused)
        self._open_deaths.append(death)
        under = [name for name in requests if self.is_suspected(name)]
        lonely = under if len(under) == 1 else list(requests) if len(requests) == 1 else []
        for name, delivered in requests.items():
            suspect = self._suspects.setdefault(name, SuspectRequest(delivered))
            suspect.delivered = max(suspect.delivered, delivered)
            suspect.deaths.append(death)
            if name in lonely:
                suspect.deaths_alone.append(death)
        return self._blame([name for name in lonely if self._suspects[name].is_stubborn])

    def record_progress(self, request: str, delivered: int) -> bool:
        """Note that a request has delivered `delivered` tokens in all. Returns True if that has just cleared it."""
        suspect = self._suspects.get(request)
        if suspect is None or delivered < suspect.delivered + CLEAR_TOKENS:
            return False
        self.forget_request(request)
        return True

    def record_cause(self, worker: str, ended: str) -> QuarantineFindings:
        """A worker is back and reports how it ended: "crashed", "killed", "alive" (it never ended), "" (unknown)."""
        deaths = [death for death in self._open_deaths if death.worker == worker]
        if not deaths or not ended:
            return QuarantineFindings()
        excessive = self._count_kills(deaths) if ended == KILLED else set()
        if excessive:
            return self._blame_kills(worker, deaths, excessive)
        self._open_deaths = [death for death in self._open_deaths if death.worker != worker]
        touched = sorted(set().union(*(death.requests for death in deaths)))
        held = [name for name in touched if self.is_held(name)]
        for death in deaths:
            death.cause = ended
        return self._update_findings(touched, held, [] if ended == CRASHED else self._clear(deaths))

    def _count_kills(self, deaths: list[WorkerDeath]) -> set[str]:
        """Count these deaths as kills; returns the requests that were present at more than MAX_EXCUSED_KILLS in a
        row, and are not excused.
        """
        excessive = set()
        for name in set().union(*(death.requests - death.excused for death in deaths)):
            delivered = self._suspects[name].delivered
            kills = self._kills.setdefault(name, KillCount(delivered))
            if delivered >= kills.delivered + CLEAR_TOKENS:
                kills.count = 0
            kills.delivered, kills.count = delivered, kills.count + 1
            if kills.count > MAX_EXCUSED_KILLS:
                excessive.add(name)
        return excessive

    def _blame_kills(self, worker: str, deaths: list[WorkerDeath], excessive: set[str]) -> QuarantineFindings:
        """Treat these kills as crashes caused by the requests in `excessive`; clear all other requests of them."""
        touched = set().union(*(death.requests for death in deaths))
        held = [name for name in sorted(touched) if self.is_held(name)]
        self._open_deaths = [death for death in self._open_deaths if death.worker != worker]
        cleared = self._clear(deaths, touched - excessive)
        for death in deaths:
            death.cause = CRASHED
            death.requests &= excessive
        return self._update_findings(sorted(excessive), held, cleared)

    def expire_waits(self, now_s: float) -> QuarantineFindings:
        """Decide about the requests of workers that have not reported a cause within `recovery_s`."""
        over = [
            death
            for death in self._open_deaths
            if not death.waited and now_s - death.at_s >= self._recovery_s
        ]
        if not over:
            return QuarantineFindings()
        touched = sorted(set().union(*(death.requests for death in over)))
        held = [name for name in touched if self.is_held(name)]
        for death in over:
            death.waited = True
        return self._update_findings(touched, held, [])

    def forget_request(self, request: str) -> None:
        """The request has ended or was cleared: forget all about it. Idempotent."""
        self._kills.pop(request, None)
        self._clear_suspicion(request)

    def _clear_suspicion(self, request: str) -> None:
        """Remove the suspicion against a request; the kills that it was present at still count."""
        suspect = self._suspects.pop(request, None)
        for death in suspect.deaths if suspect else ():
            death.requests.discard(request)
        self._open_deaths = [death for death in self._open_deaths if death.requests]

    # ---- quarantine

    def fingerprint_question(self, request: Request) -> bytes:
        """The fingerprint of one request's question (`fingerprint_questions`)."""
        return self.fingerprint_questions([request])[0]

    def fingerprint_questions(self, requests: Sequence[Request]) -> list[bytes]:
        """Per request 16 bytes that identify the question: its prompt and sampling parameters without the seed, which
        is often random. A prompt that several requests share is hashed once.
        """
        prompts = {id(request.prompt): request.prompt for request in requests}
        digests = {name: self._digest(token_bytes(prompt)) for name, prompt in prompts.items()}
        texts = (_encode_sampling(request.sampling) for request in requests)
        return [
            self._digest(digests[id(request.prompt)] + text)
            for request, text in zip(requests, texts, strict=True)
        ]

    def _digest(self, text: bytes) -> bytes:
        """A digest of `text` that nobody else can compute."""
        return hashlib.blake2b(text, digest_size=16, key=self._salt).digest()

    def ban_question(self, fingerprint: bytes, now_s: float) -> None:
        """Refuse this question from now on, for `quarantine_s` seconds."""
        self._refused_until_s.pop(fingerprint, None)
        self._refused_until_s[fingerprint] = now_s + self._quarantine_s
        if len(self._refused_until_s) > MAX_QUARANTINED:
            del self._refused_until_s[next(iter(self._refused_until_s))]

    @property
    def has_bans(self) -> bool:
        """Whether any question is refused now; if not, no fingerprint needs to be computed."""
        return bool(self._refused_until_s)

    def is_banned(self, fingerprint: bytes, now_s: float) -> bool:
        """Whether this question was recently found to crash workers."""
        until_s = self._refused_until_s.get(fingerprint)
        if until_s is not None and until_s <= now_s:
            del self._refused_until_s[fingerprint]
            return False
        return until_s is not None

    # ---- findings

    def _update_findings(self, touched: list[str], held: list[str], cleared: list[str]) -> QuarantineFindings:
        """Re-examine the requests in `touched` after news of a death.

        `held` are those that were held before the news.
        """
        findings = self._blame([name for name in touched if self._is_guilty(name)])
        free = [name for name in held if self.is_suspected(name) and not self.is_held(name)]
        return QuarantineFindings(tuple(sorted({*cleared, *free, *findings.released})), findings.quarantined)

    def _is_guilty(self, request: str) -> bool:
        suspect = self._suspects.get(request)
        return suspect is not None and suspect.is_guilty

    def _blame(self, guilty: list[str]) -> QuarantineFindings:
        """These requests are blamed for the crash; all others that ran beside them are cleared."""
        deaths = [death for name in guilty for death in self._suspects[name].deaths]
        for name in guilty:
            self.forget_request(name)
        self.num_quarantined += len(guilty)
        return QuarantineFindings(tuple(self._clear(deaths)), tuple(guilty))

    def _clear(self, deaths: list[WorkerDeath], among: set[str] | None = None) -> list[str]:
        """Nobody, or no request in `among`, is suspected for these deaths any more; returns the requests cleared."""
        self._open_deaths = [death for death in self._open_deaths if death not in deaths]
        present: set[str] = set().union(*(death.requests for death in deaths))
        touched = sorted(present if among is None else present & among)
        for name in touched:
            suspect = self._suspects[name]
            suspect.deaths = [death for death in suspect.deaths if death not in deaths]
            suspect.deaths_alone = [death for death in suspect.deaths_alone if death not in deaths]
        cleared = [name for name in touched if not self._suspects[name].deaths]
        for name in cleared:
            self._clear_suspicion(name)
        return cleared


def _encode_sampling(sampling: SamplingParams) -> bytes:
    """Sampling parameters without the seed; equal parameters give equal bytes."""
    plain = msgspec.to_builtins(msgspec.structs.replace(sampling, seed=0, seeded=True), str_keys=True)
    return msgspec.json.encode(plain, order="deterministic")
