"""The identity of this VM: its certificate, its address, its GPUs."""
