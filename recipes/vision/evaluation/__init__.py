"""How these recipes are evaluated: metrics, baselines, pictures of predictions."""
