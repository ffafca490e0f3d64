"""Other stores: fork queues, forwarders, low-water marks, and positions of external writers."""
