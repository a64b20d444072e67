"""The ops on the CPU, on MAX's own thread pool."""
