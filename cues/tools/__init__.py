"""Checks, measurements and compaction of whole stores."""
