"""Where checkpoints lie: folders, object stores, and copies on this VM."""
