"""From data files to messages on queues: commit, forward (4 and 5 of step.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cues import faults
from cues.errors import Fenced

if TYPE_CHECKING:
    from cues.spark.cluster.directory import DataFile, QueueDirectory
    from cues.spark.cluster.ledger import Ledger


def publish(ledger: Ledger, new: Mapping[QueueDirectory, Sequence[DataFile]], **record: Any) -> None:
    """Append files to queues. The next record of the processor, with the fields ``record``, is the commit.

    Files that have an index keep it; else the first message of a partition gets the next one.
    Raises :class:`Fenced`; then this driver has changed no queue. After another error it is not known whether the
    record was put. Then this driver writes nothing more to these queues, and the next start decides.
    """
    faults.point("spark.written")
    with contextlib.ExitStack() as locked:
        for directory in sorted(new, key=lambda directory: directory.queue):
            locked.enter_context(directory.lock)
            directory.settle()
        placed = {directory: directory.numbered(files) for directory, files in new.items()}
        # 4. Commit.
        try:
            ledger.commit("step", files={directory.queue: files for directory, files in placed.items()}, **record)
        except BaseException as error:
            for directory in placed:  # the record may be there
                directory.undecided = error
            if isinstance(error, Fenced):
                # Another driver has forwarded it then, before it claimed the processor. Its log entries show which
                # indices are taken, so other processors of this driver do not give them to other messages.
                for directory in placed:
                    directory.read_on()
                    directory.undecided = None
            raise
        for directory, files in placed.items():  # all of them, before a filesystem can fail
            directory.owe(ledger.processor, ledger.now.number, files)
        faults.point("spark.recorded")
        # 5. Forward.
        for directory in placed:
            directory.settle()
            faults.point("spark.forwarded")
