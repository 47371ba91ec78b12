"""What the engine counts and times, made of the step loop's journal, on the io thread."""
