"""The one process of ours on every VM: starts workers, watches them, and tells the manager."""
