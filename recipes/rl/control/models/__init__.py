"""Policies and value functions: nets, action distributions, recurrent memory."""
