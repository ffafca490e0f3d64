"""Reminders: a message says when it wants to be delivered, and is delivered once, then.

    cues run examples/reminders.py
    cues send examples/reminders.py#notes text="tea is ready" after=4m
    cues tail examples/data/reminders#reminded -f

A note may be repeated: ``times=3 after=1d``. Reminders that are due while nothing runs are delivered at the next
start, and none is lost or given twice after ``kill -9``. ``cues status`` shows how many wait, and until when.
"""

from datetime import datetime

import cues

graph = cues.Graph("reminders", errors="errors")
graph.source("notes")


@graph.stream("notes", "reminders")
def schedule(note):
    """Put a note on the queue of reminders, to be delivered at its time."""
    at = datetime.fromisoformat(note["at"]) if "at" in note else None
    return cues.delayed(note, deliver_at=at, delay=note.get("after"))


@graph.stream("reminders", {"reminded": "reminded", "again": "notes"})
def remind(note, process):
    """Deliver a note; if it is to be repeated, send it once more with its delay."""
    times = note.get("times", 1)
    again = {**note, "times": times - 1} if times > 1 else None
    return {"reminded": {"text": note["text"], "at": process.metadata["q/deliver-at"]}, "again": again}
