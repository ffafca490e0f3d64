"""A polite scraper: robots.txt, two requests a second, statuses that may pass are tried again, no page twice a day.

    SITE=https://example.com/ cues run examples/scraper.py --idle-exit 5
    cues tail examples/data/scraper#pages

Links to the same site are followed. A page that is missing or forbidden is on the queue ``errors``, with its status.
After ``kill -9`` at any moment each page is on the queue once.
"""

import functools
import os
import re
from urllib.parse import urldefrag, urljoin
from urllib.robotparser import RobotFileParser

import cues
from cues.processors import shape
from cues.processors.http_sink import Requests

SITE = os.environ.get("SITE", "http://127.0.0.1:8000/")


@functools.cache
def robots():
    parser = RobotFileParser(urljoin(SITE, "/robots.txt"))
    parser.read()
    return parser


def page(message, answer):
    links = [urldefrag(urljoin(answer.url, link)).url for link in re.findall(r'href="([^"]+)"', answer.text)]
    title = re.search(r"<title>(.*?)</title>", answer.text, re.S)
    return {"url": message["url"], "title": title and title[1], "links": [url for url in links if url.startswith(SITE)]}


fetch = Requests(lambda message: message["url"], "GET", rate="2/s", redirects=5, answer=page)
graph = cues.Graph("scraper", errors="errors")
graph.source("seeds", resume="skip")(lambda: [{"url": SITE}])
graph.stream(cues.AnyOf("seeds", "links"), "urls", id="unique")(shape.dedupe("url", within="1d"))
graph.add(fetch.stream("urls", "pages", where=lambda message: robots().can_fetch("*", message["url"])))
graph.stream("pages", "links", id="follow")(lambda page: [{"url": url} for url in page["links"]])
