"""Pulumi dynamic resources: what can drift on a host.

Their module paths and class names stand in every stack's state, since providers are pickled by reference:
never move them.
"""
