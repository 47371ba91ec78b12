"""Sessions with an engine: connecting, resubmission, and launching an engine."""
