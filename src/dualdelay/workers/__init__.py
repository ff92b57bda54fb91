"""Real workers: the protocol, its books, Ray as a transport, the worker's process, security."""
