"""What a model is called with, and what it returns."""
