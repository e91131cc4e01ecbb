"""Measurements on reinforcement learning: rewards, advantages, ends of episodes, stored observations."""
