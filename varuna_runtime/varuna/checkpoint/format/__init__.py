"""The format of a checkpoint: its manifest, its tensors, its nested states."""
