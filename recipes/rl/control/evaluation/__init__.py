"""Pictures of played episodes."""
