"""Follow an access log into requests per minute. Each minute closes once; late lines are kept, with their number.

    ACCESS_LOG=/var/log/nginx/access.log cues run examples/access_log.py
    cues tail examples/data/access-log#per-minute -f

The log is read as ``tail -F`` does: it may grow, and be rotated. Lines that cannot be read are on the queue ``errors``.
After ``kill -9`` at any moment each line is counted once.
"""

import os
import re
from datetime import datetime

import cues
from cues.processors import windows
from cues.processors.file_source import Files
from cues.processors.reducers import count, max, sum, top

LINE = re.compile(r'(\S+) \S+ \S+ \[([^]]+)\] "\S+ (\S+)[^"]*" (\d{3}) (\d+|-)')

graph = cues.Graph("access-log", errors="errors")
graph.add(cues.Source("lines", Files(os.environ.get("ACCESS_LOG", "access.log"), "text", follow=True)))


@graph.stream("lines", "requests")
def parse(line):
    """Read a line in the common log format."""
    match = LINE.match(line["line"])
    if match is None:
        raise ValueError(f"not a line of an access log: {line['line'][:80]!r}")
    host, time, path, status, size = match.groups()
    when = datetime.strptime(time, "%d/%b/%Y:%H:%M:%S %z")
    return {"host": host, "time": when, "path": path, "status": int(status), "bytes": 0 if size == "-" else int(size)}


reduce = {"requests": count(), "bytes": sum("bytes"), "paths": top("path", 3), "largest": max("bytes")}
graph.add(
    windows.tumbling("requests", "per-minute", "1m", time="time", key="status", delay="5s", late="late", reduce=reduce)
)
