"""Pods of a Kubernetes cluster as VMs."""
