"""The subcommands of `varuna`."""
