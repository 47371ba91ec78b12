"""What crosses a process boundary: messages, sampling parameters, plans, sockets and errors.

Imports nothing else of nanocore and needs only msgspec and pyzmq, so that clients and tools in any
process can use it. PROTOCOL.md specifies the same wire for other languages.
"""
