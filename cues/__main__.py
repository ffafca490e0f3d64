"""``python -m cues`` is ``cues``."""

from cues.cli import main

main()
