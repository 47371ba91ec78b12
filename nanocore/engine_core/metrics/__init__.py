"""Metrics, made on the io thread of what the step loop notes."""
