"""The connections of an agent: the stream to its manager and the socket of its workers."""
