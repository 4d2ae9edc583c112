"""The expected rate of a plan on VMs that are taken away and come back."""
