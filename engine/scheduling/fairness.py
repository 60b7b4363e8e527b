"""Fair sharing between tenants: virtual token counters (VTC).

The tenant that has received the fewest tokens is served next. A tenant that was idle restarts `CREDIT_TOKENS` below the
least served active tenant, so about one prompt of it goes ahead of others; longer idleness earns nothing more. A tenant
that had received more than this level keeps its count, so leaving and returning gains nothing either.
Source: Sheng et al., "Fairness in Serving Large Language Models" (VTC), with input and output tokens weighed alike.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

# Tokens by which a tenant that returns may be ahead of the others; about one step's worth.
CREDIT_TOKENS = 512.0


class VirtualTokenCounter:
    """Tokens served per tenant, relative to each other. Up to `limit` absent tenants are remembered."""

    def __init__(self, limit: int = 1024) -> None:
        self.limit = limit
        # Number of sequences of each present tenant.
        self._present: Counter[str] = Counter()
        # Tokens that each present tenant has received.
        self._tokens: dict[str, float] = {}
        # Tokens of the least served present tenant, without the credit that newcomers get.
        self._level = 0.0
        self._absent: OrderedDict[str, float] = OrderedDict()

    def enter_tenant(self, tenant: str) -> None:
        """Count a sequence of `tenant` in. A tenant that was absent gets a new count of tokens, as described above."""
        self._present[tenant] += 1
        if self._present[tenant] == 1:
            self._level = max(self._level, min(self._tokens.values(), default=0.0))
            start = self._level - CREDIT_TOKENS if self._tokens else 0.0
            self._tokens[tenant] = max(self._absent.pop(tenant, start), start)

    def leave_tenant(self, tenant: str) -> None:
        """One sequence of `tenant` is gone. Raises KeyError if it had none."""
        left = self._present[tenant] - 1
        if left > 0:
            self._present[tenant] = left
            return
        del self._present[tenant]
        self._absent[tenant] = self._tokens.pop(tenant)
        if len(self._absent) > self.limit:
            self._absent.popitem(last=False)
        if not self._present:
            # Without competitors all counts may restart at 0.
            self._absent.clear()
            self._level = 0.0

    def charge_tokens(self, tenant: str, tokens: int) -> None:
        """Count `tokens` that were computed for a present tenant."""
        self._tokens[tenant] += tokens

    def served_tokens(self, tenant: str) -> float:
        """The tokens that a present tenant has received."""
        return self._tokens[tenant]
