"""Which requests are suspected of killing workers, and which have been caught at it (pure).

    crash ──▶ suspects: all that were open there. They run one at a time per worker, until
      ├─ they have delivered a few tokens more than at the crash ──▶ cleared
      └─ one dies again, alone under suspicion ──▶ held until the worker is back and says how it ended
            ├─ "crashed"           ──▶ quarantined; what was beside it is cleared
            ├─ "killed" or "alive" ──▶ that death was not its doing: it goes on
            └─ no word for a while ──▶ it goes on, but the next such death quarantines it

A worker that was killed from outside clears its suspects as soon as it is back, so that nothing waits in a lane for
long when machines fail for reasons of their own.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from diptych.request import Request

CLEAR_TOKENS = 3  # delivered after a crash, they show that the request does not crash at once
QUARANTINE_S = 600.0
MAX_QUARANTINED = 1024
CRASHED = "crashed"  # of a worker's end; "killed" and "alive" acquit, "" tells nothing


@dataclass(frozen=True, slots=True)
class Verdicts:
    """`released` may run again (without a lane, or after having been held); `quarantined` must be failed."""

    released: tuple[str, ...] = ()
    quarantined: tuple[str, ...] = ()


@dataclass(eq=False, slots=True)
class Death:
    """One end of a worker. `cause` is None until it is known; `waited` once nobody waits for it any more."""

    worker: str
    at_s: float
    requests: set[str]
    cause: str | None = None
    waited: bool = False


@dataclass(slots=True)
class Suspect:
    """`delivered` at the latest death; `alone` are the deaths at which nobody else there was under suspicion."""

    delivered: int
    deaths: list[Death] = field(default_factory=list)
    alone: list[Death] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """Whether its next attempt waits for word on how workers ended."""
        if len(self.deaths) < 2 or self.deaths[-1] not in self.alone:
            return False
        return any(death.cause is None and not death.waited for death in self.deaths)

    @property
    def guilty(self) -> bool:
        """Whether a worker crashed when it was there alone under suspicion, and it had been suspected with reason.

        An earlier death is a reason if it was a crash, or if its worker has not come back to tell.
        """
        if not self.deaths or self.held:
            return False
        reasons = [death for death in self.deaths if death.cause == CRASHED or death.waited]
        return len(reasons) >= 2 and reasons[-1].cause == CRASHED and reasons[-1] in self.alone

    @property
    def stubborn(self) -> bool:
        """Whether it dies alone once more, after word on such a death had been waited for in vain."""
        before = [death for death in self.alone[:-1] if death.waited and death.cause is None]
        return bool(before) and len(self.deaths) > 2 and self.deaths[-1] in self.alone


class Docket:
    """The books on suspects. `at(worker)` names the requests that are, or are planned to be, at a worker."""

    def __init__(
        self,
        at: Callable[[str], Iterable[str]],
        *,
        recovery_s: float = 15.0,
        quarantine_s: float = QUARANTINE_S,
        salt: bytes | None = None,
    ) -> None:
        self._at, self._recovery_s, self._quarantine_s = at, recovery_s, quarantine_s
        self._salt = secrets.token_bytes(16) if salt is None else salt
        self._suspects: dict[str, Suspect] = {}
        self._open: list[Death] = []  # of unknown cause, oldest first
        self._refused_until_s: dict[bytes, float] = {}
        self.num_quarantined = 0

    # ---- what is known

    def may_run(self, request: str, worker: str) -> bool:
        """Whether it may be sent to (or planned for) this worker now."""
        suspect = self._suspects.get(request)
        if suspect is None:
            return True
        beside = (other for other in self._at(worker) if other != request)
        return not suspect.held and not any(self.suspected(other) for other in beside)

    def suspected(self, request: str) -> bool:
        """Whether it was open at a worker's death and has not been cleared."""
        return request in self._suspects

    def held(self, request: str) -> bool:
        """Whether it may run nowhere until more is known."""
        return request in self._suspects and self._suspects[request].held

    def __len__(self) -> int:
        return len(self._suspects)

    # ---- what happens

    def crash(self, worker: str, requests: Mapping[str, int], now_s: float) -> Verdicts:
        """A worker's life ended with these requests open there, each with its number of tokens delivered.

        Quarantines at once a request that dies alone under suspicion after such a death was left unexplained.
        """
        if not requests:
            return Verdicts()
        death = Death(worker, now_s, set(requests))
        self._open.append(death)
        under = [name for name in requests if self.suspected(name)]
        lonely = under if len(under) == 1 else list(requests) if len(requests) == 1 else []
        for name, delivered in requests.items():
            suspect = self._suspects.setdefault(name, Suspect(delivered))
            suspect.delivered = max(suspect.delivered, delivered)
            suspect.deaths.append(death)
            if name in lonely:
                suspect.alone.append(death)
        return self._convict([name for name in lonely if self._suspects[name].stubborn])

    def ran(self, request: str, delivered: int) -> bool:
        """It has delivered so many tokens in all; True if that has just cleared it."""
        suspect = self._suspects.get(request)
        if suspect is None or delivered < suspect.delivered + CLEAR_TOKENS:
            return False
        self.forget(request)
        return True

    def cause(self, worker: str, ended: str) -> Verdicts:
        """A worker is back and says how it ended: "crashed", "killed", "alive" (it never did), or "" (no word)."""
        deaths = [death for death in self._open if death.worker == worker]
        if not deaths or not ended:
            return Verdicts()
        self._open = [death for death in self._open if death.worker != worker]
        touched = sorted(set().union(*(death.requests for death in deaths)))
        held = [name for name in touched if self.held(name)]
        for death in deaths:
            death.cause = ended
        return self._decide(touched, held, [] if ended == CRASHED else self._acquit(deaths))

    def tick(self, now_s: float) -> Verdicts:
        """Decides about those who have waited long enough for word of a worker."""
        over = [death for death in self._open if not death.waited and now_s - death.at_s >= self._recovery_s]
        if not over:
            return Verdicts()
        touched = sorted(set().union(*(death.requests for death in over)))
        held = [name for name in touched if self.held(name)]
        for death in over:
            death.waited = True
        return self._decide(touched, held, [])

    def forget(self, request: str) -> None:
        """It has ended, or was cleared: nothing is known of it any more. Idempotent."""
        suspect = self._suspects.pop(request, None)
        for death in suspect.deaths if suspect else ():
            death.requests.discard(request)
        self._open = [death for death in self._open if death.requests]

    # ---- quarantine

    def fingerprint(self, request: Request) -> bytes:
        """16 bytes that are equal for the same question: prompt and sampling, but for the seed, which may be drawn."""
        sampling = msgspec.structs.replace(request.sampling, seed=0)
        text = msgspec.json.encode(msgspec.to_builtins(sampling, str_keys=True), order="deterministic")
        prompt = array("q", request.prompt).tobytes()
        return hashlib.blake2b(prompt + text, digest_size=16, key=self._salt).digest()

    def ban(self, fingerprint: bytes, now_s: float) -> None:
        """Refuse this question from now on, for a while."""
        self._refused_until_s.pop(fingerprint, None)
        self._refused_until_s[fingerprint] = now_s + self._quarantine_s
        if len(self._refused_until_s) > MAX_QUARANTINED:
            del self._refused_until_s[next(iter(self._refused_until_s))]

    @property
    def bans(self) -> bool:
        """Whether any question was caught lately; if not, none needs its fingerprint taken."""
        return bool(self._refused_until_s)

    def refuses(self, fingerprint: bytes, now_s: float) -> bool:
        """Whether this question has been caught crashing workers lately."""
        until_s = self._refused_until_s.get(fingerprint)
        if until_s is not None and until_s <= now_s:
            del self._refused_until_s[fingerprint]
            return False
        return until_s is not None

    # ---- books

    def _decide(self, touched: list[str], held: list[str], cleared: list[str]) -> Verdicts:
        """What follows for `touched`, of whom `held` were held, now that more is known of a death."""
        verdicts = self._convict([name for name in touched if self._is_guilty(name)])
        free = [name for name in held if self.suspected(name) and not self.held(name)]
        return Verdicts(tuple(sorted({*cleared, *free, *verdicts.released})), verdicts.quarantined)

    def _is_guilty(self, request: str) -> bool:
        suspect = self._suspects.get(request)
        return suspect is not None and suspect.guilty

    def _convict(self, guilty: list[str]) -> Verdicts:
        """They did it: whoever was beside them did not."""
        deaths = [death for name in guilty for death in self._suspects[name].deaths]
        for name in guilty:
            self.forget(name)
        self.num_quarantined += len(guilty)
        return Verdicts(tuple(self._acquit(deaths)), tuple(guilty))

    def _acquit(self, deaths: list[Death]) -> list[str]:
        """Nobody is suspected for these deaths any more. Returns who may run freely again."""
        self._open = [death for death in self._open if death not in deaths]
        touched = sorted(set().union(*(death.requests for death in deaths)))
        for name in touched:
            suspect = self._suspects[name]
            suspect.deaths = [death for death in suspect.deaths if death not in deaths]
            suspect.alone = [death for death in suspect.alone if death not in deaths]
        cleared = [name for name in touched if not self._suspects[name].deaths]
        for name in cleared:
            self.forget(name)
        return cleared
