"""What agents report, what they receive, and what new VMs install."""
