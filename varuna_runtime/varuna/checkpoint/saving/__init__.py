"""When a checkpoint is taken, and how: a copy in host memory, then everything else in the background."""
