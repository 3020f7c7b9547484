"""The contract of the server, tested from outside over its sockets."""
