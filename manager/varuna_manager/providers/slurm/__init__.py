"""Jobs of a Slurm cluster as VMs."""
