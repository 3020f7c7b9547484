"""What a server needs before its first process: the folder's lock, the socket, memory, secrets."""
