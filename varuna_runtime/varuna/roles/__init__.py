"""What a process does with the model that a script wraps: it trains it, calibrates it or inspects it."""
