"""Copies: where one VM alone has a section, another VM keeps it, too, as of the newest step that all have sent."""
