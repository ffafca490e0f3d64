"""Objects that ``with`` closes."""

from __future__ import annotations

from typing import Self

from cues.native import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Closing:
    """Calls ``close()`` at the end of a ``with`` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError
