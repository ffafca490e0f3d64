"""The error of a request that cannot be meant as it is written."""

from __future__ import annotations

from cues.errors import InvalidArgument


class Refused(InvalidArgument):
    """A request names something that is not there, or asks for things that exclude each other. Nothing was changed.

    A command line ends with exit code 2, as for other wrong usage.
    """
