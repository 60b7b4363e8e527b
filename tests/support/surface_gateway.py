"""What clients and operators of a gateway see: routes, `/openapi.json`, metrics, and the lines of the request log.

No gateway runs. Its parts get stand-ins for all that they are given, so that this file need not know what that is.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector, CollectorRegistry

from diptych.slo import Slo
from services.gateway.api_routes import ApiRoutes
from services.gateway.metrics.prometheus import GatewayMetrics
from services.gateway.metrics.request_log import RequestLog
from services.gateway.preparation.ignored_fields import IgnoredFields
from tests.support.surface_structs import example_calls

VERSION = "<version>"
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
Kinds = dict[str, set[str]]


def with_stand_ins(cls: type[Any], **given: Any) -> Any:
    """An object of `cls` that was given `given`, and stand-ins for everything else."""
    names = inspect.signature(cls).parameters
    return cls(**{name: given.get(name, MagicMock()) for name in names})


def routes() -> list[Any]:
    """Every route that a gateway can have."""
    return [*with_stand_ins(ApiRoutes, version=VERSION, root_path="").make_routes()]


def describe_routes() -> list[str]:
    """One line for each path, with its methods."""
    methods = defaultdict[str, set[str]](set)
    for route in routes():
        methods[route.path] |= route.methods
    return [f"{path} {' '.join(sorted(names))}" for path, names in sorted(methods.items())]


def openapi_document() -> Any:
    """What `GET /openapi.json` answers."""
    route = next(route for route in routes() if route.path == "/openapi.json")
    return json.loads(asyncio.run(route.endpoint(MagicMock())).body)


def describe_metrics(packages: frozenset[str]) -> list[str]:
    """One line for each metric with its type, labels and buckets. `packages` are those of the product."""
    registry = GatewayMetrics(Slo(ttft_s=1.0, tpot_s=0.1)).registry
    IgnoredFields(registry)
    # The module that runs the gateway imports all that it can collect from.
    importlib.import_module("services.gateway.__main__")
    for cls in _subclasses(Collector):
        if cls.__module__.partition(".")[0] in packages:
            registry.register(with_stand_ins(cls))
    declared = dict(_declared_labels(registry))
    lines = []
    for family in registry.collect():
        # A metric that was declared says its labels; one that is collected may have them in its samples only.
        own = declared.get(family.name)
        labels = own._labelnames if own is not None else _family_labels(family)
        name = f"{family.name}_total" if family.type == "counter" else family.name
        bounds = [f"{bound:.12g}" for bound in getattr(own, "_upper_bounds", [])]
        buckets = f" buckets {' '.join(bounds)}" if bounds else ""
        lines.append(f"{name} {family.type} [{', '.join(sorted(labels))}]{buckets}")
    return sorted(lines)


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for one in cls.__subclasses__():
        yield one
        yield from _subclasses(one)


def _declared_labels(registry: CollectorRegistry) -> Iterator[tuple[str, Any]]:
    for one in list(registry._collector_to_names):
        if isinstance(one, MetricWrapperBase):
            yield one._name, one


def _family_labels(family: Metric) -> set[str]:
    seen = {label for sample in family.samples for label in sample.labels if label != "le"}
    return {*getattr(family, "_labelnames", ()), *seen}


def describe_request_log() -> list[str]:
    """One line for each event with all fields that its line may have; `?` marks those of some kinds of the event."""
    events = defaultdict[str, list[dict[str, Any]]](list)
    for line in _log_everything():
        events[line["event"]].append(line)
    return [f"{event}: {', '.join(_describe_fields(lines))}" for event, lines in sorted(events.items())]


def _log_everything() -> Iterator[dict[str, Any]]:
    """The lines that a log writes about each thing that it can be asked to write, if all of it is known."""
    names = [name for name in vars(RequestLog) if not name.startswith("_")]
    for name in names:
        for given in example_calls(getattr(RequestLog, name)):
            written = MagicMock()
            getattr(RequestLog(written, clock=lambda: 0.5), name)(**given)
            for call in written.write.call_args_list:
                yield json.loads(call.args[0])


def _describe_fields(lines: list[dict[str, Any]]) -> Iterator[str]:
    for name in sorted({name for line in lines for name in line} - {"event"}):
        kinds = {_json_type(line[name]) for line in lines if name in line}
        optional = "" if all(name in line for line in lines) else "?"
        yield f"{name}{optional} {'|'.join(sorted(kinds))}"


def _json_type(value: Any) -> str:
    if isinstance(value, list):
        return f"[{'|'.join(sorted(set(map(_json_type, value))))}]"
    return "object" if isinstance(value, dict) else JSON_TYPES[type(value)]
