"""The operators' page at `/`: one HTML document with its style and its script, which loads nothing else.

The document is the same for everybody and holds no data. Its script asks `/status` with the key that the visitor types.
The content security policy allows exactly this style and this script, by their hashes, and calls to this server.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

import jinja2

TEMPLATE, STYLE, SCRIPT = "page.html", "page.css", "page.js"
FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class PageSection:
    """A section of the page that the script fills, hidden while there is nothing to show in it.

    `scrolls` makes it reachable by key.
    """

    id: str
    title: str
    wide: bool = False
    scrolls: bool = True


# They follow the playground, in this order.
SECTIONS = (
    PageSection("service", "Service", wide=True, scrolls=False),
    PageSection("workers", "Pools and workers", wide=True),
    PageSection("latency", "TTFT and TPOT as measured, last 15 minutes"),
    PageSection("slo", "Attainment and burn, last 15 minutes"),
    PageSection("traffic", "Traffic and queue, last 15 minutes", scrolls=False),
    PageSection("handoff", "Hand-off"),
    PageSection("plan", "Plan, and why", wide=True, scrolls=False),
    PageSection("kv", "KV", wide=True),
    PageSection("errors", "Last errors", wide=True),
    PageSection("events", "Workers that came and went", wide=True),
)


@dataclass(frozen=True, slots=True)
class WebPage:
    """The document, and the headers that it is sent with."""

    body: bytes
    headers: dict[str, str]

    def is_known(self, if_none_match: str) -> bool:
        """Whether a client that sends this `If-None-Match` has the document already."""
        tags = (tag.strip().removeprefix("W/") for tag in if_none_match.split(","))
        return any(tag in ("*", self.headers["etag"]) for tag in tags)


def render_page(needs_key: bool, root_path: str = "") -> WebPage:
    """The page of a gateway. With `needs_key`, its script waits for a key before it asks for the status.

    `root_path` is what a proxy strips from the paths of requests: without it, the script asks beside the page.
    """
    style, script = ((FOLDER / name).read_text(encoding="utf-8") for name in (STYLE, SCRIPT))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    body = (
        environment.get_template(TEMPLATE)
        .render(needs_key=needs_key, root_path=root_path, sections=SECTIONS, style=style, script=script)
        .encode()
    )
    return WebPage(
        body,
        {
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": content_policy(style, script),
            # The browser asks again each time, and gets a 304 while the page is the same.
            "cache-control": "no-cache",
            "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
        },
    )


def content_policy(style: str, script: str) -> str:
    """The content security policy: nothing but this style, this script, calls to this server, and the inline icon.

    Trusted types are required and none exist, so a browser that knows them refuses to parse any text as markup.
    """
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash_source(script)}",
            f"style-src {_hash_source(style)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hash_source(text: str) -> str:
    """The source expression for inline content (CSP level 3)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
