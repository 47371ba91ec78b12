"""The HTTP/1.1 server: listening sockets, connections, and the service with its engine client."""
