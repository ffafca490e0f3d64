"""Processes share the partitions of a queue, and one is killed: ``python examples/shared_work.py``.

    clicks/0 … clicks/5 ──► members of the group "totals", in processes ──► counted

Each session reads clicks of one partition, and writes a message for each. Its commit appends these messages and moves
the position. The first process dies in the middle of a session, and two others share its partitions. In the end each
click must be counted once, and those of one user in their order. If not, the exit code is 1.
"""

import os
import subprocess
import sys
import tempfile
from collections import defaultdict

import cues
from cues.groups import TRY_COMMIT, Member

CLICKS, PARTITIONS = 3_000, 6


def work(place, most):
    """Count clicks until there are no more; after ``most`` of them, stop in the middle of a session."""
    done = 0
    with cues.open(place, durability="process") as store, Member(store, "clicks", "totals") as member:
        idle = 0
        while idle < 3:
            with member.session() as session:
                clicks = session.read_many(50, timeout=0.5)
                for click in clicks:
                    session.write("counted", click)
                    done += 1
                    if done == most:
                        sys.stdout.flush()
                        os._exit(1)  # as if it were killed: nothing is given back
                session.end(TRY_COMMIT)
            idle = 0 if clicks else idle + 1


def main():
    with tempfile.TemporaryDirectory() as place:
        with cues.open(place, durability="process") as store:
            store.queue("counted")
            clicks = [{"user": n % 40, "n": n} for n in range(CLICKS)]
            store.queue("clicks", partitions=PARTITIONS, key="user").appender().write_many(clicks)
        command = [sys.executable, __file__, place]
        codes = [subprocess.run([*command, "400"]).returncode]  # it dies, and has had all partitions
        members = [subprocess.Popen([*command, "0"]) for _ in range(2)]
        codes += [member.wait() for member in members]
        with cues.open(place, readonly=True) as store:
            counted = defaultdict(list)
            for message in store.queue("counted").tailer():
                counted[message["user"]].append(message["n"])
    right = counted == {user: list(range(user, CLICKS, 40)) for user in range(40)}
    print(f"{sum(map(len, counted.values()))} of {CLICKS} clicks, exit codes {codes}:", "right" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(work(sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 1 else main())
