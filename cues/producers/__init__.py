"""Producers of a log: their clocks, their transactions, and the sequencer that returns what is committed."""
