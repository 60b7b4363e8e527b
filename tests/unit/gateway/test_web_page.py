"""The page at `/`: the same for everybody, small, and under a policy that allows its own style and script only."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from services.gateway.page.web_page import FOLDER, SCRIPT, SECTIONS, render_page

MAX_BYTES = 60_000


class Reader(HTMLParser):
    """Collects tags with their attributes, ids, and the texts of style and script."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("style", "script") and data.strip():
            self.texts.setdefault(self.tags[-1][0], data)


def parsed() -> Reader:
    reader = Reader()
    reader.feed(render_page(needs_key=True).body.decode())
    return reader


def test_the_policy_allows_exactly_this_style_and_this_script() -> None:
    policy = dict(
        part.split(" ", 1) for part in render_page(False).headers["content-security-policy"].split("; ")
    )
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        digest = base64.b64encode(hashlib.sha256(parsed().texts[tag].encode()).digest()).decode()
        assert policy[rule] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "'none'"
    assert "unsafe" not in str(policy)


def test_nothing_comes_from_elsewhere_and_no_markup_runs_code() -> None:
    body = render_page(needs_key=False).body
    assert len(body) <= MAX_BYTES
    for tag, attributes in parsed().tags:
        assert tag not in ("img", "iframe", "object", "base")
        for name, value in attributes.items():
            assert name != "style" and not name.startswith("on") and name not in ("src", "action")
            assert name != "href" or (value or "").startswith(("#", "data:image/svg+xml,"))
    assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"") and b"https://" not in body


def test_the_script_never_parses_markup() -> None:
    script = (FOLDER / SCRIPT).read_text(encoding="utf-8")
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc",
                 "localStorage", "sessionStorage", "cookie"):  # fmt: skip
        assert sink not in script, sink


def test_every_id_that_the_script_uses_is_there() -> None:
    script = (FOLDER / SCRIPT).read_text(encoding="utf-8")
    used = set(re.findall(r'(?:byId|body|show)\("([a-z-]+)"', script))
    there = {attributes["id"] for _, attributes in parsed().tags if "id" in attributes}
    assert used <= there and {section.id for section in SECTIONS} <= used


def test_it_says_whether_a_key_is_needed_and_nothing_else_differs() -> None:
    with_key, without = render_page(True), render_page(False)
    changed = with_key.body.replace(b'data-needs-key="true"', b'data-needs-key="false"')
    assert changed == without.body and with_key.headers["etag"] != without.headers["etag"]


@pytest.mark.parametrize(
    ("sent", "known"), [("", False), ('"x"', False), ("*", True), ("W/{}", True), ('"x", {}', True)]
)
def test_a_browser_that_has_it_need_not_get_it_again(sent: str, known: bool) -> None:
    page = render_page(False)
    assert page.is_known(sent.format(page.headers["etag"])) == known
