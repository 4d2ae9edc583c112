"""The user's module tree: copies of it, its modes, and what is special about its parameters."""
