"""How a pipeline is run: the policies, a schedule as data, and the micro-batches of a global batch."""
