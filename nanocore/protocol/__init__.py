"""The public wire: messages, sampling parameters, codec, endpoints, sockets and errors.

Imports nothing else of nanocore and needs only msgspec and pyzmq, so that clients and tools in any
process can use it. PROTOCOL.md specifies the same wire for other languages.
"""
