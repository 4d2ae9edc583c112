"""The search for the best plan over all shapes, cuts and micro-batch sizes."""
