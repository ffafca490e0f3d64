"""Names, clocks, events and texts of options: modules that do not use files or queues."""
