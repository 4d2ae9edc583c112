"""What the manager knows, and how it changes."""
