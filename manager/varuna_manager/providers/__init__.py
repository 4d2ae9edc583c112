"""Where VMs come from."""
