"""The manager's process: its ports, its locks, its parts, and whether it leads."""
