"""Reconcile loops: load what is observed, decide with a pure function, apply in a short transaction."""
