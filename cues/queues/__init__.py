"""Queues: logs, appenders, readers, partitions and retention."""
