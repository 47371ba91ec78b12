"""One request on the client: how it is submitted, and what its caller reads."""
