"""What ranks tell each other in the middle of a step: sums, candidates, hidden states."""
