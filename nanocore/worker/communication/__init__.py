"""Exchanges between ranks within a step: sums, candidates, hidden states."""
