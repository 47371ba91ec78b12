"""What the engine counts and times, made of the step log, on the io thread."""
