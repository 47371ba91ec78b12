"""Requests on the client: submission, streams, outputs and scores."""
