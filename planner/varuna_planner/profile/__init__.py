"""What a model costs on some hardware: measured, corrected while the job runs, or made up from the model's shape."""
