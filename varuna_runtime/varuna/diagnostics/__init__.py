"""What people see of a worker: timelines, the phases of its start, stacks, curves, and places in the user's code."""
