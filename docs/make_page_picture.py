"""Make docs/how-to/page.png, the picture of the page: ``python docs/make_page_picture.py`` (it needs Chromium)."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from browser import Browser  # noqa: E402

import cues  # noqa: E402
from cues.engine.history import History, Sample, path_of  # noqa: E402

SHOP = """
import random, time
import cues

graph = cues.Graph("shop", errors="errors", queues={"*": cues.QueueOptions(metadata={"t", "time"})})


@graph.source("orders", resume="again")
def orders():
    chance = random.Random(1)
    for n in range(1, 10**9):
        yield {"id": n, "country": chance.choice(["DE", "FR", "IT"]), "price": chance.randrange(1, 100)}
        time.sleep(0.004)


@graph.stream("orders", "priced")
def price(order):
    if order["id"] % 397 == 0:
        raise ValueError(f"no price for order {order['id']}")
    return {**order, "total": order["price"] * 2}


@graph.stream("priced", {"large": "large", "small": "small"})
def split(order):
    return {"large" if order["total"] > 120 else "small": order}


@graph.stream("large", "checked")
def check(order):
    time.sleep(0.03)
    return order


@graph.sink("checked")
def ship(order):
    pass


@graph.sink("small", batch=True)
def archive(orders):
    pass
"""


def write_hour(store: Path) -> None:
    """Write a history of the last hour, so that the picture need not be an hour old."""
    cues.open(store, durability="process").close()
    chance, now = random.Random(1), time.time()
    with History(path_of(store, "shop"), write=True) as history:
        for number, name in enumerate(("orders", "price", "split", "check", "ship", "archive")):
            for back in range(3600, 0, -10):
                rate = 1500 + 600 * math.sin(back / 400 + number / 3) + chance.randrange(200)
                waiting = int(max(0, 2000 - back) * 0.2) if name == "check" else 0
                taken = int(rate * (0.15 if name in ("check", "ship") else 1))
                history.add(f"shop.{name}", now - back, Sample(taken, taken, 0, waiting))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shop.py"
        path.write_text(SHOP)
        write_hour(Path(folder) / "data" / "shop")
        command = [sys.executable, "-m", "cues", "run", str(path), "--ui=0", "--durability", "process"]
        run = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        try:
            assert run.stderr is not None
            line = next(line for line in run.stderr if "Page: " in line)
            with Browser(Path(folder)) as browser:
                browser.size(1180, 760)
                browser.open("http" + line.partition("http")[2].split('"')[0].strip())
                browser.wait("document.querySelector('.problems')?.innerText.includes('falls behind')")
                time.sleep(2 + random.random())
                browser.picture(ROOT / "docs" / "how-to" / "page.png")
        finally:
            run.kill()
            run.wait()


if __name__ == "__main__":
    main()
