"""Processes and the operating system: locks, private directories, children, streams, flags."""
