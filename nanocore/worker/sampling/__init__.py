"""From logits, split over ranks, to one token per row."""
