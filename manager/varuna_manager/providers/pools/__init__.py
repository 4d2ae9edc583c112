"""Several providers as one: pools of VMs in different zones, of different types, at different prices."""
