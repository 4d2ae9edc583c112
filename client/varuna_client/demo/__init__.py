"""`varuna demo`: real training on emulated spot VMs, disturbed on purpose, and checked against plain PyTorch."""
