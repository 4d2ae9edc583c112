"""One rank's state in a checkpoint: parameters, optimizer state, the script's own states."""
