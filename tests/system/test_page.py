"""The operators' page in a real browser (Debian's Chromium), over a real deployment with a key.

What a real deployment cannot show at will (50 workers, hostile names and texts) is put into the page by answering its
calls in the browser.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployment import Served, serve_parts, wait_for

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (extra 'test')")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

KEY = "sk-page-0123456789abcdef"
MAX_BYTES = 60_000
WAIT_MS = 60_000.0
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
# Whatever runs of it sets `ran`.
HOSTILE = '<img src=x onerror="window.ran=1"><script>window.ran=1</script><svg onload="window.ran=1">'
SCREENSHOT = Path(__file__).resolve().parents[2] / ".run" / "page.png"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    slos = ("--slo-ttft-ms", "5000", "--slo-tpot-ms", "500")
    with serve_parts("--prefill", "1", "--decode", "2", "--api-key", KEY, *slos) as running:
        yield running


@pytest.fixture(scope="module")
def fresh_status(served: Served) -> dict[str, Any]:
    """The status before any request was served."""
    wait_for(lambda: served.status()["ready"])
    status: dict[str, Any] = served.status()
    return status


@pytest.fixture(scope="module")
def browser(served: Served, fresh_status: dict[str, Any]) -> Iterator[Any]:
    # After the deployment, whose start needs an event loop of its own in this thread.
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium
        chromium.close()


@dataclass
class Visit:
    """A page that is open, and what its browser noticed."""

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def paths(self) -> list[str]:
        return ["/" + url.split("/", 3)[3] for url in self.requests if not url.startswith("data:")]

    def type_key(self, key: str = KEY) -> None:
        self.page.get_by_label("Key", exact=True).fill(key)
        self.page.get_by_role("button", name="Use").click()

    def state(self, value: str) -> None:
        """Wait until the page says so."""
        self.page.locator(f"#state[data-state={value}]").wait_for(timeout=WAIT_MS)


@pytest.fixture
def visit(browser: Any, served: Served) -> Iterator[Callable[..., Any]]:
    """Opens pages. At the end: nothing went elsewhere, and no error or warning was printed that was not expected."""
    visits: list[Visit] = []

    @contextmanager
    def opened(
        answers: dict[str, Callable[[Any], None]] | None = None, expected: str = "", **options: Any
    ) -> Iterator[Visit]:
        context = browser.new_context(viewport={"width": 1400, "height": 900}, **options)
        context.set_default_timeout(WAIT_MS)
        one = Visit(context.new_page())
        visits.append(one)
        one.page.on("request", lambda request: one.requests.append(request.url))
        one.page.on("pageerror", lambda error: one.errors.append(str(error)))
        one.page.on(
            "console",
            lambda said: (
                one.errors.append(said.text)
                if said.type in ("error", "warning") and not (expected and expected in said.text)
                else None
            ),
        )
        for path, answer in (answers or {}).items():
            one.page.route(f"**/{path}", answer)
        one.page.goto(served.url + "/")
        try:
            yield one
        finally:
            context.close()

    yield opened
    assert visits
    for one in visits:
        assert one.errors == []
        assert [url for url in one.requests if not url.startswith((served.url + "/", "data:image/"))] == []


def answer_json(body: Any) -> Callable[[Any], None]:
    """Answers a call of the page with this body."""
    text = json.dumps(body)
    return lambda route: route.fulfill(status=200, content_type="application/json", body=text)


def test_the_frame_is_empty_without_a_key_and_a_wrong_key_is_refused(visit: Any, served: Served) -> None:
    with visit(expected="401") as one:
        one.state("empty")
        assert "asks for a key" in one.page.locator("#state").inner_text()
        assert one.paths() == ["/"]
        assert served.status()["workers"][0]["worker"] not in one.page.content()
        one.type_key("sk-wrong")
        one.state("refused")
        assert "401" in one.page.locator("#state").inner_text()
        assert one.paths() == ["/", "/status"]
        one.type_key()
        one.state("ready")
        assert one.page.locator("#workers tr[data-state=up]").count() == 3


# The boxes of the page that are shown, with their texts but the titles, and the number of pictures in them.
BOXES = """() => [...document.querySelectorAll('main section')].filter((one) => !one.hidden).map((one) => {
  const title = one.querySelector('h2').innerText;
  return [one.id, one.innerText.replace(title, '').trim(), one.querySelectorAll('tbody tr, svg rect').length];
})"""


def test_with_nothing_served_no_box_is_empty(visit: Any, fresh_status: dict[str, Any]) -> None:
    with visit({"status": answer_json(fresh_status)}) as one:
        page = one.page
        page.set_viewport_size({"width": 1280, "height": 800})
        assert [name for name, _, _ in page.evaluate(BOXES)] == ["playground"]
        one.type_key()
        one.state("ready")
        page.locator("#workers tbody tr").first.wait_for()
        boxes = page.evaluate(BOXES)
        assert [name for name, _, _ in boxes][:3] == ["playground", "service", "workers"]
        assert {"plan", "kv", "handoff"} <= {name for name, _, _ in boxes}
        assert {"errors", "slo", "latency", "traffic"}.isdisjoint(name for name, _, _ in boxes)
        for name, text, marks in boxes:
            assert text and "No data" not in text, name
            assert marks or name in ("playground", "service", "plan"), name
        # Nothing has to be scrolled to ask a question and to read the answer.
        playground = page.locator("#playground").bounding_box()
        assert playground["y"] + playground["height"] <= 800
        assert page.locator("#service").bounding_box()["y"] < 800
        # Every chart that is shown has something in it.
        assert page.evaluate(
            "[...document.querySelectorAll('svg.chart')].every((one) => one.childElementCount)"
        )


def test_without_slos_latencies_are_shown_as_measured(visit: Any, served: Served) -> None:
    with served.client() as client:
        for _ in range(3):
            client.completions.create(
                model="tiny", max_tokens=8, prompt="def", extra_body={"ignore_eos": True}
            )
    state = served.status()
    measured = state["history"]["latencies"]
    assert measured["ttft"]["whole"]["answers"] >= 3 and measured["tpot"]["whole"]["answers"] >= 3
    assert 0 < measured["ttft"]["whole"]["p50_s"] <= measured["ttft"]["whole"]["p90_s"]
    state["objectives"], state["history"]["objectives"] = {"ttft_s": None, "tpot_s": None}, {}
    with visit({"status": answer_json(state)}) as one:
        one.type_key()
        one.state("ready")
        rows = one.page.locator("#latency tbody tr")
        rows.first.wait_for()
        assert [row.locator("td").first.inner_text() for row in rows.all()] == ["TTFT", "TPOT"]
        assert " ms" in rows.first.inner_text() or " s" in rows.first.inner_text()
        assert "median" in one.page.locator("#service").inner_text()
        assert one.page.locator("#slo").is_hidden()


def test_it_is_small_and_shows_everything(visit: Any, served: Served) -> None:
    with served.client() as client:
        for number in range(6):
            # Long enough to leave cached prefixes behind.
            content = f"What is {number} in Python? " * 20
            client.chat.completions.create(
                model="tiny", max_tokens=8 + number, messages=[{"role": "user", "content": content}]
            )
    assert served.get("/v1/models/none").status_code == 404
    with visit() as one:
        sizes: list[int] = []
        asked: list[Any] = []
        one.page.on("response", lambda answer: sizes.append(len(answer.body())))
        one.page.on("request", lambda call: asked.append(call))
        one.page.reload()
        one.type_key()
        one.state("ready")
        one.page.locator("#workers svg").first.wait_for()
        one.page.locator("#slo svg").first.wait_for()
        # The document and the first answer to its call.
        assert len(sizes) >= 2 and sum(sizes[:2]) <= MAX_BYTES
        text = one.page.locator("main").inner_text()
        for word in ("prefill-0", "decode-1", "Burn", "raw", "model_not_found", "Wanted: 1 prefill", "req_"):
            assert word in text, word
        assert one.page.locator("#handoff rect").count() == 2
        links = one.page.locator("#handoff rect title").all_text_contents()
        assert any("B moved" in link and not link.endswith(" 0 B moved") for link in links)
        one.page.locator("#workers tr[data-state=up] td:nth-child(3)", has_text="%").first.wait_for()
        (status_call, *_) = [call for call in asked if call.url.endswith("/status")]
        assert status_call.headers["cache-control"] == "max-age=1"
        assert one.page.locator("#slo svg rect").count() > 0
        one.page.locator("#kv .f-cached[width]:not([width='0'])").first.wait_for()
        assert KEY not in one.page.content()
        status = served.get("/status").text
        assert KEY not in status and "in Python?" not in status


def test_the_keyboard_suffices_and_the_playground_streams(visit: Any) -> None:
    with visit() as one:
        page, lengths = one.page, "window.lengths"
        page.evaluate(
            f"""{lengths} = new Set(); new MutationObserver(() => {lengths}.add(
            document.getElementById('answer').textContent.length)).observe(
            document.getElementById('answer'), {{childList: true, subtree: true, characterData: true}})"""
        )
        tab_to(page, "key")
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        one.state("ready")
        tab_to(page, "prompt")
        page.keyboard.press("Control+Enter")
        page.get_by_text("ended by").wait_for()
        assert page.evaluate(f"{lengths}.size") >= 3
        assert page.locator("#answer").inner_text() and "req_" in page.locator("#answer-state").inner_text()
        tab_to(page, "max-tokens")
        page.keyboard.press("Control+a")
        page.keyboard.type("1000000")
        tab_to(page, "send")
        page.keyboard.press("Enter")
        assert not page.evaluate("document.getElementById('max-tokens').validity.valid")


NEVER_ANSWERS = """() => { window.fetch = (path, options) => new Promise((_, reject) =>
  options.signal.addEventListener('abort', () => reject(options.signal.reason))); }"""


def test_a_stream_can_be_stopped_by_key(visit: Any) -> None:
    with visit() as one:
        one.type_key()
        one.state("ready")
        one.page.evaluate(NEVER_ANSWERS)
        tab_to(one.page, "prompt")
        one.page.keyboard.press("Control+Enter")
        one.page.get_by_text("Waiting for the first token").wait_for()
        one.page.keyboard.press("Escape")
        one.page.get_by_text("Stopped.").wait_for()
        assert one.page.locator("#send").is_enabled() and one.page.locator("#stop").is_disabled()


def tab_to(page: Any, name: str) -> None:
    """Press Tab until the element with this id has the focus, which must be visible."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == name:
            break
    focused = page.evaluate(
        "[document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]"
    )
    assert focused == [name, "solid"]


def test_a_killed_worker_shows(visit: Any, served: Served) -> None:
    with visit() as one:
        one.type_key()
        one.page.locator("#workers tr[data-worker=decode-1][data-state=up]").wait_for()
        known = one.page.locator("#events tr[data-event=lost][data-worker=decode-1]").count()
        served.worker("decode-1").kill()
        killed_s = time.monotonic()
        one.page.locator("#events tr[data-event=lost][data-worker=decode-1]").nth(known).wait_for()
        # Measured, not asserted.
        print(f"a killed worker is shown after {time.monotonic() - killed_s:.1f} s")
        # Its supervisor starts it again.
        one.page.locator("#workers tr[data-worker=decode-1][data-state=up]").wait_for()
    wait_for(lambda: served.status()["ready"] and len(served.status()["links"]) == 2)


def test_a_worker_that_is_gone_keeps_its_row(visit: Any, served: Served) -> None:
    state = served.status()
    gone = state["workers"].pop()
    lost = {
        "age_s": 1.0,
        "what": "lost",
        "worker": gone["worker"],
        "role": gone["role"],
        "reason": "it ended",
    }
    state["fleet_events"].insert(0, lost)
    with visit({"status": answer_json(state)}) as one:
        one.type_key()
        row = one.page.locator(f"#workers tr[data-worker={gone['worker']}][data-state=lost]")
        row.wait_for()
        assert "it ended" in row.inner_text()
        assert "0 of 1 prefill workers" in one.page.locator("#workers").inner_text()


def hostile_copy(value: Any) -> Any:
    """The same JSON with markup in every text that is not looked up by the page."""
    if isinstance(value, dict):
        kept = {"role", "state", "what"}
        return {name: one if name in kept else hostile_copy(one) for name, one in value.items()}
    if isinstance(value, list):
        return [hostile_copy(one) for one in value]
    return value + HOSTILE if isinstance(value, str) else value


def test_markup_from_outside_never_runs(visit: Any, served: Served) -> None:
    assert served.get("/v1/models/none").status_code == 404
    state = hostile_copy(served.status() | {"reasons": ["one"]})
    counts = {name: {HOSTILE: 1} for name in ("target", "decisions", "alarms")}
    replanner = counts | {"reason": HOSTILE, "expected_attainment": 0.9, "actions": {HOSTILE: {HOSTILE: 1}}}
    state["plan"] |= {"note": HOSTILE, "replanner": replanner}
    state["links_out"] = [{"source": HOSTILE, "target": HOSTILE, "why": HOSTILE, "again_s": 1.0}]
    state["workers"][0]["kv_classes"] = {HOSTILE: {"slabs": 1, "chunk_bytes": 1}}
    state["fleet_events"].append(
        {"age_s": 1.0, "what": "lost", "worker": HOSTILE, "role": "decode", "reason": HOSTILE}
    )
    chunks = [{"choices": [{"delta": {"content": HOSTILE}, "finish_reason": HOSTILE}]}]
    stream = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"
    answers = [
        {"status": 200, "content_type": "text/event-stream", "body": stream},
        {
            "status": 404,
            "content_type": "application/json",
            "body": json.dumps({"error": {"message": HOSTILE}}),
        },
    ]
    calls = {
        "status": answer_json(state),
        "v1/chat/completions": lambda route: route.fulfill(**answers.pop(0)),
    }
    with visit(calls, expected="404 (Not Found)") as one:
        page = one.page
        one.type_key()
        one.state("ready")
        page.locator("#errors code").first.wait_for()
        for awaited in ("ended by", "404: "):
            page.get_by_role("button", name="Send").click()
            page.locator("#answer-state", has_text=awaited).wait_for()
            assert HOSTILE in page.locator("#playground").inner_text()
        for section in ("service", "plan", "workers", "handoff", "kv", "errors", "events"):
            assert HOSTILE in page.locator(f"#{section}").inner_text() or section == "service", section
        assert page.evaluate("window.ran") is None
        assert page.evaluate("document.querySelectorAll('main img, main script, main [onload]').length") == 0


def test_the_page_refuses_to_parse_markup(visit: Any) -> None:
    with visit(expected="TrustedHTML") as one, pytest.raises(sync_api.Error, match="TrustedHTML"):
        one.page.evaluate("document.body.innerHTML = '<b>x</b>'")


CONTRASTS = """() => {
  const linear = (one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).map((one) => linear(Number(one) / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    const own = getComputedStyle(node).backgroundColor;
    return own !== 'rgba(0, 0, 0, 0)' ? own : behind(node.parentElement);
  };
  const texts = 'h1, h2, th, td, dt, dd, p, label, input, button, textarea, .bad, .good';
  return [...document.querySelectorAll(texts)].map((node) => {
    const [one, two] = [light(getComputedStyle(node).color), light(behind(node))];
    return (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_can_be_read(visit: Any, scheme: str) -> None:
    with visit(color_scheme=scheme) as one:
        one.type_key()
        one.state("ready")
        one.page.locator("#workers td").first.wait_for()
        background = one.page.evaluate("getComputedStyle(document.body).backgroundColor")
        channels = [int(part) for part in background.removeprefix("rgb(").removesuffix(")").split(",")]
        assert (sum(channels) > 384) == (scheme == "light")
        contrasts = one.page.evaluate(CONTRASTS)
        # WCAG 2.2, 1.4.3
        assert len(contrasts) > 50 and min(contrasts) >= 4.5


def crowd(state: dict[str, Any], num_each: int) -> dict[str, Any]:
    """A status like `state`, with this many prefill and decode workers, all linked."""
    by_role = {one["role"]: one for one in state["workers"]}
    workers = [
        by_role[role] | {"worker": f"{role}-{number}", "pid": 1000 + number}
        for role in ("prefill", "decode")
        for number in range(num_each)
    ]
    links = [
        {"source": f"prefill-{source}", "target": f"decode-{target}", "transport": "nixl", "gb_per_s": 1.0 + target,
         "latency_us": 30.0}
        for source in range(num_each) for target in range(num_each)
    ]  # fmt: skip
    plan = state["plan"] | {"workers": {"prefill": num_each, "decode": num_each}}
    return state | {"workers": workers, "links": links, "plan": plan}


@pytest.mark.parametrize("width", [1400, 420])
def test_fifty_workers_can_be_read(visit: Any, served: Served, width: int) -> None:
    state = crowd(served.status(), 25)
    with visit({"status": answer_json(state)}) as one:
        page = one.page
        page.set_viewport_size({"width": width, "height": 900})
        one.type_key()
        page.locator("#workers tr[data-worker=decode-24]").wait_for()
        rows = page.locator("#workers tbody tr")
        assert rows.count() == 50 and page.locator("#handoff rect").count() == 625
        # Only parts of the page scroll sideways, never the page; no text is tiny, and no two rows overlap.
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert (
            page.evaluate(
                "Math.min(...[...document.querySelectorAll('td, th, text, p')]"
                ".map((one) => parseFloat(getComputedStyle(one).fontSize)))"
            )
            >= 11
        )
        boxes = [row.bounding_box() for row in rows.all()[:25]]
        assert all(
            above["y"] + above["height"] <= below["y"] + 1
            for above, below in zip(boxes, boxes[1:], strict=False)
        )
        names = [row.locator("td").first.inner_text() for row in rows.all()[:3]]
        assert names == ["prefill-0", "prefill-1", "prefill-2"]


def test_it_asks_only_while_it_is_visible(visit: Any, served: Served) -> None:
    state = answer_json(served.status())
    with visit({"status": state}) as one:
        one.page.clock.install()
        one.page.reload()
        one.type_key()
        one.state("ready")
        show = (
            "(value) => { Object.defineProperty(document, 'visibilityState', {value, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange')); }"
        )
        one.page.evaluate(show, "hidden")
        one.page.clock.run_for(2000)
        seen = one.paths().count("/status")
        one.page.clock.run_for(60_000)
        assert one.paths().count("/status") == seen
        with one.page.expect_request("**/status"):
            one.page.evaluate(show, "visible")
        with one.page.expect_request("**/status"):
            one.page.clock.run_for(2000)


def test_a_gateway_that_is_away_is_asked_again(visit: Any, served: Served) -> None:
    state, away = answer_json(served.status()), [True]
    with visit({"status": lambda route: route.abort() if away[0] else state(route)}, expected="ERR_") as one:
        one.type_key()
        one.state("failed")
        assert "is old" in one.page.locator("#state").inner_text()
        away[0] = False
        one.state("ready")


def test_a_picture_of_it_is_taken(visit: Any) -> None:
    """`.run/page.png`; the one in the documents is made of it, with fewer colours."""
    with visit() as one:
        one.type_key()
        one.state("ready")
        one.page.get_by_role("button", name="Send").click()
        one.page.get_by_text("ended by").wait_for()
        SCREENSHOT.parent.mkdir(exist_ok=True)
        one.page.set_viewport_size({"width": 1400, "height": 900})
        one.page.screenshot(path=str(SCREENSHOT), full_page=True)
        assert SCREENSHOT.read_bytes().startswith(b"\x89PNG")
