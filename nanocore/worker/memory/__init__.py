"""A rank's KV memory, what it may take, and what there is: of the machine, and beside a step."""
