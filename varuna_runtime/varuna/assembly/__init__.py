"""What one rank trains with: its stage of the model, and its connections to the other ranks."""
