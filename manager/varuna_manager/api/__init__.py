"""What the manager shows to the outside: the agents' gRPC stream and REST."""
