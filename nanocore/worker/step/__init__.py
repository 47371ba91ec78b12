"""The persistent batch on the host: counts, tokens and blocks of all rows."""
