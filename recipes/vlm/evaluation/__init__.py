"""How these recipes are evaluated."""
