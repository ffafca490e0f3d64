"""One step of a processor: take, run, commit, and recover."""
