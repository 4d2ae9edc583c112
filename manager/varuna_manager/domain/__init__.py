"""Pure: states and their transitions, what is observed, and the decisions over it."""
