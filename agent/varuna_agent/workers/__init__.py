"""Worker processes: started under a guard, watched, and ended."""
