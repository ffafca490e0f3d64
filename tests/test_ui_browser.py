"""The page in a real headless Chromium: a graph that runs, errors that are redriven, strange messages, both themes."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="starlette is not installed: pip install -e '.[ui]'")

import browser as browsers
from browser import Browser
from ui_server import Page, page_of

import cues
from cues.engine.history import History, Sample, path_of
from cues.operate.shape import shape_of_graph
from cues.testing import run_until_idle

pytestmark = pytest.mark.slow

SHOP = """
import pathlib, time
import cues

graph = cues.Graph("shop", errors="errors", queues={"*": cues.QueueOptions(metadata={"t", "time"})})
graph.source("orders")


@graph.stream("orders", "priced")
def price(order):
    if order["id"] == 3 and not pathlib.Path(__file__).with_name("mended").exists():
        raise ValueError("no price for 3")
    return {**order, "total": 7}


@graph.sink("priced")
def save(order):
    pass
"""

STRANGE = [
    {"text": "<script>alert(1)</script><img src=x onerror=alert(2)><svg onload=alert(3)>"},
    {"q/type": "<b onclick=alert(4)>type</b>", "link": "javascript:alert(5)"},
    {"<img src=x onerror=alert(6)>": "]]></code></pre><iframe srcdoc='<script>alert(7)</script>'>"},
    {"hebrew": "שלום", "override": "\u202eexe.gnp", "nul": "\x00\x1b[31m", "bytes": b"\xff" * 100},
    {"huge": "x" * 3_000_000},
    {"wide": {f"key{n}": n for n in range(20_000)}},
]
DEEP: dict[str, object] = {"leaf": 1}
for _ in range(300):
    DEEP = {"deeper": DEEP}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browsers.need()
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_trouble(browser: Browser) -> Iterator[None]:
    """No dialog, no error of a script, no request to another host."""
    browser.trouble.clear()
    browser.size(1400, 900)
    yield
    # An answer 401 is what a test asked for; live events end when their server does.
    assert not [each for each in browser.trouble if "401" not in each and "/api/events" not in each]


def shop(folder: Path) -> Path:
    path = folder / "shop.py"
    path.write_text(SHOP)
    return path


def test_a_running_graph_is_shown_and_changes_without_a_reload(browser: Browser, tmp_path: Path) -> None:
    """``cues run --ui``: the page follows the messages that another process sends, and ends with the run."""
    command = [sys.executable, "-m", "cues", "run", str(shop(tmp_path)), "--ui=0", "--durability", "process"]
    run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert run.stderr is not None
        line = next(line for line in run.stderr if "Page: " in line)
        threading.Thread(target=lambda: [None for _ in run.stderr or ()], daemon=True).start()
        browser.open("http" + line.partition("http")[2].split('"')[0].strip())
        browser.wait("document.querySelectorAll('svg a').length === 4")
        browser.wait("document.querySelector('#live-text').textContent === 'Live'")
        browser.run("window.unloaded = false; true")
        send = [sys.executable, "-m", "cues", "send", f"{tmp_path / 'shop.py'}#orders"]
        for n in (1, 2, 3):
            subprocess.run([*send, f"id={n}"], check=True, capture_output=True, timeout=120)
        browser.wait("document.querySelector('.problems').innerText.includes('price: 1 failed message')")
        browser.wait("/orders: 3 messages/.test(document.querySelector('svg a.queue title').textContent)")
        assert browser.run("window.unloaded") is False
        browser.run("location.hash = '#/message/priced/0/1'")
        browser.wait("document.querySelector('.lineage')?.innerText.includes('orders 1')")
        browser.wait("document.querySelector('.lineage')?.innerText.includes('shop.save has taken it')")
    finally:
        run.terminate()
        try:
            run.wait(60)
        finally:
            run.kill()
    browser.wait("document.querySelector('#live-text').textContent === 'No connection'")
    browser.trouble.clear()  # the browser says that the server is gone


def test_an_error_is_redriven_from_the_page(browser: Browser, tmp_path: Path) -> None:
    path = shop(tmp_path)
    cues_ = [sys.executable, "-m", "cues"]
    with cues.open(tmp_path / "data" / "shop", durability="process") as store:
        store.queue("orders", metadata={"t", "time"}).appender().write_many([{"id": n} for n in (1, 2, 3)])
    environment = {**os.environ, "CUES_OUTPUT": "json"}
    subprocess.run([*cues_, "run", str(path), "--idle-exit", "0"], check=True, capture_output=True, env=environment)
    (tmp_path / "mended").touch()
    with page_of(tmp_path / "data" / "shop", target=str(path)) as page:
        browser.open(page.url + "#/errors")
        browser.wait("document.querySelectorAll('[aria-label=\"Failed messages\"] tbody tr').length === 1")
        browser.run("document.querySelector('main tbody th a').focus(); true")
        browser.key("Enter", 13)  # by keyboard alone
        browser.wait("document.querySelector('.failure')?.innerText.includes('no price for 3')")
        browser.wait("Boolean(document.querySelector('.failure button'))")
        browser.run("document.querySelector('.failure button').focus(); true")
        browser.key("Enter", 13)
        browser.wait("document.querySelector('.failure .status')?.innerText.startsWith('Redriven')")
        assert [row["text"] for row in page.ask("messages", queue="priced")["messages"]][-1].startswith('{"id": 3')
        browser.run("location.hash = '#/errors'")
        browser.wait("document.querySelector('main').innerText.includes('No failed messages')")


def test_a_link_to_a_failed_message_opens_with_its_buttons(browser: Browser, tmp_path: Path) -> None:
    """An alert has such a link: the overview, which tells what its user may do, is read before the view is drawn."""
    path = shop(tmp_path)
    with cues.open(tmp_path / "data" / "shop", durability="process") as store:
        store.queue("orders", metadata={"t", "time"}).appender().write({"id": 3})
    subprocess.run(
        [sys.executable, "-m", "cues", "run", str(path), "--idle-exit", "0"], check=True, capture_output=True
    )
    with page_of(tmp_path / "data" / "shop", target=str(path)) as page:
        browser.command("Network.setBlockedURLs", urls=["*/api/events"])
        try:
            browser.open(page.url + "#/message/errors/0/1")
            browser.wait("document.querySelector('.failure')?.innerText.includes('no price for 3')")
            assert browser.run("document.querySelector('.failure button')?.innerText") == "Redrive"
        finally:
            browser.command("Network.setBlockedURLs", urls=[])


def test_a_list_that_is_read_again_keeps_the_place_of_the_keyboard(browser: Browser, tmp_path: Path) -> None:
    with cues.open(tmp_path / "store", durability="process") as store:
        appender = store.queue("orders").appender()
        appender.write_many([{"id": n} for n in range(3)])
        with page_of(tmp_path / "store") as page:
            browser.open(page.url + "#/queue/orders")
            browser.wait("document.querySelectorAll('main tbody tr').length === 3")
            browser.run("document.querySelector('.check input').click()")
            browser.run("document.querySelectorAll('main tbody a')[1].focus()")
            appender.write({"id": 3})
            browser.wait("document.querySelectorAll('main tbody tr').length === 4")
            assert browser.run("document.activeElement.getAttribute('href')") == "#/message/orders/0/2"


def test_without_the_token_nothing_is_shown(browser: Browser, tmp_path: Path) -> None:
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("secret").appender().write({"password": "swordfish"})
    with page_of(tmp_path / "store", token="a-token-of-24-characters") as page:
        browser.open(page.url + "#/queue/secret")
        assert "A token is needed" in browser.text() and "swordfish" not in browser.text()
        assert browser.run("fetch('/api/messages?queue=secret').then((answer) => answer.status)") == 401
        browser.run("document.querySelector('#token').value = 'a-token-of-24-characters'; true")
        browser.run("document.querySelector('form').requestSubmit(); true")
        browser.wait("document.querySelector('#live-text')?.textContent === 'Live'")
        assert browser.run("document.cookie") == ""
        assert browser.run("location.search") == ""
        browser.run("location.hash = '#/queue/secret'")
        browser.wait("document.body.innerText.includes('swordfish')")


def test_strange_messages_are_shown_harmlessly(browser: Browser, tmp_path: Path) -> None:
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("strange").appender().write_many([*STRANGE, DEEP])
    with page_of(tmp_path / "store") as page:
        browser.open(page.url + "#/queue/strange")
        browser.wait("document.querySelectorAll('main tbody tr').length === 7")
        for index in range(1, len(STRANGE) + 2):
            browser.run(f"location.hash = '#/message/strange/0/{index}'")
            browser.wait(f"document.querySelector('main h2')?.innerText === 'Message strange {index}'")
            browser.wait("document.querySelector('pre.whole code')?.textContent.length > 10")
            wrong = "main script, main img, main iframe, main b, main svg, main a[href^=javascript]"
            assert browser.run(f"document.querySelectorAll('{wrong}').length") == 0
            assert "\u202e" not in browser.text()
        # The page itself stays usable: a huge message is cut, and its rest is a click away.
        browser.run("location.hash = '#/message/strange/0/5'")
        browser.wait("document.querySelector('main').innerText.includes('of 3,000,0')")


def test_fifty_processors_in_both_themes_and_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    """No box covers another one, names can be read, and a phone scrolls in one direction only."""
    graph = cues.Graph("wide", store=tmp_path / "store", durability="process")
    for lane in range(5):
        graph.source(f"feed{lane}")
        before = f"feed{lane}"
        for place in range(9):
            after = f"stage_{lane}_{place}"
            graph.stream(before, after, id=f"transform_{lane}_{place}")(lambda message: message)
            before = after
    lanes = cues.AnyOf(*(f"stage_{lane}_8" for lane in range(5)))
    graph.stream(lanes, "merged", id="merge_all_lanes")(lambda message: message)
    for sink in range(4):
        graph.sink("merged", id=f"publish-to-the-warehouse-{sink}")(lambda message: None)
    with cues.open(tmp_path / "store", durability="process") as store:
        for lane in range(5):
            store.queue(f"feed{lane}").appender().write_many([{"n": n} for n in range(20)])
    run_until_idle(graph)
    overlaps = """(() => {
        const boxes = [...document.querySelectorAll('svg .box')].map((box) => box.getBoundingClientRect());
        return boxes.flatMap((a, n) => boxes.slice(n + 1).filter((b) =>
            a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)).length;
    })()"""
    heights = "[...document.querySelectorAll('svg text.name')].map((each) => each.getBoundingClientRect().height)"
    with page_of(tmp_path / "store", shape_of_graph(graph)) as page:
        for theme, width, phone in (("light", 1400, False), ("dark", 1400, False), ("light", 390, True)):
            browser.size(width, 900, phone)
            browser.theme(theme, "reduce")
            browser.open(page.url)
            browser.command("Page.reload")
            browser.wait("document.querySelectorAll('svg a.processor').length === 50")
            browser.wait("document.querySelectorAll('main tbody tr').length >= 50")
            browser.picture(tmp_path / f"{theme}-{width}.png")
            assert browser.run(overlaps) == 0
            assert min(browser.run(heights)) > 8
            assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "the page itself scrolls sideways"
            dark = browser.run("getComputedStyle(document.documentElement).backgroundColor") == "rgb(18, 23, 24)"
            assert dark == (theme == "dark")
        named = "[...document.querySelectorAll('a, button, input, select')].every((each) => each.textContent.trim()"
        named += " || each.labels?.length || each.getAttribute('aria-label'))"
        assert browser.run(named)
        browser.theme("light")


def hour_of(store: Path, graph: cues.Graph) -> None:
    """Write a history: an hour with a wave, a backlog, failures and an outage, and days before it."""
    now = time.time()
    with History(path_of(store, graph.id), write=True) as history:
        for number, node in enumerate(graph.plan().running):
            chance = random.Random(number)
            for back in (*range(20 * 86400, 3600, -1800), *range(3600, 0, -10)):
                wave = 1.2 + math.sin((now - back) / 700 + number) + chance.random() / 4
                waiting = int(max(0.0, 900 * math.sin(back / 600 + number)))
                failed, away_s = 3 * (chance.random() < 0.02), 10.0 * (1200 < back < 1300)
                sample = Sample(int(200 * wave), int(190 * wave), failed, waiting, 0.004 * wave, 0.03 * wave, away_s)
                history.add(node.id, now - back, sample)


def wait_for_view(browser: Browser, page: Page, view: str) -> None:
    browser.open(page.url + view)
    browser.command("Page.reload")
    live = "document.querySelector('#live-text')?.textContent === 'Live'"
    browser.wait(f"Boolean({live} && document.querySelector('main h2') && !document.querySelector('main[aria-busy]'))")


CLIPPED = """(() => {
    const outside = [...document.querySelectorAll('.scroll')].filter((each) => each.scrollWidth > each.clientWidth + 1);
    const page = document.documentElement;
    return outside.map((each) => each.getAttribute('aria-label')).concat(page.scrollWidth > innerWidth ? ['page'] : []);
})()"""


def test_what_was_is_shown_in_every_width_and_theme(browser: Browser, tmp_path: Path) -> None:
    """Sparklines, charts and groups of errors. No table is cut off, also on a phone; and texts do not overlap."""
    graph = cues.Graph("shop", store=tmp_path / "store", durability="process", errors="errors")
    graph.source("orders")

    @graph.stream("orders", "priced")
    def price(order: dict[str, int]) -> dict[str, int]:
        if order["id"] % 9 == 0:
            raise ValueError(f"no price for order {order['id']} in the list of the warehouse that was read an hour ago")
        if order["id"] % 31 == 0:
            raise KeyError("country")
        return order

    price.__module__, price.__qualname__ = "shop", "price"  # as the pictures of the docs show it
    graph.sink("priced", id="ship")(lambda order: None)
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("orders").appender().write_many([{"id": n} for n in range(1, 301)])
    run_until_idle(graph)
    hour_of(tmp_path / "store", graph)
    first = "document.querySelector('figure.chart svg')"
    with page_of(tmp_path / "store", shape_of_graph(graph), target=str(tmp_path / "store")) as page:
        for (width, theme), view in itertools.product(
            ((390, "light"), (390, "dark"), (1024, "light"), (1440, "light"), (1440, "dark")),
            ("", "#/processor/shop.price", "#/errors", "#/queues", "#/queue/orders", "#/message/errors/0/2"),
        ):
            browser.size(width, 900, width == 390)
            browser.theme(theme, "reduce")
            wait_for_view(browser, page, view)
            assert browser.run(CLIPPED) == [], (width, view)
            if view == "":
                browser.wait("document.querySelectorAll('svg .spark .line').length >= 2")
                overlaps = """[...document.querySelectorAll('svg a.processor')].filter((box) => {
                    const [spark, failed] = ['.spark', '.failed'].map((each) =>
                        box.querySelector(each).getBoundingClientRect());
                    return failed.width && spark.right > failed.left + 1;
                }).length"""
                assert browser.run(overlaps) == 0
            if view == "#/errors":
                browser.wait("document.querySelectorAll('.scroll[aria-label=Causes] tbody tr').length === 2")
                cells = "[...document.querySelectorAll('td.{}')].every((each) => each.getBoundingClientRect().{})"
                assert browser.run(cells.format("message", "right <= innerWidth"))
                assert browser.run(cells.format("when", "height < 60")), "on one line"
        browser.theme("light")
        browser.size(1180, 420)
        wait_for_view(browser, page, "#/errors")
        make(browser, "page-errors.png")
        browser.size(1180, 640)
        wait_for_view(browser, page, "#/processor/shop.price")
        browser.wait(f"{first}.querySelectorAll('path.line').length === 2")
        make(browser, "page-history.png")
        browser.run(f"{first}.focus(); true")
        for _ in range(30):  # the last periods are those in which this test runs
            browser.key("ArrowLeft", 37)
        browser.wait("document.querySelector('figure.chart .value').textContent.includes(' in, ')")
        browser.run("document.querySelector('[aria-label=Time] button:last-child').click(); true")
        browser.wait("/^\\d\\d-\\d\\d /.test(document.querySelector('figure.chart .axis').innerText)")
        path_of(tmp_path / "store", "shop").unlink()
        browser.run("document.querySelector('[aria-label=Time] button:first-child').click(); true")
        browser.wait("document.querySelector('main').innerText.includes('There are no samples of this time')")


def test_a_narrow_picture_has_the_table_at_its_side(browser: Browser, tmp_path: Path) -> None:
    """A chain is drawn from top to bottom: the half beside it is used where the table fits, and nowhere else."""
    graph = cues.Graph("chain", store=tmp_path / "store", durability="process")
    graph.source("q0")
    for n in range(9):
        graph.stream(f"q{n}", f"q{n + 1}", id=f"step-{n}")(lambda message: message)
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("q0").appender().write({"n": 1})
    run_until_idle(graph)
    with page_of(tmp_path / "store", shape_of_graph(graph)) as page:
        for width, beside in ((390, False), (700, False), (1440, True)):
            browser.size(width, 900, width == 390)
            wait_for_view(browser, page, "")
            browser.wait("document.querySelectorAll('.scroll[aria-label=Processors] tbody tr').length === 9")
            tops = "[...document.querySelectorAll('.split > section')].map((each) => each.getBoundingClientRect().top)"
            first, second = browser.run(tops)
            assert (first == second) == beside, width
            assert width == 700 or browser.run(CLIPPED) == []


def make(browser: Browser, name: str) -> None:
    """Delete a picture of the docs, and this test makes it again."""
    path = Path(__file__).parent.parent / "docs" / "how-to" / name
    if not path.exists():
        browser.picture(path)


def test_a_group_of_errors_is_discarded_and_redriven_from_the_page(browser: Browser, tmp_path: Path) -> None:
    path = shop(tmp_path)
    path.write_text(SHOP.replace('order["id"] == 3', 'order["id"] % 2'))
    with cues.open(tmp_path / "data" / "shop", durability="process") as store:
        store.queue("orders", metadata={"t", "time"}).appender().write_many([{"id": n} for n in range(10)])
        store.queue("orders").appender().write({"number": 1})
    command = [sys.executable, "-m", "cues", "run", str(path), "--idle-exit", "0"]
    subprocess.run(command, check=True, capture_output=True)
    (tmp_path / "mended").touch()
    with page_of(tmp_path / "data" / "shop", target=str(path)) as page:
        wait_for_view(browser, page, "#/errors")
        browser.wait("document.querySelectorAll('.scroll[aria-label=Causes] button').length === 4")
        press = "document.querySelector('.scroll[aria-label=Causes] tbody tr:{} button:{}').click(); true"
        browser.run(press.format("last-child", "last-child"))
        browser.wait("document.activeElement.id === 'reason'")
        browser.run("document.activeElement.value = 'a test order'; document.activeElement.form.requestSubmit(); true")
        browser.wait("document.querySelector('main .status').innerText === '1 discarded.'")
        browser.wait("document.querySelectorAll('.scroll[aria-label=Causes] tbody tr').length === 1")
        browser.run(press.format("first-child", "first-child"))
        browser.wait("document.querySelector('main .status').innerText === '5 redriven.'")
        browser.wait("document.querySelector('main').innerText.includes('No failed messages')")


def test_a_search_that_comes_with_a_link_waits_for_a_click(browser: Browser, tmp_path: Path) -> None:
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("orders").appender().write_many([{"n": n} for n in range(5)])
    with page_of(tmp_path / "store") as page:
        browser.open(f"{page.url}#/queue/orders?where=n+%3D%3D+3")
        browser.wait("document.querySelector('main .status')?.innerText.includes('click Go to run it')")
        assert browser.run("document.querySelector('#where').value") == "n == 3"
        browser.run("document.querySelector('form.tools button').click(); true")
        browser.wait("document.querySelector('main .status')?.innerText.includes('1 match.')")
        browser.run("document.querySelector('#where').value = 'n > 2'; true")
        browser.run("document.querySelector('form.tools button').click(); true")
        browser.wait("document.querySelector('main .status')?.innerText.includes('2 matches.')")
