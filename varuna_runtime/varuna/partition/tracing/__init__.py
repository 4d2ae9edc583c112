"""The dry run: the user's own forward on fake tensors, and what it shows of the model."""
