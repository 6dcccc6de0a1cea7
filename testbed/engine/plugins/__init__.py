"""Stand-ins of the Pulumi provider plugins `command` and `proxmoxve`, for machines that reach only package registries.

They do the real work (SSH, the Proxmox API) and behave as the real plugins do, faults included.
"""
