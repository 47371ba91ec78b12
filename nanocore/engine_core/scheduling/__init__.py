"""What a step computes: requests, their queues and rows, plans and what comes of them."""
