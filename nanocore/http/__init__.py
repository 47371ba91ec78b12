"""nanocore.http: what clients of OpenAI's and Anthropic's APIs talk to.

A process of its own, without torch: a client of the engine. Imports client and protocol only.
"""
