"""Between the step loop and its workers: in this process, or as ranks in processes of their own."""
