"""The manager's documents as text for people."""
