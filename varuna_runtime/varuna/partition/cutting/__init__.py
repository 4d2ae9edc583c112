"""Where a model is cut, and what crosses each cut."""
