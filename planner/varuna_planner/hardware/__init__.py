"""GPUs and networks in numbers, and how those numbers are fitted to measurements."""
