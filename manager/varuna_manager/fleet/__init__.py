"""The fleet as its users see it: VMs, cordons, and the admission of agents."""
