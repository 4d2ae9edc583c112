"""What an agent shows of itself: metrics and spans."""
