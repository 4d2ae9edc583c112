"""Reconcile loops: load the observed state, decide with a pure function, apply in a short transaction."""
