"""The ops on a GPU."""
