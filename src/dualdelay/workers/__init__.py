"""Real workers: the coordinator, the protocol, transports, the worker's process, security."""
