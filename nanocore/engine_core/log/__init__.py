"""The event log, and what is made of it: metrics, live view, step trace, machine use."""
