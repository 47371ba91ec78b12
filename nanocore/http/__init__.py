"""nanocore.http: a server for clients of OpenAI's and Anthropic's APIs.

It runs in its own process, without torch, as a client of the engine. Imports client and protocol
only.
"""
