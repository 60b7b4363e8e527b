"""What `/metrics` says about each key of the file: its name is the label, never the key.

A name that has left the file is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.keys.named_keys import NamedKeys


class KeyCollector(Collector):
    """A Prometheus collector of what each name has used."""

    def __init__(self, keys: NamedKeys) -> None:
        self._keys = keys

    def describe(self) -> Iterable[Metric]:
        """No metrics in advance, since the labels depend on the file."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Requests, tokens and refusals by name."""
        requests = CounterMetricFamily(
            "diptych:key_requests", "Requests admitted, by the name of the key", labels=["key"]
        )
        tokens = CounterMetricFamily(
            "diptych:key_tokens", "Tokens counted: prompt, generation", labels=["key", "kind"]
        )
        refused = CounterMetricFamily(
            "diptych:key_refused", "Refusals by rate: requests, tokens", labels=["key", "limit"]
        )
        for rates in self._keys.rates:
            name, use = rates.key.name, rates.use
            requests.add_metric([name], use.requests)
            tokens.add_metric([name, "prompt"], use.prompt_tokens)
            tokens.add_metric([name, "generation"], use.generated_tokens)
            for limit, count in use.refused.items():
                refused.add_metric([name, limit], count)
        yield from (requests, tokens, refused)
