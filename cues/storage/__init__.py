"""The LMDB environment of a store, its locks and its doorbells. No module here knows queues."""
