"""Names, clock, crash points and events: modules that know no file and no queue."""
