"""Count words with keyed state: each word has a count of its own, committed with the step that changed it.

``python examples/word_count.py`` counts in a temporary store and prints the result.
``cues run examples/word_count.py`` counts in a permanent store, where a second run finds nothing new.
"""

import tempfile
from collections import Counter

import cues

TEXT = """\
It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of
foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light,
it was the season of Darkness, it was the spring of hope, it was the winter of despair.
"""

graph = cues.Graph("word-count")


@graph.source("lines")
def lines(position):
    """Yield each line with the position after it. A restart begins at the committed position."""
    for number, line in enumerate(TEXT.splitlines()):
        if number >= (position or 0):
            yield number + 1, {"line": line}


@graph.stream("lines", "words")
def split(message):
    """Return a list of messages for one message."""
    return [{"word": word.strip(",.").lower()} for word in message["line"].split()]


@graph.stream("words", "counts", key="word")
def count(message, process):
    """Count in ``process.state``, which is the state of this word, because ``key="word"``."""
    process.state["count"] = process.state.get("count", 0) + 1
    return {"word": message["word"], "count": process.state["count"]}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as store, graph.start(store=store) as running:
        running.wait_done()
        counts = {message["word"]: message["count"] for message in running.messages("counts")}
    for word, times in Counter(counts).most_common(5):
        print(f"{times:3} {word}")
