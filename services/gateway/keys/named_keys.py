"""The keys of the file of `--keys`, beside those that are set elsewhere: what opens routes, and the rates of each.

    a key ─▶ its digest ─▶ a name ─▶ a tenant, which has the name's files, batches, cached prefixes and rates

The table is replaced as a whole when the file changes. A name that stays keeps what it has, even with another key.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterator, Sequence

from diptych.hashing import hash_fields
from diptych.keys.named_key import NamedKey, digest_key
from services.gateway.http.access_keys import BearerKeys, Headers, presented_key
from services.gateway.keys.key_rates import KeyRates
from services.gateway.openai.tenancy import TENANT_HEX, tenant_of_key


class NamedKeys(BearerKeys):
    """API keys with names, and those of `plain`, which have none.

    A presented key is found by a digest with a secret of this process, so the time that it takes tells nothing.
    """

    def __init__(self, named_keys: Sequence[NamedKey], plain: Collection[str] = ()) -> None:
        super().__init__(plain)
        self.plain_digests = frozenset(map(digest_key, plain))
        self._plain_tenants = frozenset(tenant_of_key(key.encode()) for key in plain)
        self._secret = secrets.token_bytes(32)
        self._by_digest: dict[bytes, NamedKey] = {}
        self._by_tenant: dict[str, KeyRates] = {}
        self.replace_keys(named_keys)

    def replace_keys(self, named_keys: Sequence[NamedKey]) -> None:
        """Accept these keys instead of those before. Names that stay keep what they have used."""
        before = self._by_tenant
        after = dict[str, KeyRates]()
        for key in named_keys:
            tenant = tenant_of_name(key.name)
            after[tenant] = before.get(tenant) or KeyRates(key)
            after[tenant].change_key(key)
        self._by_digest = {self._find_slot(key.digest): key for key in named_keys}
        self._by_tenant = after

    def __len__(self) -> int:
        return super().__len__() + len(self._by_tenant)

    @property
    def rates(self) -> list[KeyRates]:
        """The rates of all names, in the order of the file."""
        return list(self._by_tenant.values())

    @property
    def tenants(self) -> Collection[str]:
        """The tenants whose keys are accepted, as it is whenever it is asked."""
        return _AcceptedTenants(self)

    def accepts_tenant(self, tenant: str) -> bool:
        """Whether a tenant's key is accepted now."""
        return tenant in self._by_tenant or tenant in self._plain_tenants

    @property
    def all_tenants(self) -> frozenset[str]:
        """The tenants of all keys that are accepted now."""
        return self._plain_tenants | self._by_tenant.keys()

    def rates_of_tenant(self, tenant: str) -> KeyRates | None:
        """The rates of a tenant; None if its key has no name."""
        return self._by_tenant.get(tenant)

    def accepts_key(self, presented: bytes) -> bool:
        """Whether `presented` is one of the keys. The time that it takes does not depend on which one."""
        return (self._find_entry(presented) is not None) | super().accepts_key(presented)

    def tenant_of_headers(self, headers: Headers) -> str:
        """The tenant of a request, derived from the name of its accepted key, or from the key if it has no name."""
        key = presented_key(headers)
        entry = self._find_entry(key)
        return tenant_of_key(key) if entry is None else tenant_of_name(entry.name)

    def priority_of_key(self, presented: bytes) -> int | None:
        """The best priority of a key with a name; None of others."""
        entry = self._find_entry(presented)
        return None if entry is None else entry.priority

    def _find_entry(self, presented: bytes) -> NamedKey | None:
        """The entry of a presented key; None if it has no name, or is not accepted."""
        return self._by_digest.get(self._find_slot(hashlib.sha256(presented).digest()))

    def _find_slot(self, digest: bytes) -> bytes:
        """Where the table has the entry of a key with this digest: nobody outside can predict it."""
        return hashlib.blake2b(digest, key=self._secret, digest_size=16).digest()


class _AcceptedTenants(Collection[str]):
    """The tenants of all keys, as they are now."""

    def __init__(self, keys: NamedKeys) -> None:
        self._keys = keys

    def __contains__(self, tenant: object) -> bool:
        return isinstance(tenant, str) and self._keys.accepts_tenant(tenant)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys.all_tenants)

    def __len__(self) -> int:
        return len(self._keys.all_tenants)


def tenant_of_name(name: str) -> str:
    """The tenant that a name stands for, whatever its key. No key's own tenant is the same."""
    return hash_fields(["named tenant", name]).hex()[:TENANT_HEX]
