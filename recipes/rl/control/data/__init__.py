"""Environments and replay buffers of the control recipes."""
