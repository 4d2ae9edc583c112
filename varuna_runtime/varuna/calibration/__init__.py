"""What the calibration is made of: time and memory of sections, links between ranks, agreement among ranks."""
