"""State moves between memories: processes that have left a generation give their state to those of the next."""
