"""The user's model as the script sees it: one stage, with the names of the whole model."""
