"""How long a mini-batch takes: the simulator and its compiled loops."""
