"""Code shared by the control recipes (ppo, dqn, sac)."""
