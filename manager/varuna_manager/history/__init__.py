"""What happened: events and their followers, jobs' pasts, costs, step metrics, and how long all of it is kept."""
