"""The LMDB environment of a store, its locks and its doorbells. Nothing here knows what a queue holds."""
