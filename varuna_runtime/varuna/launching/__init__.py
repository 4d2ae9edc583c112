"""Starting the ranks of one generation without a manager: the parts of `varuna.launcher` and `varuna.run_varuna`."""
