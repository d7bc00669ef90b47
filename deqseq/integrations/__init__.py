"""Optional integrations; import the one you need."""
