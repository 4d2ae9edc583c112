"""Who may call the manager: tokens, certificates, and the record of calls."""
