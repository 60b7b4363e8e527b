"""Who has been served how much: virtual token counters, one per tenant.

Whoever has the least service in tokens comes next. A tenant that was away starts where the least served of those
present is, so that being idle saves up no claim; whatever it had received beyond that still counts against it.
Source: Sheng et al., "Fairness in Serving Large Language Models" (VTC), with a token in and a token out weighed alike.
"""

from __future__ import annotations

from collections import Counter, OrderedDict


class Service:
    """Tokens served by tenant, on a scale of its own; `limit` bounds how many absent ones are remembered."""

    def __init__(self, limit: int = 1024) -> None:
        self.limit = limit
        self._present: Counter[str] = Counter()  # sequences that are here
        self._tokens: dict[str, float] = {}  # of those present
        self._absent: OrderedDict[str, float] = OrderedDict()

    def enter(self, tenant: str) -> None:
        """One more sequence of `tenant` is here."""
        self._present[tenant] += 1
        if self._present[tenant] == 1:
            least = min(self._tokens.values(), default=0.0)
            self._tokens[tenant] = max(self._absent.pop(tenant, least), least)

    def leave(self, tenant: str) -> None:
        """One of its sequences is gone. Raises KeyError if none was here."""
        left = self._present[tenant] - 1
        if left > 0:
            self._present[tenant] = left
            return
        del self._present[tenant]
        self._absent[tenant] = self._tokens.pop(tenant)
        if len(self._absent) > self.limit:
            self._absent.popitem(last=False)
        if not self._present:  # nobody is left to be unfair to: the scale begins anew
            self._absent.clear()

    def charge(self, tenant: str, tokens: int) -> None:
        """`tokens` were computed for a tenant that is here."""
        self._tokens[tenant] += tokens

    def of(self, tenant: str) -> float:
        """What a tenant that is here has received."""
        return self._tokens[tenant]
