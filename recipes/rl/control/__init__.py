"""What the control recipes (ppo, dqn, sac) share."""
